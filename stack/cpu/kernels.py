"""A training step on a CPU, faster than PyTorch's: attention and the arithmetic of the loss head, for compiled models.

What lies between the matmuls is kernels.cpp, compiled at first use with the C++ compiler that torch.compile needs too.
The plain twins are model.Attention.attend and model.chunk_arithmetic; stack/twins.py attaches and compares.
"""

import ctypes

import torch

import model as plain
from stack.cpu.build import compile_cpp

DTYPES = (torch.bfloat16, torch.float32)  # what kernels.cpp reads
SHORT = 64  # tokens, below which blocks of queries do not pay


def available() -> bool:
    """Whether kernels.cpp compiles here.  Raises OSError where it would, but for a folder that cannot be written:
    compiling the blocks would fail in stranger words."""
    try:
        compile_cpp("kernels")
    except OSError as error:
        if error.errno:
            raise
        return False
    return True


def serves(attn, q, k, v, mask) -> bool:
    """Whether `attention` takes this call of Attention.attend: a whole sequence, no dropout, formats that it reads.
    Without QK-norm scores grow, and large ones would lose too much as bf16."""
    return (q.dtype in DTYPES and q.dtype == k.dtype == v.dtype and q.shape[2] == k.shape[2] >= SHORT
            and (mask is None or mask.dtype == torch.bool and mask.shape[1] == 1)  # the same for all heads
            and isinstance(getattr(attn, "q_norm", None), plain.RMSNorm)
            and not (attn.training and getattr(attn, "dropout", 0)))


def attention(q, k, v, mask):
    """q (B, H, T, D), k, v (B, K, T, D), mask None (causal) or bool (B or 1, 1, T, T) -> (B, H, T, D)."""
    return Attend.apply(q, k, v, mask)


def _call(function: str, *args):
    """A function of kernels.cpp: contiguous tensors by their address, ints as long, floats as float."""
    kinds = {int: ctypes.c_long, float: ctypes.c_float, bool: ctypes.c_int}
    assert all(x.is_contiguous() for x in args if torch.is_tensor(x))
    getattr(compile_cpp("kernels"), function)(*(
        ctypes.c_void_p(None if x is None else x.data_ptr()) if x is None or torch.is_tensor(x) else kinds[type(x)](x)
        for x in args))


def _softmax(function: str, matrices, queries: int, mask, rows, scale: float):
    """softmax_forward or _backward over a block of queries, in place.  matrices (n, groups * t, S) or (n, S, groups *
    t), bf16 or fp32; mask bool (b, t, S) or (b, S, t), or None; rows (n, groups, T, 1) fp32, contiguous."""
    n, groups, T, _ = rows[0].shape
    mask = None if mask is None else mask.contiguous()
    _call(function, *matrices, mask, *rows, n, groups, queries, matrices[0].numel() // (n * groups * queries), T,
          1 if mask is None else n // len(mask), scale, matrices[0].dtype == torch.bfloat16)


def chunk_arithmetic(logits, targets, factor, n_vocab: int, ignore_index: int, z_loss: float, softcap: float,
                     grad: bool):
    """model.chunk_arithmetic, its plain twin, in one pass over each row."""
    if logits.dtype not in DTYPES or targets.dtype != torch.int64:
        return plain.chunk_arithmetic(logits, targets, factor, n_vocab, ignore_index, z_loss, softcap, grad)
    loss = torch.empty(len(logits))
    _call("cross_entropy_rows", logits, targets.contiguous(), factor.contiguous(), loss, *logits.shape, n_vocab,
          ignore_index, float(z_loss), float(softcap), bool(grad), logits.dtype == torch.bfloat16)
    return loss


def _rows(T: int) -> int:
    """Queries per head in one block of scores: few, to skip most future keys; many, to feed the matmuls (measured)."""
    return min(256, -(-T // 2))


def _blocks(T: int, mask):
    """(queries, keys, mask) of each block of queries: slices of positions, and what of the mask belongs to them."""
    for start in range(0, T, _rows(T)):
        end = min(start + _rows(T), T)
        yield slice(start, end), slice(0, end), None if mask is None else mask[:, 0, start:end, :end]


@torch.library.custom_op("stack100m::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> tuple[
        torch.Tensor, torch.Tensor]:
    """Causal attention for CPUs, as matmuls over blocks of queries: faster, forward and backward, than
    F.scaled_dot_product_attention, its plain twin, and like it without keeping scores for the backward pass.

    q (B, H, T, D), k, v (B, K, T, D), bf16 or fp32, mask None or bool (B or 1, 1, T, T), true on the diagonal ->
    (B, H, T, D), lse (B*K, H/K, T, 1) fp32.  The query heads of one key head are rows of one matmul, the softmax is one
    pass over a block that is still in the cache, keys after a block's last query are never multiplied.  An operator of
    its own, so that the compiler of the block around it neither looks inside nor keeps scores.
    """
    (B, H, T, D), K = q.shape, k.shape[1]
    n, groups = B * K, H // K
    out, lse = q.new_empty(B, T, H, D).transpose(1, 2), q.new_empty(n, groups, T, 1, dtype=torch.float32)
    q, by_key = q.reshape(B, K, groups, T, D), out.view(B, K, groups, T, D)
    k, v = k.reshape(n, T, D), v.reshape(n, T, D)
    buffer = q.new_empty(n * groups * _rows(T) * T)
    for rows, keys, seen in _blocks(T, mask):
        some = q[:, :, :, rows].reshape(n, -1, D)  # (n, groups * t, D)
        weights = buffer[:some.shape[1] * n * keys.stop].view(n, -1, keys.stop)
        torch.bmm(some, k[:, keys].transpose(1, 2), out=weights)
        _softmax("softmax_forward", (weights,), rows.stop - rows.start, seen, (lse,), D**-0.5)
        by_key[:, :, :, rows] = torch.bmm(weights, v[:, keys]).view(B, K, groups, -1, D)
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
    buffer = q.new_empty(2, n * groups * _rows(T) * T)
    for rows, keys, seen in _blocks(T, mask):
        some, some_grad = q[:, :, :, rows].reshape(n, -1, D), grad[:, :, :, rows].reshape(n, -1, D)
        # keys first: only the last of the five matmuls has to transpose a large matrix
        weights, dscores = buffer[:, :some.shape[1] * n * keys.stop].view(2, n, keys.stop, -1)
        torch.bmm(keys_of[:, keys], some.transpose(1, 2), out=weights)
        torch.bmm(values[:, keys], some_grad.transpose(1, 2), out=dscores)
        _softmax("softmax_backward", (weights, dscores), rows.stop - rows.start,
                 None if seen is None else seen.transpose(1, 2), (lse, delta), D**-0.5)
        dv[:, keys] += torch.bmm(weights, some_grad)
        dk[:, keys] += torch.bmm(dscores, some)
        by_key[:, :, :, rows] = torch.bmm(dscores.transpose(1, 2), keys_of[:, keys]).view(B, K, groups, -1, D)
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
