"""How long a micro step takes on a GPU at least, by what bounds each part of it: arithmetic, from the model's shapes.

A matmul takes its FLOPs at a share of the peak or its traffic at MOVED of the bandwidth, whichever is longer; attention
its FLOPs at rates of its own; everything else its traffic.  Shares and rates are assumptions (docs/gpu.md says what
they rest on), none of them measured with this repository; what is left out (kernels that wait for each other, a slow
host) only adds, so this is an optimistic end.

What is moved is a compiled block's, in bytes per token: l the matmuls' format, s the residual stream's.

    forward   norms: the stream in, l C out; the second one adds wo's output first          2 (s + l) C + l C
              the stream at the end, of the input and both branches                         2 (s + l) C
              norm and rotation of queries and keys, in and out                             2 l (q + k)
              the activation, in and out                                                    l (up + F)
    backward  the gradient cast for w_down; the activation: three reads or two, and writes  (s + l) C + l (2 up + F)
              norms: a gradient per matmul, input, wo's output, gradient in and out, cast   l (n + 2) C + 6 s C
              the second norm's gain: its output's gradient and wo's output once more       2 l C
              sums of output times gradient, for attention                                  2 l q
              queries and keys: rotation in and out, two reads for the gain, three to norm  7 l (q + k)
              the gradient of values into that of what wq, wk and wv return, where merged   2 l k
              biases: each linear's output gradient once more                               l (q + 2 k + up + 2 C)

Without QK-norm queries and keys move 2 l (q + k) backward, without rotation 5.  Casts fall away where s is l.  n
matmuls read a norm's output: one per norm where compiled.merge_linears makes them one, in 16 bits, else each linear.

Matmuls, and what attends, are counted on the model that is built; linears of a part of a block, but for wo and w_down,
are taken to read one input and to be merged.  What is moved is that of model.py's own block.  Both kinds of
recomputation do the whole forward part again, "block" all matmuls too, of which the compiler may leave out one.
Dropout costs nothing here, and under document masks keeps FlexAttention's rates, though it takes a boolean mask there.
"""

import collections
import math
import re

import torch

from model import GPT, default_chunk
from stack import counts
from stack.device import DTYPES, PEAK_TFLOPS
from stack.memory import MOMENTS, owned
from stack.optim import NS_STEPS, Muon

GPUS = {  # name in device.PEAK_TFLOPS: GB, GB/s (NVIDIA's data sheets; SXM for A100, H100); assumed: share of the peak
    # in large matmuls, TFLOP/s of attention under a block mask at head_dim 64, forward and backward
    "A100": (80, 2039, 0.75, 130, 108), "H100": (80, 3350, 0.62, 230, 190), "H200": (141, 4800, 0.62, 230, 190),
    "RTX 4090": (24, 1008, 0.85, 100, 83),
}
MOVED = 0.85  # of the bandwidth; assumed
TILE = 128  # keys and queries that FlexAttention and flash attention take or leave together
IDLE = 2e-3  # seconds a step in which the GPU waits for the host, which reads loss and norm; assumed
CLIPPED = 12  # bytes per parameter: the gradient is read for its norm, read and written to be scaled
STEPPED = {kind: 4 * (3 + 2 * moments) for kind, moments in MOMENTS.items()}  # gradient in; weight, moments in and out


def newton_schulz_flops(muon_params) -> int:
    """Of an optimizer step: for each r x c matrix, r <= c, NS_STEPS times X X^T, its square, one more product."""
    return sum(NS_STEPS * (4 * min(p.shape) ** 2 * max(p.shape) + 2 * min(p.shape) ** 3) for p in muon_params)


