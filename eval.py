"""How good a model is on text it has not seen, at choosing answers, and what became of its embedding table.

    python eval.py out/demo                          loss, perplexity, bits per byte over the whole held-out split
    python eval.py out/demo --data data/other --max_tokens 1e6 --json
    python eval.py out/demo --stride 64              each token with most of a window before it; takes longer
    python eval.py out/demo --choices FILE.jsonl     multiple choice, by lm-evaluation-harness's rules
    python eval.py out/demo --tasks hellaswag,piqa   the harness itself, on a task of its own or a .yaml of yours
    python eval.py out/chat --answers                held-out questions: how many answers end; some of them
    python eval.py out/demo --by_position            the loss by what stands before; out/demo/positions.png
    python eval.py out/demo --passkey                is a number found again over 25, 50, 75, 100 % of the context?
    python eval.py out/demo --embeddings             undertrained rows, norms, neighbours; out/demo/embeddings.png

Windows are fixed and in order; each token is predicted once, except the first of a shard and the few at its end that do
not fill a window; each weighs the same.  So the result depends on nothing but model, data, --seq_len and --stride: not
on the batch size, not on a seed.  Windows lie side by side, so that a token has half a window before it on average;
with --stride N they begin every N tokens and only the last N of each count, of a shard's first all (transformers' guide
to perplexity calls it a sliding window).  With --by_position and --passkey, --seq_len may go beyond the context of a
run with rotary positions, to see what is lost there.  Of conversations only what the assistant says counts.  Loss is in
nats per token, without z-loss.  Bits per byte can be compared between vocabularies.
"""

import json
import math
import sys
from pathlib import Path

from stack.config import Parser, as_command
from stack.log import on_terminal


def parse(argv):
    p = Parser(prog="eval.py", description=__doc__)
    p.add_argument("run", help="run folder (out/NAME: its ckpt_last) or a checkpoint folder (out/NAME/ckpt_best)")
    p.add_argument("--data", metavar="FOLDER", help="data set (default: the one the run was trained on)")
    p.add_argument("--split", default="val", choices=("val", "train"), help="held-out text, or the trained-on (val)")
    p.add_argument("--max_tokens", type=float, metavar="N",
                   help="at most so many, in windows spread evenly over the split (default: all)")
    p.add_argument("--seq_len", type=int, metavar="N", help="context of a window (default: the run's)")
    p.add_argument("--stride", type=int, metavar="N", help="windows begin every N tokens, and each token has a context "
                   "of seq_len - N or more (default: seq_len, windows side by side)")
    p.add_argument("--micro_batch_size", type=int, metavar="N", help="windows at a time; changes only the speed (8)",
                   default=8)
    instead = p.add_mutually_exclusive_group()
    instead.add_argument("--choices", metavar="FILE", help='a .jsonl of {"query", "choices", "gold"} instead, or '
                         "HellaSwag's own; stack/evaluation/choices.py says how it is scored")
    instead.add_argument("--tasks", metavar="NAMES", help="tasks of lm_eval instead, with commas between; needs pip "
                         'install "lm_eval[hf]" and fetches their data')
    instead.add_argument("--answers", action="store_true", help="ask the first question of each held-out conversation "
                         "instead: how many answers end within 128 tokens, and three of them")
    p.add_argument("--limit", type=int, metavar="N", help="so many questions of --choices, --tasks or --answers, texts "
                   "of --passkey")
    instead.add_argument("--passkey", action="store_true", help="tell a number at the beginning of a text and ask for "
                         "it at the end instead: how often it is chosen of ten, over four lengths up to --seq_len")
    p.add_argument("--by_position", action="store_true", help="the loss over positions in powers of two too")
    instead.add_argument("--embeddings", action="store_true", help="report on the embedding table instead")
    p.add_argument("--words", nargs="+", default=(), metavar="WORD", help="with --embeddings: whose neighbours to show")
    p.add_argument("--json", action="store_true", help="one JSON object instead of text")
    p.add_argument("--quant", choices=["int8"], help="also with weights of 8 bits, as sample.py --quant has them")
    p.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps (auto)")
    p.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16: of the matmuls (auto)")
    args = p.parse_args(argv)
    for name in ("max_tokens", "seq_len", "stride", "micro_batch_size", "limit"):
        if getattr(args, name) is not None and not 1 <= getattr(args, name) < 1e15:
            p.error(f"--{name} is {getattr(args, name)}; it must be 1 or more, and below 1e15.")
    if args.tasks is not None and not args.tasks.strip(" ,"):
        p.error("--tasks is empty; it needs names of tasks, as in --tasks hellaswag,piqa.")
    if args.words and not args.embeddings:
        p.error("--words belongs to --embeddings.")
    asked = args.choices or args.tasks
    for name in ("quant", "stride", "by_position"):
        if getattr(args, name) and (asked or args.embeddings or args.answers or args.passkey):
            p.error(f"--{name} belongs to the held-out loss.")
    if args.limit and not (asked or args.answers or args.passkey):
        p.error("--limit belongs to --choices, --tasks, --answers and --passkey.")
    if args.max_tokens and (args.answers or args.passkey):
        p.error("--max_tokens belongs to the held-out loss and --embeddings. --limit is the number of questions.")
    if args.data and args.passkey:
        p.error("--data belongs to what is read of a data set, not to --passkey, which makes its texts.")
    if asked and (args.data or args.max_tokens or args.seq_len):
        p.error("--data, --max_tokens and --seq_len belong to the held-out loss, not to --choices and --tasks.")
    return args


