"""Ranks compare their twins with model.py together: equal ones change nothing, others step aside on all of them."""

import pytest
import runs
import torch
import torch.distributed as dist
from conftest import tiny_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import model as model_module
from model import GPT, Attention, chunk_arithmetic
from stack import compiled, twins
from stack.cpu import kernels
from stack.parallel import sharding
from stack.parallel.ranks import Ranks

MODELS = {"stack": {}, "untied": dict(tie_embeddings=False, logit_softcap=5.0),
          "gpt2": dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False, n_kv_heads=4)}


def louder(logits, targets, scale, *more):
    return 1.01 * chunk_arithmetic(logits, targets, 1.01 * scale, *more)


def one_row(logits, targets, scale, *more):
    """The gradient of one id, which one rank of two has, is another, by what only this rank sees to be too much."""
    loss = chunk_arithmetic(logits, targets, scale, *more)
    logits[:, 7] += 0.008 * scale
    return loss


def scaled(self, q, k, v, mask):
    return 1.01 * torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def a_step(model, checked: bool):
    """Lines of check and whether parameters are shards then, loss, whole gradients by name."""
    ids = torch.randint(0, 300, (2, 161), generator=torch.Generator().manual_seed(1))
    x, y = ids[:, :-1], ids[:, 1:]
    lines = twins.check(model, x, y, None, dtype=torch.float32, z_loss=0.1) if checked else []
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    loss = model(x, y, z_loss=0.1)
    loss.backward()
    return (lines, sharded), loss.detach(), {name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                                  for name, p in model.named_parameters()}


def build(kind):
    torch.manual_seed(3)
    return GPT(tiny_config(max_seq_len=160, vocab_multiple=512, **MODELS[kind]))


def on_a_rank(kind, change, tp: int, checked: bool, compile: bool = True):
    """A step of this rank, and which twins sharding.whole gives the model that is evaluated."""
    if change is scaled:
        Attention.attend = scaled
    elif change is not None:
        model_module.chunk_arithmetic = change
    compiled.compile_or_not = lambda f, *_: f
    model = build(kind)
    mesh = init_device_mesh("cpu", (2 // tp, tp)[:tp], mesh_dim_names=("dp", "tp")[:tp])
    ranks = Ranks(dist.get_rank(), dist.get_rank(), 2, tp=tp, mesh=mesh)
    model = sharding.parallelize(model, ranks, torch.device("cpu"), dp="fsdp", compile=compile)
    (lines, sharded), loss, grads = a_step(model, checked)
    sharding.finish_gradients(model, ranks)
    whole = sharding.whole(model, compile=compile)
    return dict(lines=lines, sharded=sharded, loss=loss, grads=grads, attends=bool(twins._twins(whole)[0]),
                kernels=compile and whole.cross_entropy.keywords["arithmetic"] is kernels.chunk_arithmetic)


@pytest.mark.parametrize("change", [None, louder, one_row])
@pytest.mark.parametrize("kind, compile", [("stack", True), ("untied", False), ("gpt2", False)])
def test_tensor_parallel(kind, compile, change, tmp_path, monkeypatch):
    """A head cut in two is model.py's; where that was changed, be it for the ids of one rank alone, both put theirs
    aside, and loss and gradients are those of one process."""
    results = runs.call_ranks(2, tmp_path, on_a_rank, kind, change, 2, True, compile)
    if change is not None:
        monkeypatch.setattr(model_module, "chunk_arithmetic", change)
    _, loss, grads = a_step(build(kind), False)
    for result in results:
        assert ["loss head" in line and "does not compute" in line for line in result["lines"]] == [change is not None]
        torch.testing.assert_close(result["loss"], loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(result["grads"], grads, rtol=1e-4, atol=1e-6)
        assert not result["kernels"]  # which nobody compared


@pytest.mark.parametrize("change", [None, louder, scaled])
def test_fsdp(change, tmp_path):
    """Parameters are shards again once compared, and the step is to the bit what it is without; a model put together to
    be evaluated has the twins that are left."""
    results = runs.call_ranks(2, tmp_path / "checked", on_a_rank, "stack", change, 1, True)
    for result in results:
        assert result["sharded"] and len(result["lines"]) == 1 and ("equal" in result["lines"][0]) == (change is None)
        assert (result["attends"], result["kernels"]) == (change is not scaled, change is not louder)
    if change is None:
        for result, plain in zip(results, runs.call_ranks(2, tmp_path / "plain", on_a_rank, "stack", None, 1, False),
                                 strict=True):
            assert torch.equal(result["loss"], plain["loss"])
            assert all(torch.equal(grad, plain["grads"][name]) for name, grad in result["grads"].items())
