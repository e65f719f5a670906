"""A training step as a GPU would be given it, traced where there is none: `make trace`, minutes.

Tensors without values on "cuda", in PyTorch's build for CUDA, go through what train.py does in a step, up to its one
read of loss and norm: micro batches with documents of their own, forward, loss head, backward, the clipped norm, both
optimizers.  Compiled means Dynamo's graphs, and autograd's partition into what is kept and what is computed again,
without Triton's code.  CUDA's runtime is asked for a device, streams and events all the same: tests/no_cuda.c answers,
preloaded.

Printed is a table for docs/gpu.md; the exit code is 1 where a graph breaks or is compiled again for other documents,
where a micro step or an optimizer waits for the device, or where what autograd keeps is not what account.py says.
"""

import datetime
import functools
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model import GPT, ModelConfig
from stack import compiled, twins
from stack.memory import activation_bytes
from stack.optim import make_optimizers
from stack.parallel.ranks import Ranks
from stack.parallel.sharding import parallelize, total_norm

ROWS, T, MICRO_STEPS = 2, 2048, 5
CUDA = torch.device("cuda")


class Waits(TorchDispatchMode):
    """Names of operators whose result the host has to wait for."""

    supports_higher_order_operators = True  # FlexAttention is one
    SCALARS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"}

    def __init__(self):
        super().__init__()
        self.seen = []

    @classmethod
    def is_infra_mode(cls):
        return True  # Dynamo compiles under it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, tensors = func.name().partition(".")[0], [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        to = (kwargs or {}).get("device")
        if (name in self.SCALARS or name == "aten::index" and any(x.dtype == torch.bool for x in tensors[1:])
                or name == "aten::_to_copy" and to is not None and torch.device(to).type == "cpu"
                and tensors[0].device.type == "cuda"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def kept_bytes(model, loss_of) -> tuple[torch.Tensor, int]:
    """A loss, and the bytes that autograd keeps for its backward: each storage once, without parameters and their casts
    (by shape: nothing else has a weight's)."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    rows = [sum(len(linear.weight) for linear in linears) for linears in (  # of what merge_linears makes one
        (model.blocks[0].attn.wq, model.blocks[0].attn.wk, model.blocks[0].attn.wv),
        (model.blocks[0].mlp.w_gate, model.blocks[0].mlp.w_up))]
    shapes = [p.shape for p in model.parameters() if p.ndim == 2] + [torch.Size((n, model.cfg.d_model)) for n in rows]
    shapes, kept = {*shapes, *(shape[::-1] for shape in shapes)}, {}

    def keep(x):
        if x.untyped_storage()._cdata not in weights and x.shape not in shapes:
            kept[x.untyped_storage()._cdata] = x.untyped_storage()
        return x
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = loss_of()
    return loss, sum(storage.nbytes() for storage in kept.values())


def trace(compile: bool, documents: bool, residual: torch.dtype) -> dict:
    torch._dynamo.reset()
    counters.clear()
    compiled.compiled = functools.cache(compiled.compile_or_not)
    cfg, after_first = ModelConfig(), 0
    with FakeTensorMode(allow_non_fake_inputs=True), Waits() as waits:
        with CUDA:
            model = GPT(cfg)
        model.to = lambda device: model  # is there already; tensors without values cannot be exchanged
        model.is_causal, twins.draws = True, lambda model: False  # else asked of numbers, once
        parallelize(model, Ranks(), CUDA, dtype=torch.bfloat16, compile=compile, doc_mask=documents,
                    residual_dtype=residual)
        optimizers = make_optimizers(model)
        waits.seen.clear()
        totals = torch.zeros(2, device=CUDA)
        for _ in range(MICRO_STEPS):
            x = torch.randint(0, cfg.vocab_size, (ROWS, T), device=CUDA)
            docs = (x < 60).cumsum(1) if documents else None

            def loss_of(x=x, docs=docs):
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    return model(x, x, docs=docs, z_loss=1e-4, reduction="sum")
            nats, kept = kept_bytes(model, loss_of)
            nats.backward()
            totals += torch.stack((nats.detach(), (x != -100).sum()))
            after_first = after_first or counters["stats"]["unique_graphs"]
        in_micro_steps = list(waits.seen)
        grads = [p.grad for p in model.parameters()]
        norm = total_norm(grads)
        torch._foreach_mul_(grads, (1 / (norm + 1e-6)).clamp(max=1))
        for optimizer in optimizers:
            optimizer.step()
    said = activation_bytes(cfg, 2, compiled=compile, mask_keys=T * documents, residual=residual.itemsize)
    said = cfg.n_layers * said["block"] + said["around"]
    kind = ("compiled" if compile else "eager") + ", documents" * documents + ", bf16 stream" * (residual.itemsize == 2)
    return dict(kind=kind, graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()), again=counters["stats"]["unique_graphs"]
        - after_first, kept=kept / (ROWS * T), said=said, micro=in_micro_steps, rest=waits.seen[len(in_micro_steps):])


def main():
    if torch.version.cuda is None or not torch.cuda.is_available():
        sys.exit("tests/traced.py: needs PyTorch's build for CUDA and tests/no_cuda.c before it: make trace")
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def run(graph, inputs):
        return make_boxed_func(graph)

    def backend(graph, inputs):
        return aot(compiled.merge_linears(graph), inputs)
    aot = aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=min_cut_rematerialization_partition)
    compile = torch.compile
    torch.compile = lambda function, **options: compile(function, backend=backend, dynamic=options.get("dynamic"))
    rows = [trace(compile, documents, torch.float32) for compile in (False, True) for documents in (False, True)]
    rows += [trace(compile, True, torch.bfloat16) for compile in (False, True)]
    print(f"torch {torch.__version__}, {ROWS} x {T} tokens, bf16, no card, {datetime.date.today()}, `make trace`:\n")
    print("| | graphs | breaks | compiled again | kept, B a token | account.py | | waits, micro steps | optimizers |")
    print("|---|---|---|---|---|---|---|---|---|")
    for x in rows:
        print(f"| {x['kind']} | {x['graphs']} | {x['breaks']} | {x['again']} | {x['kept']:,.0f} | {x['said']:,} | "
              f"{x['kept'] / x['said'] - 1:+.1%} | {len(x['micro'])} | {len(x['rest'])} |")
    wrong = [x for x in rows if x["breaks"] or x["again"] or x["micro"] or x["rest"]
             or abs(x["kept"] / x["said"] - 1) > 0.05]
    for x in wrong:
        print(f"trace: {x['kind']}: not as it should be: {sorted({*x['micro'], *x['rest']})}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