def data_folder(args, trained: dict) -> Path:
    """--data, or what the run was trained on."""
    folder = trained.get("data_dir") if args.data is None else args.data
    if folder is None:
        raise FileNotFoundError(f"{args.run} does not say what data it was trained on.\n"
                                "  Name a data set: --data data/NAME")
    if args.data is None and not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder}, the data {args.run} was trained on, not found from here.\n"
                                "  Say where it is: --data FOLDER")
    return Path(folder)


def open_data(folder: Path, split: str, seq_len: int, run, tokenizer, stride: int | None = None):
    """The split, once shards and checkpoint are known to speak of the same tokens."""
    from stack.checkpoint.folder import find
    from stack.data.batches import TokenData
    from stack.data.shards import read_meta
    meta = read_meta(folder)
    if meta["tokenizer"] not in ("", tokenizer.fingerprint):  # "": foreign shards, which do not say
        raise ValueError(
            f"{folder / 'tokenizer.json'} ({meta['tokenizer'][:12]}) and {find(run) / 'tokenizer.json'} "
            f"({tokenizer.fingerprint[:12]}) are different tokenizers: an id of one is another token of the other.\n"
            f"  Prepare the text for this model: python prepare.py ... --tokenizer {run}")
    return TokenData(folder, split, seq_len=seq_len, stride=stride, vocab_size=tokenizer.vocab_size)


def go_beyond(args, model, seq_len: int) -> int:
    """The context that the run has; where it is asked what is behind that, the model takes longer ones from now on."""
    own = model.cfg.max_seq_len
    if seq_len > own and (model.cfg.pos == "learned" or not (args.by_position or args.passkey)):
        raise ValueError(f"--seq_len is {seq_len}; {args.run} has a context of {own}. Lower it.")
    model.cfg.max_seq_len = max(own, seq_len)
    return own


