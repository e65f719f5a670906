"""Ours beside the alternatives, measured in one run on this machine.

    python -m bench step                        one training step: forward, backward, clip, optimizer
    python -m bench step --micro_batch_size=16 --optimizer=muon --doc_mask      any setting of train.py, as there
    python -m bench sample                      decoding, prefill, a batch
    python -m bench prepare                     encoding text, training a tokenizer
    python -m bench head                        the loss head, forward and backward
    python -m bench head --chunks               ours over chunk sizes: where default_chunk's byte budget comes from
    python -m bench growth                      time and memory over context, batch, vocabulary, depth: six minutes
    python -m bench gpu                         on one card, eight minutes: right, fast, learning; --tiny: on a CPU

Each prints a table for docs/, or with --json one object a line.  How a row is measured is in measure.py, what its
limits are in the bench's own file, of whom the peers are in peers.py.  Other people's packages are rows where they are
installed, best in an environment of their own, whose python then runs this (torch from the CPU index, or on a GPU the
build that fits it; litgpt without its pins, which would lower the others; llama.cpp compiles for five minutes):

    python -m venv .venv-peers
    .venv-peers/bin/pip install -r requirements.txt lightning jsonargparse docstring-parser psutil llama-cpp-python
    .venv-peers/bin/pip install --no-deps litgpt==0.5.13
    .venv-peers/bin/python -m bench step
"""

import argparse
import json
import signal
import sys
import tempfile

from stack.config import Parser, as_command, not_installed

try:
    import torch

    from bench import gpu, growth, head, prepare, sample, step
    from bench.measure import listening, uncompiled
    from stack.device import pick_device
except ModuleNotFoundError as error:
    not_installed(error)

BENCHES = dict(step=step, sample=sample, prepare=prepare, head=head, growth=growth, gpu=gpu)


def main():
    parser = Parser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="|".join(BENCHES), dest="command")
    for name, bench in BENCHES.items():
        sub = commands.add_parser(name, help=bench.__doc__.partition(":")[0], epilog=(
            None if bench in (head, prepare) else "and every --key=value of train.py (python train.py --help)"))
        sub.add_argument("--json", action="store_true", help="one JSON object a line, one per row")
        sub.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
        sub.add_argument("--repeats", type=int, default=10 if bench is gpu else 3,
                         help="timed calls per row, after one that is not (3; gpu: 10)")
        sub.add_argument("--row", help=argparse.SUPPRESS)  # measure this row here instead of starting processes
        sub.add_argument("--folder", help=argparse.SUPPRESS)  # what rows share: the float64 results, a tokenizer
        if bench not in (growth, gpu):
            sub.add_argument("--rows", help="only these, separated by commas")
        for flag, how in bench.FLAGS.items():
            sub.add_argument(flag, **how)
    args, args.settings = parser.parse_known_args()
    bench = BENCHES[args.command]
    with as_command("bench"), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, value in vars(args).items():
            if type(value) is int and value < 1:
                raise ValueError(f"--{name} is {value}; it must be 1 or more.")
        if args.settings and bench in (head, prepare):
            raise ValueError(f"{args.settings[0]} is nothing that {args.command} knows"
                             f"{parser.named(args).advice(args.settings) or '.'}")
        device = torch.device("cpu") if bench is prepare else pick_device(args.device)
        args.folder = args.folder or folder
        if not args.row:
            for name in ("SIGTERM", "SIGHUP"):  # by way of run_row, which ends what it started
                if signal.getsignal(ending := getattr(signal, name, signal.SIGTERM)) == signal.SIG_DFL:
                    signal.signal(ending, lambda number, _: sys.exit(128 + number))
            sys.exit(bench.run(args, device))  # 1 where a row failed
        with listening() as heard:
            result = bench.row(args, device)
        print(f"\n{json.dumps(result | uncompiled(heard))}")  # whatever a model printed before


if __name__ == "__main__":
    main()
