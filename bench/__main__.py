"""Ours beside the alternatives, measured in one run on this machine.

    python -m bench step                        one training step: forward, backward, clip, optimizer
    python -m bench step --micro_batch_size=16 --optimizer=muon --doc_mask      any setting of train.py, as there
    python -m bench sample                      decoding, prefill, a batch
    python -m bench prepare                     encoding text, training a tokenizer
    python -m bench head                        the loss head, forward and backward
    python -m bench head --chunks               ours over chunk sizes: where default_chunk's byte budget comes from
    python -m bench growth                      time and memory over context, batch, vocabulary, depth: six minutes
    python -m bench gpu                         all of it that matters on one card, within eight minutes

Each prints a table for the README, or with --json one object a line.

A time means little without its neighbours: whatever slows the machine today slows every row.  So a table is always
one sitting, every row runs in a process of its own (no allocator, compiler cache or thread pool warmed by the row
before), the first call is thrown away (compilation, first touch) and the median of the others counts.  Peak memory is
what a call needs above its inputs, or a training step above the imports: on CUDA the allocator's own peak; on Linux the
kernel's high-water mark of resident memory, set back before the call, after freed memory was returned.  Only growth,
which has no use for the first call's time, lets its rows share what was compiled.

*The limits.*  Matmuls are held against the rate that one large matmul reaches here: `head` needs 6*N*d*V FLOPs, `step`
model.flops_per_token (causal) a token.  Decoding one sequence is held against reading every weight once a token, at the
rate at which one large tensor is summed here.  Errors of `head` are relative to float64 from the same inputs.

*The peers.*  The plain rows state our model and a GPT-2 of the same width and depth in PyTorch's own modules, with full
logits.  Other people's packages are rows where they are installed, best in an environment of their own, whose python
then runs this file (torch from the CPU index, or on a GPU the build that fits it; litgpt without its pins, which would
lower the others; llama.cpp compiles for five minutes):

    python -m venv /tmp/peers
    /tmp/peers/bin/pip install -r requirements.txt lightning jsonargparse docstring-parser psutil llama-cpp-python
    /tmp/peers/bin/pip install --no-deps litgpt==0.5.13
    /tmp/peers/bin/python -m bench step
"""

import argparse
import contextlib
import ctypes
import datetime
import functools
import gc
import importlib
import io
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ModuleNotFoundError as error:
    from stack.config import not_installed
    not_installed(error, "bench")

from bench import peers
from model import GPT, ModelConfig, default_chunk, fused_linear_cross_entropy, generate
from stack.compiled import chunk_arithmetic as compiled_arithmetic
from stack.config import TrainConfig, as_command, load
from stack.counts import flops_per_token
from stack.cpu.kernels import chunk_arithmetic
from stack.data.batches import Batches, TokenData
from stack.data.shards import write_meta, write_shard
from stack.device import DTYPES, autocast, keep_freed_memory, machine, peak_flops, pick_device, pick_dtype
from stack.optim import make_optimizers
from stack.parallel.parallel import Ranks, parallelize
from stack.quantize import quantize_int8
from stack.twins import fast_decoding

ROOT = Path(__file__).resolve().parent.parent
# What is timed for the ceilings: far beyond any cache, and long against starting a kernel
MATMUL_SIZE, READ_BYTES = {"cpu": 2048, "cuda": 8192}, {"cpu": 1 << 30, "cuda": 8 << 30}

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


def reset_peak(device) -> float | None:
    """Forget the highest use of memory so far; returns MiB in use now, None where they cannot be measured."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 2**20
    if sys.platform != "linux" or device.type != "cpu":
        return None
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the warm-up freed is not what the call needs
    Path("/proc/self/clear_refs").write_text("5")  # 5: set the high-water mark back to now
    return resident_mib("VmRSS")


def peak_since(before: float | None, device) -> float | None:
    """MiB of the highest use since reset_peak, above `before`."""
    if before is None:
        return None
    highest = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else resident_mib("VmHWM")
    return round(highest - before, 1)


def peak_mib(call, device) -> float | None:
    """Memory that one call needs above what is held before it; None where it cannot be measured."""
    before = reset_peak(device)
    call()
    return peak_since(before, device)


def matmul_rate(device, dtype) -> float:
    """FLOP/s of one large square matmul, the machine's practical ceiling."""
    size = MATMUL_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / statistics.median(seconds(lambda: torch.mm(a, b, out=out), device, 9))


