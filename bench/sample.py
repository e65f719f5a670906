"""Greedy decoding of a model with random weights, prefill, a batch: `python -m bench sample`.

Decoding one sequence is held against reading every weight once a token, at the rate at which one large tensor is summed
here; prefill against the matmul rate.
"""

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench import peers
from bench.measure import choose, matmul_rate, percent, read_rate, reset_peak, run_rows, seconds
from bench.step import settings
from model import GPT, ModelConfig, generate
from stack.counts import flops_per_token
from stack.quantize import quantize_int8
from stack.twins import fast_decoding

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


def row(args, device) -> dict:
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
        peak, (who, precision, *how) = reset_peak(device), args.row.split(" ")
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
        peak_mib=peak(), prefill_tok_per_s=args.prefill_tokens / prefill,
        prefill_flops=(args.prefill_tokens * (flops - head) + head) / prefill,
        batch=args.batch, batch_tok_per_s=rows and args.batch * args.new_tokens / rows)


def run(args, device) -> bool:
    settings(args)
    rows, reading = choose(args, sample_rows()), read_rate(device)
    rates = {dtype: matmul_rate(device, dtype) for dtype in (torch.bfloat16, torch.float32)}

    def derive(x):
        limit = reading / x["weight_bytes"]
        rate = rates[torch.float32 if x["row"].endswith("fp32") else torch.bfloat16]
        return dict(limit_tok_per_s=limit, of_bandwidth=x["tok_per_s"] / limit, of_gemm=x["prefill_flops"] / rate,
                    gemm_flops=rate)

    def table(results):
        speeds = {x["row"]: x["tok_per_s"] for x in results}

        def ratio(x, peer):
            precision = x["row"].split(" ")[1]  # 8 bits beside 8 bits
            other = speeds.get(f"{peer} {precision}") or speeds.get(f"{peer} {SAME_BITS.get(precision)}")
            return x["tok_per_s"] / other if other else None
        return (f"Greedy decoding, {args.prompt_tokens} + {args.new_tokens} tokens, prefill of {args.prefill_tokens}; "
                f"weights read at {reading / 1e9:.0f} GB/s, matmuls at {rates[torch.bfloat16] / 1e9:,.0f} GFLOP/s "
                f"bf16, {rates[torch.float32] / 1e9:,.0f} fp32; median of {args.repeats}"), {
            "": "row", "tokens/s": "tok_per_s", "x transformers": lambda x: ratio(x, "transformers"),
            "x llama_cpp": lambda x: ratio(x, "llama_cpp"), "limit: reading the weights": "limit_tok_per_s",
            "of it": percent("of_bandwidth"), "prefill tokens/s": "prefill_tok_per_s",
            "of the matmul rate": percent("of_gemm"), f"batch {args.batch} tokens/s": "batch_tok_per_s",
            "x batch 1": lambda x: x["batch_tok_per_s"] and x["batch_tok_per_s"] / x["tok_per_s"],
            "first call s": "first_seconds"}, results
    return run_rows(args, device, rows, table, derive, bytes_per_s=reading, prompt_tokens=args.prompt_tokens,
                    new_tokens=args.new_tokens, prefill_tokens=args.prefill_tokens)
