"""The decoder, whole: ids -> vectors -> blocks -> vectors -> loss or next id.

The defaults are Stack-100M (rotary positions, RMSNorm, SwiGLU, grouped-query attention with QK-norm, tied table: a
Qwen3 checkpoint elsewhere); the GPT-2 switches make it GPT-2.

*The logits never exist.*  At V=32768, C=512 they are 64 times the hidden states.  `fused_linear_cross_entropy` walks
over the tokens in chunks; as the loss is a plain mean, its gradient is known as soon as a chunk's softmax is: both
gradients are formed in the forward pass and the next chunk overwrites this one.  Nothing is recomputed, nothing of size
[N, V] is held.  (Gradient-in-forward is Liger's, arXiv 2410.10989.)

*What is computed here is the truth.*  What computes the same faster is set on a built model from outside, in place of
`Attention.attend` and GPT's `mask`, `cross_entropy` and `decoder`, and is compared with these before it serves.

Shapes: B batch, T time (queries), S keys, C d_model, H n_heads, K n_kv_heads, D head_dim, F d_ff, V padded vocabulary,
L n_layers, N = B*T tokens.  This file imports torch and the standard library only: it can be copied out and used alone.
"""

import functools
import math
import warnings
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

INIT_STD, INIT_WIDTH = 0.02, 128  # GPT-2's, the demo's; nn.Embedding's own N(0, 1) starts a tied model at ~500 nats
ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN's plans each anew


@dataclass
class ModelConfig:
    # vocabulary
    vocab_size: int = 32768  # real ids: ranks + special tokens; the tokenizer decides it
    vocab_multiple: int = 64  # table rows are padded up to a multiple of this; pad rows never get probability
    tie_embeddings: bool = True  # one table for input and output
    embed_scale: bool = False  # multiply embeddings by sqrt(d_model) (original Transformer, Gemma)
    embed_constant: float = 0.0  # a 16th of each row begins as one constant, so many times the rest; 0 = off
    # shape
    d_model: int = 512  # width of the residual stream
    n_layers: int = 30  # blocks
    n_heads: int = 8  # query heads
    n_kv_heads: int = 2  # key/value heads, shared by groups of query heads
    head_dim: int = 64  # width of a head
    d_ff: int = 1408  # hidden width of the MLP
    max_seq_len: int = 2048  # longest context, in tokens
    # switches
    pos: Literal["rope", "learned"] = "rope"  # positions: rotations of queries and keys, or a table of vectors
    rope_theta: float = 10000.0  # base of rope's wavelengths; larger for longer contexts
    nope_every: int = 0  # every n-th layer has no rotary positions; 0 = off
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # layernorm as GPT-2
    norm_eps: float = 1e-5  # added under the norm's root
    mlp: Literal["swiglu", "gelu"] = "swiglu"  # gelu as GPT-2: two matrices, no gate
    bias: bool = False  # biases in linears and LayerNorm
    qk_norm: bool = True  # RMSNorm over head_dim on queries and keys, before rotation
    logit_softcap: float = 0.0  # cap * tanh(logits / cap), in training and sampling; 0 = off
    dropout: float = 0.0  # on embeddings, attention and residual branches; active in training only

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the table: vocab_size rounded up to vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    def problems(self) -> list[str]:
        """Every impossible setting, as sentences a user can act on; empty when the config is sound."""
        positive = ("vocab_size", "vocab_multiple", "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "d_ff",
                    "max_seq_len", "rope_theta", "norm_eps")
        found = [f"{name} ({v}) must be positive." for name in positive if not (v := getattr(self, name)) > 0]
        found += [f"{name} ({getattr(self, name)!r}) must be one of {choices}." for name in ("pos", "norm", "mlp")
                  if getattr(self, name) not in (choices := get_args(ModelConfig.__annotations__[name]))]
        found += [f"{name} ({getattr(self, name)}) must be 0 (off) or positive."
                  for name in ("nope_every", "logit_softcap", "embed_constant") if getattr(self, name) < 0]
        if min(self.n_heads, self.n_kv_heads) > 0 and self.n_heads % self.n_kv_heads:
            found.append(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads}). "
                         f"Set n_kv_heads to one of {[k for k in range(1, self.n_heads + 1) if not self.n_heads % k]}.")
        if self.pos == "rope" and self.head_dim > 0 and self.head_dim % 2:
            found.append(f"head_dim ({self.head_dim}) must be even for rotary positions. Set {self.head_dim + 1}.")
        if self.pos == "learned" and self.nope_every:
            found.append("nope_every drops rotary positions, but pos is 'learned'. Set pos='rope' or nope_every=0.")
        if not 0 <= self.dropout < 1:
            found.append(f"dropout ({self.dropout}) must lie in [0, 1).")
        return found


