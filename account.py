"""What a config costs before it runs: parameters, memory, FLOPs, hours, disk, and a generated token's price.

    python account.py configs/stack100m.py
    python account.py configs/stack100m.py --micro_batch_size=8 --mean_doc_len=600 --json

Nothing is allocated.  Parameters, FLOPs, cache and optimizer state are counted on the model and the optimizers that
would be made, so that a changed model.py is counted as changed (stack/counts.py); activations and the loss head are
arithmetic on ModelConfig (stack/memory.py).  Where conventions differ:

*Training memory* is fp32 weights and gradients, an fp32 buffer for what Muon owns and two for what AdamW owns; under
bf16 a copy of every block matrix, from forward to backward; what autograd keeps per token, never attention scores; and
the loss head, the usual one beside ours.  *FLOPs* are forward + backward per token.  6N counts parameters only and
misses attention; +6LTd adds what a causal model needs, +12LTd all T*T scores (PaLM, nanoGPT).  Document masks, here of
documents of geometric length (a boundary is equally likely everywhere), cost less still.

*Hours* follow from a roofline: each part of a compiled micro step takes what bounds it, matmuls or memory
(stack/roofline.py; nobody has measured it, and it is an optimistic end).  MFU, the share of a GPU's peak rate, is what
train.py would log then; none in fp32, of which it knows no peak.  --peak_tflops is for that log alone, and memory is
printed for --compile=false too: neither changes the hours.  What they see of a changed model.py: docs/hacking.md.  In
--json these hours are {"roofline": {"hours"}} of a GPU.  Its other "hours" are for whoever knows a share of the peak:
{"40%": ...} is the run's 6N + 6LTd, document masks or not, at 40 % of it.

*Decoding* one sequence reads every weight and the KV cache once per token, and is priced by memory bandwidth alone.
1 GB is 1e9 bytes.
"""

import json
import math
import sys
import textwrap
from dataclasses import dataclass, replace
from statistics import fmean

from stack.config import not_installed  # first: it says how torch's threads are to wait

try:
    import torch
except ModuleNotFoundError as error:
    not_installed(error)

from model import INIT_STD, INIT_WIDTH, ModelConfig
from stack import counts, roofline
from stack.config import as_command, load
from stack.device import DTYPES, PEAK_TFLOPS
from stack.memory import activation_bytes, head_bytes, optimizers_of, owned, train_state_bytes
from stack.optim import AdamW, Muon
from stack.parallel import tensor_parallel
from stack.parallel.tensor_parallel import ROWS
from stack.roofline import GPUS
from stack.start import batch_problems
from stack.train_config import TrainConfig

MFUS = (0.3, 0.4, 0.5, 0.6)
VOCABULARIES = (4096, 16384, 32768, 50257, 65536, 128256, 256000)  # to compare; 50257 is GPT-2's, 128256 Llama 3's
TP_SIZES = (1, 2, 4, 8)
INT4_GROUP = 64  # weights that share a scale and an offset


@dataclass
class AccountConfig:
    json: bool = False  # one JSON object instead of tables
    mean_doc_len: int = 1000  # tokens per document, for attention under document masks
    token_budget: int = 20_000_000_000  # training tokens, turned into steps and windows

    def problems(self) -> list[str]:
        return [f"{name} ({getattr(self, name)}) must be positive." for name in ("mean_doc_len", "token_budget")
                if getattr(self, name) < 1]


def check(cfg: ModelConfig, train: TrainConfig, options: AccountConfig) -> list[str]:
    """What train.py would refuse, were there one replica of the model, on --tp ranks."""
    return batch_problems(train, 1) + (tensor_parallel.problems(cfg, train.tp) if train.tp > 1 else [])


