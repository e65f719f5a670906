"""What a config costs before it runs: parameters, memory, FLOPs, hours, disk, and a generated token's price.

    python account.py configs/stack100m.py
    python account.py configs/stack100m.py --micro_batch_size=8 --mean_doc_len=600 --json

Nothing is allocated: every figure is arithmetic on the shapes in ModelConfig.  So that arithmetic cannot drift from
the code, tests hold each figure against the thing itself: parameter counts against a built model, FLOPs against
torch.utils.flop_counter, saved activations against autograd's own hooks, the loss head and a whole training step
against the memory they take.

What is counted, where conventions differ:

*Training state* is what lies in memory between steps: fp32 weights and gradients, one fp32 buffer for what Muon owns,
two for what AdamW owns.  Under bf16 a copy of every block matrix is kept from forward to backward on top.

*Activations* are what autograd keeps per token from forward to backward.  Eager, every operation keeps its own inputs;
compiled, the block keeps what it cannot cheaply compute again.  Attention scores are never kept (flash attention).

*The loss head* has three figures, because they fall at different moments: bytes held from forward to backward, the peak
inside forward and the peak inside backward, all above hidden states and weight.  "naive" is
F.cross_entropy(F.linear(h, W).float()), which holds 4 bytes per logit, then 8, then 12.  Ours forms its gradients in
forward, one chunk of logits at a time.

*FLOPs* are forward + backward per token.  6N counts parameters only and misses attention; +6LTd adds what a causal
model needs, +12LTd all T*T scores (PaLM, nanoGPT).  With document masks attention costs less still: for documents of
geometric length with mean m (a boundary is equally likely everywhere) the mean number of keys has a closed form.

*Hours* are tokens * FLOPs in the +6LTd convention / (peak * MFU).  MFU is the share of a GPU's peak rate that a run
reaches; nobody can know it beforehand, so there is a column for each of several.  *Decoding* one sequence reads every
weight and the KV cache once per token, and is priced by memory bandwidth alone.  1 GB is 1e9 bytes.
"""

import json
import math
import sys
from dataclasses import dataclass, replace

try:
    import torch
except ModuleNotFoundError as error:
    from stack.config import not_installed
    not_installed(error)

from model import INIT_STD, ModelConfig, default_chunk
from stack.config import TrainConfig, as_command, load
from stack.counts import flops_per_token, kv_cache_bytes_per_token, num_params
from stack.device import DTYPES, PEAK_TFLOPS
from stack.optim import NS_STEPS

GPUS = {  # name in device.PEAK_TFLOPS: memory in GB, memory bandwidth in GB/s (NVIDIA data sheets; SXM for A100, H100)
    "A100": (80, 2039), "H100": (80, 3350), "H200": (141, 4800), "RTX 4090": (24, 1008),
}
MFUS = (0.3, 0.4, 0.5, 0.6)
VOCABULARIES = (4096, 16384, 32768, 50257, 65536, 128256, 256000)  # to compare; 50257 is GPT-2's, 128256 Llama 3's
TP_SIZES, TP_MULTIPLE = (1, 2, 4, 8), 128  # Megatron's padding: a multiple of 128 rows on every rank
INT4_GROUP = 64  # weights that share a scale and an offset


@dataclass
class AccountConfig:
    json: bool = False  # one JSON object instead of tables
    mean_doc_len: int = 1000  # tokens per document, for attention under document masks
    token_budget: int = 20_000_000_000  # training tokens, turned into steps and windows

    def problems(self) -> list[str]:
        return [f"{name} ({getattr(self, name)}) must be positive." for name in ("mean_doc_len", "token_budget")
                if getattr(self, name) < 1]


def check(cfg: ModelConfig, train: TrainConfig, _) -> list[str]:
    if train.seq_len > cfg.max_seq_len:
        return [f"seq_len ({train.seq_len}) is more than max_seq_len ({cfg.max_seq_len}). Lower one or raise the "
                "other."]
    return []


# ---------------------------------------------------------------------------------------------------------------------
# The formulas.  low = bytes per value of the matmuls' format: 2 for bf16 and fp16, 4 for fp32