# ---------------------------------------------------------------------------------------------------------------------
# The loss head

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # logits alive at a time, see default_chunk


def default_chunk(n_tokens: int, vocab: int, dtype: torch.dtype, device_type: str) -> int:
    """Tokens per chunk: as many as keep one chunk of logits within CHUNK_BYTES, evened out over the chunks.  Small
    ones stay in cache, but add a pass over the weight gradient each; large ones feed the matmuls (docs/speed.md)."""
    budget = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"])
    largest = max(budget // (vocab * dtype.itemsize), 16)
    if dtype == torch.float16:  # ends at 65504, and gradients are summed over the chunk before they are averaged
        largest = min(largest, 4096)
    chunks = max(math.ceil(n_tokens / largest), 1)
    return max(math.ceil(n_tokens / chunks), 1)


def chunk_arithmetic(logits, targets, scale, n_vocab: int, ignore_index: int, z_loss: float, softcap: float,
                     grad: bool):
    """Loss per token of one chunk; with `grad` the logits are overwritten by scale * dloss/dlogits.

    logits (n, V) in the matmul's dtype, targets (n,), scale (n,) fp32 -> loss (n,) fp32, 0 where ignored.  In between
    all is fp32 (fp64 for fp64): in bf16 a loss near 10.4 moves in steps of 0.06, and softmax - onehot cancels."""
    x = logits[:, :n_vocab].to(torch.promote_types(logits.dtype, torch.float32))  # pad columns take part in nothing
    if softcap:
        capped = torch.tanh(x / softcap)
        x = softcap * capped
    top = x.amax(dim=-1, keepdim=True)  # (n, 1)
    x = x - top  # an offset common to all logits drops out before it can swallow digits
    rest = torch.exp(x).sum(dim=-1).log()  # (n,) log-sum-exp above the largest logit
    lse = rest + top.squeeze(1)
    valid = targets != ignore_index
    safe = torch.where(valid, targets, 0)
    loss = rest - x.gather(1, safe[:, None]).squeeze(1)
    if z_loss:
        loss = loss + z_loss * lse * lse
    if grad:
        d = torch.exp(x - rest[:, None])  # softmax
        if z_loss:
            d = d * (1 + 2 * z_loss * lse)[:, None]
        onehot = torch.arange(n_vocab, device=x.device) == safe[:, None]
        d = torch.where(onehot, d - 1, d)
        if softcap:
            d = d * (1 - capped * capped)
        logits[:, :n_vocab] = (d * (scale * valid)[:, None]).to(logits.dtype)
        logits[:, n_vocab:] = 0
    return torch.where(valid, loss, 0)


def _walk_chunks(hidden, weight, targets, scale, options, want_dh: bool, want_dw: bool):
    """One pass over the tokens.  hidden (N, C), weight (V, C), same dtype -> loss (N,), dh (N, C), dw (V, C) fp32: the
    gradients of sum(scale * loss), or None where not wanted."""
    n_vocab, ignore_index, z_loss, softcap, chunk, arithmetic = options
    N, V, wide = hidden.shape[0], weight.shape[0], torch.promote_types(hidden.dtype, torch.float32)
    chunk = chunk or default_chunk(N, V, hidden.dtype, hidden.device.type)
    loss = torch.empty(N, dtype=wide, device=hidden.device)
    dh = torch.empty_like(hidden) if want_dh else None
    dw = (torch.empty_like if N else torch.zeros_like)(weight, dtype=wide) if want_dw else None  # chunk 0 writes it all
    buffer = hidden.new_empty(min(chunk, N), V)  # one chunk of logits, reused: fresh pages cost as much as the matmul
    direct = hidden.dtype == wide or (weight.is_cuda and torch.__version__ >= (2, 13))  # the matmul adds to fp32 itself
    dw_chunk = torch.empty_like(weight) if want_dw and N > chunk and not direct else None
    rows = max((1 << 20) // weight.shape[1], 1) if weight.device.type == "cpu" else V
    for start in range(0, N, chunk):
        here = slice(start, start + chunk)
        h = hidden[here]  # (n, C)
        logits = torch.mm(h, weight.t(), out=buffer[:len(h)])  # (n, V)
        loss[here] = arithmetic(logits, targets[here], scale[here], n_vocab, ignore_index, z_loss, softcap,
                                want_dh or want_dw)
        if want_dh:
            torch.mm(logits, weight, out=dh[here])
        if want_dw and direct:
            torch.addmm(dw, logits.t(), h, *([] if h.dtype == wide else [wide]), beta=int(start > 0), out=dw)
        elif want_dw and start == 0:
            dw.copy_(torch.mm(logits.t(), h, out=dw_chunk))
        elif want_dw:  # summed in fp32; in blocks, since at once a CPU first makes an fp32 copy, on fresh pages
            torch.mm(logits.t(), h, out=dw_chunk)
            for total, part in zip(dw.split(rows), dw_chunk.split(rows), strict=True):
                total += part
    return loss, dh, dw


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """Forms both gradients in forward, up to the incoming gradient, which backward multiplies in.

    The mean's 1/count is split into a factor in (1, 2], applied before the matmuls, and a power of two, which waits for
    the incoming gradient: 1/count itself would push fp16 values below their smallest number, and applied after the
    matmuls it would round bf16 values a second time.  (An incoming gradient of 1, 1/8 or 65536 rounds nothing.)"""

    @staticmethod
    def forward(ctx, hidden, weight, targets, reduction, options, dtype, grad_enabled):
        low_hidden, low_weight = hidden.to(dtype), weight.to(dtype)
        count = (targets != options[1]).sum().clamp(min=1).to(torch.promote_types(dtype, torch.float32))
        mantissa, _ = torch.frexp(count)  # count = mantissa * 2**k, mantissa in [0.5, 1)
        mean = reduction == "mean"
        scale = (1 / mantissa if mean else torch.ones_like(count)).expand(len(targets)).contiguous()
        ctx.norm = mantissa / count if mean else torch.ones_like(count)  # 2**-k
        # "none" meets a gradient per token, which the weight gradient needs before the sum over tokens: recompute there
        form = reduction != "none" and grad_enabled
        wanted = [form and needed for needed in ctx.needs_input_grad[:2]]
        loss, *grads = _walk_chunks(low_hidden, low_weight, targets, scale, options, *wanted)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.scale, ctx.options, ctx.dtype, ctx.formed = scale, options, dtype, grads if form else None
        return loss if reduction == "none" else loss.sum() / count if mean else loss.sum()

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # create_graph: what follows would silently count as constant
            raise NotImplementedError("fused_linear_cross_entropy has first derivatives only. For second ones use "
                                      "F.cross_entropy(F.linear(hidden, weight), targets).")
        hidden, weight, targets = ctx.saved_tensors
        factor = grad * ctx.norm
        if ctx.formed is None:  # a gradient per token, or a second backward through the same graph
            _, dh, dw = _walk_chunks(hidden.to(ctx.dtype), weight.to(ctx.dtype), targets, factor * ctx.scale,
                                     ctx.options, *ctx.needs_input_grad[:2])
        else:
            (dh, dw), ctx.formed = ctx.formed, None  # handed over: autograd need not copy what nobody else holds
            factor = factor.reshape(1, 1)  # a 0-dim factor would be rounded to bf16, or overflow fp16, on CUDA
            dh = dh if dh is None else torch.mul(dh, factor, out=dh if dh.dtype == hidden.dtype else None)
            dw = dw if dw is None else dw.mul_(factor)
        grads = (d if d is None else d.to(x.dtype) for d, x in ((dh, hidden), (dw, weight)))
        return *grads, None, None, None, None, None


def fused_linear_cross_entropy(hidden, weight, targets, *, ignore_index: int = -100, z_loss: float = 0.0,
                               softcap: float = 0.0, n_valid_vocab: int | None = None,
                               reduction: Literal["mean", "sum", "none"] = "mean", chunk: int | None = None,
                               n_rows: int | None = None, arithmetic=None):
    """cross_entropy(softcap(hidden @ weight.T), targets) + z_loss * logsumexp**2, without the [N, V] logits.

    hidden (N, C), weight (V, C), targets (N,) int64 -> () or, for "none", (N,); fp32 (fp64 for fp64 inputs).  Matmuls
    run in autocast's dtype if it is on, else in hidden's.  Both terms are averaged over the valid (not ignored) tokens;
    without any, "mean" is 0 with zero gradients (PyTorch gives NaN).  n_valid_vocab: columns from there on are padding.
    n_rows: for a weight that is one rank's share of n_rows rows.  arithmetic: what stands in for chunk_arithmetic.
    Raises ValueError on a target outside the vocabulary; on accelerators, where asking stalls the queue, gives NaN."""
    n_rows = n_rows or weight.shape[0]
    n_vocab = n_rows if n_valid_vocab is None else n_valid_vocab
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'.")
    if hidden.ndim != 2 or targets.shape != hidden.shape[:1] or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}: "
                         "they do not fit: (N, C), (V, C) and (N,) are needed. Flatten batch and time first.")
    if not 0 < n_vocab <= n_rows:
        raise ValueError(f"n_valid_vocab is {n_vocab}; the weight has {n_rows} rows.")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be a positive number of tokens, or None to choose it.")
    outside = ((targets < 0) | (targets >= n_vocab)) & (targets != ignore_index)
    if targets.device.type == "cpu" and outside.any():
        raise ValueError(f"target {int(targets[outside][0])} is outside the vocabulary of {n_vocab}. Ids must be "
                         f"0..{n_vocab - 1}, or {ignore_index} to be ignored: do tokenizer and model fit together?")
    targets = torch.where(outside, 0, targets)  # keep the gather in bounds; poisoned below
    device_type = hidden.device.type
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden.dtype
    options = (n_vocab, ignore_index, z_loss, softcap, chunk, arithmetic or chunk_arithmetic)
    loss = _FusedLinearCrossEntropy.apply(hidden, weight, targets, reduction, options, dtype, torch.is_grad_enabled())
    return loss + torch.where(outside.any() if reduction != "none" else outside, float("nan"), 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# The blocks


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in fp32, returned in x's dtype (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


def make_norm(cfg: ModelConfig) -> nn.Module:
    return RMSNorm(cfg.d_model, cfg.norm_eps) if cfg.norm == "rmsnorm" else nn.LayerNorm(
        cfg.d_model, cfg.norm_eps, bias=cfg.bias)


def rope_tables(positions, head_dim: int, theta: float):
    """Angles of each position.  positions (...,) int -> cos, sin (..., D/2) fp32 (bf16 would be wrong past 256)."""
    freqs = theta ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.float()[..., None] * freqs
    return angles.cos(), angles.sin()


def apply_rope(x, cos, sin):
    """Rotate channel d with channel d + D/2 by position.  x (B, T, H, D); cos, sin (T, D/2) or (B, T, D/2)."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same for every head
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class KVCache:
    """Keys and values of the tokens seen so far, for all layers: two tensors (L, B, K, S, D), filled up to `length`."""

    def __init__(self, cfg: ModelConfig, batch_size: int, max_len: int, device, dtype):
        shape = (cfg.n_layers, batch_size, cfg.n_kv_heads, max_len, cfg.head_dim)
        self.k, self.v = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.length = 0  # the model advances it once, after the last layer

    def places(self, T: int):
        """Positions of T new tokens (T,), how many positions there are to attend to, whether that takes a mask."""
        end, size = self.length + T, self.k.shape[3]
        if end > size:
            raise ValueError(f"the cache holds {size} tokens and {end} are needed. Make it larger.")
        return torch.arange(self.length, end, device=self.k.device), end, T > 1 and self.length > 0


@torch.no_grad()
def init(layer, summands: int = 1):
    """A layer that starts without bias, a table from N(0, 0.02²), a linear one from INIT_WIDTH/d_model of that, so
    that what leaves it is as large at every width (docs/scaling-laws.md).  Where a branch ends in the residual stream
    that is divided by the 2L branches, summands of the stream.  Only embed_constant overwrites any of it."""
    width = INIT_WIDTH if isinstance(layer, nn.Embedding) else layer.out_features if summands > 1 else layer.in_features
    layer.weight.normal_(std=INIT_STD / math.sqrt(summands * width / INIT_WIDTH))
    if getattr(layer, "bias", None) is not None:
        layer.bias.zero_()
    return layer


class Attention(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.head_dim, self.dropout = cfg.head_dim, cfg.dropout
        self.wq = init(nn.Linear(cfg.d_model, cfg.n_heads * cfg.head_dim, bias=cfg.bias))
        self.wk = init(nn.Linear(cfg.d_model, cfg.n_kv_heads * cfg.head_dim, bias=cfg.bias))
        self.wv = init(nn.Linear(cfg.d_model, cfg.n_kv_heads * cfg.head_dim, bias=cfg.bias))
        self.wo = init(nn.Linear(cfg.n_heads * cfg.head_dim, cfg.d_model, bias=cfg.bias), 2 * cfg.n_layers)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(cfg.head_dim, cfg.norm_eps) if cfg.qk_norm else nn.Identity()

    def forward(self, x, rope, mask, cache=None):
        """x (B, T, C); rope (cos, sin) or None; mask None or GPT.mask's -> (B, T, C).  cache: this layer's keys and
        values (B, K, S, D), and the positions (T,) in them that are x's."""
        B, T, _ = x.shape
        q = self.q_norm(self.wq(x).view(B, T, -1, self.head_dim))  # (B, T, H, D); -1: a sharded wq has fewer heads
        k = self.k_norm(self.wk(x).view(B, T, -1, self.head_dim))  # (B, T, K, D)
        v = self.wv(x).view(B, T, -1, self.head_dim)  # (B, T, K, D)
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or K, T, D)
        if cache is not None:
            k, v = cache[0].index_copy_(2, cache[2], k), cache[1].index_copy_(2, cache[2], v)  # (B, K, S, D)
        y = self.attend(q, k, v, mask)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))  # (B, T, C)

    def attend(self, q, k, v, mask):
        """q (B, H, T, D); k, v (B, K, S, D); mask None = causal, or bool (B or 1, 1, T, S) -> (B, H, T, D)."""
        # is_causal aligns top-left, right only without a past (T == S); one query (T == 1) needs no mask at all
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and q.shape[2] > 1,
                                              enable_gqa=q.shape[1] != k.shape[1],
                                              dropout_p=self.dropout if self.training else 0.0)


