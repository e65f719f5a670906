"""The loss head, N hidden states (N, d) and a table (V, d) to a loss and both gradients: `python -m bench head`.

Held against 6*N*d*V FLOPs at the matmul rate.  Errors are relative to float64 from the same inputs.
"""

import functools
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from bench import peers
from bench.measure import choose, matmul_rate, reset_peak, run_rows, seconds, spread
from model import default_chunk, fused_linear_cross_entropy
from stack import compiled
from stack.cpu import kernels
from stack.device import DTYPES

FLAGS = {
    "--n_tokens": dict(type=int, default=8192, help="N, positions (8192)"),
    "--d_model": dict(type=int, default=512, help="d, width (512)"),
    "--vocab": dict(type=int, default=32768, help="V, ids (32768)"),
    "--dtype": dict(default="bfloat16", choices=list(DTYPES), help="of hidden states and table (bfloat16)"),
    "--chunks": dict(action="store_true", help="ours over chunk sizes instead of the peers"),
}


def naive(hidden, weight, targets, reduction: str = "mean"):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction=reduction)


def checkpointed(hidden, weight, targets, chunk: int = 4096):
    """Chunks whose logits are thrown away and computed again in the backward pass."""
    sums = [checkpoint(naive, h, weight, t, "sum", use_reentrant=False)
            for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)]
    return torch.stack(sums).sum() / (targets != -100).sum().clamp(min=1)


def liger(hidden, weight, targets):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, targets)


def cut_cross_entropy(hidden, weight, targets):
    from cut_cross_entropy import linear_cross_entropy
    return linear_cross_entropy(hidden, weight, targets)


def head_rows(device) -> dict:
    """name -> function, in the order of the table; only what can run here."""
    rows = {"naive": naive, "compiled naive": naive, "checkpointed 4096": checkpointed}
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        for policy in ("accurate", "auto"):
            options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy)
            rows[f"F.linear_cross_entropy {policy}"] = functools.partial(F.linear_cross_entropy, options=options)
    packages = {"liger_kernel": ("Liger-Kernel", liger), "cut_cross_entropy": ("cut-cross-entropy", cut_cross_entropy)}
    if device.type == "cuda":
        rows |= [packages[name] for name in peers.installed(*packages)]
    arithmetic = kernels.chunk_arithmetic if device.type == "cpu" else compiled.chunk_arithmetic  # as in training
    return rows | {"ours": functools.partial(fused_linear_cross_entropy, arithmetic=arithmetic)}


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
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = 0
    for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        part = F.cross_entropy(F.linear(h, weight), t, reduction="sum") / len(targets)
        part.backward()
        loss += part.detach()
    return loss, hidden.grad, weight.grad


def row(args, device) -> dict:
    name, _, chunk = args.row.partition(" chunk ")
    call = head_rows(device)[name]
    if chunk:
        call = functools.partial(call, chunk=int(chunk))
    if name.startswith("compiled"):
        call = torch.compile(call)  # imports the compiler: seconds that only this row should wait for
    hidden, weight, targets = head_inputs(args, device)

    def step():
        hidden.grad = weight.grad = None
        loss = call(hidden, weight, targets)
        loss.backward()
        return loss
    times = seconds(step, device, args.repeats)
    hidden.grad = weight.grad = None
    peak = reset_peak(device)
    step()
    result = dict(row=args.row, **spread(times), peak_mib=peak())
    truth = Path(args.folder) / "truth.pt"
    if truth.exists():
        loss, dh, dw = torch.load(truth, mmap=True)
        result["loss_error"] = (abs(step().detach().cpu() - loss) / loss).item()
        result["grad_error"] = max(((got.grad.cpu().double() - want).norm() / want.norm()).item()
                                for got, want in ((hidden, dh), (weight, dw)))
    return result


def run(args, device) -> bool:
    N, d, V, dtype = args.n_tokens, args.d_model, args.vocab, DTYPES[args.dtype]
    what = f"Loss head, forward + backward, N={N} d={d} V={V} {args.dtype}, median of {args.repeats}"
    if args.chunks:
        default = default_chunk(N, V, dtype, device.type)
        rows = [f"ours chunk {chunk}" for chunk in sorted({min(2**k, N) for k in range(7, 14)} | {default})]
        what += f"; {default} is the default chunk"
    else:
        rows = choose(args, list(head_rows(device)))
        torch.save(head_truth(*head_inputs(args, torch.device("cpu"))), Path(args.folder) / "truth.pt")
    floor = 6 * N * d * V / matmul_rate(device, dtype)

    def table(results):
        base = next((x for x in results if x["row"] == "ours"), min(results, key=lambda x: x["seconds"]))
        return what, {
            "": "row", "seconds": "seconds", f"x {base['row']}": lambda x: x["seconds"] / base["seconds"],
            "peak MiB": "peak_mib", "loss error": "loss_error", "grad error": "grad_error",
        }, [*results, dict(row="floor: the matmuls", seconds=floor)]
    return run_rows(args, device, rows, table, floor_seconds=floor, n_tokens=N, d_model=d, vocab=V, dtype=args.dtype)
