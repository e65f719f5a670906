"""What a GPU compiles, traced on CPU tensors: FlexAttention under document masks in Dynamo's and autograd's graphs."""

import functools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention import flex_attention

from stack import compiled, twins
from stack.parallel.ranks import Ranks
from stack.parallel.sharding import parallelize

T = 256
SHAPE = dict(max_seq_len=T, d_ff=4096)  # matrices of 1 MB, each a bucket to DDP


@pytest.fixture
def traced(monkeypatch, tiny):
    """traced(compile_blocks) -> (a model with FlexAttention attached as on a GPU, graphs): compiled with this backend,
    which runs graphs operator by operator and notes of each what it calls, {"forward" or "backward": [names]}."""
    graphs = {"forward": [], "backward": []}

    def look(kind, graph, inputs):
        graphs[kind].append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed_func(graph)
    forward, backward = (functools.partial(look, kind) for kind in graphs)
    backend = aot_autograd(fw_compiler=forward, bw_compiler=backward, partition_fn=min_cut_rematerialization_partition)
    compile = torch.compile

    def merged(graph, inputs):  # one for all blocks: what is compiled by another backend is compiled again
        return backend(compiled.merge_linears(graph), inputs)
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=merged, **options))
    monkeypatch.setattr(compiled, "compiled", functools.cache(compiled.compile_or_not))
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)  # else no gradients on a CPU
    monkeypatch.setattr(twins.kernels, "available", lambda: False)
    torch._dynamo.reset()
    counters.clear()
    model = tiny(**SHAPE)
    twins.replace_function(model, "mask", functools.partial(compiled.document_mask, model, model.mask))
    twins.replace_attend(model, compiled.flex, twins._under_block_mask)
    yield model, graphs
    torch._dynamo.reset()
    torch.compiler.set_stance("default")


def micro_steps(model, n: int):
    """n losses, each with documents of its own."""
    for seed in range(n):
        x = torch.randint(0, 300, (2, T), generator=torch.Generator().manual_seed(seed))
        loss = model(x, x, docs=(x < 4).cumsum(1))
        loss.backward()
        yield loss.item()


@pytest.mark.parametrize("remat", ["none", "selective"])
def test_graphs_of_documents(traced, tiny, remat):
    """One graph for masks and one for all blocks, whatever the documents: no break, no recompilation, no warning;
    the backward pass that recomputes does not compute attention again.  The losses are model.py's."""
    model, graphs = traced
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        replica = parallelize(model, Ranks(), torch.device("cpu"), remat=remat, compile=True)
        losses = list(micro_steps(replica, 5))
    assert not [w for w in said if re.search("lru_cache|nothing is compiled|deprecat.*create_block", str(w.message))]
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
    attention = [[name for name in graph if "flex_attention" in name] for graph in graphs["backward"]]
    assert attention == [["flex_attention_backward"]] or remat == "none"  # which on CPUs means cheap ones again
    assert losses == pytest.approx(list(micro_steps(tiny(**SHAPE), 5)), rel=1e-5)


def matmuls(graphs, name="mm") -> int:
    return sum(f"aten.{name}" in called for called in graphs[-1])


@pytest.mark.parametrize("changes, remat", [
    (dict(), "none"), (dict(mlp="gelu", bias=True, norm="layernorm"), "selective")])
def test_linears_of_one_input_are_one(traced, tiny, changes, remat):
    """Under autocast: a block has 4 matmuls instead of 7 (6 with GELU) and 8 in its backward pass, recomputed or not;
    the gradients are each parameter's own."""
    _, graphs = traced
    results = []
    for compile in (True, False):
        model = tiny(**SHAPE, **changes)
        parallelize(model, Ranks(), torch.device("cpu"), remat=remat, compile=compile)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            list(micro_steps(model, 1))
        results.append({name: p.grad for name, p in model.named_parameters()})
    assert matmuls(graphs["forward"], "addmm" if changes else "mm") == 4 and matmuls(graphs["backward"]) == 8
    for name, grad in results[0].items():
        want = results[1][name]
        assert grad.is_contiguous() and (grad - want).norm() < 0.02 * want.norm() + 1e-6, name


def test_without_casts_linears_stay(traced, tiny):
    """In fp32, or with FSDP's weights, the copy into one matrix would be one that nobody needs."""
    model, graphs = traced
    parallelize(model, Ranks(), torch.device("cpu"), compile=True)
    list(micro_steps(model, 1))
    assert matmuls(graphs["forward"]) == 7 and matmuls(graphs["backward"]) == 14


def gate_in_fp32(x, v, w):
    first = F.linear(x, v)
    with torch.autocast("cpu", enabled=False):
        return first, F.linear(x, w)


