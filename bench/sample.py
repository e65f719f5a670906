"""Greedy decoding of random weights, prefill, a batch: `python -m bench sample`.

Decoding one sequence is held against reading every weight once a token, at the rate at which one large tensor is summed
here; prefill against the matmul rate.
"""

import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from bench import peers
from bench.measure import choose, matmul_rate, read_rate, run_rows, seconds
from bench.step import settings
from stack.counts import flops_per_token

FLAGS = {
    "--batch": dict(type=int, default=16, help="prompts at once in the batch column (16)"),
    "--prompt_tokens": dict(type=int, default=64, help="of each prompt (64)"),
    "--new_tokens": dict(type=int, default=64, help="after each prompt (64)"),
    "--prefill_tokens": dict(type=int, default=384, help="of the prompt whose reading is timed (384)"),
}
PRECISIONS = {"ours": ("bf16", "fp32", "int8", "bf16 uncompiled"), "transformers": ("bf16", "fp32"),
              "llama_cpp": ("bf16", "f16", "q8_0")}
SAME_BITS = {"int8": "q8_0"}


def sample_rows() -> list[str]:
    return [f"{who} {how}" for who in ["ours", *peers.installed("transformers", "llama_cpp")]
            for how in PRECISIONS[who]]


def row(args, device) -> dict:
    model_cfg, cfg = settings(args)
    torch.manual_seed(cfg.seed)
    long = max(args.prompt_tokens + args.new_tokens, args.prefill_tokens + 1)
    model_cfg = replace(model_cfg, max_seq_len=max(model_cfg.max_seq_len, long))
    rng, firsts = np.random.default_rng(0), []
    who, precision, *how = args.row.split(" ")
    decode, weight_bytes, peak = peers.decoder(who, precision, model_cfg, device, cfg.compile and not how)

    def timed(rows, n_prompt, n_new):
        prompts = rng.integers(0, model_cfg.vocab_size - 9, (rows, n_prompt)).tolist()
        start = time.perf_counter()
        got = len(decode(prompts, n_new))
        firsts.append(time.perf_counter() - start)
        if got != n_new:
            raise ValueError(f"{got} tokens instead of {n_new}")
        return statistics.median(seconds(lambda: decode(prompts, n_new), device, args.repeats))
    one, prefill = timed(1, args.prompt_tokens, args.new_tokens), timed(1, args.prefill_tokens, 1)
    rows = timed(args.batch, args.prompt_tokens, args.new_tokens) if who != "llama_cpp" else None  # one at a time
    flops = flops_per_token(model_cfg, args.prefill_tokens)["causal"] // 3  # forward
    head = 2 * model_cfg.padded_vocab_size * model_cfg.d_model  # at the last position only
    return dict(
        row=args.row, tok_per_s=args.new_tokens / one, first_seconds=firsts[0], weight_bytes=weight_bytes,
        peak_mib=peak(), prefill_tok_per_s=args.prefill_tokens / prefill,
        prefill_flops=(args.prefill_tokens * (flops - head) + head) / prefill,
        batch=args.batch, batch_tok_per_s=rows and args.batch * args.new_tokens / rows)


def run(args, device) -> bool:
    settings(args)  # what is wrong with them, before anything is measured
    rows, reading, speeds = choose(args, sample_rows()), read_rate(device), {}
    bf16, fp32 = (matmul_rate(device, dtype) for dtype in (torch.bfloat16, torch.float32))

    def derive(x):
        limit, rate = reading / x["weight_bytes"], fp32 if x["row"].endswith("fp32") else bf16
        speeds[x["row"]] = x["tok_per_s"]
        x |= dict(limit_tok_per_s=limit, of_bandwidth=x["tok_per_s"] / limit, of_gemm=x["prefill_flops"] / rate,
                  gemm_flops=rate)

    def times(peer):
        def ratio(x):
            precision = x["row"].split(" ")[1]  # 8 bits beside 8 bits
            other = speeds.get(f"{peer} {precision}") or speeds.get(f"{peer} {SAME_BITS.get(precision)}")
            return x["tok_per_s"] / other if other else None
        return ratio
    what = (f"Greedy decoding, {args.prompt_tokens} + {args.new_tokens} tokens, prefill of {args.prefill_tokens}; "
            f"weights read at {reading / 1e9:.0f} GB/s, matmuls at {bf16 / 1e9:,.0f} GFLOP/s bf16, "
            f"{fp32 / 1e9:,.0f} fp32; median of {args.repeats}")
    columns = {
        "": "row", "tokens/s": "tok_per_s", "x transformers": times("transformers"), "x llama_cpp": times("llama_cpp"),
        "limit: reading the weights": "limit_tok_per_s", "of it": "of_bandwidth%",
        "prefill tokens/s": "prefill_tok_per_s", "of the matmul rate": "of_gemm%",
        f"batch {args.batch} tokens/s": "batch_tok_per_s",
        "x batch 1": lambda x: x["batch_tok_per_s"] and x["batch_tok_per_s"] / x["tok_per_s"],
        "first call s": "first_seconds"}
    return run_rows(args, device, rows, lambda results: (what, columns, results), derive, bytes_per_s=reading,
                    prompt_tokens=args.prompt_tokens, new_tokens=args.new_tokens, prefill_tokens=args.prefill_tokens)