def padded_rows(vocab_size: int, tp: int) -> int:
    """Vocabulary that splits into `tp` equal slices, each a multiple of ROWS."""
    return -(-vocab_size // (ROWS * tp)) * ROWS * tp


def run_hours(flops: float, peak_tflops: float, mfu: float) -> float:
    return flops / (peak_tflops * 1e12 * mfu) / 3600


def account(cfg: ModelConfig, train: TrainConfig, *, mean_doc_len: int = 1000, token_budget: int = 20 * 10**9) -> dict:
    """Every figure under a plain name; integers are exact.  Raises ValueError on a context that the model lacks."""
    if train.seq_len > cfg.max_seq_len:
        raise ValueError(f"seq_len ({train.seq_len}) is more than max_seq_len ({cfg.max_seq_len}). Lower one or raise "
                         "the other.")
    model = counts.build(cfg)
    optimizers, looked_up = optimizers_of(model, train.optimizer), counts.tables(model)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    n, L = counts.num_params(model), len(model.blocks)
    total, table = n["total"], n["embedding"]
    tied, untied = (counts.num_params(replace(cfg, tie_embeddings=tie))["total"] for tie in (True, False))
    block_sizes = [sum(p.numel() for p in block.parameters()) for block in model.blocks]
    final_norm = sum(p.numel() for p in model.norm.parameters())
    a = n | {
        "components": counts.components(n),
        "attention_per_block": n["attention"] // L, "mlp_per_block": n["mlp"] // L,
        "norm_per_block": (n["norm"] - final_norm) // L, "block_sizes": sorted(set(block_sizes)),
        "blocks": sum(block_sizes), "final_norm": final_norm, "body": total - table - n["head"] - n["position"],
        "total_tied": tied, "total_untied": untied,
        "table_share": (table + n["head"]) / total, "table_share_tied": table / tied,
        "table_share_untied": 2 * table / untied,
        "muon_params": sum(p.numel() for p in owned(optimizers, Muon)),
        "adamw_params": sum(p.numel() for p in owned(optimizers, AdamW)),
        "groups": counts.describe_groups(optimizers, model),
        "expected_initial_loss": math.log(cfg.vocab_size) + (
            cfg.d_model if cfg.tie_embeddings else INIT_WIDTH) * INIT_STD ** 2 / 2 / (1 + cfg.embed_constant ** 2),
    }
    # bytes
    dtype = DTYPES.get(train.dtype, torch.bfloat16)  # auto: as on the GPUs below
    low, micro_tokens = dtype.itemsize, train.micro_batch_size * train.seq_len
    acts, whole = ({name: activation_bytes(cfg, low, compiled=name == "compiled", remat=remat,
                                           mask_keys=train.seq_len * train.doc_mask,
                                           residual=DTYPES[train.residual_dtype].itemsize)
                    for name in ("eager", "compiled")} for remat in (train.remat, "none"))
    per_token = {name: L * act["block"] + act["around"] for name, act in acts.items()}
    head, state = head_bytes(cfg, micro_tokens, dtype), train_state_bytes(model, optimizers)
    n_cast = sum(p.numel() for p in matrices if p not in looked_up)
    casts = (n_cast if train.remat == "none" else n_cast // L) * low * (low < 4)  # remat: of the block at work
    n_quantized = sum(p.numel() for p in matrices) + table
    cache = counts.kv_cache_bytes_per_token(cfg)
    a |= {
        **{f"bytes_{name}": total * size for name, size in (("float32", 4), ("bfloat16", 2), ("int8", 1))},
        "int8_row_scales": sum(len(p) for p in matrices) + cfg.padded_vocab_size,
        "int4_groups": n_quantized // INT4_GROUP,
        "bytes_int4": n_quantized // 2 + n_quantized // INT4_GROUP * 8,  # scale and offset in fp32
        "train_state_bytes": state, "train_state_bytes_adamw": 16 * total,
        "weight_cast_bytes": casts,
        "activation_bytes_per_token": per_token["compiled" if train.compile else "eager"],
        **{f"activation_bytes_per_token_{name}": value for name, value in per_token.items()},
        "activation_bytes_per_token_per_block": {name: act["block"] for name, act in acts.items()},
        "head_tokens": micro_tokens, "head_bytes": head,
        "train_peak_bytes": {name: state + casts + micro_tokens * per_token[name] + max(
            head["chunked"]["forward_peak"] + head["chunked"]["uncompiled"] * (name == "eager"),
            # or, in backward, a block computed again
            micro_tokens * (whole[name]["block"] - acts[name]["block"])) for name in per_token},
        "kv_cache_bytes_per_token": cache,
        "kv_cache_bytes_per_token_mha": counts.kv_cache_bytes_per_token(replace(cfg, n_kv_heads=cfg.n_heads)),
        "kv_cache_bytes": {T: T * cache for T in (cfg.max_seq_len, 4 * cfg.max_seq_len)},
    }
    # FLOPs
    flops = counts.flops_per_token(model, train.seq_len, mean_doc_len)
    windows = [window for _, window in counts.attention_layers(model)]
    newton_schulz = roofline.newton_schulz_flops(owned(optimizers, Muon))
    needed = flops["doc_masked" if train.doc_mask else "causal"]  # what train.py counts
    times = {name: roofline.micro_step(model, optimizers, train, name, dtype=dtype, mean_doc_len=mean_doc_len)
             for name in GPUS}
    speeds = {name: micro_tokens / sum(parts.values()) for name, parts in times.items()}
    a |= {
        **{f"flops_{name}": value for name, value in flops.items()},
        "flops_attention": flops["causal"] - flops["6n"], "flops_attention_at_4x": 4 * (flops["causal"] - flops["6n"]),
        "mean_doc_len": mean_doc_len,
        "mean_keys": {name: fmean(counts.mean_keys(train.seq_len, length, window) for window in windows or [0])
                      for name, length in (("causal", None), ("doc_masked", mean_doc_len))},
        "flops_head_share_of_forward": 6 * table / flops["causal"],
        "flops_newton_schulz_per_step": newton_schulz,
        "flops_newton_schulz_share": newton_schulz / (flops["6n"] * train.batch_tokens),
    }
    # the run, and a generated token: every matrix is read once (a lookup is a single row), and the cache
    tokens = train.tokens
    reads = {name: 2 * (total - counts.lookup_params(model)) + T * cache
             for name, T in (("empty", 0), ("full", cfg.max_seq_len))}
    a |= {
        **{name: getattr(train, name) for name in ("seq_len", "micro_batch_size", "batch_tokens", "max_steps")},
        "micro_steps": train.batch_tokens / micro_tokens, "tokens": tokens, "windows": tokens // train.seq_len,
        "tokens_per_parameter": tokens / total, "shard_bytes": tokens * (2 if cfg.vocab_size <= 65536 else 4),
        "flops_run": tokens * flops["causal"],
        "budget": {"tokens": token_budget, "steps": train.steps(token_budget),
                   "windows": -(-token_budget // train.seq_len)},
        "gpus": {name: {
            "peak_tflops": PEAK_TFLOPS[name], "memory_gb": memory, "bandwidth_gb_s": bandwidth,
            "hours": {f"{mfu:.0%}": run_hours(tokens * flops["causal"], PEAK_TFLOPS[name], mfu) for mfu in MFUS},
            "roofline": {"micro_step_ms": {part: seconds * 1e3 for part, seconds in times[name].items()},
                         "tok_per_s": speeds[name],
                         "mfu": speeds[name] * needed / (PEAK_TFLOPS[name] * 1e12) if low < 4 else None,
                         "hours": tokens / speeds[name] / 3600},
            "decode_ms": {state: n_bytes / bandwidth / 1e6 for state, n_bytes in reads.items()}}
            for name, (memory, bandwidth, *_) in GPUS.items()},
        "decode_bytes": reads,
    }
    # the vocabulary
    sizes = {V: counts.num_params(replace(cfg, vocab_size=V, vocab_multiple=1)) for V in VOCABULARIES}
    return a | {
        "vocab_size": cfg.vocab_size, "padded_vocab_size": cfg.padded_vocab_size,
        "padded_vocab_size_by_tp": {tp: padded_rows(cfg.vocab_size, tp) for tp in TP_SIZES},
        "vocabularies": {V: {"total": n["total"], "table_share": (n["embedding"] + n["head"]) / n["total"]}
                         for V, n in sizes.items()},
    }


def size(n: float) -> str:
    """Bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.4g} {unit}"
        n /= 1000


def row(label: str, value, note: str = "") -> str:
    return f"  {label:<24}{f'{value:,}' if isinstance(value, int) else value:>18}   {note}".rstrip()


def tables(a: dict, cfg: ModelConfig, train: TrainConfig) -> str:
    """account()'s figures as a page."""
    fits = [name for name, gpu in a["gpus"].items() if a["train_peak_bytes"]["compiled"] < 0.9e9 * gpu["memory_gb"]]
    lines = [
        "Parameters",
        *(row(name, n, f"{n / a['total']:.1%}") for name, n in a["components"].items()),
        row("total", a["total"], f"{' or '.join(f'{n:,}' for n in a['block_sizes'])} per block x {cfg.n_layers}"),
        row("total tied", a["total_tied"], f"table {a['table_share_tied']:.2%}"),
        row("total untied", a["total_untied"], f"tables {a['table_share_untied']:.2%}"),
        row("loss before training", f"{a['expected_initial_loss']:.2f}",
            f"nats: ln V + {'d_model' if cfg.tie_embeddings else INIT_WIDTH} * 0.02^2 / 2"
            f"{' / (1 + embed_constant^2) at least' if cfg.embed_constant else ''}"),
        *(textwrap.fill(group, 118, initial_indent="  ", subsequent_indent="    ") for group in a["groups"]),
        "", "Weights",
        row("float32", size(a["bytes_float32"])),
        row("bfloat16", size(a["bytes_bfloat16"])),
        row("int8", size(a["bytes_int8"]), f"+ {a['int8_row_scales']:,} row scales"),
        row("int4", size(a["bytes_int4"]), f"{a['int4_groups']:,} groups of {INT4_GROUP}, scale and offset included"),
        "", f"Training memory, {train.micro_batch_size} x {train.seq_len:,} = {a['head_tokens']:,} tokens at a time, "
            f"{'fp32' if train.dtype == 'float32' else 'bf16 or fp16 on fp32 weights'}",
        row("state between steps", size(a["train_state_bytes"]),
            f"{train.optimizer}; AdamW for all: {size(a['train_state_bytes_adamw'])}"),
        row("low-precision weights", size(a["weight_cast_bytes"]),
            "forward to backward" if train.remat == "none" else "of one block"),
        *(row(f"activations {kind}", size(a[f"activation_bytes_per_token_{kind}"] * a["head_tokens"]),
              f"{a[f'activation_bytes_per_token_{kind}']:,} B per token, {per_block:,} of them per block"
              f"{f', remat {train.remat}' * (train.remat != 'none')}")
          for kind, per_block in a["activation_bytes_per_token_per_block"].items()),
        row("peak eager", size(a["train_peak_bytes"]["eager"])),
        row("peak compiled", size(a["train_peak_bytes"]["compiled"]),
            f"fits {', '.join(fits) or 'none of these GPUs'}"),
        "", f"Loss head, {a['head_tokens']:,} tokens x {a['padded_vocab_size']:,} ids, above hidden states and weight",
        f"  {'':<24}{'held':>18}{'forward peak':>16}{'backward peak':>16}",
        *(f"  {kind:<24}{size(head['saved']):>18}{size(head['forward_peak']):>16}{size(head['backward_peak']):>16}"
          + (f"   {head['chunk']:,} tokens a chunk" if "chunk" in head else "")
          for kind, head in a["head_bytes"].items()),
        "", f"Training FLOPs per token, context {train.seq_len:,}",
        row("6N", a["flops_6n"]),
        row("6N + 6LTd  causal", a["flops_causal"], f"head {a['flops_head_share_of_forward']:.1%} of forward"),
        row("6N + 12LTd PaLM", a["flops_palm"]),
        row("with document masks", a["flops_doc_masked"], f"mean length {a['mean_doc_len']:,}: "
            f"{a['mean_keys']['doc_masked']:.0f} keys a query, not {a['mean_keys']['causal']:.0f}"),
        *([row("Newton-Schulz per step", a["flops_newton_schulz_per_step"],
               f"{a['flops_newton_schulz_share']:.2%} of the step's 6N")] if a["flops_newton_schulz_per_step"] else []),
        "", "The run",
        row("tokens per step", a["batch_tokens"],
            f"{a['micro_steps']:g} x {train.micro_batch_size} x {train.seq_len:,} on one device"
            + f", half of it in the first {train.ramp_steps:,} steps" * bool(train.ramp_steps)),
        row("steps", a["max_steps"]),
        row("tokens", a["tokens"], f"{a['tokens_per_parameter']:,.0f} per parameter, {a['windows']:,} windows, "
            f"{size(a['shard_bytes'])} on disk"),
        row("FLOPs (6N + 6LTd)", f"{a['flops_run']:.4g}"),
        row("a budget of", a["budget"]["tokens"], f"tokens (--token_budget) is {a['budget']['steps']:,} steps, "
            f"{a['budget']['windows']:,} windows"),
        "", f"One GPU, compiled: milliseconds of {a['head_tokens']:,} tokens by what bounds them, and what follows; an "
            "optimistic end",
        f"  {'':<11}{'matmuls':>9}{'attention':>11}{'pointwise':>11}{'head':>7}{'rest':>7}{'sum':>8}{'tokens/s':>12}"
        f"{'MFU':>6}{'hours':>9}",
        *(f"  {name:<11}{ms['block matmuls']:>9,.1f}{ms['attention']:>11,.1f}{ms['pointwise and norms']:>11,.1f}"
          f"{ms['head matmuls'] + ms['head pointwise and dw']:>7,.1f}{ms['rest']:>7,.1f}{sum(ms.values()):>8,.1f}"
          f"{line['tok_per_s']:>12,.0f}{'-' if line['mfu'] is None else format(line['mfu'], '.0%'):>6}"
          f"{line['hours']:>9,.{1 if line['hours'] < 100 else 0}f}"
          for name, line, ms in ((name, gpu["roofline"], gpu["roofline"]["micro_step_ms"])
                                 for name, gpu in a["gpus"].items())),
        *(["  hours leave dropout out: under document masks it takes a slower attention kernel, and its mask is kept"]
          if cfg.dropout and train.doc_mask else []),
        "", "Milliseconds per generated token, bf16, one sequence",
        f"  {'':<11}{'bandwidth':>15}{'first':>9}{f'at {cfg.max_seq_len:,}':>11}",
        *(f"  {name:<11}{gpu['bandwidth_gb_s']:>10} GB/s"
          f"{gpu['decode_ms']['empty']:>9.3f}{gpu['decode_ms']['full']:>11.3f}" for name, gpu in a["gpus"].items()),
        "", "KV cache (bf16)",
        row("per token", f"{a['kv_cache_bytes_per_token']:,} B",
            f"{a['kv_cache_bytes_per_token_mha']:,} B with as many KV heads as query heads"),
        *(row(f"at {T:,} tokens", size(n_bytes)) for T, n_bytes in a["kv_cache_bytes"].items()),
        "", "Vocabulary",
        row("ids, rows", f"{a['vocab_size']:,}, {a['padded_vocab_size']:,}", "on 1, 2, 4, 8 tensor-parallel ranks "
            + " ".join(f"{n:,}" for n in a["padded_vocab_size_by_tp"].values())),
        *(row(f"with {V:,} ids", n["total"], f"table {n['table_share']:.1%}") for V, n in a["vocabularies"].items()),
    ]
    return "\n".join(lines)


def main():
    with as_command("account.py"):
        cfg, train, options = load((ModelConfig, TrainConfig, AccountConfig), sys.argv[1:], doc=__doc__, check=check)
        a = account(cfg, train, mean_doc_len=options.mean_doc_len, token_budget=options.token_budget)
        print(json.dumps(a) if options.json else tables(a, cfg, train))


if __name__ == "__main__":
    main()