def written_between(x, v, w):
    x = x + 1
    first = F.linear(x, v)
    x.view(-1).mul_(2)
    return first, F.linear(x, w)


def written_after(x, v, w):
    return F.linear(x, v).relu_(), F.linear(x, w)


def low_rank(x, v, w):
    return F.linear(x, v), F.linear(x, w + w[:, :1] @ v[:1])


def biases_by_name(x, v, w):
    return F.linear(x, v, bias=v[:, 0]), F.linear(x, w, bias=w[:, 0])


def strides_read(x, v, w):
    first = F.linear(x, v)
    return first.as_strided((3, 5, 2), (first.stride(0), first.stride(1), 2)), F.linear(x, w)


def clamped_past_autograd(x, v, w):
    first = F.linear(x, v)
    w.data.clamp_(-0.5, 0.5)
    return first, F.linear(x, w)


def viewed(x, v, w):
    return F.linear(x, v).view(3, -1) * 1, F.linear(x, w).view(-1) * 1


def viewed_again(x, v, w):
    """Views of views, of what is not contiguous where it is a slice."""
    first = F.linear(x, v)
    seen = (first.view(3, 5, 2, 2).view(-1), first.unsqueeze(0).view(size=(60,)), first.transpose(0, 1).transpose(
        0, 1).view(15, 4).view(60), first.to(torch.bfloat16).view_as(torch.empty(60)), first.chunk(1, 0)[0].view(60))
    return *(one * 1 for one in seen), F.linear(x, w) * 1


def written_by_foreach(x, v, w):
    x = x + 0
    first = F.linear(x, v) * 1
    with torch.no_grad():
        torch._foreach_mul_([x], 2.0)
    return first, F.linear(x, w) * 1


ONE = torch.randn(1)  # a bias for all rows