class MLP(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.w_gate = init(nn.Linear(cfg.d_model, cfg.d_ff, bias=cfg.bias)) if cfg.mlp == "swiglu" else None
        self.w_up = init(nn.Linear(cfg.d_model, cfg.d_ff, bias=cfg.bias))
        self.w_down = init(nn.Linear(cfg.d_ff, cfg.d_model, bias=cfg.bias), 2 * cfg.n_layers)

    def forward(self, x):
        if self.w_gate is not None:
            return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))  # SwiGLU, arXiv 2002.05202
        return self.w_down(F.gelu(self.w_up(x), approximate="tanh"))  # GPT-2's GELU


class Block(nn.Module):
    def __init__(self, cfg: ModelConfig):
        super().__init__()
        self.norm1, self.attn = make_norm(cfg), Attention(cfg)
        self.norm2, self.mlp = make_norm(cfg), MLP(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x, rope, mask, cache=None):
        x = x + self.drop(self.attn(self.norm1(x), rope, mask, cache))
        return x + self.drop(self.mlp(self.norm2(x)))  # (B, T, C)


class GPT(nn.Module):
    """Token ids to loss or logits.  Linears are named wq wk wv wo w_gate w_up w_down; the table is `embed.weight`."""

    cross_entropy = staticmethod(fused_linear_cross_entropy)
    cached = True  # whether `generate` may read with a cache: not where stack/twins.py saw other logits than forward's
    decoder = None  # of model, cache and docs: a function of the newest ids (B, 1) to logits (B, vocab_size)

    def __init__(self, cfg: ModelConfig):
        super().__init__()
        if cfg.problems():
            raise ValueError("\n".join(cfg.problems()))
        self.cfg = cfg
        self.embed = init(nn.Embedding(cfg.padded_vocab_size, cfg.d_model))
        self.pos_embed = init(nn.Embedding(cfg.max_seq_len, cfg.d_model)) if cfg.pos == "learned" else None
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.n_layers))
        self.norm = make_norm(cfg)
        if cfg.embed_constant:  # rotary heads tell places apart by what all tokens share; logits need none: gain 0
            n = math.ceil(cfg.d_model / 16)
            nn.init.constant_(self.embed.weight[:, :n], cfg.embed_constant * INIT_STD * math.sqrt(cfg.d_model / n))
            nn.init.zeros_(self.norm.weight[:n])
        self.head = None if cfg.tie_embeddings else init(nn.Linear(cfg.d_model, cfg.padded_vocab_size, bias=False))

    @property
    def head_weight(self):
        """(V, C): the table itself when tied, which then is one parameter, one optimizer slot, one tensor on disk."""
        return self.embed.weight if self.head is None else self.head.weight

    def mask(self, where, size: int, docs):
        """What queries at the positions `where` (T,) may see of S = size keys: bool (B or 1, 1, T, S), for
        Attention.attend.  docs (B, S) or None, as in `hidden`."""
        causal = (torch.arange(size, device=where.device) <= where[:, None])[None, None]  # (1, 1, T, S)
        return causal if docs is None else causal & (docs[:, None, where, None] == docs[:, None, None])

    @functools.cached_property
    def is_causal(self) -> bool:
        """Whether `mask` says, without documents, what attention does without a mask; by three queries."""
        keys = torch.arange(self.cfg.max_seq_len, device=self.embed.weight.device)
        where = keys[[0, len(keys) // 2, -1]]
        return bool((self.mask(where, len(keys), None) == (keys <= where[:, None])).all())

    def hidden(self, ids, *, docs=None, cache: KVCache | None = None):
        """Everything up to the final norm.  ids (B, T) -> (B, T, C).

        docs (B, S or more): the document of each token, those in the cache first.  Attention stays within equal
        numbers, learned positions restart where the number changes."""
        T, past = ids.shape[1], 0 if cache is None else cache.length
        if past + T > self.cfg.max_seq_len:
            raise ValueError(f"{past + T} tokens do not fit the context of max_seq_len ({self.cfg.max_seq_len}). "
                             "Shorten the input.")
        if ids.device.type == "cpu":  # elsewhere the check would wait for the device; batches are checked when made
            check_ids(ids, self.cfg.vocab_size)
        where, size, masked = (torch.arange(T, device=ids.device), T, False) if cache is None else cache.places(T)
        docs = None if docs is None else docs[:, :size]
        mask = self.mask(where, size, docs) if masked or docs is not None or not self.is_causal else None
        positions = where  # (T,)
        if docs is not None and self.pos_embed is not None:  # rotary scores depend on distances only
            first = F.pad(docs[:, 1:] != docs[:, :-1], (1, 0), value=True)
            everywhere = torch.arange(size, device=ids.device)
            positions = (everywhere - torch.where(first, everywhere, 0).cummax(dim=1).values)[:, where]  # (B, T)
        x = self.embed(ids)  # (B, T, C): row copies; equal to one_hot(ids) @ table at none of its cost
        x = x * math.sqrt(self.cfg.d_model) if self.cfg.embed_scale else x
        if self.pos_embed is not None:
            x, rope = x + self.pos_embed(positions), None
        else:  # tables are computed per call: nothing to save, nothing that .to(bfloat16) could round
            rope = rope_tables(positions, self.cfg.head_dim, self.cfg.rope_theta)
        x = self.drop(x)
        for i, block in enumerate(self.blocks):
            rotated = self.cfg.nope_every == 0 or (i + 1) % self.cfg.nope_every
            kept = None if cache is None else (cache.k[i, :, :, :size], cache.v[i, :, :, :size], where)
            x = block(x, rope if rotated else None, mask, kept)
        if cache is not None:
            cache.length += T
        return self.norm(x)

    def logits(self, hidden):
        """hidden (..., C) -> (..., vocab_size) fp32, soft-capped, without the pad rows."""
        logits = F.linear(hidden, self.head_weight[:self.cfg.vocab_size].to(hidden.dtype)).float()
        cap = self.cfg.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits

    def forward(self, ids, targets=None, *, docs=None, cache: KVCache | None = None, z_loss: float = 0.0,
                reduction: Literal["mean", "sum", "none"] = "mean"):
        """ids (B, T) -> logits (B, T, vocab_size); with targets (B, T), -100 = ignored -> loss () or (B*T,) alone."""
        h = self.hidden(ids, docs=docs, cache=cache)
        if targets is None:
            return self.logits(h)
        return self.cross_entropy(h.flatten(0, 1), self.head_weight, targets.flatten(), softcap=self.cfg.logit_softcap,
                                  n_valid_vocab=self.cfg.vocab_size, z_loss=z_loss, reduction=reduction)


def check_ids(ids, vocab_size: int):
    """Raise on an id no row belongs to, naming it; on a GPU the lookup itself would only say "device-side assert"."""
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise ValueError(f"token id {int(outside[0])} is outside the vocabulary of {vocab_size} (ids 0.."
                         f"{vocab_size - 1}). Use the tokenizer the model was trained with, or resize the model after "
                         "adding tokens.")


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def sample_next(logits, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
                generator=None):
    """Choose one id per row.  logits (B, V) -> (B, 1).

    temperature 0 takes the most likely id (the lowest of equals).  Then, in this order, top_k keeps exactly k ids (0 =
    off), top_p the smallest set of most likely ids with at least that much probability, min_p (arXiv 2407.01082) those
    at least min_p times as likely as the best.  Raises ValueError on NaN or inf logits and on senseless settings."""
    if not temperature >= 0 or not 0 <= top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(f"temperature {temperature}, top_p {top_p}, min_p {min_p}: temperature must be 0 or more, "
                         "top_p and min_p between 0 and 1.")
    if not (logits < torch.inf).all():
        raise ValueError("the logits contain NaN or infinity: the weights are damaged. Sample an earlier checkpoint.")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # max 0: no overflow at small temperatures, which fp32 must not round to 0 either
    logits = (logits - logits.max(-1, keepdim=True).values) / max(temperature, 1e-30)
    if top_k and top_k < logits.shape[-1]:
        values, ids = logits.topk(top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, ids, values)
    if top_p < 1:
        values, ids = logits.sort(descending=True, stable=True)
        probs = values.softmax(-1)
        before = probs.cumsum(-1) - probs  # probability of the ids ahead of this one
        before[:, 0] = -1  # the best stays, whatever top_p
        logits = logits.scatter(-1, ids, values.masked_fill(before >= top_p, -torch.inf))
    probs = logits.softmax(-1)
    if min_p:
        probs = torch.where(probs < min_p * probs.max(-1, keepdim=True).values, 0, probs)
    return torch.multinomial(probs, 1, generator=generator)


@torch.inference_mode()
def generate(model: GPT, prompts, *, max_new_tokens: int, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
             min_p: float = 0.0, stop_ids=(), seed: int | None = None, use_cache: bool = True,
             cache: KVCache | None = None, on_token=None, on_logits=None) -> list[list[int]]:
    """Continue each prompt, a list of ids or a row of a tensor (B, T); returns the new ids, without a row's stop id.

    Prompts may differ in length: rows are padded on the left, as if by another document, so that a row's probabilities
    do not depend on its neighbours (its random numbers do: one generator serves all rows).  A prompt longer than the
    context loses its beginning, with one warning; a row that fills the context while generating drops its older half
    and goes on.  `on_token(row, id)` is called for every new id and ends the row by returning True; `on_logits(logits)`
    (B, V) returns those to choose from.  A cache, new or with the only prompt's beginning, changes no id."""
    limit, device, use_cache = model.cfg.max_seq_len, model.embed.weight.device, use_cache and model.cached
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more.")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {row} is empty. Start it with the tokenizer's boundary id.")
        check_ids(torch.as_tensor(prompt), model.cfg.vocab_size)
    if any(len(p) > limit for p in prompts):
        warnings.warn(f"a prompt of {max(map(len, prompts))} tokens is longer than the context of {limit}: its "
                      "beginning is left out.", stacklevel=3)
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else model.embed.weight.dtype
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    contexts = [list(map(int, p[-limit:])) for p in prompts]
    new, alive, was_training = [[] for _ in contexts], [True] * len(contexts), model.training
    model.eval()
    try:
        for step in range(max_new_tokens if contexts else 0):
            if step == 0 or not use_cache or max(map(len, contexts)) > limit:  # all of it is read, once or again
                contexts = [c[-max(limit // 2, 1):] if len(c) > limit else c for c in contexts]
                longest = max(map(len, contexts))
                size = min(limit, max(1 << (longest + max_new_tokens - step - 1).bit_length(), 128))  # few compilations
                if cache is None or step > 0:
                    cache = KVCache(model.cfg, len(contexts), size, device, dtype) if use_cache else None
                decode, pads, past = None, [longest - len(c) for c in contexts], cache.length if cache else 0
                ids = torch.tensor([[0] * n + c[past:] for n, c in zip(pads, contexts, strict=True)], device=device)
                docs = (torch.arange(size) >= torch.tensor(pads)[:, None]).int().to(device) if any(pads) else None
            elif model.decoder is not None:
                decode = decode or model.decoder(model, cache, docs)
            if decode is None:
                with torch.compiler.set_stance("force_eager"), sdpa_kernel(ANY_LENGTH):  # blocks recompile for each
                    logits = (model.logits(model.hidden(ids, docs=docs, cache=cache)[:, -1]) if use_cache else
                              model(ids, docs=docs)[:, -1])
            else:
                logits = decode(ids)
            ids = sample_next(logits if on_logits is None else on_logits(logits), temperature=temperature, top_k=top_k,
                              top_p=top_p, min_p=min_p, generator=generator)
            for row, token in enumerate(ids[:, 0].tolist()):
                contexts[row].append(token)
                alive[row] = alive[row] and token not in stop_ids
                if alive[row]:
                    new[row].append(token)
                    alive[row] = on_token is None or not on_token(row, token)
            if not any(alive):
                break
    finally:
        model.train(was_training)
    return new