def block_matrices(cfg: ModelConfig) -> dict[tuple[int, int], int]:
    """Shape (out, in) -> how many of them, over all blocks: what Muon owns."""
    q, kv = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    shapes = [(q, cfg.d_model), (kv, cfg.d_model), (kv, cfg.d_model), (cfg.d_model, q), (cfg.d_ff, cfg.d_model),
              (cfg.d_model, cfg.d_ff)] + [(cfg.d_ff, cfg.d_model)] * (cfg.mlp == "swiglu")
    return {shape: cfg.n_layers * shapes.count(shape) for shape in dict.fromkeys(shapes)}


def train_state_bytes(n_params: int, n_muon: int) -> int:
    """fp32 weights and gradients, Muon's one buffer, AdamW's two."""
    return 8 * n_params + 4 * n_muon + 8 * (n_params - n_muon)


def activation_bytes(cfg: ModelConfig, low: int, *, compiled: bool, remat: str = "none") -> dict[str, int]:
    """Bytes per token that autograd keeps: of one block, and of everything around the blocks.

    The residual stream is fp32 (the table is, and bf16 branches are added to it).  A norm keeps its input and 1/rms,
    RMSNorm also the normalised values, which its gain multiplies.  Under autocast each linear casts the fp32 norm
    output for itself, so those of q, k and v keep three copies.  Attention keeps q, k, v, its output and the
    log-sum-exp per head.  Compiled, the fp32 intermediates are computed again from the block's input and the matmuls'
    outputs.  remat="block" keeps the block's input alone, "selective" also what its matmuls and attention return.
    """
    C, F, H, K = cfg.d_model, cfg.d_ff, cfg.n_heads, cfg.n_kv_heads
    q, kv = H * cfg.head_dim, K * cfg.head_dim
    rms, swiglu = cfg.norm == "rmsnorm", cfg.mlp == "swiglu"
    norm = 4 * C + 4 * C * rms + (4 if rms else 8)  # LayerNorm keeps mean and 1/std
    attention = low * (2 * q + 2 * kv) + 4 * H
    if remat != "none":
        block = 4 * C
        if remat == "selective":
            block += low * (2 * q + 2 * kv + 2 * C + (2 if swiglu else 1) * F) + 4 * H
    elif compiled:
        block = 4 * C + 2 * (4 if rms else 8)  # the input of the block
        block += low * 3 * C  # both norms' outputs, wo's output
        block += (low * (q + kv) + 4 * (H + K)) * cfg.qk_norm  # q and k before their norm
        block += low * (3 if swiglu else 2) * F
    else:
        copies = (3 + (2 if swiglu else 1)) if low < 4 else 2  # of norm outputs
        block = 2 * norm + low * copies * C
        block += (8 * (q + kv) + 4 * (H + K)) * cfg.qk_norm
        block += low * (4 if swiglu else 2) * F
    if remat == "none":
        block += attention + 2 * C * (cfg.dropout > 0)  # a GPU's dropout keeps a byte per value
    ids_and_targets = 16
    return {"block": block, "around": norm + 4 * C + C * (cfg.dropout > 0) + ids_and_targets}


def head_bytes(cfg: ModelConfig, n_tokens: int, dtype: torch.dtype, *,
               device_type: str = "cuda") -> dict[str, dict[str, int]]:
    """The loss head's bytes above hidden (N, C) and weight (V, C), both fp32 and multiplied in `dtype`.

    Ours holds dH in the matmul's format and dW in fp32 between the passes.  Its forward peak has one chunk of logits
    (its arithmetic is compiled at sizes that matter, so nothing else of that size exists), cast copies of hidden and
    weight, a chunk's dW, and 8 bytes per token of loss and scale; its backward peak has dH once more, in fp32.  A CPU
    multiplies bf16 by fp32 by way of one more fp32 copy, a GPU does not.
    """
    N, V, C, low = n_tokens, cfg.padded_vocab_size, cfg.d_model, dtype.itemsize
    chunk = default_chunk(N, V, dtype, device_type)
    saved = low * N * C + 4 * V * C
    forward, backward = saved + low * chunk * V + 8 * N, saved
    if low < 4:
        forward += low * (N + V) * C + (N > chunk) * low * V * C
        backward += (2 if device_type == "cpu" else 1) * 4 * N * C
    return {"naive": {"saved": 4 * N * V, "forward_peak": 8 * N * V, "backward_peak": 12 * N * V},
            "chunked": {"saved": saved, "forward_peak": forward, "backward_peak": backward, "chunk": chunk}}


