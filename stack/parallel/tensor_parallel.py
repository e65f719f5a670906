"""Tensor parallelism: `tp` ranks hold one model together, each a part of every matrix, and work on the same batch.

It is for a model whose state or whose activations are too large for one GPU, over the fastest links there are: every
layer waits for its sums.  Below that size data parallelism costs less (docs/scaling.md has both as bytes).

*Blocks.*  wq wk wv w_gate w_up are cut by output rows and wo w_down by input columns, so that a rank's heads and its
part of the MLP need nothing from the others in between; the output is a sum over ranks.  One all-reduce of (N, C) after
attention and one after the MLP, in backward one each for the gradients of their inputs.  PyTorch's DTensor does this
(torch.distributed.tensor.parallel): parameters know their placement, so that FSDP, optimizers and checkpoints do too.

*Table.*  A rank holds V/tp rows.  It looks up its own ids, the others' are zeros, one all-reduce gives every rank all
vectors.  (RowwiseParallel knows nn.Embedding too, but its backward makes a gradient for all V rows on each rank.)

*Loss head.*  model.py's walk over chunks, where a rank has its own columns of a chunk's logits and never a whole row.
What its softmax needs of the others is the largest logit, the sum of exponentials and the target's logit: an all-reduce
of (n,), then one of (n, 2).  The hidden states' gradient is a sum over ranks, one all-reduce of (N, C) in backward.

*What is the same everywhere*, norm gains and learned positions, is computed from the same numbers on each rank, so that
their gradients are equal; but for the gains of QK-norm, of which each rank sees its own heads only.

Rejected: sequence parallelism (norms on T/tp tokens: the same bytes on the link, less activation memory, a third
placement to keep in mind), and dropout, which would have to draw alike outside of the heads and differently inside.
"""

import functools

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from model import GPT, ModelConfig, fused_linear_cross_entropy
from stack.compiled import run_chunk
from stack.twins import replace_function

ROWS = 128  # of the table, on each rank, are a multiple of this: as Megatron pads, for the matmuls' sake
BY_ROWS = "attn.wq", "attn.wk", "attn.wv", "mlp.w_gate", "mlp.w_up"  # of what is stored, y = x @ W.T
BY_COLUMNS = "attn.wo", "mlp.w_down"
GAINS = "attn.q_norm", "attn.k_norm"  # whole, and seen by a rank's own heads
INSTEAD = "Use --dp fsdp or ddp with --tp=1, or state in tensor_parallel.apply (stack/parallel) how it is cut."


def problems(cfg: ModelConfig, tp: int) -> list[str]:
    """Why `cfg` cannot be cut into `tp` parts, as sentences a user can act on; empty when it can."""
    found = []
    for name in ("n_heads", "n_kv_heads", "d_ff"):
        if getattr(cfg, name) % tp:
            found.append(f"{name} ({getattr(cfg, name)}) must be a multiple of tp ({tp}): each rank gets as many. "
                         f"Change {name} or --tp.")
    if cfg.padded_vocab_size % (ROWS * tp):
        found.append(f"the table has {cfg.padded_vocab_size} rows and tp ({tp}) needs a multiple of {ROWS} * {tp} = "
                     f"{ROWS * tp}. Set --vocab_multiple={ROWS * tp} and start from scratch, or lower --tp.")
    if cfg.dropout:
        found.append(f"dropout ({cfg.dropout}) would have to draw alike on all ranks, but not for their heads: with "
                     f"tp ({tp}) it must be 0. Set --dropout=0 or --tp=1.")
    return found


def plan(cfg: ModelConfig, tp: int) -> str:
    """What becomes of each kind of module, a line each."""
    heads, keys, hidden, rows = cfg.n_heads // tp, cfg.n_kv_heads // tp, cfg.d_ff // tp, cfg.padded_vocab_size // tp
    kinds = {
        "embed" if cfg.tie_embeddings else "embed, head": f"rows: {rows:,} of {cfg.padded_vocab_size:,} ids",
        "wq": f"outputs: {heads} of {cfg.n_heads} heads",
        "wk, wv": f"outputs: {keys} of {cfg.n_kv_heads} heads",
        "w_gate, w_up" if cfg.mlp == "swiglu" else "w_up": f"outputs: {hidden:,} of {cfg.d_ff:,}",
        "wo, w_down": "inputs, as above; outputs are summed over ranks",
        "loss": f"columns: {rows:,} of a chunk's logits; maximum and sums over ranks",
        "norms" if cfg.pos == "rope" else "norms, pos_embed": "whole on every rank",
    }
    return "\n".join([f"tensor parallel over {tp} ranks, each holds"] + [f"  {k:<14}{v}" for k, v in kinds.items()])


