"""Weights of 8 bits for inference: half the memory, and on a CPU faster to read.  One call on a built model."""

import copy

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
            y = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]), self.whole, self.scale).view(*x.shape[:-1], -1)
        else:
            y = F.linear(x, self.whole.to(x.dtype)) * self.scale
        return y if self.bias is None else y + self.bias


@torch.no_grad()
def quantize_int8(model):
    """Make the blocks' linears Int8Linear, in place, for inference; returns the model.  Table and head keep their
    format: they are read by the row, or decide between close logits.

    What stands where a plain linear is expected but multiplies otherwise keeps its weights as they are: each Int8Linear
    is compared with the layer it replaces, given the same rounded weights.
    """
    for block in model.blocks:
        for part in list(block.modules()):
            for name, child in part.named_children():
                if isinstance(child, nn.Linear) and _same(int8 := Int8Linear(child), child):
                    setattr(part, name, int8)
    return model


def _same(int8: Int8Linear, linear: nn.Linear) -> bool:
    """Whether they give the same products of random vectors, in fp32, the linear with int8's rounded weights."""
    int8, linear = copy.deepcopy(int8).float(), copy.deepcopy(linear).float()
    linear.weight.data = int8.weight
    x = torch.randn(2, linear.in_features, generator=torch.Generator().manual_seed(0)).to(linear.weight)
    try:
        want, got = linear(x), int8(x)
    except Exception:  # one that is called otherwise
        return False
    return bool((got - want).norm() <= 1e-3 * want.norm())
