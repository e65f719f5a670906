"""Which part of the model is mine, and how gradients travel.

*ddp*: every process holds the model, gradients are averaged after the last micro batch's backward
(DistributedDataParallel; or, since that knows no parts, by `finish_gradients` where tp is more than 1).

*fsdp*: weights, gradients and optimizer state are divided over the dp ranks (FSDP2's `fully_shard`), and a block's
weights are gathered when it runs, so that 1/dp_size of the state and one block are in memory.  Each block is a group;
the table, learned positions, final norm and an untied head are the root group, gathered once a micro batch: a tied
table is one parameter used at both ends, and a group of its own would be freed between them.  Blocks are gathered in
the matmuls' format, which halves the traffic; the root group stays fp32, as autocast leaves the table and with it the
residual stream.  The result is autocast's but for the blocks' gains and biases, which are rounded too (at 1 and 0,
where they start, to themselves).  Gradients are reduced after the last micro batch only; where there are several, each
rank holds the whole of them (4 bytes a parameter) until then.
"""

import functools
import logging
import traceback

import torch
import torch.distributed as dist

from model import GPT
from stack import twins
from stack.counts import undrawn
from stack.device import round_residual
from stack.parallel import tensor_parallel
from stack.parallel.ranks import Ranks
from stack.parallel.tensor_parallel import local
from stack.train_config import RESIDUAL_NEEDS_BFLOAT16

BOUND = 5e-3  # of a difference, as its share of a gradient's norm: rounding makes 4e-6 (Stack-100M, GPT-2)
FLOOR = 1e-4  # of the largest norm: smaller ones count as that.  The gradients of GPT-2's key biases are rounding alone


def parallelize(model, ranks: Ranks, device: torch.device, *, dp: str = "ddp", dtype: torch.dtype = torch.float32,
                remat: str = "none", compile: bool = False, doc_mask: bool = False,
                residual_dtype: torch.dtype = torch.float32):
    """This process's part of a built model, to be called like it; `model` itself is changed in place.

    The order is the only one that works: tensor parallelism changes what a projection holds, recomputation wraps a
    block, the compiler sees both, data parallelism goes around it all.  dtype: of the matmuls, as autocast has it.
    Each process builds the whole model, so that what a constructor sets is what all start from, and keeps its part.
    doc_mask: whether it will be given documents, for `check_cut`.  residual_dtype: float32 or dtype, else ValueError,
    as where a model cannot be cut.
    """
    sharded = dp == "fsdp" and ranks.dp_size > 1
    if ranks.tp > 1 and dtype == torch.float16:
        raise ValueError("dtype is float16, whose loss scaling would differ between the parts of a matrix. With tp "
                         f"({ranks.tp}) use --dtype=bfloat16 or float32.")
    if residual_dtype not in (torch.float32, dtype):
        raise ValueError(RESIDUAL_NEEDS_BFLOAT16.format(str(dtype).removeprefix("torch.")))
    model.to(device)
    if residual_dtype != torch.float32:
        round_residual(model, residual_dtype)
    if ranks.tp > 1:
        tensor_parallel.apply(model, ranks.mesh["tp"])
        logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # two dimensions, two sums
        check_cut(model, ranks, device, doc_mask)
    if remat != "none":
        random = twins.draws(model)
        for block in model.blocks:
            block.forward = recomputed(block.forward, remat, random)
    if compile:
        twins.compile_blocks(model, device)
    if sharded:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        low = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32,
                                   cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=ranks.mesh["dp"], mp_policy=low)
        fully_shard(model, mesh=ranks.mesh["dp"], mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
    if sharded or ranks.dp_size == 1 or ranks.tp > 1:  # DDP knows no parts: see finish_gradients
        return model
    torch._dynamo.config.optimize_ddp = False  # it would cut blocks, graphs of their own already, in two
    return torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True)


def sync_gradients(replica, now: bool):
    """Whether the next backward exchanges gradients; said before the forward, where DDP looks.  False: they add up."""
    if hasattr(replica, "set_requires_gradient_sync"):  # FSDP's
        replica.set_requires_gradient_sync(now)
    elif isinstance(replica, torch.nn.parallel.DistributedDataParallel):
        replica.require_backward_grad_sync = now


def finish_gradients(model, ranks: Ranks):
    """After a step's last backward: the sums that neither DDP nor FSDP takes where tensor parallelism is."""
    if ranks.tp == 1:
        return
    tensor_parallel.sum_shared_gradients(model, ranks.mesh.get_group("tp"))
    if ranks.dp_size > 1 and not hasattr(model, "set_requires_gradient_sync"):
        grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
        for sent in [dist.all_reduce(grad, group=ranks.mesh.get_group("dp"), async_op=True) for grad in grads]:
            sent.wait()
        torch._foreach_div_(grads, ranks.dp_size)


@torch.no_grad()
def whole(model, compile: bool = False):
    """A sharded model put together on every rank, fp32, to evaluate and sample from; an unsharded one itself.

    Called by all ranks together; then any may run it without the others (an uneven share of the held-out windows, a
    sample on one), where FSDP's own forward would have them wait for each other, and counts on a backward.
    """
    if not any(is_sharded(p) for p in model.parameters()):
        return model
    with undrawn():
        put_together = GPT(model.cfg)
    put_together.load_state_dict({name: t.full_tensor() if is_sharded(t) else t
                                  for name, t in model.state_dict().items()}, assign=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):  # those too that are not persistent
        module, _, own = name.rpartition(".")
        setattr(put_together.get_submodule(module), own, buffer)
    if hasattr(model, "residual_dtype"):
        round_residual(put_together, model.residual_dtype)
    if compile:
        twins.compile_blocks(put_together, next(put_together.parameters()).device, like=model)
    return put_together


