"""Parameters, FLOPs and cache bytes of a model, by formula."""

from model import ModelConfig


def num_params(cfg: ModelConfig) -> dict[str, int]:
    """Parameters by component: every tensor the model holds, the tied table once, pad rows included.

    attention = L * (2*C*H*D + 2*C*K*D), mlp = L * (3 or 2)*C*F, both plus biases; norm = per block 2 gains of C and,
    with QK-norm, 2 of D, then the final one.
    """
    C, L, q, kv = cfg.d_model, cfg.n_layers, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    bias = int(cfg.bias)
    attention = C * q + 2 * C * kv + q * C + bias * (q + 2 * kv + C)
    mlp = (3 if cfg.mlp == "swiglu" else 2) * C * cfg.d_ff + bias * ((2 if cfg.mlp == "swiglu" else 1) * cfg.d_ff + C)
    one_norm = C * (2 if cfg.norm == "layernorm" and cfg.bias else 1)
    block_norms = 2 * one_norm + (2 * cfg.head_dim if cfg.qk_norm else 0)
    counts = {
        "embedding": cfg.padded_vocab_size * C,
        "position": cfg.max_seq_len * C if cfg.pos == "learned" else 0,
        "attention": L * attention,
        "mlp": L * mlp,
        "norm": L * block_norms + one_norm,
        "head": 0 if cfg.tie_embeddings else cfg.padded_vocab_size * C,
    }
    return {**counts, "total": sum(counts.values()), "per_block": attention + mlp + block_norms}


def flops_per_token(cfg: ModelConfig, seq_len: int) -> dict[str, int]:
    """Training FLOPs (forward + backward) per token in three conventions.

    "6n": 6 per parameter that multiplies (a lookup table multiplies only where it is also the head).  "causal": plus
    6*L*T*H*D, the scores and weighted sums a causal model needs on average over positions.  "palm": plus 12*L*T*H*D,
    all T*T of them (PaLM, arXiv 2204.02311, appendix B; nanoGPT).
    """
    counts = num_params(cfg)
    multiplied = counts["total"] - counts["position"] - (0 if cfg.tie_embeddings else counts["embedding"])
    attention = 6 * cfg.n_layers * seq_len * cfg.n_heads * cfg.head_dim
    return {"6n": 6 * multiplied, "causal": 6 * multiplied + attention, "palm": 6 * multiplied + 2 * attention}


def kv_cache_bytes_per_token(cfg: ModelConfig, bytes_per_value: int = 2) -> int:
    """One key and one value per layer and KV head: 2*K*D*L values."""
    return 2 * cfg.n_kv_heads * cfg.head_dim * cfg.n_layers * bytes_per_value
