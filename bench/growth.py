"""Time and memory of our step, one axis at a time from a shape that a CPU can do: `python -m bench growth`."""

import sys

import torch

from bench import head, step
from bench.measure import run_rows
from stack.device import pick_dtype

SHAPE = ["--d_model=256", "--n_layers=6", "--n_heads=4", "--n_kv_heads=1", "--d_ff=704", "--seq_len=512"]
AXES = {  # setting -> (what further time and memory is for, values)
    "seq_len": ("token", (256, 512, 1024, 2048, 4096)), "micro_batch_size": ("token", (1, 2, 4, 8, 16)),
    "vocab_size": ("id", (8192, 16384, 32768, 65536, 131072)), "n_layers": ("layer", (6, 12, 24, 60))}
FLAGS = {"--axis": dict(action="append", help="only this, with its values or without: seq_len=256,512 "
                                              f"({', '.join(AXES)})")}


def row(args, device) -> dict:
    """The head alone, then the step, from which on freed memory is kept.  The row is a setting, as in seq_len=256."""
    setting, (axis, _, value), args.row = args.row, args.row.partition("="), "ours"
    args.settings = [*SHAPE, *args.settings, f"--{setting}"]
    model_cfg, cfg = step.settings(args)
    tokens, dtype = cfg.micro_batch_size * cfg.seq_len, pick_dtype(cfg.dtype, device)
    args.n_tokens, args.d_model, args.vocab = tokens, model_cfg.d_model, model_cfg.padded_vocab_size
    args.dtype = str(dtype).removeprefix("torch.")
    torch.compiler.set_stance("default" if cfg.compile else "force_eager")
    peak = head.row(args, device)["peak_mib"]
    if peak is not None:  # without its result: the gradient, as long as the head's input
        peak = round(peak - tokens * model_cfg.d_model * dtype.itemsize / 2**20, 1)
    result = step.row(args, device)
    return result | dict(row=setting, tokens=tokens, us_per_token=result["seconds"] / tokens * 1e6, head_mib=peak,
                         units=tokens if AXES[axis][0] == "token" else int(value))


def run(args, device) -> bool:
    failed, (model_cfg, cfg) = False, step.settings(args, *SHAPE)
    chosen = [axis.partition("=") for axis in args.axis or AXES]
    if unknown := [axis for axis, _, _ in chosen if axis not in AXES]:
        raise ValueError(f"there is no axis {unknown[0]!r}. Choose from: {', '.join(AXES)}.")
    what = (f", else d_model {model_cfg.d_model}, {model_cfg.n_layers} layers, vocabulary {model_cfg.vocab_size}, "
            f"{cfg.micro_batch_size} x {cfg.seq_len} tokens, {cfg.optimizer}, {cfg.dtype}, median of {args.repeats}; "
            "peaks above weights and moments, the head's above its inputs and its result [tokens, d]; further: than "
            "the row above")

    def derive(x):
        print(f"bench: {x['row']} done", file=sys.stderr)

    def table(results):
        axis, unit = results[0]["row"].partition("=")[0], AXES[results[0]["row"].partition("=")[0]][0]
        above = dict(zip([x["row"] for x in results], [None, *results], strict=False))

        def further(key, scale):
            def of(x):
                before = above[x["row"]]
                more = before and x["units"] - before["units"]
                return (x[key] - before[key]) * scale / more if more and x[key] is not None else None
            return of
        return f"Our training step over {axis}{what}", {
            axis: lambda x: x["row"].partition("=")[2], "us a token": "us_per_token",
            "x the first": lambda x: x["us_per_token"] / results[0]["us_per_token"],
            f"us for each further {unit}": further("seconds", 1e6), "peak MiB": "step_mib",
            f"KiB for each further {unit}": further("step_mib", 1024),
            "weights, gradients, moments": "state_mib", "head's peak MiB": "head_mib"}, results
    for axis, _, values in chosen:
        rows = [f"{axis}={value}" for value in (values.split(",") if values else AXES[axis][1])]
        failed |= run_rows(args, device, rows, table, derive, cache=args.folder)  # shared: no first call is timed
        print(flush=True, end="" if args.json else "\n")
    return failed