def unknown(model: GPT, tp: int) -> list[str]:
    """Why the blocks of `model` cannot be cut: what else is in their attn and mlp, or not there, by its name in the
    first block of which it is so, as a sentence; empty when all is known.  Elsewhere in a block all is whole."""
    found = {}
    for i, block in enumerate(model.blocks):
        layers = dict(block.named_modules())
        left_out = tuple(f"{part}." for part in ("attn", "mlp") if getattr(block, part, ...) is None)  # by a fork
        for name in (*BY_ROWS, *BY_COLUMNS):
            optional = name == "mlp.w_gate" and name not in layers or name.startswith(left_out)
            if not isinstance(layers.get(name), nn.Linear) and not optional:
                found.setdefault(name, f"blocks.{i}.{name} ({'no nn.Linear' if name in layers else 'not there'})")
        for name, _ in block.named_parameters():
            layer, _, own = name.rpartition(".")
            if name.startswith(("attn.", "mlp.")) and layer not in GAINS and (
                    own not in ("weight", "bias") or layer not in (*BY_ROWS, *BY_COLUMNS)):
                found.setdefault(name, f"blocks.{i}.{name}")
    if not found:
        return []
    names = list(found.values())
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return [f"tp ({tp}) cuts the Attention and MLP of model.py; here it does not know {', '.join(names[:6])}{more}. "
            f"{INSTEAD}"]


def apply(model: GPT, mesh):
    """Cut a built model, in place, over the ranks of a 1-D device mesh; all ranks call it, with the same weights.

    Parameters that are cut become DTensors over `mesh`.  Call it before FSDP and before optimizers are made.  What is
    left is for training: forward needs targets, and sharding.whole gives the model that can be sampled from.
    Raises ValueError with all `problems` and what is `unknown`.
    """
    from torch.distributed.tensor import Shard, distribute_tensor, parallel
    if found := problems(model.cfg, mesh.size()) + unknown(model, mesh.size()):
        raise ValueError("\n".join(found))
    by_rows, by_columns = parallel.ColwiseParallel(), parallel.RowwiseParallel()  # named for y = x @ W, stored is W.T
    for block in model.blocks:
        layers = dict(block.named_modules())
        parallel.parallelize_module(block, mesh, {
            name: by_rows if name in BY_ROWS else by_columns for name in (*BY_ROWS, *BY_COLUMNS) if name in layers})
        for part in ("attn", "mlp"):
            if part in layers:
                layers[part].register_forward_pre_hook(functools.partial(_shared, mesh))
    for module in (model.embed, model.head):
        if module is not None:
            module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)]),
                                         requires_grad=module.weight.requires_grad)
    model.embed.forward = functools.partial(_lookup, model.embed, mesh)
    replace_function(model, "cross_entropy", functools.partial(cross_entropy, mesh=mesh))


def _shared(mesh, module, args):
    """Before attn and mlp: the first argument becomes a DTensor once for all column-parallel matrices.  Left to each of
    wq wk wv, the backward would sum three times."""
    from torch.distributed.tensor import DTensor, Replicate
    return (DTensor.from_local(args[0], mesh, [Replicate()], run_check=False), *args[1:]) if args else args


def sum_shared_gradients(model: GPT, group):
    """After a step's last backward: make whole the gradients of QK-norm's gains, of which a rank has its heads' part.

    Once a step: in each micro step's backward it would cost 2 L small all-reduces.
    """
    gains = [local(p.grad) for block in model.blocks for name, p in block.named_parameters()
             if name.rpartition(".")[0] in GAINS and p.grad is not None]
    if gains:
        flat = torch.cat([grad.flatten() for grad in gains])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(gains, flat.split([grad.numel() for grad in gains]), strict=True):
            grad.copy_(total.view_as(grad))