def moved_bytes(cfg, low: int, residual: int, merged: bool) -> tuple[int, int]:
    """What everything but matmuls and attention moves in a block, forward and backward, per token; of blocks with and
    without rotation the mean."""
    C, F, q, k = cfg.d_model, cfg.d_ff, cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
    up, turns = F * (2 if cfg.mlp == "swiglu" else 1), cfg.pos == "rope"
    if cfg.nope_every:
        turns *= 1 - cfg.n_layers // cfg.nope_every / cfg.n_layers
    turned = (q + k) * (1 if cfg.qk_norm else turns)
    casts = residual != low
    forward = 4 * (residual + low) * C + low * C + 2 * low * turned + low * (up + F)
    backward = casts * (residual + low) * C + low * (2 * up + F) + 6 * residual * C
    backward += low * ((2 if merged else up // F + 3) + 3 + casts) * C
    backward += low * (2 * q + (2 * turns + 5 * cfg.qk_norm) * (q + k) + 2 * k * merged)
    backward += low * (q + 2 * k + up + 2 * C) * cfg.bias
    return round(forward), round(backward)


def micro_step(model: GPT, optimizers, train, gpu: str, *, dtype: torch.dtype, mean_doc_len: int) -> dict[str, float]:
    """Seconds of each part of a compiled micro step on one of GPUS, of a model as counts.build makes it; those of its
    optimizers are divided over the micro steps of the run.  dtype: of the matmuls; fp32 has TF32's rate, half of
    bf16's."""
    _, bandwidth, share, *attention = GPUS[gpu]
    cfg, N, low, looked_up = model.cfg, train.micro_batch_size * train.seq_len, dtype.itemsize, counts.tables(model)
    peak = PEAK_TFLOPS[gpu] * 1e12 * share
    rate, moved, (ahead, back) = peak * 2 / low, bandwidth * 1e9 * MOVED, (x * 1e12 * 2 / low for x in attention)
    again = {"none": 0, "selective": 0, "block": 1}[train.remat]  # matmuls and attention forward once more

    def matmul(r, c):
        return max(2 * N * r * c / rate, low * (N * (r + c) + r * c) / moved)
    merged = low < 4 and train.dp == "ddp" and train.tp == 1  # compiled.merge_linears leaves sharded weights alone
    shapes = collections.Counter()  # rows by name and columns, of what is merged together
    for name, p in model.blocks.named_parameters():
        if p.ndim == 2 and p not in looked_up:
            where = re.sub(r"\.(?!wo\.|w_down\.)\w+\.weight$", ".merged", name) if merged else name
            shapes[where, p.shape[1]] += len(p)
    keys = [(width, counts.mean_keys(train.seq_len, mean_doc_len if train.doc_mask else None, window)
             + TILE / 2 * (1 + train.doc_mask)) for width, window in counts.attention_layers(model)]
    scores = N * sum(4 * width * seen for width, seen in keys)  # FLOPs forward; backward computes them again: 2.5 times
    forward, backward = moved_bytes(cfg, low, DTYPES[train.residual_dtype].itemsize, merged)
    V, C = model.head_weight.shape
    chunks = math.ceil(N / default_chunk(N, V, dtype, "cuda"))
    n_cast, n = sum(rows * columns for (_, columns), rows in shapes.items()), sum(p.numel() for p in model.parameters())
    step = sum(size * sum(p.numel() for p in owned(optimizers, kind)) for kind, size in STEPPED.items())
    step = (step + CLIPPED * n) / moved + newton_schulz_flops(owned(optimizers, Muon)) / peak + IDLE
    around = n_cast * (4 + low + low + 8) + V * C * 12 + N * C * (8 + 12 + 24)  # casts, sums; lookups, the last norm
    return {
        "block matmuls": (3 + again) * sum(matmul(rows, columns) for (_, columns), rows in shapes.items()),
        "attention": scores * ((1 + again) / ahead + 2.5 / back),
        "pointwise and norms": N * cfg.n_layers * (forward * (1 + (train.remat != "none")) + backward) / moved,
        "head matmuls": 3 * matmul(V, C),
        "head pointwise and dw": (2 * low * N * V + (chunks - 1) * 8 * V * C) / moved,
        "rest": around / moved + step * N * train.max_steps / train.tokens,
    }
