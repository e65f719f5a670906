"""Training curves of several runs, one over the other, as a picture.

    python plot.py out/demo                                     one run: plot.png
    python plot.py out/demo out/demo_nanogpt                    two, against tokens, seconds and FLOPs
    python plot.py out/a out/b --x seconds --out compare.png    against one of them only
    python plot.py out/* --out curves.svg                       the ending decides the format: png, svg, pdf

Above is the loss in training and on held-out text, in nats per token; below are held-out bits per byte, which can be
compared between runs whatever their vocabularies.  The three horizontal axes ask three questions: which run learns more
from the same text (tokens), in the same time on its machine (seconds, with evaluations and compilation), from the same
arithmetic (FLOPs: training floating point operations, causal attention counted half).  Also printed: where each run
ended.  Runs may be under way.
"""

from pathlib import Path

from stack.config import Parser, as_command, written_aside


def last_lines(run: str, xs) -> tuple[dict, dict]:
    """The last training and the last held-out line of a run's log.  FileNotFoundError or ValueError without them."""
    from stack.log import read_log
    path = Path(run) / "log.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found: {run} is no run folder.\n"
                                "  Name folders that train.py made, for example out/demo.")
    log = read_log(path)
    train, held = ([line for line in log if line.get(key) is not None] for key in ("loss", "val_loss"))
    if not train and not held:
        raise ValueError(f"{path} has no losses yet.\n  Wait for the first ones, or leave {run} out.")
    if missing := [x for x in xs if not any(x in line for line in train + held)]:
        raise ValueError(f"{path} does not say the {' and '.join(missing)} of its lines.\n"
                         "  Choose another axis: --x step.")
    return (train or [{}])[-1], (held or [{}])[-1]


def main():
    p = Parser(prog="plot.py", description=__doc__)
    p.add_argument("runs", nargs="+", metavar="out/RUN", help="run folders, as train.py makes them")
    p.add_argument("--x", choices=("tokens", "seconds", "flops", "step"),
                   help="horizontal axis (default: tokens, seconds and flops side by side)")
    p.add_argument("--out", metavar="FILE", default="plot.png", help="picture to write (plot.png)")
    args = p.parse_args()
    with as_command("plot.py"):
        if Path(args.out).is_dir():
            raise ValueError(f"--out {args.out} is a folder.\n  Name a picture in it: --out "
                             f"{Path(args.out) / 'plot.png'}")
        from stack.log import draw
        xs = [args.x] if args.x else ["tokens", "seconds", "flops"]
        rows = [(run, *last_lines(run, xs)) for run in args.runs]
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        with written_aside(args.out) as aside:
            draw(args.runs, xs).savefig(aside, format=Path(args.out).suffix[1:] or "png", dpi=120)
        print(f"{'':<24}{'step':>8}{'tokens':>16}{'seconds':>10}{'FLOPs':>11}{'loss':>9}{'held out':>10}"
              f"{'bits/byte':>11}")
        for run, train, held in rows:
            at = train | held if held.get("step", -1) >= train.get("step", -1) else held | train
            loss, val_loss, bpb = ("" if value is None else f"{value:.4f}" for value in (
                train.get("loss"), held.get("val_loss"), held.get("val_bpb")))
            print(f"{run:<24}{at['step']:>8,}{at.get('tokens', 0):>16,}{at.get('seconds', 0):>10,.0f}"
                  f"{at.get('flops', 0):>11.3g}{loss:>9}{val_loss:>10}{bpb:>11}")
        print(f"saved in {args.out}")


if __name__ == "__main__":
    main()