def losses(args, model, tokenizer, trained: dict, seq_len: int, device) -> str:
    """What to print about loss, perplexity and bits per byte over the split; with --quant, of 8 bits too."""
    import torch
    from tqdm import tqdm

    from stack.data.batches import iterate_windows
    from stack.device import pick_dtype
    from stack.evaluation import positions
    from stack.evaluation.held_out import evaluate
    from stack.quantize import quantize_int8
    from stack.twins import compile_head
    trained_on = go_beyond(args, model, seq_len)
    if args.stride and args.stride > seq_len:
        raise ValueError(f"--stride is {args.stride} and a window has {seq_len} tokens: those in between would not be "
                         "counted. Lower it, or raise --seq_len.")
    data = open_data(data_folder(args, trained), args.split, seq_len, args.run, tokenizer, args.stride)
    talk = data.loss_on == "assistant"
    if args.stride and talk:
        raise ValueError("--stride is for text: conversations are in their windows whole. Leave it out.")
    if args.max_tokens and args.max_tokens < seq_len:
        raise ValueError(f"--max_tokens is {args.max_tokens:.0f} and a window has {seq_len} tokens: none would be "
                         "counted. Raise it, or lower --seq_len.")
    whole = data.n_shards * (seq_len - data.stride)  # more tokens in windows that begin a shard than in others
    n_windows = data.n_windows if args.max_tokens is None else min(
        max((int(args.max_tokens) - whole) // data.stride, 1), data.n_windows)
    forms, results = {args.split: compile_head} | ({args.quant: quantize_int8} if args.quant else {}), {}
    for name, prepare in forms.items():
        windows = iterate_windows(data, args.micro_batch_size, max_windows=n_windows)
        bar = tqdm(windows, total=-(-n_windows // args.micro_batch_size), unit="batch", leave=False, disable=None)
        places = torch.zeros(2, seq_len, dtype=torch.float64) if args.by_position else None
        result = evaluate(prepare(model), bar, tokenizer.token_bytes(), device=device, places=places,
                          dtype=pick_dtype(args.dtype, device), doc_mask=bool(talk or trained.get("doc_mask")))
        if not math.isfinite(result["loss"]):
            raise ValueError(f"the loss is {result['loss']}: the weights are damaged. Try an earlier checkpoint.")
        results[name] = result | ({"by_position": positions.by_powers(places)} if args.by_position else {})
    if args.by_position and (picture := drawn(args.run, "positions.png", lambda path: positions.plot(
            results[args.split]["by_position"], path, trained_on))):
        print(f"eval.py: a picture is in {picture}", file=sys.stderr)
    if args.json:
        return json.dumps(results[args.split] | ({"quantized": results[args.quant]} if args.quant else {}))
    alone = talk and data.meta["chat"]["conversations"] == sum(s["documents"] for s in data.meta["splits"].values())
    what = ", answers only" if alone else ", answers and text" if talk else ""
    return "\n".join(
        f"{name}{what}: loss {r['loss']:.4f} nats per token | perplexity {r['ppl']:.2f} | "
        + ("no bytes to count bits per" if r["bpb"] is None else f"{r['bpb']:.4f} bits per byte")
        + f" | {r['tokens']:,} tokens, {r['bytes']:,} bytes"
        + ("\n" + positions.text(r["by_position"]) if args.by_position else "") for name, r in results.items())


def find_passkeys(args, model, tokenizer, seq_len: int, device) -> str:
    """What to print about numbers told at the beginning of a context and asked for at its end."""
    from stack.device import pick_dtype
    from stack.evaluation import positions
    go_beyond(args, model, seq_len)
    result = positions.passkey(model, tokenizer, seq_len, trials=args.limit, device=device,
                               dtype=pick_dtype(args.dtype, device), rows=args.micro_batch_size)
    return json.dumps(result) if args.json else "\n".join(
        [f"pass key, {result['trials']} texts of each length, one of ten numbers (chance is 10 %):",
         *(f"  {length:,} tokens: {share:.0%} found" for length, share in result["found"].items())])


def drawn(run, name: str, plot) -> str | None:
    """The path of a picture about a run, or about a checkpoint in it, by plot(path); None, said, where that fails."""
    run = Path(run)
    path = str((run.parent if run.name.startswith("ckpt_") else run) / name)
    try:
        plot(path)
        return path
    except OSError as error:
        print(f"eval.py: no picture: {error}", file=sys.stderr)
        return None


def answers(args, model, tokenizer, device) -> str:
    """What to print about a file of questions or lm_eval's tasks."""
    from stack.device import pick_dtype
    from stack.evaluation import choices as tasks
    how = dict(device=device, dtype=pick_dtype(args.dtype, device), rows=args.micro_batch_size)
    if args.tasks:
        result = tasks.harness(model, tokenizer, args.tasks.split(","), limit=args.limit, **how)
    else:
        questions = tasks.read_questions(args.choices)[:args.limit]
        result = {args.choices: tasks.choices(model, tokenizer, questions, **how)}
    return json.dumps(result) if args.json else tasks.text(result)


def ask(args, model, tokenizer, trained: dict, seq_len: int) -> str:
    """What to print about the answers to held-out questions."""
    from stack.evaluation import answers
    from stack.twins import check_cache
    data = open_data(data_folder(args, trained), args.split, seq_len, args.run, tokenizer)
    if data.loss_on != "assistant":
        raise ValueError(f"{data.dir} has no conversations. Name a set that has: --data data/NAME")
    result = answers.report(check_cache(model), tokenizer, data, args.limit)
    return json.dumps(result) if args.json else "\n".join([
        f"{result['ended']:.1%} of {result['questions']:,} {'held-out' if args.split == 'val' else 'training'} "
        f"questions have an answer that ends within "
        f"{result['most']} tokens", *(on_terminal(f"\n> {e['question']}\n{e['answer']}") for e in result["examples"])])


def know_table(args, model, tokenizer, trained: dict, seq_len: int) -> str:
    """What to print about the embedding table, once it is drawn; with the training shards at hand, counts too."""
    from stack.evaluation import embeddings
    counts, touched = None, []
    try:
        folder = data_folder(args, trained)
    except FileNotFoundError as error:
        print(f"eval.py: {error}\n  Going on without counts.", file=sys.stderr)
    else:
        data = open_data(folder, "train", seq_len, args.run, tokenizer)
        counts = count_ids(data, args.max_tokens)
        sizes = {seq_len, seq_len * trained.get("micro_batch_size", 8), trained.get("batch_tokens", 8 * seq_len)}
        touched = [(n, rows_of_batches(data, n // seq_len)) for n in sorted(sizes) if n // seq_len <= data.n_windows]
    result, arrays = embeddings.report(model, tokenizer, counts=counts, touched=touched, words=args.words)
    result["png"] = drawn(args.run, "embeddings.png", lambda path: embeddings.plot(arrays, path))
    return json.dumps(result) if args.json else embeddings.text(result)


def count_ids(data, max_tokens: float | None):
    """Occurrences of each id in the split's shards (from their start, up to max_tokens).  -> (V,) int64"""
    import numpy as np
    from tqdm import tqdm

    from stack.data.shards import open_shard
    counts, left = np.zeros(data.vocab_size, np.int64), min(int(max_tokens or data.n_tokens), data.n_tokens)
    block = 1 << 24
    with tqdm(total=left, unit="tok", unit_scale=True, leave=False, disable=None, desc="counting") as bar:
        for entry in data.meta["splits"][data.split]["shards"]:
            shard = open_shard(data.dir / entry["file"])[:left]
            for start in range(0, len(shard), block):
                part = shard[start:start + block]
                counts += np.bincount(part, minlength=len(counts))
                bar.update(len(part))
            left -= len(shard)
    return counts


def rows_of_batches(data, windows: int, batches: int = 4) -> float:
    """Mean number of distinct ids in batches of so many windows, drawn as training draws them."""
    import numpy as np
    order = data.order(0, 0)
    batches = max(min(batches, data.n_windows // windows), 1)
    return float(np.mean([len(np.unique([data.window(w)[0] for w in order[b * windows:(b + 1) * windows]]))
                          for b in range(batches)]))


def main():
    args = parse(sys.argv[1:])
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # tokens that the console lacks
    with as_command("eval.py"):
        from stack.checkpoint.tensors import load_model  # torch: seconds that --help need not wait for
        from stack.device import pick_device
        device = pick_device("cpu" if args.embeddings else args.device)
        model, tokenizer, state = load_model(args.run, device=device)
        trained = state["train"] or {}  # the settings of an imported model's training are not known
        seq_len = args.seq_len or trained.get("seq_len") or model.cfg.max_seq_len
        if args.embeddings:
            print(know_table(args, model, tokenizer, trained, seq_len))
        elif args.answers:
            print(ask(args, model, tokenizer, trained, seq_len))
        elif args.passkey:
            print(find_passkeys(args, model, tokenizer, args.seq_len or model.cfg.max_seq_len, device))
        elif args.choices or args.tasks:
            print(answers(args, model, tokenizer, device))
        else:
            print(losses(args, model, tokenizer, trained, seq_len, device))


if __name__ == "__main__":
    main()
