"""Ours beside the alternatives, measured in one run on this machine.

    python bench.py head                        the loss head, forward and backward
    python bench.py head --chunks               ours over chunk sizes: where default_chunk's byte budget comes from
    python bench.py head --json                 one JSON object a line instead of a table for the README

A time means little without its neighbours: whatever slows the machine today slows every row.  So a table is always
one sitting, every row runs in a process of its own (no allocator, compiler cache or thread pool warmed by the row
before), the first call is thrown away (compilation, first touch) and the median of the others counts.  Peak memory is
what a call needs above its inputs: on CUDA the allocator's own peak; on Linux the kernel's high-water mark of resident
memory, set back before the call, after freed memory was returned.  Errors are relative to float64, computed once from
the same inputs.  The floor of `head` is the time of its three matmuls, 6*N*d*V FLOPs, at the rate that one large matmul
reaches here.
"""

import argparse
import contextlib
import ctypes
import datetime
import functools
import gc
import importlib.util
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from device import DTYPES, machine, pick_device
from model import default_chunk, fused_linear_cross_entropy

# ---------------------------------------------------------------------------------------------------------------------
# Measuring


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call, device, repeats: int) -> list[float]:
    """Wall-clock of each of `repeats` calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def resident_mib(key: str) -> float:
    """VmRSS (now) or VmHWM (highest since the last reset) of this process."""
    line, = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def peak_mib(call, device) -> float | None:
    """Memory that one call needs above what is held before it; None where it cannot be measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the warm-up freed is not what the call needs
    before = resident_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # 5: set the high-water mark back to now
    call()
    return resident_mib("VmHWM") - before


def matmul_rate(device, dtype) -> float:
    """FLOP/s of one large square matmul, the machine's practical ceiling."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / statistics.median(seconds(lambda: torch.mm(a, b, out=out), device, 5))


def in_fresh_processes(command: list[str], rows: list[str]):
    """Run `bench.py COMMAND --row NAME` for each row; yields the objects they print.  A row that fails is reported."""
    for row in rows:
        done = subprocess.run([sys.executable, __file__, *command, "--row", row], capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            print(f"bench.py: row {row!r} failed: {reason}", file=sys.stderr)
        else:
            yield json.loads(done.stdout.splitlines()[-1])


def print_json(bench: str, device, **row):
    print(json.dumps(dict(bench=bench, **row, device=machine(device), torch=torch.__version__,
                          date=str(datetime.date.today()))), flush=True)


def print_table(what: str, device, header: list[str], body: list[list]):
    """A markdown table under what was measured where, how and when.  None is an empty cell; empty columns go."""
    print(f"{what}. {machine(device)}, torch {torch.__version__}, {datetime.date.today()}, "
          f"`python {shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`:\n")
    columns = [[name, *cells] for name, *cells in zip(header, *body, strict=True) if any(x is not None for x in cells)]
    columns = [[x if isinstance(x, str) else "" if x is None else f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"
                for x in column] for column in columns]
    widths = [max(map(len, column)) for column in columns]
    for cells in (*zip(*columns, strict=True),):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |")
        if cells[1] == header[1]:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


# ---------------------------------------------------------------------------------------------------------------------
# head: N hidden states (N, d) and a table (V, d) to a loss and both gradients


@functools.cache
def compiled(call):
    return torch.compile(call)  # imports the compiler: seconds that only this row should wait for


def naive(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def compiled_naive(hidden, weight, targets):
    return compiled(naive)(hidden, weight, targets)


def checkpointed(hidden, weight, targets, chunk: int = 4096):
    """Chunks whose logits are thrown away and computed again in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    def of_chunk(hidden, targets):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
    sums = [checkpoint(of_chunk, h, t, use_reentrant=False)
            for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)]
    return torch.stack(sums).sum() / (targets != -100).sum().clamp(min=1)


def torch_chunked(hidden, weight, targets, policy: str):
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
    return F.linear_cross_entropy(hidden, weight, targets, options=options)


def liger(hidden, weight, targets):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, targets)


def cut_cross_entropy(hidden, weight, targets):
    from cut_cross_entropy import linear_cross_entropy
    return linear_cross_entropy(hidden, weight, targets)


def head_rows(device) -> dict:
    """name -> function, in the order of the table; only what can run here."""
    rows = {"naive": naive, "compiled naive": compiled_naive, "checkpointed 4096": checkpointed}
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        for policy in ("accurate", "auto"):
            rows[f"F.linear_cross_entropy {policy}"] = functools.partial(torch_chunked, policy=policy)
    for name, package, call in (("Liger-Kernel", "liger_kernel", liger),
                                ("cut-cross-entropy", "cut_cross_entropy", cut_cross_entropy)):
        if device.type == "cuda" and importlib.util.find_spec(package):
            rows[name] = call
    return rows | {"ours": fused_linear_cross_entropy}


