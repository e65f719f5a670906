"""Bytes that training takes: what lies between steps, what autograd keeps, what the loss head needs.

*Training state*, between steps, is that of the optimizers themselves.  The other two are arithmetic on ModelConfig:
what a block was changed to keep is not in them.  low = bytes per value of the matmuls' format: 2 for bf16 and fp16, 4
for fp32.

*Activations* are what autograd keeps per token from forward to backward.  Eager, every operation keeps its own inputs;
compiled, the block keeps what it cannot cheaply compute again.  Attention scores are never kept (flash attention).

*The loss head* has three figures, because they fall at different moments: bytes held from forward to backward, the peak
inside forward and the peak inside backward, all above hidden states and weight.  "naive" is
F.cross_entropy(F.linear(h, W).float()), which holds 4 bytes per logit, then 8, then 12.
"""

from inspect import unwrap
from unittest import mock

import torch

from model import GPT, ModelConfig, default_chunk
from stack.optim import AdamW, Muon, Optimizer, make_optimizers

MOMENTS = {Muon: 1, AdamW: 2}  # fp32 values kept per parameter; of another optimizer one step is measured


def optimizers_of(model: GPT, name: str) -> list[Optimizer]:
    """Those that train.py would make, over a model without values."""
    # add_param_group as it was before a decorator that would import the compiler, two seconds, to leave it uncompiled
    with mock.patch.object(Optimizer, "add_param_group", unwrap(Optimizer.add_param_group)):
        return make_optimizers(model, optimizer=name)


def owned(optimizers: list[Optimizer], kind: type) -> list[torch.Tensor]:
    """The parameters of all optimizers of one class."""
    return [p for opt in optimizers if type(opt) is kind for group in opt.param_groups for p in group["params"]]


def train_state_bytes(model: GPT, optimizers: list[Optimizer]) -> int:
    """fp32 weights, gradients of what is trained, and the optimizers' state: MOMENTS, or what a step on meta leaves.

    Raises ValueError where an optimizer unknown to MOMENTS cannot step without values.
    """
    n_bytes = 4 * sum(p.numel() * (1 + p.requires_grad) for p in model.parameters())
    n_bytes += 4 * sum(moments * p.numel() for kind, moments in MOMENTS.items() for p in owned(optimizers, kind))
    for opt in (opt for opt in optimizers if type(opt) not in MOMENTS):
        for p in owned([opt], type(opt)):
            p.grad = torch.empty_like(p)
        try:
            opt.step()
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(f"{type(opt).__name__}'s memory cannot be measured: it does not step without values "
                             f"({error}).\n  Say in stack/memory.py's MOMENTS what it keeps per parameter.") from error
        kept = [t for state in opt.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        n_bytes += sum(t.nbytes for t in kept if t.ndim)  # but for the number of the step
    return n_bytes


def activation_bytes(cfg: ModelConfig, low: int, *, compiled: bool, remat: str = "none",
                     mask_keys: int = 0, residual: int = 4) -> dict[str, int]:
    """Bytes per token that autograd keeps: of one block, and of everything around the blocks.

    The residual stream is fp32 (the table is, and bf16 branches are added to it), or has `residual` bytes per value.  A
    norm keeps its input and 1/rms, RMSNorm also the normalised values, which its gain multiplies.  Under autocast each
    linear casts the fp32 norm output for itself, so those of q, k and v keep three copies.  Attention keeps q, k, v,
    its output and the log-sum-exp per head.  Compiled, the fp32 intermediates are computed again from the block's input
    and the matmuls' outputs.  mask_keys: keys that a boolean mask has, of documents where nothing is compiled: each
    layer adds it to its scores as numbers, which it keeps.  remat="block" keeps the block's input alone, "selective"
    also what its matmuls and attention return.
    """
    C, F, H, K = cfg.d_model, cfg.d_ff, cfg.n_heads, cfg.n_kv_heads
    q, kv, heads = H * cfg.head_dim, K * cfg.head_dim, 4 * (H + K)  # heads: 1/rms of each, or the log-sum-exp
    up = F * (2 if cfg.mlp == "swiglu" else 1)  # what the matmuls into the MLP return
    moments = 4 if cfg.norm == "rmsnorm" else 8  # LayerNorm keeps mean and 1/std
    norm = 4 * C * (2 if cfg.norm == "rmsnorm" else 1) + moments
    attention = low * (2 * q + 2 * kv) + 4 * H
    dropped = C * (cfg.dropout > 0)  # a GPU's dropout keeps a byte per value
    low_norms = residual < 4 and cfg.norm == "rmsnorm"  # they return the stream's format, LayerNorm fp32
    if remat == "block":
        block = residual * C
    elif remat == "selective":
        block = residual * C + attention + low * (2 * C + up)
    elif compiled:
        block = residual * C + 2 * moments + attention + low * (up + F) + 2 * dropped  # residual: the block's input
        block += low * 3 * C  # both norms' outputs, wo's output
        block += (low * (q + kv) + heads) * cfg.qk_norm  # q and k before their norm
    else:
        copies = (3 + up // F) if low < 4 and not low_norms else 2  # of norm outputs
        block = 2 * norm + attention + low * (copies * C + 2 * up) + (8 * (q + kv) + heads) * cfg.qk_norm + 2 * dropped
        block += low * mask_keys
    ids_and_targets = 16
    return {"block": block, "around": norm + (residual if low_norms else 4) * C + dropped + ids_and_targets}


def head_bytes(cfg: ModelConfig, n_tokens: int, dtype: torch.dtype, *,
               device_type: str = "cuda") -> dict[str, dict[str, int]]:
    """The loss head's bytes above hidden (N, C) and weight (V, C), both fp32 and multiplied in `dtype`.

    Ours holds dH in the matmul's format and dW in fp32 between the passes.  Its forward peak has one chunk of logits
    (compiled arithmetic has nothing else of that size; "uncompiled" is what it takes without: four fp32 copies and a
    mask), cast copies of hidden and weight, a chunk's dW, and 8 bytes per token of loss and scale; its backward peak
    has dH once more, in fp32.  A CPU multiplies bf16 by fp32 by way of one more fp32 copy, a GPU does not, and with
    PyTorch 2.13 adds a chunk's dW where it multiplies.
    """
    N, V, C, low = n_tokens, cfg.padded_vocab_size, cfg.d_model, dtype.itemsize
    chunk = default_chunk(N, V, dtype, device_type)
    saved = low * N * C + 4 * V * C
    forward, backward = saved + low * chunk * V + 8 * N, saved
    if low < 4:
        forward += low * (N + V) * C + (N > chunk and device_type != "cuda") * low * V * C
        backward += (2 if device_type == "cpu" else 1) * 4 * N * C
    return {"naive": {"saved": 4 * N * V, "forward_peak": 8 * N * V, "backward_peak": 12 * N * V},
            "chunked": {"saved": saved, "forward_peak": forward, "backward_peak": backward, "chunk": chunk,
                        "uncompiled": 17 * chunk * V}}
