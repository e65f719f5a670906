#!/usr/bin/env bash
# From nothing to a model that answers, at full size: the whole of Stack-100M, in the order in which it happens.
#     bash runs/speedrun.sh
# Costs are estimates, of account.py's roofline; nobody has run this file to its end yet. Of an
# H100 16.4 hours at the least: 14.3 for the run, 1.4 to anneal it, 0.7 for the conversations. Disk: 70 GB.
#
# Before you pay: prepare.py and its downloads need no GPU, so run its lines on another machine and copy data/. On the
# card, python -m bench gpu finds out in eight minutes whether it does what is estimated here; runs/demo.sh rehearses the
# whole way in ten. A 24 GB card: TRAIN="python train.py --micro_batch_size=8" before this file; of an
# RTX 4090 57 hours at the least: 49.5, 5.0 and 2.5.
#
# Killed? The same file again goes on: finished data sets are left as they are, unfinished ones continued, and a run
# that has a checkpoint is resumed. Eight GPUs: TRAIN="torchrun --standalone --nproc_per_node=8 train.py" before it.
set -euo pipefail
trap 'echo "runs/speedrun.sh: stopped; the same file again goes on" >&2; exit 130' INT TERM HUP  # train.py ends well then
cd "$(dirname "$0")/.."
make --silent --no-print-directory env
PATH="$PWD/.venv/bin:$PATH"

# train RUN CONFIG [--key=value ...]: begins the run, or goes on with it
train() {
    local run=$1
    shift
    if compgen -G "$run/ckpt_last*" >/dev/null; then set -- "$@" --init_from=resume; fi
    ${TRAIN:-python train.py} "$@"
}

# What it will cost: parameters, memory, FLOPs, hours by the card. Seconds.
python account.py configs/stack100m.py

# 20 billion tokens, 40 GB: 84 GB of text come through the network; 1.6 hours divided by the cores, or as long as the
# download takes. The code wants its terms accepted on its page first, then: hf auth login
python prepare.py configs/data_stack100m.py --out data/stack100m

# The run: 1.6e19 FLOPs, H100 14.3 h, A100 29.5 h
train out/stack100m configs/stack100m.py
python eval.py out/stack100m

# Annealed on more mathematics, code and textbooks, from before its decay: 2 billion tokens, H100 1.4 h
python prepare.py configs/data_stack100m_anneal.py --out data/stack100m_anneal
train out/stack100m_anneal configs/stack100m_anneal.py
python eval.py out/stack100m_anneal
python eval.py out/stack100m_anneal --data data/stack100m

# A million conversations: about 1 billion tokens, H100 0.7 h
python prepare.py hf:HuggingFaceTB/smoltalk:all --chat --tokenizer out/stack100m --out data/stack100m_chat
train out/stack100m_chat configs/stack100m_chat.py --init_from=out/stack100m_anneal
python eval.py out/stack100m_chat --answers --limit 500

# Talk to it, and take it elsewhere: transformers and vLLM, llama.cpp (docs/serve.md). Minutes.
python sample.py out/stack100m_chat --chat --prompt "Why is the sky blue?"
test -e out/stack100m_chat-hf || python convert.py export out/stack100m_chat out/stack100m_chat-hf
test -e out/stack100m_chat.gguf || python convert.py gguf out/stack100m_chat out/stack100m_chat.gguf
