"""Decoding on a CPU, as fast as its memory allows.  model.py does without it; `use(model)` attaches it.

decode.cpp is one step of the whole model, for one token of each text, compiled in seconds the first time.  It reads the
weights and writes the cache where they lie.  Since it says a second time what model.py says, some of its logits are
compared with model.py's: a model that it does not know is decoded without it.
"""

import ctypes
import functools
import math
import struct
import warnings

import torch
import torch.nn as nn

from model import Int8Linear, RMSNorm, _decode_step, rope_tables
from stack.cpu.build import compile_cpp

BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 1}
# of logits to model.py's, as the difference's share of their root mean square; bf16 alone makes 0.011 at 30 layers
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
HUGE = 1 << 18  # bytes of a matrix, from which the page around it may become a huge one


@functools.cache
def library():
    made = compile_cpp("decode")
    made.step.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    made.step.restype, made.huge_pages.argtypes = ctypes.c_int64, [ctypes.c_size_t, ctypes.c_size_t]
    return made


class Step:
    """A function of ids (B, 1) to logits (B, vocab_size) fp32.  Raises TypeError on what decode.cpp cannot read."""

    def __init__(self, model, cache, docs):
        self.cache, self.keep = cache, []  # keep: what the addresses below belong to
        cfg, (L, B, K, S, D) = model.cfg, cache.k.shape
        C, H, F, V = cfg.d_model, cfg.n_heads, cfg.d_ff, cfg.vocab_size
        layers = []
        for i, block in enumerate(model.blocks):
            attn, mlp = block.attn, block.mlp
            layers += [*self.matrix(attn.wq, H * D, C), *self.matrix(attn.wk, K * D, C),
                       *self.matrix(attn.wv, K * D, C), *self.matrix(attn.wo, C, H * D),
                       *(self.matrix(mlp.w_gate, F, C) if cfg.mlp == "swiglu" else (0,) * 6),
                       *self.matrix(mlp.w_up, F, C), *self.matrix(mlp.w_down, C, F),
                       *self.norm(block.norm1, C), *self.norm(block.norm2, C),
                       *(self.norm(part, D)[0] if cfg.qk_norm else 0 for part in (attn.q_norm, attn.k_norm)),
                       cfg.pos == "rope" and (cfg.nope_every == 0 or (i + 1) % cfg.nope_every != 0)]
        rows, table, head, positions = cfg.padded_vocab_size, model.embed.weight, model.head_weight, model.pos_embed
        first = torch.zeros(B, dtype=torch.long) if docs is None else (docs != docs[:, -1:]).sum(1)
        cos, sin = rope_tables(torch.arange(S), D, cfg.rope_theta) if cfg.pos == "rope" else (None, None)
        parts = [
            cfg.norm_eps, cfg.logit_softcap, math.sqrt(C) if cfg.embed_scale else 1, C, L, H, K, D, F, B, S,
            torch.get_num_threads(), cfg.norm == "layernorm", BYTES[table.dtype], BYTES[cache.k.dtype],
            self.address(table, rows, C),
            positions and self.address(positions.weight, cfg.max_seq_len, C, dtype=table.dtype) or 0,
            cache.k.data_ptr(), cache.v.data_ptr(), self.fp32(cos, S, D // 2), self.fp32(sin, S, D // 2),
            self.address(first, B), *self.norm(model.norm, C), self.address(torch.tensor(layers), len(layers))]
        parts += [self.address(head, rows, C), 0, 0, V, C, BYTES[head.dtype]]
        self.model = struct.pack("3d29q", *parts, 0)
        floats = library().step(self.model, None, None, 0)
        self.model = struct.pack("3d29q", *parts, self.address(torch.zeros(floats), floats))
        self.logits = torch.empty(B, V)

    def address(self, tensor, *shape, dtype=None):
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.is_contiguous()
        if not plain or tensor.shape != shape or tensor.dtype != (dtype or tensor.dtype):
            raise TypeError
        self.keep.append(tensor)
        return tensor.data_ptr()

    def fp32(self, tensor, *shape):
        return 0 if tensor is None else self.address(tensor.detach().float().contiguous(), *shape)

    def matrix(self, linear, rows: int, cols: int):
        if type(linear) not in (nn.Linear, Int8Linear):
            raise TypeError
        return (self.address(linear.weight, rows, cols), self.fp32(getattr(linear, "scale", None), rows),
                self.fp32(linear.bias, rows), rows, cols, BYTES[linear.weight.dtype])

    def norm(self, part, size: int):
        if type(part) not in (RMSNorm, nn.LayerNorm):
            raise TypeError
        return self.fp32(part.weight, size), self.fp32(getattr(part, "bias", None), size)

    def __call__(self, ids):
        self.cache.places(1)  # raises where there is none
        ids = ids.contiguous()
        library().step(self.model, ids.data_ptr(), self.logits.data_ptr(), self.cache.length)
        self.cache.length += 1
        return self.logits


def use(model):
    """Attach to a model.GPT that generate(..., compile=True) will use on a CPU; returns the model."""
    model.decoder = functools.partial(decoder, {})
    return model


def decoder(known: dict, model, cache, docs):
    """A Step, or model.py's own compiled step for what is not a Step's.  known: of weights at some addresses, up to how
    many tokens the step computes the model, or False.  One token is computed twice where that is not known, and again
    wherever the context has doubled: a window, or other positions, show late."""
    weights = tuple(p.data_ptr() for p in model.parameters())
    step = None
    if model.embed.weight.device.type == "cpu" and known.get(weights) is not False:
        try:
            step = Step(model, cache, docs)
        except (AttributeError, KeyError, TypeError):  # parts that decode.cpp cannot read
            pass
    if step is None:
        return _decode_step(model, cache, docs)
    if weights not in known:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.nbytes >= HUGE:
                library().huge_pages(tensor.data_ptr(), tensor.nbytes)
    right_to = known.get(weights, 0)

    def compared(ids):
        nonlocal step, right_to
        if cache.length < 2 * right_to:
            return step(ids)
        got = step(ids)
        cache.length -= 1
        with torch.compiler.set_stance("force_eager"):
            seen = docs if docs is None else docs[:, :cache.length + 1]
            want = model.logits(model.hidden(ids, docs=seen, cache=cache)[:, -1])
        if want.isnan().any():  # damaged weights, which sample_next speaks of
            return want
        low = torch.bfloat16 in (cache.k.dtype, model.embed.weight.dtype)
        allowed = TOLERANCE[torch.bfloat16 if low else torch.float32] * want.norm()
        if (got - want).norm() <= allowed < math.inf:  # infinite: a change that forbids ids
            right_to = known[weights] = cache.length
            return got
        right_to, known[weights] = math.inf, False
        warnings.warn(f"decode.cpp does not compute what model.py computes, seen at token {cache.length}: decoding "
                      "goes on without it. Was the model changed? State the change in decode.cpp too, or leave "
                      "decode.use(model) out.", stacklevel=4)
        step = _decode_step(model, cache, docs)
        return want
    return compared