def check_cut(model, ranks: Ranks, device: torch.device, doc_mask: bool):
    """Hold a model just cut by tensor_parallel.apply against itself put together: the loss and each gradient of 64
    random tokens in fp32, two documents under doc_mask.  The model is left as it was, without gradients.

    The loss head is model.py's for both: the one that is cut has a check of its own, in twins.py.  It takes the memory
    of all weights.  Raises ValueError, on all ranks together, that names what differs most.
    """
    complete, parts, n = whole(model), dict(model.named_parameters()), min(model.cfg.max_seq_len, 64)
    silent = [name for name in parts if not complete.get_parameter(name).any()]  # zeros hide what others do
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # which both have
    precision, head, found = torch.get_float32_matmul_precision(), model.cross_entropy, {}

    def step(model):
        torch.manual_seed(0)
        ids = torch.randint(model.cfg.vocab_size, (1, n + 1)).to(device)
        docs = (torch.arange(n, device=device)[None] >= n // 3).int() if doc_mask else None
        try:
            loss = model(ids[:, :-1], ids[:, 1:], docs=docs)
            loss.backward()
        finally:
            for name, buffer in buffers.items():
                model.get_buffer(name).copy_(buffer)
        return loss.detach()

    def compare(name, p):  # by each rank for its part, as soon as it is there: no second model of gradients is held
        want, got, p.grad = p.grad, parts[name].grad, None
        want, got = (want, 0 * want) if got is None else (local(part_of(want, got)), local(got))
        found[name] = (got - want).norm(), want.norm()
    model.cross_entropy = lambda hidden, weight, *args, **options: head.plain(
        hidden, weight.full_tensor(), *args, **options)
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(0)
            for name in silent:
                fill(parts[name], torch.nn.init.normal_(complete.get_parameter(name), std=0.02))
            try:
                got = step(model)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                step(complete)  # a mistake that has nothing to do with the cut speaks for itself
                why = traceback.format_exception_only(error)[0].splitlines()[0]
                raise ValueError(f"with tp ({ranks.tp}) this model does not run ({why}). "
                                 f"{tensor_parallel.INSTEAD}") from error
            tensor_parallel.sum_shared_gradients(model, ranks.mesh.get_group("tp"))
            for name, p in complete.named_parameters():
                if p.requires_grad_(parts[name].requires_grad).requires_grad:
                    p.register_post_accumulate_grad_hook(functools.partial(compare, name))
            want = step(complete)
    finally:
        torch.set_float32_matmul_precision(precision)
        model.cross_entropy = head
        with torch.no_grad():
            for name in silent:
                parts[name].zero_()
    found |= {name: (local(p.grad).norm(), 0 * want) for name, p in parts.items()
              if p.grad is not None and name not in found}
    model.zero_grad()
    names = [name for name in parts if name in found]
    differ, size = torch.tensor([found[name] for name in names], device=device).T
    shares = torch.cat((differ / size.clamp(min=FLOOR * size.max()), ((got - want) / want).abs()[None]))
    shares = shares.nan_to_num(nan=torch.inf)
    dist.all_reduce(shares, dist.ReduceOp.MAX)
    if n_wrong := int((shares > BOUND).sum()):
        worst = int(shares.argmax())
        what = f"the gradient of {names[worst]}" if worst < len(names) else "the loss"
        raise ValueError(f"with tp ({ranks.tp}) another model would be trained: on random tokens {what} differs by "
                         f"{shares[worst]:.1%} from that of the model put together"
                         f"{f', and {n_wrong - 1} more do' if n_wrong > 1 else ''}. {tensor_parallel.INSTEAD}")


def total_norm(grads) -> torch.Tensor:
    """The 2-norm of all gradients, whole or sharded; the same on every rank."""
    groups = {}  # tensors of one layout: one reduction
    for grad in grads:
        layout = (grad.device_mesh, grad.placements) if is_sharded(grad) else None
        groups.setdefault(layout, []).append(grad)
    norms = [torch.nn.utils.get_total_norm(group) for group in groups.values()]
    norms = [norm.full_tensor() if is_sharded(norm) else norm for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def is_sharded(tensor) -> bool:
    """A DTensor: this process has a part of it."""
    return hasattr(tensor, "placements")


@torch.no_grad()
def fill(tensor, full):
    """Copy a whole tensor into one that may be sharded."""
    tensor.copy_(part_of(full, tensor))


def part_of(full, like):
    """A whole tensor sharded like another, which may be whole: each process takes its part, nothing is sent."""
    if not is_sharded(like) or is_sharded(full):
        return full
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(full.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def recomputed(forward, remat: str, random: bool):
    """A block's forward that keeps less from forward to backward, and computes the rest again there.

    "block" keeps the input alone, and costs one more forward; "selective" also what matmuls and attention return, and
    costs the cheap operations between them.  random: as dropout, which must draw the same again.
    """
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    options = {}
    if remat == "selective":
        aten = torch.ops.aten
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, [
            aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
            aten._scaled_dot_product_cudnn_attention.default, aten.bmm.default, torch.ops.stack100m.attend.default,
            torch.ops.higher_order.flex_attention])
    return functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=random, **options)