def read_rate(device) -> float:
    """Bytes/s at which one large tensor is summed: as fast as weights can be read."""
    x = torch.ones(READ_BYTES[device.type] // 4, device=device)
    return x.nbytes / statistics.median(seconds(x.sum, device, 5))


def copy_rate(device) -> float:
    """Bytes/s, read and written, of copying one large tensor."""
    a, b = torch.ones(2, READ_BYTES[device.type] // 8, device=device)
    return 2 * a.nbytes / statistics.median(seconds(lambda: a.copy_(b), device, 5))


def run_row(command: list[str], row: str, timeout: float | None = None, cache: str | None = None) -> dict:
    """What `bench COMMAND --row NAME` prints, in a process of its own; {"row", "failed": why} where it fails.

    cache: a folder for what was compiled, where the first call's time does not matter; else it is another day's.
    """
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as fresh:
            done = subprocess.run([sys.executable, "-m", "bench", *command, "--row", row], cwd=ROOT, timeout=timeout,
                                  capture_output=True, text=True,
                                  env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache or fresh})
    except subprocess.TimeoutExpired:
        return dict(row=row, failed=f"not ready after {timeout:.0f} s")
    if done.returncode:
        return dict(row=row, failed=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    for line in done.stderr.splitlines():
        if "compiled" in line and "Warning" in line:  # a row that says compiled and is not
            print(f"bench: row {row!r}: {line}", file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def in_fresh_processes(args, device, rows: list[str], command=(), derive=lambda x: {}, cache: str | None = None,
                       **facts) -> list[dict]:
    """The objects that rows print, with what derive(object) adds; with --json printed at once, together with facts.
    A row that fails is reported and left out."""
    results = []
    for row in rows:
        result = run_row([*sys.argv[1:], *command], row, cache=cache)
        if "failed" in result:
            print(f"bench: row {row!r} failed: {result['failed']}", file=sys.stderr)
            continue
        results.append(result | derive(result))
        if args.json:
            print_json(args.command, device, **results[-1], **facts, repeats=args.repeats)
    return results


def spread(times: list[float]) -> dict:
    return dict(seconds=statistics.median(times), seconds_min=min(times), seconds_max=max(times))


def choose(args, rows: list[str]) -> list[str]:
    """Those of the rows that were asked for."""
    chosen = args.rows.split(",") if args.rows else rows
    for row in chosen:
        if row not in rows:
            raise ValueError(f"there is no row {row!r} here. Choose from: {', '.join(rows)}.")
    return chosen


def percent(part: float | None) -> str | None:
    return None if part is None else f"{part:.1%}" if part < 0.1 else f"{part:.0%}"


def print_json(bench: str, device, **row):
    print(json.dumps(dict(bench=bench, **row, device=machine(device), torch=torch.__version__,
                          date=str(datetime.date.today()))), flush=True)


def print_table(what: str, device, header: list[str], body: list[list]):
    """A markdown table under what was measured where, how and when.  None is an empty cell; empty columns go."""
    print(f"{what}. {machine(device)}, torch {torch.__version__}, {datetime.date.today()}, "
          f"`python -m bench {shlex.join(sys.argv[1:])}`:\n")
    columns = [[name, *cells] for name, *cells in zip(header, *body, strict=True) if any(x is not None for x in cells)]
    columns = [[x if isinstance(x, str) else "" if x is None else f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"
                for x in column] for column in columns]
    widths = [max(map(len, column)) for column in columns]
    for i, cells in enumerate(zip(*columns, strict=True)):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


# ---------------------------------------------------------------------------------------------------------------------
# head: N hidden states (N, d) and a table (V, d) to a loss and both gradients


@functools.cache
def compiled(call):
    return torch.compile(call)  # imports the compiler: seconds that only this row should wait for


def naive(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


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
    rows = {"naive": naive, "compiled naive": lambda *inputs: compiled(naive)(*inputs),
            "checkpointed 4096": checkpointed}
    if hasattr(F, "linear_cross_entropy"):  # torch 2.13
        for policy in ("accurate", "auto"):
            rows[f"F.linear_cross_entropy {policy}"] = functools.partial(torch_chunked, policy=policy)
    for name, package, call in (("Liger-Kernel", "liger_kernel", liger),
                                ("cut-cross-entropy", "cut_cross_entropy", cut_cross_entropy)):
        if device.type == "cuda" and peers.installed(package):
            rows[name] = call
    how = dict(arithmetic=chunk_arithmetic if device.type == "cpu" else compiled_arithmetic)  # as in training
    return rows | {"ours": functools.partial(fused_linear_cross_entropy, **how)}


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
    row = dict(row=args.row, **spread(times), peak_mib=peak_mib(step, device))
    if args.folder:
        loss, dh, dw = torch.load(Path(args.folder) / "truth.pt", mmap=True)
        row["loss_error"] = (abs(step().detach().cpu() - loss) / loss).item()
        row["grad_error"] = max(((got.grad.cpu().double() - want).norm() / want.norm()).item()
                                for got, want in ((hidden, dh), (weight, dw)))
    return row


def head(args, device):
    N, d, V, dtype = args.n_tokens, args.d_model, args.vocab, DTYPES[args.dtype]
    what = f"Loss head, forward + backward, N={N} d={d} V={V} {args.dtype}, median of {args.repeats}"
    if args.chunks:
        default = default_chunk(N, V, dtype, device.type)
        rows = [f"ours chunk {chunk}" for chunk in sorted({min(2**k, N) for k in range(7, 14)} | {default})]
        what += f"; {default} is the default chunk"
    else:
        rows = choose(args, list(head_rows(device)))
    command = []
    with tempfile.TemporaryDirectory() as folder:
        if not args.chunks:
            torch.save(head_truth(*head_inputs(args, torch.device("cpu"))), Path(folder) / "truth.pt")
            command.append(f"--folder={folder}")
        floor = 6 * N * d * V / matmul_rate(device, dtype)
        results = in_fresh_processes(args, device, rows, command, floor_seconds=floor, n_tokens=N, d_model=d, vocab=V,
                                     dtype=args.dtype)
    if not args.json and results:
        base = next((x for x in results if x["row"] == "ours"), min(results, key=lambda x: x["seconds"]))
        body = [[x["row"], x["seconds"], x["seconds"] / base["seconds"], x["peak_mib"], x.get("loss_error"),
                 x.get("grad_error")] for x in results]
        body.append(["floor: the matmuls", floor, floor / base["seconds"], None, None, None])
        print_table(what, device, ["", "seconds", f"x {base['row']}", "peak MiB", "loss error", "grad error"], body)
    return len(results) < len(rows)


# ---------------------------------------------------------------------------------------------------------------------
# step: (x, y) to updated weights, in the settings of train.py

STEP = ["--seq_len=1024", "--micro_batch_size=2", "--optimizer=adamw", "--doc_mask=false", "--dtype=bfloat16"]


def settings(args, *defaults: str) -> tuple[ModelConfig, TrainConfig]:
    """Both dataclasses from this bench's defaults and what the command line changes."""
    model_cfg, cfg = load((ModelConfig, TrainConfig), [*STEP, *defaults, *args.settings])
    return replace(model_cfg, max_seq_len=max(model_cfg.max_seq_len, cfg.seq_len)), cfg


def step_rows(cfg: TrainConfig) -> list[str]:
    """Ours and the peers, each as written and compiled whole.  Only the plain model also knows document masks."""
    those = ["plain"] if cfg.doc_mask else ["plain", "GPT-2", *peers.installed("transformers", "litgpt")]
    return ["ours"] + [f"{peer} {how}" for peer in those for how in ("eager", "compiled")]


def step_model(row: str, model_cfg: ModelConfig, cfg: TrainConfig, device):
    """(model, loss_of(x, y, docs), FLOPs a token).  Ours is train.py's steps 4 and 5; the loss is a mean everywhere."""
    if row == "ours":
        model = parallelize(GPT(model_cfg), Ranks(), device, dtype=pick_dtype(cfg.dtype, device), remat=cfg.remat,
                            compile=cfg.compile)

        def loss_of(x, y, docs):
            return model(x, y, docs=docs, z_loss=cfg.z_loss, reduction="sum") / y.numel()
    else:
        peer, how = row.rsplit(" ", 1)
        model, loss_of, model_cfg = peers.trained(peer, model_cfg, device)
        loss_of = torch.compile(loss_of) if how == "compiled" else loss_of
    return model.train(), loss_of, flops_per_token(model_cfg, cfg.seq_len)["causal"]


def step_batches(folder, model_cfg: ModelConfig, cfg: TrainConfig, device) -> Batches:
    """train.py's loader over random tokens, in documents of 500 on average that begin with id 0."""
    rng, n = np.random.default_rng(0), 64 * cfg.micro_batch_size * cfg.seq_len + 1
    ids = np.where(rng.random(n) < 1 / 500, 0, rng.integers(1, model_cfg.vocab_size, n)).astype(np.uint32)
    facts = dict(fingerprint="0" * 64, vocab_size=model_cfg.vocab_size)
    entry = write_shard(Path(folder) / "train_000000.bin", ids, **facts)
    write_meta(folder, sources=[], boundary_id=0, splits={"train": [{**entry, "documents": 0, "bytes": 0}]}, **facts)
    return Batches(TokenData(folder, "train", seq_len=cfg.seq_len), seed=cfg.seed, device=device,
                   micro_batch_size=cfg.micro_batch_size)


def step_row(args, device):
    """train.py's step 8 with one micro batch."""
    model_cfg, cfg = settings(args)
    dtype, ours, clock = pick_dtype(cfg.dtype, device), args.row == "ours", time.perf_counter
    import torch._inductor.compile_fx  # noqa: F401 (the compiler's own memory is no row's)
    if (package := args.row.split(" ")[0]) in ("transformers", "litgpt"):
        importlib.import_module(package)
    if ours and device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    torch.compiler.set_stance("force_eager" if ours and not cfg.compile else "default")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --deterministic, as in train.py
    torch.use_deterministic_algorithms(cfg.deterministic)
    torch.manual_seed(cfg.seed)
    imported = reset_peak(device)
    model, loss_of, flops = step_model(args.row, model_cfg, cfg, device)
    optimizers = make_optimizers(model, optimizer=cfg.optimizer if ours else "adamw", muon_lr=cfg.muon_lr,
                                 adamw_lr=cfg.adamw_lr, weight_decay=cfg.weight_decay, betas=(cfg.beta1, cfg.beta2))
    params = [p for p in model.parameters() if p.requires_grad]

    def step(batches):
        """Seconds in all, without data, in the optimizer; the loss."""
        synchronize(device)
        start = clock()
        x, y, docs = next(batches)
        fetched = clock()
        with autocast(device, dtype):
            loss = loss_of(x, y, docs if cfg.doc_mask else None)
        loss.backward()
        synchronize(device)
        differentiated = clock()
        grads = [p.grad for p in params if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if math.isfinite(norm.item()):
            torch._foreach_mul_(grads, (cfg.grad_clip / (norm + 1e-6)).clamp(max=1) if cfg.grad_clip else 1.0)
            for optimizer in optimizers:
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        end = clock()
        return end - start, fetched - start, end - differentiated, loss.item()

    with tempfile.TemporaryDirectory() as folder:
        batches = step_batches(folder, model_cfg, cfg, device)
        first, _, _, loss = step(batches)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        held = reset_peak(device)  # weights, moments and the compiler's leftovers
        step(batches)
        times = [step(batches) for _ in range(args.repeats)]
        batches.close()
    totals, *columns, _ = zip(*times, strict=True)
    total, wait, optimizer = map(statistics.median, (totals, *columns))
    moments = sum(t.nbytes for o in optimizers for state in o.state.values() for t in state.values()
                  if torch.is_tensor(t))
    tokens = cfg.micro_batch_size * cfg.seq_len
    return dict(
        row=args.row, tok_per_s=tokens / total, **spread(totals), first_seconds=first,
        recompiled=torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
        optimizer_seconds=optimizer, data_wait=wait / total, peak_mib=peak_since(imported, device),
        step_mib=peak_since(held, device), loss=loss, flops_per_token=flops,
        state_mib=round((2 * sum(p.nbytes for p in params) + moments) / 2**20, 1))


def step(args, device):
    model_cfg, cfg = settings(args)
    rows, dtype = choose(args, step_rows(cfg)), pick_dtype(cfg.dtype, device)
    rate, peak = matmul_rate(device, dtype), peak_flops(device, dtype)

    def derive(x):
        if x["recompiled"]:
            print(f"bench: row {x['row']!r} compiled {x['recompiled']} graphs after its first step", file=sys.stderr)
        long = x["optimizer_seconds"] + 16 / cfg.micro_batch_size * (x["seconds"] - x["optimizer_seconds"])
        flops = x["tok_per_s"] * x["flops_per_token"]
        return dict(of_floor=flops / rate, mfu=flops / peak if peak else None,
                    optimizer_of_16=x["optimizer_seconds"] / long)
    results = in_fresh_processes(args, device, rows, (), derive, gemm_flops=rate, seq_len=cfg.seq_len,
                                 micro_batch_size=cfg.micro_batch_size, optimizer=cfg.optimizer, doc_mask=cfg.doc_mask,
                                 dtype=str(dtype).removeprefix("torch."))
    if not args.json and results:
        best = max((x["tok_per_s"] for x in results if x["row"].endswith("compiled")), default=None)
        body = [[x["row"], x["tok_per_s"], x["tok_per_s"] / best if best else None, percent(x["of_floor"]),
                 percent(x["mfu"]), x["peak_mib"], x["state_mib"], x["first_seconds"],
                 percent(x["optimizer_seconds"] / x["seconds"]), percent(x["optimizer_of_16"]), percent(x["data_wait"])]
                for x in results]
        floor = rate / flops_per_token(model_cfg, cfg.seq_len)["causal"]
        body.append(["floor: the matmuls", floor, floor / best if best else None, *[None] * 8])
        print_table(f"Training step, {cfg.micro_batch_size} x {cfg.seq_len} tokens, {cfg.optimizer} (peers: adamw), "
                    f"{str(dtype).removeprefix('torch.')}, document masks {'on' if cfg.doc_mask else 'off'}, matmuls "
                    f"{rate / 1e9:,.0f} GFLOP/s, median of {args.repeats}", device,
                    ["", "tokens/s", "x best compiled peer", "of the floor", "MFU", "peak MiB",
                     "of it weights, gradients, moments", "first step s", "optimizer share", "with 16 sequences",
                     "data wait"], body)
    return len(results) < len(rows)


# ---------------------------------------------------------------------------------------------------------------------
# sample: greedy decoding of a model with random weights

SAME_BITS = {"int8": "q8_0"}


def sample_rows() -> list[str]:
    precisions = {"ours": ("bf16", "fp32", "int8", "bf16 uncompiled"), "transformers": ("bf16", "fp32"),
                  "llama_cpp": ("bf16", "f16", "q8_0")}
    return [f"{who} {how}" for who in ["ours", *peers.installed("transformers", "llama_cpp")]
            for how in precisions[who]]


def our_decoder(precision: str, model_cfg: ModelConfig, device, compile: bool):
    """(decode(prompts, n_new) -> the first row's ids, bytes of weights read per token), as sample.py does it."""
    model = GPT(model_cfg).to(device, peers.PRECISIONS.get(precision, torch.bfloat16))
    if precision == "int8":
        quantize_int8(model)
    if compile:
        fast_decoding(model)

    def first_row(prompts, n_new):
        return generate(model, prompts, max_new_tokens=n_new)[0]
    return first_row, sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def sample_row(args, device):
    model_cfg, cfg = settings(args)
    torch.manual_seed(cfg.seed)
    long = max(args.prompt_tokens + args.new_tokens, args.prefill_tokens + 1)
    model_cfg = replace(model_cfg, max_seq_len=max(model_cfg.max_seq_len, long))
    rng, firsts = np.random.default_rng(0), []

    def timed(rows, n_prompt, n_new):
        prompts = rng.integers(0, model_cfg.vocab_size - 9, (rows, n_prompt)).tolist()
        start = time.perf_counter()
        got = len(generated(prompts, n_new))
        firsts.append(time.perf_counter() - start)
        if got != n_new:
            raise ValueError(f"{got} tokens instead of {n_new}")
        return statistics.median(seconds(lambda: generated(prompts, n_new), device, args.repeats))
    with tempfile.TemporaryDirectory() as folder:
        before, (who, precision, *how) = reset_peak(device), args.row.split(" ")
        if who == "ours":
            generated, weight_bytes = our_decoder(precision, model_cfg, device, cfg.compile and not how)
        else:
            generated, weight_bytes = peers.decoder(who, precision, model_cfg, device, Path(folder))
        one, prefill = timed(1, args.prompt_tokens, args.new_tokens), timed(1, args.prefill_tokens, 1)
        rows = timed(args.batch, args.prompt_tokens, args.new_tokens) if who != "llama_cpp" else None  # one at a time
    flops = flops_per_token(model_cfg, args.prefill_tokens)["causal"] // 3  # forward
    head = 2 * model_cfg.padded_vocab_size * model_cfg.d_model  # at the last position only
    return dict(
        row=args.row, tok_per_s=args.new_tokens / one, first_seconds=firsts[0], weight_bytes=weight_bytes,
        peak_mib=peak_since(before, device),
        prefill_tok_per_s=args.prefill_tokens / prefill,
        prefill_flops=(args.prefill_tokens * (flops - head) + head) / prefill,
        batch=args.batch, batch_tok_per_s=rows and args.batch * args.new_tokens / rows)


def sample(args, device):
    settings(args)
    rows, reading = choose(args, sample_rows()), read_rate(device)
    rates = {dtype: matmul_rate(device, dtype) for dtype in (torch.bfloat16, torch.float32)}

    def derive(x):
        limit = reading / x["weight_bytes"]
        rate = rates[torch.float32 if x["row"].endswith("fp32") else torch.bfloat16]
        return dict(limit_tok_per_s=limit, of_bandwidth=x["tok_per_s"] / limit, of_gemm=x["prefill_flops"] / rate,
                    gemm_flops=rate)
    results = in_fresh_processes(args, device, rows, (), derive, bytes_per_s=reading, prompt_tokens=args.prompt_tokens,
                                 new_tokens=args.new_tokens, prefill_tokens=args.prefill_tokens)
    if not args.json and results:
        speeds = {x["row"]: x["tok_per_s"] for x in results}

        def ratio(x, peer):
            precision = x["row"].split(" ")[1]  # 8 bits beside 8 bits
            other = speeds.get(f"{peer} {precision}") or speeds.get(f"{peer} {SAME_BITS.get(precision)}")
            return x["tok_per_s"] / other if other else None
        body = [[x["row"], x["tok_per_s"], ratio(x, "transformers"), ratio(x, "llama_cpp"), x["limit_tok_per_s"],
                 percent(x["of_bandwidth"]), x["prefill_tok_per_s"], percent(x["of_gemm"]), x["batch_tok_per_s"],
                 x["batch_tok_per_s"] and x["batch_tok_per_s"] / x["tok_per_s"], x["first_seconds"]] for x in results]
        print_table(f"Greedy decoding, {args.prompt_tokens} + {args.new_tokens} tokens, prefill of "
                    f"{args.prefill_tokens}; weights read at {reading / 1e9:.0f} GB/s, matmuls at "
                    f"{rates[torch.bfloat16] / 1e9:,.0f} GFLOP/s bf16, {rates[torch.float32] / 1e9:,.0f} fp32; median "
                    f"of {args.repeats}", device,
                    ["", "tokens/s", "x transformers", "x llama_cpp", "limit: reading the weights", "of it",
                     "prefill tokens/s", "of the matmul rate", f"batch {args.batch} tokens/s", "x batch 1",
                     "first call s"], body)
    return len(results) < len(rows)


# ---------------------------------------------------------------------------------------------------------------------
# prepare: text to ids, text to a vocabulary

PREPARE = ["tiktoken in a bare pool", "ours: encode_documents", "ours: prepare.py, whole", "bare rustbpe",
           "ours: train_tokenizer"]


def prepare_row(args, device):
    """Over the documents that prepare.py would read, held in memory (but for the command)."""
    from concurrent.futures import ThreadPoolExecutor

    import rustbpe
    import tiktoken

    from stack.data.sources import Reader, Source
    from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer, train_tokenizer
    words, workers = Tokenizer.load(args.folder), os.cpu_count()
    texts = [piece.text for name in args.text for piece in Reader(Source(name), errors="replace", skip_bad=True)]
    bare = tiktoken.Encoding("bare", pat_str=words.pattern, mergeable_ranks=words.ranks, special_tokens={})

    def pool():
        with ThreadPoolExecutor(workers) as threads:
            for _ in threads.map(lambda text: bare.encode_to_numpy(text, disallowed_special=()), texts):
                pass

    def ours():
        for _ in words.encode_documents(texts, workers):
            pass

    def command():
        with tempfile.TemporaryDirectory() as out:
            subprocess.run([sys.executable, ROOT / "prepare.py", *args.text, "--tokenizer", args.folder, "--errors",
                            "replace", "--skip_bad", "--out", f"{out}/data"], check=True, capture_output=True)

    def rust():
        rustbpe.Tokenizer().train_from_iterator(iter(texts), args.vocab - len(SPECIALS), pattern=PATTERN)
    with contextlib.redirect_stderr(io.StringIO()):  # a small text has too few pairs, and says so every time
        call = dict(zip(PREPARE, (pool, ours, command, rust, lambda: train_tokenizer(texts, args.vocab)),
                        strict=True))[args.row]
        times = seconds(call, device, args.repeats)
    size = sum(len(text.encode("utf-8", "replace")) for text in texts)
    return dict(row=args.row, **spread(times), mb=size / 1e6, mb_per_s=size / 1e6 / statistics.median(times))


def prepare(args, device):
    from stack.data.sources import Reader, Source
    from stack.data.tokenizer import train_tokenizer
    rows, speeds = choose(args, PREPARE), {}

    def derive(x):
        speeds[x["row"]] = x["mb_per_s"]
        bare = speeds.get(PREPARE[0 if PREPARE.index(x["row"]) < 3 else 3])
        return dict(ratio=x["mb_per_s"] / bare if bare else 1.0)
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer((piece.text for name in args.text for piece in Reader(Source(name), errors="replace",
                                                                             skip_bad=True)), args.vocab).save(folder)
        results = in_fresh_processes(args, device, rows, [f"--folder={folder}"], derive, vocab=args.vocab)
    if not args.json and results:
        print_table(f"Text to ids, then text to {args.vocab} ids, {results[0]['mb']:.1f} MB of "
                    f"{' '.join(args.text)}, median of {args.repeats}", device,
                    ["", "seconds", "MB/s", "x the bare one"],
                    [[x["row"], x["seconds"], x["mb_per_s"], x["ratio"]] for x in results])
    return len(results) < len(rows)


# ---------------------------------------------------------------------------------------------------------------------
# growth: our step, one axis at a time from a shape that a CPU can do

GROWTH = ["--d_model=256", "--n_layers=6", "--n_heads=4", "--n_kv_heads=1", "--d_ff=704", "--seq_len=512"]
AXES = {"seq_len": (256, 512, 1024, 2048, 4096), "micro_batch_size": (1, 2, 4, 8, 16),
        "vocab_size": (8192, 16384, 32768, 65536, 131072), "n_layers": (6, 12, 24, 60)}
UNITS = {"seq_len": "token", "micro_batch_size": "token", "vocab_size": "id", "n_layers": "layer"}


def growth_row(args, device):
    """The head alone, then the step, from which on freed memory is kept.  The row is a setting, as in seq_len=256."""
    setting, (axis, _, value), args.row = args.row, args.row.partition("="), "ours"
    args.settings = [*GROWTH, *args.settings, f"--{setting}"]
    model_cfg, cfg = settings(args)
    tokens, dtype = cfg.micro_batch_size * cfg.seq_len, pick_dtype(cfg.dtype, device)
    args.n_tokens, args.d_model, args.vocab = tokens, model_cfg.d_model, model_cfg.padded_vocab_size
    args.dtype = str(dtype).removeprefix("torch.")
    torch.compiler.set_stance("default" if cfg.compile else "force_eager")
    head = head_row(args, device)["peak_mib"]
    if head is not None:  # without its result: the gradient, as long as the head's input
        head = round(head - tokens * model_cfg.d_model * dtype.itemsize / 2**20, 1)
    row = step_row(args, device)
    return row | dict(row=setting, tokens=tokens, us_per_token=row["seconds"] / tokens * 1e6, head_mib=head,
                      units=tokens if UNITS[axis] == "token" else int(value))


def growth(args, device):
    axes, failed, (model_cfg, cfg) = dict(AXES), False, settings(args, *GROWTH)
    if args.axis:
        given = [axis.partition("=") for axis in args.axis]
        if unknown := [name for name, _, _ in given if name not in AXES]:
            raise ValueError(f"there is no axis {unknown[0]!r}. Choose from: {', '.join(AXES)}.")
        axes = {name: values.split(",") if values else AXES[name] for name, _, values in given}

    def derive(x):
        print(f"bench: {x['row']} done", file=sys.stderr)
        return {}

    def further(before, x, key, scale):
        more = before and x["units"] - before["units"]
        return (x[key] - before[key]) * scale / more if more and x[key] is not None else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        for axis, values in axes.items():
            results = in_fresh_processes(args, device, [f"{axis}={value}" for value in values], (), derive, cache)
            failed |= len(results) < len(values)
            if args.json or not results:
                continue
            print_table(f"Our training step over {axis}, else d_model {model_cfg.d_model}, {model_cfg.n_layers} layers,"
                        f" vocabulary {model_cfg.vocab_size}, {cfg.micro_batch_size} x {cfg.seq_len} tokens, "
                        f"{cfg.optimizer}, {cfg.dtype}, median of {args.repeats}; peaks above weights and moments, the "
                        "head's above its inputs and its result [tokens, d]; further: than the row above", device,
                        [axis, "us a token", "x the first", f"us for each further {UNITS[axis]}", "peak MiB",
                         f"KiB for each further {UNITS[axis]}", "weights, gradients, moments", "head's peak MiB"],
                        [[x["row"].partition("=")[2], x["us_per_token"], x["us_per_token"] / results[0]["us_per_token"],
                          further(before, x, "seconds", 1e6), x["step_mib"], further(before, x, "step_mib", 1024),
                          x["state_mib"], x["head_mib"]] for before, x in zip([None, *results], results, strict=False)])
            print(flush=True)
    return failed


# ---------------------------------------------------------------------------------------------------------------------
# gpu: one card, one table


def gpu_parts(args, device) -> list[tuple[str, list[str], str]]:
    """(what, command, row), the most telling first: what the time does not suffice for is at the end."""
    model_cfg, cfg = settings(args, "--seq_len=2048")
    common = [f"--repeats={args.repeats}", f"--device={device}"]
    n = 16 * cfg.seq_len

    def step_part(what, row, *changes):
        return what, ["step", *common, "--seq_len=2048", "--micro_batch_size=16", *args.settings, *changes], row
    parts = [("ceilings", ["gpu", f"--device={device}", *args.settings], "ceilings"),
             step_part(f"step, 16 x {cfg.seq_len}", "ours"),
             step_part(f"step, 32 x {cfg.seq_len}", "ours", "--micro_batch_size=32"),
             step_part(f"step, 16 x {cfg.seq_len}, document masks", "ours", "--doc_mask=true"),
             step_part(f"step, 16 x {cfg.seq_len}, Muon", "ours", "--optimizer=muon"),
             ("sample, batch 1 and 64", ["sample", *common, "--batch=64", *args.settings], "ours bf16"),
             step_part(f"step, 32 x {cfg.seq_len}, document masks, Muon: the recipe", "ours", "--micro_batch_size=32",
                       "--doc_mask=true", "--optimizer=muon")]
    parts += [step_part(f"step, 16 x {cfg.seq_len}, {row}", row) for row in reversed(step_rows(cfg))
              if row.endswith("compiled") and not row.startswith("GPT-2")]
    return parts + [(f"head, {n} tokens, {row}", [
        "head", *common, f"--n_tokens={n}", f"--d_model={model_cfg.d_model}", f"--vocab={model_cfg.padded_vocab_size}",
        f"--dtype={'bfloat16' if cfg.dtype == 'auto' else cfg.dtype}"], row)
        for row in ("ours", "compiled naive", *list(head_rows(device))[3:-1])]


def gpu_row(args, device):
    dtype = pick_dtype(settings(args)[1].dtype, device)
    return dict(row=args.row, gemm_flops=matmul_rate(device, dtype), copy_bytes_per_s=copy_rate(device),
                read_bytes_per_s=read_rate(device), peak_flops=peak_flops(device, dtype))


def gpu(args, device):
    body, start, ceilings, failed = [], time.monotonic(), {}, False
    for what, command, row in gpu_parts(args, device):
        left = args.minutes * 60 - (time.monotonic() - start)
        x = run_row(command, row, timeout=min(left, 150)) if left > 5 else dict(row=row, failed="no time left")
        failed |= "failed" in x
        if row == "ceilings":
            ceilings = x
        gemm, reading, peak = (ceilings.get(key) for key in ("gemm_flops", "read_bytes_per_s", "peak_flops"))
        flops = x["tok_per_s"] * x["flops_per_token"] if "flops_per_token" in x else None
        limit = reading / x["weight_bytes"] if reading and "weight_bytes" in x else None
        x |= dict(part=what, of_gemm=flops and gemm and flops / gemm, mfu=flops and peak and flops / peak,
                  of_bandwidth=limit and x["tok_per_s"] / limit)
        if args.json:
            print_json("gpu", device, **x)
        note = x.get("failed")
        if row == "ceilings" and gemm:
            note = (f"matmuls {gemm / 1e12:.3g} TFLOP/s, copying {x['copy_bytes_per_s'] / 1e9:,.0f} GB/s, "
                    f"reading {reading / 1e9:,.0f} GB/s")
        elif x.get("batch_tok_per_s"):
            note = f"batch {x['batch']}: {x['batch_tok_per_s']:,.0f} tokens/s, prefill {x['prefill_tok_per_s']:,.0f}"
        elif "optimizer_seconds" in x:
            note = f"first step {x['first_seconds']:.0f} s, optimizer {x['optimizer_seconds'] * 1e3:.1f} ms"
        body.append([what, x.get("tok_per_s"), x["seconds"] * 1e3 if "seconds" in x else None, percent(x["mfu"]),
                     percent(x["of_gemm"]), percent(x["of_bandwidth"]), x.get("peak_mib"), note or ""])
        print(f"bench: {time.monotonic() - start:4.0f} s  {what}: {note or 'done'}", file=sys.stderr)
    if not args.json:
        print_table(f"One card, {args.repeats} repeats", device, ["", "tokens/s", "ms", "MFU", "of the matmul rate",
                                                                  "of the bandwidth", "peak MiB", "note"], body)
    return failed


# ---------------------------------------------------------------------------------------------------------------------


def main():
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--json", action="store_true", help="one JSON object a line, one per row")
    common.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    common.add_argument("--repeats", type=int, help="timed calls per row, after one that is not (3; gpu: 10)")
    common.add_argument("--row", help=argparse.SUPPRESS)  # measure this row here instead of starting processes
    common.add_argument("--folder", help=argparse.SUPPRESS)  # what rows share: the float64 results, a tokenizer
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="step|sample|prepare|head|growth|gpu", dest="command")

    def add(run, measure, help_text):
        sub = commands.add_parser(run.__name__, parents=[common], help=help_text, allow_abbrev=False, epilog=(
            None if run in (head, prepare) else "and every --key=value of train.py (python train.py --help)"))
        sub.set_defaults(run=run, measure=measure)
        if run not in (growth, gpu):
            sub.add_argument("--rows", help="only these, separated by commas")
        return sub.add_argument
    add(step, step_row, "one training step")
    flag = add(sample, sample_row, "greedy decoding")
    flag("--batch", type=int, default=16, help="prompts at once in the batch column (16)")
    flag("--prompt_tokens", type=int, default=64, help="of each prompt (64)")
    flag("--new_tokens", type=int, default=64, help="after each prompt (64)")
    flag("--prefill_tokens", type=int, default=384, help="of the prompt whose reading is timed (384)")
    flag = add(prepare, prepare_row, "encoding and tokenizer training")
    flag("--text", nargs="+", default=["stdlib"], help="files, folders, globs (the interpreter's standard library)")
    flag("--vocab", type=int, default=32768, help="ids of the tokenizer (32768)")
    flag = add(head, head_row, "the loss head, forward and backward")
    flag("--n_tokens", type=int, default=8192, help="N, positions (8192)")
    flag("--d_model", type=int, default=512, help="d, width (512)")
    flag("--vocab", type=int, default=32768, help="V, ids (32768)")
    flag("--dtype", default="bfloat16", choices=list(DTYPES), help="of hidden states and table (bfloat16)")
    flag("--chunks", action="store_true", help="ours over chunk sizes instead of the peers")
    flag = add(growth, growth_row, "time and memory over context, batch, vocabulary, depth")
    flag("--axis", action="append", help=f"only this, with its values or without: seq_len=256,512 ({', '.join(AXES)})")
    flag = add(gpu, gpu_row, "one card, within minutes")
    flag("--minutes", type=float, default=8, help="what does not fit in is left out, and said (8)")
    args, args.settings = parser.parse_known_args()
    if args.repeats is None:
        args.repeats = 10 if args.run is gpu else 3
    with as_command("bench"):
        for name in ("repeats", "n_tokens", "d_model", "vocab", "batch", "prompt_tokens", "new_tokens",
                     "prefill_tokens"):
            if getattr(args, name, 1) < 1:
                raise ValueError(f"--{name} is {getattr(args, name)}; it must be 1 or more.")
        if args.settings and args.run in (head, prepare):
            raise ValueError(f"{args.settings[0]} is nothing that {args.command} knows. --help lists what it does.")
        device = torch.device("cpu") if args.run is prepare else pick_device(args.device)
        if not args.row:
            sys.exit(args.run(args, device))  # 1 where a row failed
        print(json.dumps(args.measure(args, device)))


if __name__ == "__main__":
    main()