@torch.library.custom_op("tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    """As a kernel that reads rows from the shape, whatever the strides."""
    return 2 * torch.as_strided(x, x.shape, torch.empty(x.shape).stride())


double.register_fake(torch.empty_like)
double.register_autograd(lambda ctx, grad: 2 * grad)


@pytest.mark.parametrize("function, merged", [
    (viewed_again, 1), (written_by_foreach, 0), (lambda x, v, w: (double(F.linear(x, v)), F.linear(x, w) * 1), 0),
    (lambda x, v, w: (F.linear(x, v) * (F.linear(x, v).view(torch.int16) > 0), F.linear(x, w) * 1), 0),
    (lambda x, v, w: (F.linear(x, v, ONE) * 1, F.linear(x, w, ONE) * 1), 0),
    (gate_in_fp32, 0), (written_between, 0), (written_after, 0), (low_rank, 0),
    (biases_by_name, 0), (strides_read, 0), (clamped_past_autograd, 0), (viewed, 1),
    (lambda x, v, w: (F.linear(x, v), F.linear(x + 1, w)), 0), (lambda x, v, w: (F.linear(x, v), F.linear(x, w[0])), 0),
    (lambda x, v, w: (F.linear(x, w), F.linear(x, v).view(-1)), 0),  # whose caller may count on strides
    (lambda x, v, w: (F.linear(x, w) * 1, F.linear(x, v) * 1, F.linear(x, w) * 1), 1)])
def test_what_a_fork_may_write(function, merged):
    """Linears are merged where it is the same, else left: values and gradients are those without."""
    x, v, w = (torch.randn(shape, requires_grad=True) for shape in ((3, 5, 8), (4, 8), (6, 8)))
    seen = []

    def backend(graph, inputs):
        graph = compiled.merge_linears(graph)
        seen.append(str(graph.graph).count("torch.cat"))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
    torch._dynamo.reset()
    results = []
    for call in (function, torch.compile(function, backend=backend, dynamic=False)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs = call(x, v, w)
        results.append([*outs, *torch.autograd.grad([out.float().square().sum() for out in outs], (x, v, w))])
    assert seen == [merged]
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype and (got - want).norm() < 0.01 * want.norm()


def test_what_nothing_learns_from_has_no_gradient():
    """Zeros in its place would let weight decay move what a fork looks at only."""
    x, v, w, u = (torch.randn(shape, requires_grad=True) for shape in ((3, 5, 8), (4, 8), (6, 8), (2, 8)))

    def looked_at(x, v, w, u):
        seen = F.linear(x, w).view(-1, 6)
        return F.linear(x, v) * (seen.detach().mean() + 1), F.linear(x, u) * 2

    def backend(graph, inputs):
        return torch._dynamo.lookup_backend("aot_eager")(compiled.merge_linears(graph), inputs)
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = torch.compile(looked_at, backend=backend, dynamic=False)(x, v, w, u)
        sum(out.float().sum() for out in outs).backward()
    assert w.grad is None and v.grad is not None and u.grad is not None


def two_linears(x, v, w):
    return F.linear(x, v).sigmoid() @ F.linear(x, w).sigmoid().mT


def test_sharded_weights_are_left_alone(tmp_path):
    """Those of tensor parallelism lie on a mesh: to put them into one matrix is communication."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    seen = []

    def backend(graph, inputs):
        seen.append(str(compiled.merge_linears(graph).graph).count("torch.cat"))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for place in (lambda t: t, lambda t: distribute_tensor(t, mesh, [Shard(0)] if t.ndim == 2 else [Replicate()])):
            torch._dynamo.reset()
            x, v, w = (place(torch.randn(shape)).requires_grad_() for shape in ((3, 5, 8), (4, 8), (4, 8)))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                torch.compile(two_linears, backend=backend, dynamic=False)(x, v, w)
    finally:
        dist.destroy_process_group()
    assert seen == [1, 0]


@pytest.mark.parametrize("broken", [0, 1, 2])  # the how-manieth graph that Inductor lowers: none, forward, backward
def test_the_graph_as_it_was_where_a_merged_one_does_not_compile(monkeypatch, broken):
    """On a GPU linears are merged; where Inductor fails at that, also at the gradients, it is compiled without."""
    from torch._inductor.graph import GraphLowering
    lowered, merges = [], []

    def run(self, *args, lower=GraphLowering.run):
        lowered.append(self)
        if len(lowered) == broken:
            raise ValueError("Cannot view a tensor\nat line 3")
        return lower(self, *args)
    monkeypatch.setattr(GraphLowering, "run", run)
    monkeypatch.setattr(compiled, "merge_linears", lambda graph, merge=compiled.merge_linears: merges.append(
        str(merge(graph).graph).count("torch.cat")) or graph)
    monkeypatch.setattr(compiled, "_on_gpu", lambda inputs: True)
    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_available", lambda: True)
        call = compiled.compile_or_not(two_linears_summed)
    torch._dynamo.reset()
    torch.manual_seed(broken)
    tensors, results = [torch.randn(shape, requires_grad=True) for shape in ((3, 5, 8), (4, 8), (6, 8))], []
    with (warnings.catch_warnings(record=True) as said, torch._inductor.config.patch(fx_graph_cache=False),
          torch._functorch.config.patch(enable_autograd_cache=False), torch.autocast("cpu", dtype=torch.bfloat16)):
        warnings.simplefilter("always")
        for function in (two_linears_summed, call):
            value = function(*tensors)
            results.append([value, *torch.autograd.grad(value, tensors)])
    for want, got in zip(*results, strict=True):
        assert (got - want).norm() < 0.02 * want.norm()
    assert merges == [1] and len(lowered) == (2, 3, 4)[broken]
    assert [message for message in (str(w.message) for w in said) if "merged" in message] == [
        "linears of one input are not merged, a step is some per cent slower: "
        "InductorError: ValueError: Cannot view a tensor at line 3"] * bool(broken)


def two_linears_summed(x, v, w):
    return F.linear(x, v).float().square().sum() + F.linear(x, w).float().square().sum()


def test_ddp_does_not_cut_blocks(traced, tmp_path):
    """Gradients that are exchanged leave a block one graph, forward and backward."""
    model, graphs = traced
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        replica = parallelize(model, Ranks(world_size=2), torch.device("cpu"), compile=True)
        assert isinstance(replica, torch.nn.parallel.DistributedDataParallel)
        list(micro_steps(replica, 2))
    finally:
        dist.destroy_process_group()
    assert len(graphs["backward"]) == 1


def test_without_a_compiler(traced, monkeypatch, tiny):
    """Documents then go by the boolean mask to PyTorch's attention: FlexAttention would hold every score, in fp32."""
    model, _ = traced

    def broken(function, **options):
        def call(*args, **kwargs):
            raise torch._dynamo.exc.BackendCompilerFailed(None, RuntimeError("no gcc"), None)
        return call

    def refused(*args, **kwargs):
        raise AssertionError("dense")
    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(compiled, "failed", False)
    monkeypatch.setattr(flex_attention, "flex_attention", refused)
    with pytest.warns(UserWarning, match="nothing is compiled, training is slower"):
        replica = parallelize(model, Ranks(), torch.device("cpu"), compile=True)
        losses = list(micro_steps(replica, 2))
    assert losses == pytest.approx(list(micro_steps(tiny(**SHAPE), 2)), rel=1e-5)
    x = torch.randint(0, 300, (2, T), generator=torch.Generator().manual_seed(0))
    assert not [line for line in twins.check(model, x, x, (x < 4).cumsum(1), dtype=torch.float32)
                if "the fast attention" in line]  # which nobody is given
