"""A training step as a GPU would be given it, traced where there is none: `make trace`, minutes.

Tensors without values on "cuda", in PyTorch's build for CUDA, go through what train.py does in a step, up to its one
read of loss and norm: micro batches with documents of their own, forward, loss head, backward, the clipped norm, both
optimizers.  Compiled means all that the compiler does for an H100: Dynamo's graphs, autograd's partition into what is
kept and what is computed again, Inductor's kernels, Triton's machine code for sm_90, FlexAttention's included.  Then
the graph goes on without values, and no kernel is launched.  CUDA's runtime is asked for a device, streams and events
all the same: tests/no_cuda.c answers, preloaded.

Printed is a table for docs/gpu.md; the exit code is 1 where something does not compile, a graph breaks or is compiled
again for other documents, where a micro step or an optimizer waits for the device, or where what autograd keeps or what
a block's kernels read and write is not what account.py says.
"""

import copy
import dataclasses
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
from stack.roofline import moved_bytes

ROWS, T, MICRO_STEPS = 32, 2048, 5  # a micro batch of configs/stack100m.py
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


def trace(graphs: list, compile: bool, documents: bool, residual: torch.dtype) -> dict:
    torch._dynamo.reset()
    counters.clear()
    graphs.clear()
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
    # by a block's kernels, but for attention's own, which are named for the templates that they are made from
    moved = [size for inputs, kernels in graphs for name, size in kernels.items() if "_tem_" not in name
             and any(getattr(x, "shape", None) == (ROWS, T, cfg.d_model) for x in inputs)]
    return dict(
        kind=kind, compile=compile, graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()), again=counters["stats"]["unique_graphs"] - after_first,
        kernels=sum(len(kernels) for _, kernels in graphs), moved=sum(moved) / (ROWS * T),
        # the account is for attention by FlexAttention
        said_moved=sum(moved_bytes(cfg, 2, residual.itemsize, merged=True)) if compile and documents else None,
        kept=kept / (ROWS * T), said=said, micro=in_micro_steps, rest=waits.seen[len(in_micro_steps):])


class NoDriver:
    """In place of Triton's driver: the card to compile for."""

    @staticmethod
    def is_active():
        return True

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)


def compile_only() -> list[tuple[list, dict[str, int]]]:
    """Has Inductor compile each graph for sm_90 and hand the graph itself back to be run.  The list that it fills: of
    each graph its inputs, and the bytes that each kernel of it moves by Inductor's estimate."""
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx, config
    from torch._inductor.fx_passes import fuse_attention, pad_mm
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton import backends
    nvidia, graphs, inner = backends.backends["nvidia"], [], compile_fx.compile_fx_inner
    backends.backends["nvidia"] = dataclasses.replace(nvidia, driver=NoDriver)
    # kernels are compiled here and now, say what they move, and are not loaded; constant folding and the patterns for
    # attention and padding would run code on the card
    config.compile_threads, config.force_disable_caches, config.profile_bandwidth = 1, True, True
    config.use_static_cuda_launcher = config.joint_graph_constant_folding = False
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = lambda device: None

    def note(self):
        assert all(result.kernel.asm["cubin"] for result in self.compile_results)
        self.launchers = []
        graphs[-1][1][self.inductor_meta["kernel_name"]] = round(self.inductor_meta["kernel_num_gb"] * 1e9)

    def compile(graph, inputs, **options):
        graphs.append((inputs, {}))  # compiled is a copy: Inductor rewrites it
        inner(torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)), inputs, **options)
        return make_boxed_func(graph)
    CachingAutotuner._make_launchers = note
    compile_fx.compile_fx = functools.partial(compile_fx.compile_fx, inner_compile=compile)
    return graphs


def main():
    if torch.version.cuda is None or not torch.cuda.is_available():
        sys.exit("tests/traced.py: needs PyTorch's build for CUDA and LD_PRELOAD of tests/no_cuda.c: make trace")
    graphs = compile_only()
    fp32, bf16 = torch.float32, torch.bfloat16
    rows = [trace(graphs, compile, documents, fp32) for compile in (False, True) for documents in (False, True)]
    rows += [trace(graphs, compile, True, bf16) for compile in (False, True)]
    print(f"torch {torch.__version__}, {ROWS} x {T} tokens, bf16, no card, {datetime.date.today()}, `make trace`:\n")
    print("| | graphs | breaks | compiled again | kept, B a token | account.py | | waits, micro steps | optimizers |")
    print("|---" * 9 + "|")
    for x in rows:
        print(f"| {x['kind']} | {x['graphs']} | {x['breaks']} | {x['again']} | {x['kept']:,.0f} | {x['said']:,} | "
              f"{x['kept'] / x['said'] - 1:+.1%} | {len(x['micro'])} | {len(x['rest'])} |")
    print("\n| | kernels for sm_90 | moved in a block, B a token | account.py | |\n" + "|---" * 5 + "|")
    for x in (x for x in rows if x["compile"]):
        off = f"{x['said_moved']:,} | {x['moved'] / x['said_moved'] - 1:+.1%} |" if x["said_moved"] else "| |"
        print(f"| {x['kind']} | {x['kernels']} | {x['moved']:,.0f} | {off}")
    wrong = [x for x in rows if x["breaks"] or x["again"] or x["micro"] or x["rest"]
             or abs(x["kept"] / x["said"] - 1) > 0.05 or x["compile"] and not (x["graphs"] and x["kernels"])
             or x["said_moved"] and abs(x["moved"] / x["said_moved"] - 1) > 0.1]
    for x in wrong:
        print(f"trace: {x['kind']}: not as it should be: {sorted({*x['micro'], *x['rest']})}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
