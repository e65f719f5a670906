"""What a GPU compiles, traced on CPU tensors: FlexAttention under document masks in Dynamo's and autograd's graphs."""

import functools
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
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
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=backend, **options))
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