def head_inputs(args, device):
    """Logits of a young model: hidden states of rms 1, a table of N(0, 0.02²)."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.n_tokens, args.d_model, generator=generator)
    weight = torch.randn(args.vocab, args.d_model, generator=generator) * 0.02
    targets = torch.randint(0, args.vocab, (args.n_tokens,), generator=generator)
    dtype = DTYPES[args.dtype]
    return (hidden.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), targets.to(device))


def head_truth(hidden, weight, targets, chunk: int = 512):
    """loss, dh, dw in float64, of the inputs as rounded."""
    hidden, weight = hidden.detach().double(), weight.detach().double()
    loss, dh, dw = torch.zeros((), dtype=torch.float64), torch.empty_like(hidden), torch.zeros_like(weight)
    for i in range(0, len(hidden), chunk):
        log_probs = F.linear(hidden[i:i + chunk], weight).log_softmax(-1)
        rows = torch.arange(len(log_probs)), targets[i:i + chunk]
        loss -= log_probs[rows].sum()
        d = log_probs.exp_()
        d[rows] -= 1
        d /= len(hidden)
        dh[i:i + chunk] = d @ weight
        dw.addmm_(d.t(), hidden[i:i + chunk])
    return loss / len(hidden), dh, dw


def head_row(args, device):
    """One row, in this process."""
    name, _, chunk = args.row.partition(" chunk ")
    call = head_rows(device)[name]
    if chunk:
        call = functools.partial(call, chunk=int(chunk))
    hidden, weight, targets = head_inputs(args, device)

    def step():
        hidden.grad = weight.grad = None
        loss = call(hidden, weight, targets)
        loss.backward()
        return loss
    times = seconds(step, device, args.repeats)
    hidden.grad = weight.grad = None
    peak = peak_mib(step, device)
    row = dict(row=args.row, seconds=statistics.median(times), seconds_min=min(times), seconds_max=max(times),
               peak_mib=None if peak is None else round(peak, 1))
    if args.truth:
        loss, dh, dw = torch.load(args.truth, mmap=True)
        row["loss_error"] = (abs(step().detach().cpu() - loss) / loss).item()
        row["grad_error"] = max(((got.grad.cpu().double() - want).norm() / want.norm()).item()
                                for got, want in ((hidden, dh), (weight, dw)))
    print(json.dumps(row))


def head(args):
    device = pick_device(args.device)
    if args.row:
        return head_row(args, device)
    N, d, V, dtype = args.n_tokens, args.d_model, args.vocab, DTYPES[args.dtype]
    what = f"Loss head, forward + backward, N={N} d={d} V={V} {args.dtype}, median of {args.repeats}"
    if args.chunks:
        default = default_chunk(N, V, dtype, device.type)
        rows = [f"ours chunk {chunk}" for chunk in sorted({min(2**k, N) for k in range(7, 14)} | {default})]
        what += f"; {default} is the default chunk"
    else:
        rows = args.rows.split(",") if args.rows else list(head_rows(device))
        for row in rows:
            if row not in head_rows(device):
                raise ValueError(f"there is no row {row!r} here. Choose from: {', '.join(head_rows(device))}.")
    command = ["head", f"--device={device}", f"--n_tokens={N}", f"--d_model={d}", f"--vocab={V}",
               f"--dtype={args.dtype}", f"--repeats={args.repeats}"]
    with tempfile.TemporaryDirectory() as folder:
        if not args.chunks:
            truth = Path(folder) / "truth.pt"
            torch.save(head_truth(*head_inputs(args, torch.device("cpu"))), truth)
            command.append(f"--truth={truth}")
        floor = 6 * N * d * V / matmul_rate(device, dtype)
        results = []
        for result in in_fresh_processes(command, rows):
            results.append(result)
            if args.json:
                print_json("head", device, **result, floor_seconds=floor, n_tokens=N, d_model=d, vocab=V,
                           dtype=args.dtype, repeats=args.repeats)
    if not args.json and results:
        base = next((x for x in results if x["row"] == "ours"), min(results, key=lambda x: x["seconds"]))
        body = [[x["row"], x["seconds"], x["seconds"] / base["seconds"], x["peak_mib"], x.get("loss_error"),
                 x.get("grad_error")] for x in results]
        body.append(["floor: the matmuls", floor, floor / base["seconds"], None, None, None])
        print_table(what, device, ["", "seconds", f"x {base['row']}", "peak MiB", "loss error", "grad error"], body)
    if len(results) < len(rows):
        sys.exit(1)


def main():
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="one JSON object a line, one per row")
    common.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    common.add_argument("--repeats", type=int, default=3, help="timed calls per row, after one that is not (3)")
    common.add_argument("--row", help=argparse.SUPPRESS)  # measure this row here instead of starting processes
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="head")
    sub = commands.add_parser("head", parents=[common], help="the loss head, forward and backward")
    sub.add_argument("--n_tokens", type=int, default=8192, help="N, positions (8192)")
    sub.add_argument("--d_model", type=int, default=512, help="d, width (512)")
    sub.add_argument("--vocab", type=int, default=32768, help="V, ids (32768)")
    sub.add_argument("--dtype", default="bfloat16", choices=list(DTYPES), help="of hidden states and table (bfloat16)")
    sub.add_argument("--rows", help="only these, separated by commas")
    sub.add_argument("--chunks", action="store_true", help="ours over chunk sizes instead of the peers")
    sub.add_argument("--truth", help=argparse.SUPPRESS)  # file with the float64 results
    sub.set_defaults(run=head)
    args = parser.parse_args()
    try:
        for name in ("repeats", "n_tokens", "d_model", "vocab"):
            if getattr(args, name, 1) < 1:
                raise ValueError(f"--{name} is {getattr(args, name)}; it must be 1 or more.")
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
