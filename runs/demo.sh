#!/usr/bin/env bash
# From nothing to a model that answers, in ten minutes on two CPU cores: what `make demo chat` runs.
#     bash runs/demo.sh           all of it
#     bash runs/demo.sh base      the first half, as make demo: a model of the Python standard library
#     bash runs/demo.sh chat      the second, as make chat: it learns to answer questions about that
# Measured together: 7 min 36 s and 2 min 9 s (Intel Xeon, 2 cores, bf16, torch 2.13.0, 2026-11-30, a demo
# of 3,800 shorter steps), the environment being there. The same at full size: runs/speedrun.sh
set -euo pipefail
trap 'exit 130' INT TERM HUP  # train.py saves and ends well, and nothing after it should begin
cd "$(dirname "$0")/.."
make --silent --no-print-directory env
PATH="$PWD/.venv/bin:$PATH"

python() { printf '%q ' python "$@"; echo; command python "$@"; }  # each command is shown, then run

base() {
    # text, tokenizer, shards: half a minute
    python prepare.py stdlib --out data/demo --vocab_size 4096 --val_fraction 0.05
    # 1.2M parameters see 7.8M tokens: three to seven minutes where the CPU multiplies bf16, 20 to 30 elsewhere
    python train.py configs/demo.py
    python eval.py out/demo
    echo
    python sample.py out/demo --prompt "    def read" --max_new_tokens 150 --temperature 0.9 --top_p 0.9 --seed 5
    echo
    echo "Curves, samples and settings are in out/demo/report.html. Try next:"
    echo "  .venv/bin/python sample.py out/demo --interactive"
    echo "  .venv/bin/python eval.py out/demo --embeddings"
    echo "  .venv/bin/python account.py configs/stack100m.py"
}

chat() {
    test -e out/demo/ckpt_last || { echo "There is no out/demo to go on from. Make both: make demo chat" >&2; exit 2; }
    # 6,500 conversations, made from docstrings
    python prepare.py stdlib --chat --tokenizer out/demo --out data/chat --val_fraction 0.05
    # a minute or two
    python train.py configs/chat.py
    echo
    echo "Held-out answers, before and after:"
    python eval.py out/demo --data data/chat
    python eval.py out/chat
    echo
    python eval.py out/chat --answers
    echo
    echo "Try next:"
    echo "  .venv/bin/python sample.py out/chat --chat"
}

case "${1:-all}" in
    base) base ;;
    chat) chat ;;
    all) base; chat ;;
    *) echo "runs/demo.sh: there is no part $1; there are base and chat." >&2; exit 2 ;;
esac
