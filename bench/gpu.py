"""All of it that matters on one card, in one table, within minutes: `python -m bench gpu`."""

import sys
import time

from bench.head import head_rows
from bench.measure import copy_rate, matmul_rate, print_json, print_table, read_rate, run_row
from bench.step import settings, step_rows
from stack.device import peak_flops, pick_dtype

FLAGS = {"--minutes": dict(type=float, default=8, help="what does not fit in is left out, and said (8)")}


def gpu_parts(args, device) -> list[tuple[str, list[str], str]]:
    """(what, command, row), the most telling first: what the time does not suffice for is at the end."""
    model_cfg, cfg = settings(args, "--seq_len=2048")
    common, n = [f"--repeats={args.repeats}", f"--device={device}"], 16 * cfg.seq_len

    def step(what, *changes, row="ours", rows=16):
        command = ["step", *common, "--seq_len=2048", f"--micro_batch_size={rows}", *args.settings, *changes]
        return f"step, {rows} x {cfg.seq_len}{what}", command, row
    masks, muon = "--doc_mask=true", "--optimizer=muon"
    head = ["head", *common, f"--n_tokens={n}", f"--d_model={model_cfg.d_model}",
            f"--vocab={model_cfg.padded_vocab_size}", f"--dtype={cfg.dtype.replace('auto', 'bfloat16')}"]
    return [
        ("ceilings", ["gpu", f"--device={device}", *args.settings], "ceilings"), step(""), step("", rows=32),
        step(", document masks", masks), step(", Muon", muon),
        ("sample, batch 1 and 64", ["sample", *common, "--batch=64", *args.settings], "ours bf16"),
        step(", document masks, Muon: the recipe", masks, muon, rows=32),
        *(step(f", {row}", row=row) for row in reversed(step_rows(cfg))
          if row.endswith("compiled") and not row.startswith("GPT-2")),
        *((f"head, {n} tokens, {row}", head, row)
          for row in ("ours", "compiled naive", *list(head_rows(device))[3:-1]))]


def row(args, device) -> dict:
    """The ceilings."""
    dtype = pick_dtype(settings(args)[1].dtype, device)
    return dict(row=args.row, gemm_flops=matmul_rate(device, dtype), copy_bytes_per_s=copy_rate(device),
                read_bytes_per_s=read_rate(device), peak_flops=peak_flops(device, dtype))


def note(x) -> str:
    """What a row has to say besides its columns."""
    if "gemm_flops" in x:
        return (f"matmuls {x['gemm_flops'] / 1e12:.3g} TFLOP/s, copying {x['copy_bytes_per_s'] / 1e9:,.0f} GB/s, "
                f"reading {x['read_bytes_per_s'] / 1e9:,.0f} GB/s")
    if x.get("batch_tok_per_s"):
        return f"batch {x['batch']}: {x['batch_tok_per_s']:,.0f} tokens/s, prefill {x['prefill_tok_per_s']:,.0f}"
    if "optimizer_seconds" in x:
        return f"first step {x['first_seconds']:.0f} s, optimizer {x['optimizer_seconds'] * 1e3:.1f} ms"
    return x.get("failed", "")


def run(args, device) -> bool:
    results, start, ceilings = [], time.monotonic(), {}
    for what, command, row in gpu_parts(args, device):
        left = args.minutes * 60 - (time.monotonic() - start)
        x = run_row(command, row, timeout=min(left, 150)) if left > 5 else dict(row=row, failed="no time left")
        ceilings = ceilings or x  # the first part
        gemm, reading, peak = (ceilings.get(key) for key in ("gemm_flops", "read_bytes_per_s", "peak_flops"))
        flops = x["tok_per_s"] * x["flops_per_token"] if "flops_per_token" in x else None
        limit = reading / x["weight_bytes"] if reading and "weight_bytes" in x else None
        x |= dict(part=what, of_gemm=flops and gemm and flops / gemm, mfu=flops and peak and flops / peak,
                  of_bandwidth=limit and x["tok_per_s"] / limit)
        results.append(x)
        if args.json:
            print_json("gpu", device, **x)
        print(f"bench: {time.monotonic() - start:4.0f} s  {what}: {note(x) or 'done'}", file=sys.stderr)
    if not args.json:
        print_table(device, f"One card, {args.repeats} repeats", {
            "": "part", "tokens/s": "tok_per_s", "ms": lambda x: x["seconds"] * 1e3 if "seconds" in x else None,
            "MFU": "mfu%", "of the matmul rate": "of_gemm%", "of the bandwidth": "of_bandwidth%",
            "peak MiB": "peak_mib", "note": note}, results)
    return any("failed" in x for x in results)
