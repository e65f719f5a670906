"""Decoding on a CPU, as fast as its memory allows.  model.py does without it; stack/twins.py attaches and compares it.

decode.cpp is one step of the whole model, for one token of each text, compiled in seconds the first time.  It reads the
weights and writes the cache where they lie.
"""

import ctypes
import functools
import math
import struct

import torch
import torch.nn as nn

from model import RMSNorm, rope_tables
from stack.cpu.build import compile_cpp
from stack.quantize import Int8Linear

BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.int8: 1}
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
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.nbytes >= HUGE and tensor.device.type == "cpu":
                library().huge_pages(tensor.data_ptr(), tensor.nbytes)
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
        weight = linear.whole if isinstance(linear, Int8Linear) else linear.weight
        return (self.address(weight, rows, cols), self.fp32(getattr(linear, "scale", None), rows),
                self.fp32(linear.bias, rows), rows, cols, BYTES[weight.dtype])

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
