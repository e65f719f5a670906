"""Weights of 8 bits for inference: half the memory, and on a CPU faster to read.  One call on a built model."""

import copy
import math
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F


class Int8Linear(nn.Module):
    """A linear of whole numbers: weights of 8 bits, one scale per row, rounded to nearest; activations as they come.
    Who reads `weight`, to multiply otherwise, gets what the numbers stand for."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = (linear.weight.float().abs().amax(1) / 127).clamp(min=1e-12)  # (out,)
        self.register_buffer("whole", (linear.weight.float() / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = linear.bias

    @property
    def weight(self):
        return self.whole.to(self.scale.dtype) * self.scale[:, None]

    def forward(self, x):
        # a kernel for few rows that does not check what it reads; many rows are unpacked first
        if x.device.type == "cpu" and x.numel() <= 8 * x.shape[-1] and not any(n % 64 for n in self.whole.shape):
            y = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.whole, self.scale)
            y = y.view(*x.shape[:-1], len(self.whole))
        else:
            y = F.linear(x, self.whole.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


@torch.no_grad()
def quantize_int8(model):
    """Make the blocks' linears Int8Linear, in place, for inference; returns the model.  Table and head keep their
    format: they are read by the row, or decide between close logits.

    What stands where a plain linear is expected but multiplies otherwise keeps its weights as they are: each Int8Linear
    is compared with the layer it replaces, given the same rounded weights; then so is the model, with a warning.
    """
    swaps = [(part, name, child, int8) for block in model.blocks for part in block.modules()
             for name, child in part.named_children()
             if isinstance(child, nn.Linear) and _same(int8 := Int8Linear(child), child)]
    exact = [linear.weight.data for _, _, linear, _ in swaps]
    for _, _, linear, int8 in swaps:
        linear.weight.data = int8.weight
    want = _hidden(model)
    for (part, name, linear, int8), weight in zip(swaps, exact, strict=True):
        linear.weight.data = weight
        setattr(part, name, int8)
    bound = 1e-3 if want[0].dtype == torch.float32 else 0.02 * math.sqrt(model.cfg.n_layers)  # rounding, as in twins.py
    if any((a - b).norm() > bound * b.norm() for a, b in zip(_hidden(model), want, strict=True)):
        warnings.warn("with linears of 8 bits the blocks compute something else than with weights rounded so: they "
                      "keep their format. Was model.py changed?", stacklevel=2)
        for part, name, linear, _ in swaps:
            setattr(part, name, linear)
    return model


def _hidden(model) -> list:
    """What the model makes of some tokens: of few, and of more than the kernel for few rows takes."""
    n = min(model.cfg.max_seq_len, 32)
    ids = torch.arange(n, device=model.embed.weight.device)[None] % model.cfg.vocab_size
    was_training = model.training
    model.eval()
    try:
        return [model.hidden(ids[:, :-(-n // 8)]), model.hidden(ids)]
    finally:
        model.train(was_training)


def _same(int8: Int8Linear, linear: nn.Linear) -> bool:
    """Whether they give the same products of random vectors, in fp32, the linear with int8's rounded weights."""
    int8, linear = copy.deepcopy(int8).float(), copy.deepcopy(linear).float()
    linear.weight.data = int8.weight
    x = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight)
    x *= torch.tensor([[1], [32], [1 / 32]]).to(x)  # a clamp would bite where values are large
    try:
        want, got = linear(x), int8(x)
    except Exception:  # one that is called otherwise
        return False
    return got.shape == want.shape and bool(((got - want).norm(dim=1) <= 1e-3 * want.norm(dim=1)).all())