def mean_keys(seq_len: int, mean_doc_len: float | None = None) -> float:
    """Keys a query attends to, averaged over the window, the diagonal counted half (so that causal is T/2).

    Causal: T/2.  Document masks, lengths geometric with mean m: position t of the window sees min(age, t) tokens, the
    age of its document being geometric too, which averages to m (1 - q m (1 - q^T) / T) with q = 1 - 1/m.
    """
    if mean_doc_len is None:
        return seq_len / 2
    m, q = mean_doc_len, 1 - 1 / mean_doc_len
    return m * (1 - q * m * (1 - q ** seq_len) / seq_len) - 0.5


def attention_flops(cfg: ModelConfig, keys: float) -> int:
    """Scores and weighted sums, forward and backward, per token: 12 L keys H D."""
    return round(12 * cfg.n_layers * keys * cfg.n_heads * cfg.head_dim)


def newton_schulz_flops(cfg: ModelConfig) -> int:
    """Muon's orthogonalisation, per optimizer step: of each r x c matrix (r <= c) X X^T, its square, one more."""
    return sum(n * NS_STEPS * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s, n in block_matrices(cfg).items())


def padded_rows(vocab_size: int, tp: int) -> int:
    """Vocabulary that splits into `tp` equal slices, each a multiple of 128 rows."""
    return -(-vocab_size // (TP_MULTIPLE * tp)) * TP_MULTIPLE * tp


def decode_bytes(cfg: ModelConfig, context: int) -> int:
    """Read in bf16 for one more token of one sequence: every matrix once (a lookup is a single row), and the cache."""
    counts = num_params(cfg)
    looked_up = counts["position"] + (0 if cfg.tie_embeddings else counts["embedding"])
    return 2 * (counts["total"] - looked_up) + context * kv_cache_bytes_per_token(cfg)


# ---------------------------------------------------------------------------------------------------------------------
# All of them for one config


def account(cfg: ModelConfig, train: TrainConfig, *, mean_doc_len: int = 1000, token_budget: int = 20 * 10**9) -> dict:
    """Every figure under a plain name; integers are exact."""
    counts, flops = num_params(cfg), flops_per_token(cfg, train.seq_len)
    tied, untied = (num_params(replace(cfg, tie_embeddings=tie))["total"] for tie in (True, False))
    matrices = block_matrices(cfg)
    n_matrix = sum(n * math.prod(shape) for shape, n in matrices.items())
    n_muon = n_matrix if train.optimizer == "muon" else 0
    tables = counts["embedding"] + counts["head"] + counts["position"]
    attention, mlp = counts["attention"] // cfg.n_layers, counts["mlp"] // cfg.n_layers
    norms = counts["per_block"] - attention - mlp
    a = {
        **counts,
        "attention_per_block": attention,
        "mlp_per_block": mlp,
        "norm_per_block": norms,
        "blocks": cfg.n_layers * counts["per_block"],
        "final_norm": counts["norm"] - cfg.n_layers * norms,
        "body": counts["total"] - tables,
        "total_tied": tied,
        "total_untied": untied,
        "table_share": (counts["embedding"] + counts["head"]) / counts["total"],
        "table_share_tied": counts["embedding"] / tied,
        "table_share_untied": 2 * counts["embedding"] / untied,
        "muon_params": n_muon,
        "adamw_params": counts["total"] - n_muon,
        "expected_initial_loss": math.log(cfg.vocab_size) + cfg.d_model * INIT_STD ** 2 / 2,
    }
    # bytes
    dtype = DTYPES.get(train.dtype, torch.bfloat16)  # auto: as on the GPUs below
    low = dtype.itemsize
    micro_tokens = train.micro_batch_size * train.seq_len
    acts, whole = ({name: activation_bytes(cfg, low, compiled=name == "compiled", remat=remat)
                    for name in ("eager", "compiled")} for remat in (train.remat, "none"))
    per_token = {name: cfg.n_layers * act["block"] + act["around"] for name, act in acts.items()}
    head = head_bytes(cfg, micro_tokens, dtype)
    state, casts = train_state_bytes(counts["total"], n_muon), n_matrix * low if low < 4 else 0
    casts = casts if train.remat == "none" else casts // cfg.n_layers  # those of the block at work
    rows = sum(n * shape[0] for shape, n in matrices.items())
    n_quantized = n_matrix + counts["embedding"]
    a |= {
        **{f"bytes_{name}": counts["total"] * size for name, size in (("float32", 4), ("bfloat16", 2), ("int8", 1))},
        "int8_row_scales": rows + cfg.padded_vocab_size,
        "int4_groups": n_quantized // INT4_GROUP,
        "bytes_int4": n_quantized // 2 + n_quantized // INT4_GROUP * 8,  # scale and offset in fp32
        "train_state_bytes": state,
        "train_state_bytes_adamw": train_state_bytes(counts["total"], 0),
        "weight_cast_bytes": casts,
        "activation_bytes_per_token": per_token["compiled" if train.compile else "eager"],
        "activation_bytes_per_token_eager": per_token["eager"],
        "activation_bytes_per_token_compiled": per_token["compiled"],
        "activation_bytes_per_token_per_block": {name: act["block"] for name, act in acts.items()},
        "head_tokens": micro_tokens,
        "head_bytes": head,
        "train_peak_bytes": {name: state + casts + micro_tokens * per_token[name] + max(
            head["chunked"]["forward_peak"],  # or, in backward, a block computed again
            micro_tokens * (whole[name]["block"] - acts[name]["block"])) for name in per_token},
        "kv_cache_bytes_per_token": kv_cache_bytes_per_token(cfg),
        "kv_cache_bytes_per_token_mha": kv_cache_bytes_per_token(replace(cfg, n_kv_heads=cfg.n_heads)),
        "kv_cache_bytes": {T: T * kv_cache_bytes_per_token(cfg) for T in (cfg.max_seq_len, 4 * cfg.max_seq_len)},
    }
    # FLOPs
    keys = mean_keys(train.seq_len, mean_doc_len)
    newton_schulz = newton_schulz_flops(cfg) if n_muon else 0
    a |= {
        **{f"flops_{name}": value for name, value in flops.items()},
        "flops_attention": flops["causal"] - flops["6n"],
        "flops_attention_at_4x": 4 * (flops["causal"] - flops["6n"]),
        "flops_doc_masked": flops["6n"] + attention_flops(cfg, keys),
        "mean_doc_len": mean_doc_len,
        "mean_keys": {"causal": mean_keys(train.seq_len), "doc_masked": keys},
        "flops_head_share_of_forward": 6 * counts["embedding"] / flops["causal"],
        "flops_newton_schulz_per_step": newton_schulz,
        "flops_newton_schulz_share": newton_schulz / (flops["6n"] * train.batch_tokens),
    }
    # the run
    tokens = train.max_steps * train.batch_tokens
    a |= {
        "seq_len": train.seq_len,
        "micro_batch_size": train.micro_batch_size,
        "micro_steps": train.batch_tokens / micro_tokens,
        "batch_tokens": train.batch_tokens,
        "max_steps": train.max_steps,
        "tokens": tokens,
        "windows": tokens // train.seq_len,
        "tokens_per_parameter": tokens / counts["total"],
        "shard_bytes": tokens * (2 if cfg.vocab_size <= 65536 else 4),
        "flops_run": tokens * flops["causal"],
        "budget": {"tokens": token_budget, "steps": -(-token_budget // train.batch_tokens),
                   "windows": -(-token_budget // train.seq_len)},
        "gpus": {name: {
            "peak_tflops": PEAK_TFLOPS[name], "memory_gb": memory, "bandwidth_gb_s": bandwidth,
            "hours": {f"{mfu:.0%}": run_hours(tokens * flops["causal"], PEAK_TFLOPS[name], mfu) for mfu in MFUS},
            "decode_ms": {"empty": decode_bytes(cfg, 0) / bandwidth / 1e6,
                          "full": decode_bytes(cfg, cfg.max_seq_len) / bandwidth / 1e6}}
            for name, (memory, bandwidth) in GPUS.items()},
        "decode_bytes": {"empty": decode_bytes(cfg, 0), "full": decode_bytes(cfg, cfg.max_seq_len)},
    }
    # the vocabulary
    sizes = {V: num_params(replace(cfg, vocab_size=V, vocab_multiple=1)) for V in VOCABULARIES}
    a |= {
        "vocab_size": cfg.vocab_size,
        "padded_vocab_size": cfg.padded_vocab_size,
        "padded_vocab_size_by_tp": {tp: padded_rows(cfg.vocab_size, tp) for tp in TP_SIZES},
        "vocabularies": {V: {"total": n["total"], "table_share": (n["embedding"] + n["head"]) / n["total"]}
                         for V, n in sizes.items()},
    }
    return a


def run_hours(flops: float, peak_tflops: float, mfu: float) -> float:
    return flops / (peak_tflops * 1e12 * mfu) / 3600


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def size(n: float) -> str:
    """Bytes for people, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.4g} {unit}"
        n /= 1000
    return f"{n:.4g} TB"


def tables(a: dict, cfg: ModelConfig, train: TrainConfig) -> str:
    lines = []

    def section(title):
        lines.extend(([""] if lines else []) + [title])

    def row(label, value, note=""):
        lines.append(f"  {label:<24}{value:>18}{'   ' + note if note else ''}".rstrip())

    section("Parameters")
    for name in ("embedding", "position", "attention", "mlp", "norm", "head"):
        if a[name]:
            row(name, f"{a[name]:,}", f"{a[name] / a['total']:.1%}")
    row("total", f"{a['total']:,}", f"{a['per_block']:,} per block x {cfg.n_layers}")
    row("total tied", f"{a['total_tied']:,}", f"table {a['table_share_tied']:.2%}")
    row("total untied", f"{a['total_untied']:,}", f"tables {a['table_share_untied']:.2%}")
    row("Muon / AdamW", f"{a['muon_params']:,}", f"/ {a['adamw_params']:,}")
    row("loss before training", f"{a['expected_initial_loss']:.2f}", "nats: ln V + d_model * 0.02^2 / 2")

    section("Weights")
    for name in ("float32", "bfloat16", "int8", "int4"):
        row(name, size(a[f"bytes_{name}"]), {
            "int8": f"+ {a['int8_row_scales']:,} row scales",
            "int4": f"{a['int4_groups']:,} groups of {INT4_GROUP}, scale and offset included"}.get(name, ""))

    section(f"Training memory, {train.micro_batch_size} x {train.seq_len:,} = {a['head_tokens']:,} tokens at a time, "
            f"{'fp32' if train.dtype == 'float32' else 'bf16 or fp16 on fp32 weights'}")
    row("state between steps", size(a["train_state_bytes"]), f"{train.optimizer}; AdamW for all: "
        f"{size(a['train_state_bytes_adamw'])}")
    row("low-precision weights", size(a["weight_cast_bytes"]), "forward to backward" if train.remat == "none" else
        "of one block")
    for kind in ("eager", "compiled"):
        per_token = a[f"activation_bytes_per_token_{kind}"]
        row(f"activations {kind}", size(per_token * a["head_tokens"]), f"{per_token:,} B per token, "
            f"{a['activation_bytes_per_token_per_block'][kind]:,} of them per block"
            + f", remat {train.remat}" * (train.remat != "none"))
    row("peak eager", size(a["train_peak_bytes"]["eager"]))
    peak = a["train_peak_bytes"]["compiled"]
    fits = [name for name, gpu in a["gpus"].items() if peak < 0.9e9 * gpu["memory_gb"]]
    row("peak compiled", size(peak), f"fits {', '.join(fits) or 'none of these GPUs'}")

    section(f"Loss head, {a['head_tokens']:,} tokens x {a['padded_vocab_size']:,} ids, above hidden states and weight")
    lines.append(f"  {'':<24}{'held':>18}{'forward peak':>16}{'backward peak':>16}")
    for kind, note in (("naive", ""), ("chunked", f"   {a['head_bytes']['chunked']['chunk']:,} tokens a chunk")):
        head = a["head_bytes"][kind]
        lines.append(f"  {kind:<24}{size(head['saved']):>18}{size(head['forward_peak']):>16}"
                     f"{size(head['backward_peak']):>16}{note}")

    section(f"Training FLOPs per token, context {train.seq_len:,}")
    row("6N", f"{a['flops_6n']:,}")
    row("6N + 6LTd  causal", f"{a['flops_causal']:,}", f"head {a['flops_head_share_of_forward']:.1%} of forward")
    row("6N + 12LTd PaLM", f"{a['flops_palm']:,}")
    row("with document masks", f"{a['flops_doc_masked']:,}", f"mean length {a['mean_doc_len']:,}: "
        f"{a['mean_keys']['doc_masked']:.0f} keys a query, not {a['mean_keys']['causal']:.0f}")
    if a["flops_newton_schulz_per_step"]:
        row("Newton-Schulz per step", f"{a['flops_newton_schulz_per_step']:,}",
            f"{a['flops_newton_schulz_share']:.2%} of the step's 6N")

    section("The run")
    row("tokens per step", f"{a['batch_tokens']:,}", f"{a['micro_steps']:g} x {train.micro_batch_size} x "
        f"{train.seq_len:,} on one device")
    row("steps", f"{a['max_steps']:,}")
    row("tokens", f"{a['tokens']:,}", f"{a['tokens_per_parameter']:,.0f} per parameter, {a['windows']:,} windows, "
        f"{size(a['shard_bytes'])} on disk")
    row("FLOPs (6N + 6LTd)", f"{a['flops_run']:.4g}")
    budget = a["budget"]
    row("a budget of", f"{budget['tokens']:,}", f"tokens (--token_budget) is {budget['steps']:,} steps, "
        f"{budget['windows']:,} windows")

    section("Hours by the share of peak FLOPs reached (MFU); milliseconds per generated token (bf16, one sequence)")
    lines.append(f"  {'':<22}{'peak':>12}" + "".join(f"{f'{mfu:.0%}':>9}" for mfu in MFUS) + f"{'bandwidth':>13}"
                 f"{'first':>9}{f'at {cfg.max_seq_len:,}':>11}")
    for name, gpu in a["gpus"].items():
        decode = gpu["decode_ms"]
        hours = "".join(f"{h:>9,.{1 if h < 100 else 0}f}" for h in gpu["hours"].values())
        lines.append(f"  {name:<22}{gpu['peak_tflops']:>5} TFLOPS{hours}{gpu['bandwidth_gb_s']:>8} GB/s"
                     f"{decode['empty']:>9.3f}{decode['full']:>11.3f}")

    section("KV cache (bf16)")
    row("per token", f"{a['kv_cache_bytes_per_token']:,} B", f"{a['kv_cache_bytes_per_token_mha']:,} B with as many KV "
        "heads as query heads")
    for T, n in a["kv_cache_bytes"].items():
        row(f"at {T:,} tokens", size(n))

    section("Vocabulary")
    row("ids, rows", f"{a['vocab_size']:,}, {a['padded_vocab_size']:,}", "on 1, 2, 4, 8 tensor-parallel ranks "
        + " ".join(f"{n:,}" for n in a["padded_vocab_size_by_tp"].values()))
    for V, n in a["vocabularies"].items():
        row(f"with {V:,} ids", f"{n['total']:,}", f"table {n['table_share']:.1%}")
    return "\n".join(lines)


def main():
    with as_command("account.py"):
        cfg, train, options = load((ModelConfig, TrainConfig, AccountConfig), sys.argv[1:], doc=__doc__, check=check)
        a = account(cfg, train, mean_doc_len=options.mean_doc_len, token_budget=options.token_budget)
        print(json.dumps(a) if options.json else tables(a, cfg, train))


if __name__ == "__main__":
    main()
