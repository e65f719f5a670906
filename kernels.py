"""Attention for compiled training on CPUs, faster than PyTorch's.  model.py does without it; `use(model)` attaches it.

Two ways, both with F.scaled_dot_product_attention as their plain twin: short contexts as two halves of plain matmuls,
which the compiler fuses with their neighbours; long ones block by block, without ever keeping scores.
"""

import functools
import math

import torch

SHORT = 512  # tokens up to which halves are faster, measured


def use(model):
    """Attach to each block of a model.GPT that will be compiled for a CPU; returns the model."""
    for block in model.blocks:
        block.attn.kernel = attention
    return model


def attention(q, k, v, mask):
    """q (B, H, T, D), k, v (B, K, T, D), mask None (causal) or bool (B or 1, 1, T, T) -> (B, H, T, D)."""
    return attend_in_halves(q, k, v, mask) if q.shape[2] <= SHORT else Attend.apply(q, k, v, mask)


def attend_in_halves(q, k, v, mask):
    """Causal attention as plain matmuls over two halves of the queries; the first ignores the second's keys.

    q (B, H, T, D), k, v (B, K, T, D), mask None or bool (B, 1, T, T) -> (B, H, T, D).  On a CPU, compiled, at short
    contexts, a training step is a quarter faster with this than with F.scaled_dot_product_attention, its plain twin:
    query heads of one key head become rows of one matmul, and the softmax is fused around it.
    """
    B, H, T, D = q.shape
    K = k.shape[1]
    q = q.reshape(B * K, H // K, T, D)
    k, v = k.reshape(B * K, T, D), v.reshape(B * K, T, D)
    halves = []
    for start, end in ((0, T // 2), (T // 2, T)):
        rows = q[:, :, start:end].reshape(B * K, -1, D)  # (B*K, H/K * t, D)
        scores = torch.bmm(rows, k[:, :end].transpose(1, 2)).view(B, K, H // K, end - start, end)
        positions = torch.arange(end, device=q.device)
        seen = positions <= positions[start:, None] if mask is None else mask[:, :, None, start:end, :end]
        scores = torch.where(seen, scores.float() / math.sqrt(D), -torch.inf)
        weights = scores.softmax(-1).to(v.dtype).view(B * K, -1, end)
        halves.append(torch.bmm(weights, v[:, :end]).view(B * K, H // K, end - start, D))
    return torch.cat(halves, dim=2).view(B, H, T, D)


ATTEND_ROWS = 128  # queries per head in one block of scores: few enough to skip most future keys, measured


def _softmax_block(scores, mask, groups: int, scale: float):
    """scores (n, groups * t, S) of t queries to S keys, the last of which is the last query's own, become exp(scaled
    score - largest) in place; -> their sum and log-sum-exp, (n, groups, t, 1) fp32.  mask (b, t, S) bool or None."""
    n, rows, S = scores.shape
    t = rows // groups
    x = _seen(scores.view(n, groups, t, S).float() * scale, mask, -torch.inf)
    top = x.amax(dim=-1, keepdim=True)
    weights = torch.exp(x - top)
    total = weights.sum(dim=-1, keepdim=True)
    scores.copy_(weights.view(n, rows, S))
    return total, top + total.log()


def _softmax_block_backward(scores, grads, mask, lse, delta, groups: int, scale: float):
    """scores and the gradients of the weights (n, groups * t, S) become, in place, weights and gradients of scores.
    lse, delta (n, groups, t, 1) fp32."""
    n, rows, S = scores.shape
    t = rows // groups
    weights = _seen(torch.exp(scores.view(n, groups, t, S).float() * scale - lse), mask, 0.0)
    grads.copy_((weights * (grads.view(n, groups, t, S).float() - delta) * scale).view(n, rows, S))
    scores.copy_(weights.view(n, rows, S))


def _seen(x, mask, otherwise: float):
    """x (n, groups, t, S) where the query may see the key, `otherwise` elsewhere."""
    n, groups, t, S = x.shape
    if mask is None:
        seen = torch.arange(S, device=x.device) <= torch.arange(S - t, S, device=x.device)[:, None]
    else:
        seen = mask[:, None].expand(-1, n // len(mask), -1, -1).reshape(n, 1, t, S)
    return torch.where(seen, x, otherwise)


@functools.cache
def _compiled_blocks():
    return torch.compile(_softmax_block, dynamic=True), torch.compile(_softmax_block_backward, dynamic=True)


def _blocks(T: int, mask):
    """(queries, keys, mask) of each block of queries: slices of positions, and what of the mask belongs to them."""
    for start in reversed(range(0, T, ATTEND_ROWS)):  # the last first: a square one would be compiled by itself
        end = min(start + ATTEND_ROWS, T)
        yield slice(start, end), slice(0, end), None if mask is None else mask[:, 0, start:end, :end]


@torch.library.custom_op("stack100m::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> tuple[
        torch.Tensor, torch.Tensor]:
    """Causal attention for CPUs, as matmuls over blocks of queries: twice as fast, forward and backward, as
    F.scaled_dot_product_attention, its plain twin, and like it without keeping scores for the backward pass.

    q (B, H, T, D), k, v (B, K, T, D), mask None or bool (B or 1, 1, T, T) -> (B, H, T, D), lse (B*K, H/K, T, 1) fp32.
    The query heads of one key head are rows of one matmul, the softmax is one compiled pass over a block that is still
    in the cache, keys after a block's last query are never multiplied.  An operator of its own, so that the compiler of
    the block around it neither looks inside nor keeps scores.
    """
    (B, H, T, D), K = q.shape, k.shape[1]
    n, groups = B * K, H // K
    out, lse = q.new_empty(B, T, H, D).transpose(1, 2), q.new_empty(n, groups, T, 1, dtype=torch.float32)
    q, by_key = q.reshape(B, K, groups, T, D), out.view(B, K, groups, T, D)
    k, v = k.reshape(n, T, D), v.reshape(n, T, D)
    with torch.inference_mode():  # always the same kind of tensor, or the softmax would be compiled again for another
        buffer = q.new_empty(n * groups * min(ATTEND_ROWS, T) * T)
        for rows, keys, seen in _blocks(T, mask):
            some = q[:, :, :, rows].reshape(n, -1, D)  # (n, groups * t, D)
            scores = buffer[:some.shape[1] * n * keys.stop].view(n, -1, keys.stop)
            torch.bmm(some, k[:, keys].transpose(1, 2), out=scores)
            total, lse[:, :, rows] = _compiled_blocks()[0](scores, seen, groups, D**-0.5)
            y = torch.bmm(scores, v[:, keys]).view(B, K, groups, -1, D)
            torch.div(y, total.view(B, K, groups, -1, 1), out=by_key[:, :, :, rows])
    return out, lse


@attend.register_fake
def _(q, k, v, mask):
    (B, H, T, D), K = q.shape, k.shape[1]
    return (q.new_empty(B, T, H, D).transpose(1, 2), q.new_empty(B * K, H // K, T, 1, dtype=torch.float32))


@torch.library.custom_op("stack100m::attend_backward", mutates_args=())
def attend_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None,
                    lse: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of attend: scores are computed again, block by block.  delta (B, H, T, 1): sum of grad * out."""
    (B, H, T, D), K = q.shape, k.shape[1]
    n, groups = B * K, H // K
    dq, delta = q.new_empty(B, T, H, D).transpose(1, 2), delta.reshape(n, groups, T, 1)
    q, grad, by_key = (x.reshape(B, K, groups, T, D) for x in (q, grad, dq))
    keys_of, values = k.reshape(n, T, D), v.reshape(n, T, D)
    dk, dv = (q.new_zeros(n, T, D, dtype=torch.float32) for _ in range(2))
    with torch.inference_mode():
        buffer = q.new_empty(2, n * groups * min(ATTEND_ROWS, T) * T)
        for rows, keys, seen in _blocks(T, mask):
            some, some_grad = q[:, :, :, rows].reshape(n, -1, D), grad[:, :, :, rows].reshape(n, -1, D)
            weights, dscores = buffer[:, :some.shape[1] * n * keys.stop].view(2, n, -1, keys.stop)
            torch.bmm(some, keys_of[:, keys].transpose(1, 2), out=weights)
            torch.bmm(some_grad, values[:, keys].transpose(1, 2), out=dscores)
            per_row = lse[:, :, rows].contiguous(), delta[:, :, rows].contiguous()  # as slices: several programs
            _compiled_blocks()[1](weights, dscores, seen, *per_row, groups, D**-0.5)
            dv[:, keys] += torch.bmm(weights.transpose(1, 2), some_grad)
            dk[:, keys] += torch.bmm(dscores.transpose(1, 2), some)
            by_key[:, :, :, rows] = torch.bmm(dscores, keys_of[:, keys]).view(B, K, groups, -1, D)
    return dq, dk.view(B, K, T, D).to(k.dtype), dv.view(B, K, T, D).to(v.dtype)


@attend_backward.register_fake
def _(grad, q, k, v, mask, lse, delta):
    B, H, T, D = q.shape
    return q.new_empty(B, T, H, D).transpose(1, 2), k.new_empty(k.shape), v.new_empty(v.shape)


class Attend(torch.autograd.Function):  # and not attend.register_autograd: the compiler's cache would not see edits
    @staticmethod
    def forward(ctx, q, k, v, mask):
        out, lse = attend(q, k, v, mask)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, mask, out, lse = ctx.saved_tensors
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)  # the compiler fuses it into its neighbours
        return *attend_backward(grad, q, k, v, mask, lse, delta), None