def local(tensor):
    """The part of a DTensor that lies on this rank, in the same memory; another tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _lookup(embed, mesh, ids):
    """ids (B, T) -> (B, T, C) from tables of V/tp rows on each rank."""
    from torch.distributed.tensor import DTensor, Partial
    table = local(embed.weight)  # (V/tp, C)
    ids = ids - mesh.get_local_rank() * len(table)
    foreign = (ids < 0) | (ids >= len(table))
    x = F.embedding(ids.masked_fill(foreign, 0), table).masked_fill(foreign[..., None], 0)
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).full_tensor()


# ---------------------------------------------------------------------------------------------------------------------
# The loss head.  V stands for this rank's V/tp columns


def cross_entropy(hidden, weight, targets, *, mesh, **options):
    """model.fused_linear_cross_entropy where rank r of `mesh` holds rows r * V to (r + 1) * V of the weight.

    hidden (N, C) and targets (N,), the ids of the whole vocabulary, are the same on all ranks, and so are the loss and
    the gradient of hidden.  Options, values and errors are the single version's; n_valid_vocab counts over all ranks.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate
    weight = local(weight)
    hidden = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    return fused_linear_cross_entropy(hidden, weight, targets, n_rows=len(weight) * mesh.size(),
                                      arithmetic=functools.partial(_chunk_arithmetic, mesh.get_group()), **options)


def _chunk_arithmetic(group, logits, targets, scale, n_vocab: int, ignore_index: int, z_loss: float, softcap: float,
                      grad: bool):
    """model.chunk_arithmetic of all ranks' columns: loss (n,), the same everywhere; own logits become gradients."""
    first = dist.get_rank(group) * logits.shape[1]
    n_own = n_vocab - first  # columns from there on are padding: all of them if it is not positive
    valid, own = targets != ignore_index, targets - first  # (n,) both; own is a column where it lies in 0..V - 1
    top = run_chunk(_largest, logits, n_own, softcap)  # (n,)
    dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    sums = run_chunk(_sums, logits, own, valid, top, n_own, softcap)  # (n, 2)
    dist.all_reduce(sums, group=group)
    rest = sums[:, 0].log()  # log-sum-exp above the largest logit
    lse = rest + top
    loss = rest - sums[:, 1]
    if z_loss:
        loss = loss + z_loss * lse * lse
    if grad:
        factor = 1 + 2 * z_loss * lse  # of the softmax
        run_chunk(_gradient, logits, own, top, rest, factor, scale * valid, n_own, softcap)
    return torch.where(valid, loss, 0)


def _capped(logits, n_own, softcap):
    """The logits, wide and soft-capped, -inf where padding; the derivative of the cap, or None."""
    x, slope = logits.to(torch.promote_types(logits.dtype, torch.float32)), None
    if softcap:
        capped = torch.tanh(x / softcap)
        x, slope = softcap * capped, 1 - capped * capped
    return torch.where(torch.arange(x.shape[1], device=x.device) < n_own, x, -torch.inf), slope


def _largest(logits, n_own: int, softcap: float):
    return _capped(logits, n_own, softcap)[0].amax(dim=-1)


def _sums(logits, own, valid, top, n_own: int, softcap: float):
    """(n, 2): the sum of exponentials, and the target's logit where it is one of ours; both relative to the largest."""
    x = _capped(logits, n_own, softcap)[0] - top[:, None]
    here = valid & (own >= 0) & (own < x.shape[1])
    target = x.gather(1, torch.where(here, own, 0)[:, None]).squeeze(1)
    return torch.stack((torch.exp(x).sum(dim=-1), torch.where(here, target, 0)), dim=1)


def _gradient(logits, own, top, rest, factor, scale, n_own: int, softcap: float):
    """Overwrite the logits by scale * dloss/dlogits."""
    x, slope = _capped(logits, n_own, softcap)
    d = torch.exp(x - top[:, None] - rest[:, None]) * factor[:, None]
    d = torch.where(torch.arange(x.shape[1], device=x.device) == own[:, None], d - 1, d)
    if slope is not None:
        d = d * slope
    logits.copy_(d * scale[:, None])
