"""Ranks that hold a model together compute what one process computes, and none of them holds a whole row of logits."""

import os

import pytest
import runs
import torch
import torch.distributed as dist
from conftest import tiny_config
from test_fsdp import SAME, single  # noqa: F401 (a fixture)
from test_parallel import assert_close, check_output, in_fp32, run_ranks
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import train
from model import GPT, ModelConfig, fused_linear_cross_entropy, generate
from stack import compiled as compiled_module
from stack import optim
from stack.parallel import sharding, tensor_parallel
from stack.parallel.ranks import Ranks, read_ranks

N, C, V = 23, 16, 40
OPTIONS = [{}, dict(z_loss=0.1), dict(softcap=2.0), dict(n_valid_vocab=33), dict(ignore_index=7),
           dict(z_loss=0.1, softcap=2.0, n_valid_vocab=27)]  # on 4 ranks the last has padding only
CASES = [(options, reduction, chunk) for options in OPTIONS for reduction in ("mean", "sum", "none")
         for chunk in (7, None)]


# ---------------------------------------------------------------------------------------------------------------------
# The loss head


def head_inputs(dtype=torch.float64):
    torch.manual_seed(1)
    hidden, weight = torch.randn(N, C, dtype=dtype), torch.randn(V, C, dtype=dtype)
    targets, incoming = torch.randint(0, 27, (N,)), torch.randn(N, dtype=dtype)
    targets[::5] = -100
    return hidden, weight, targets, incoming


def head_results(cross_entropy, hidden, weight, targets, incoming, options, reduction, chunk):
    """loss, dh, dw; ignore_index other than -100: these targets are then valid nowhere."""
    if "ignore_index" in options:
        targets = torch.where(targets == -100, options["ignore_index"], targets)
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = cross_entropy(hidden, weight, targets, reduction=reduction, chunk=chunk, **options)
    return loss.detach(), *torch.autograd.grad((loss * (incoming if reduction == "none" else 1.7)).sum(),
                                               (hidden, weight))


def heads_on_a_rank(cases, dtype=torch.float64, compiled=False):
    hidden, weight, targets, incoming = head_inputs(dtype)
    part = weight.chunk(dist.get_world_size())[dist.get_rank()]
    compiled_module.COMPILE_FROM = 1 if compiled else 1 << 40
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [head_results(lambda *args, **kwargs: tensor_parallel.cross_entropy(*args, mesh=mesh, **kwargs),
                         hidden, part, targets, incoming, *case) for case in cases]


@pytest.mark.parametrize("n", [2, 4])
def test_head_equals_the_single_one(n, tmp_path):
    """Loss and both gradients, for every option, reduction and chunk size, in float64; ranks agree to the bit."""
    ranks = runs.call_ranks(n, tmp_path, heads_on_a_rank, CASES)
    for case, *results in zip(CASES, *ranks, strict=True):
        loss, dh, dw = head_results(fused_linear_cross_entropy, *head_inputs(), *case)
        for result in results:
            assert torch.equal(result[0], results[0][0]) and torch.equal(result[1], results[0][1])
        for got, want in ((results[0][0], loss), (results[0][1], dh), (torch.cat([r[2] for r in results]), dw)):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13, msg=lambda m, case=case: f"{case}: {m}")


def test_compiled_head_equals_the_single_one(tmp_path):
    """In float32, with a C++ compiler; without one this says nothing."""
    case = (dict(z_loss=0.1, softcap=2.0, n_valid_vocab=33), "mean", 8)
    ((a,), (b,)), one = runs.call_ranks(2, tmp_path, heads_on_a_rank, [case], torch.float32, True), head_results(
        fused_linear_cross_entropy, *head_inputs(torch.float32), *case)
    torch.testing.assert_close((a[0], a[1], torch.cat((a[2], b[2]))), one, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# The model

SHAPE = dict(vocab_size=2500, vocab_multiple=2560, d_model=32, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=8, d_ff=48,
             max_seq_len=32)
MODELS = {"stack": SHAPE,
          "untied": SHAPE | dict(tie_embeddings=False, logit_softcap=5.0, embed_scale=True, nope_every=2),
          "gpt2": SHAPE | dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False, n_kv_heads=8)}


PROMPT = dict(prompts=[[7, 8, 9], [1]], max_new_tokens=4, temperature=1.0, seed=3)


class Watch(TorchDispatchMode):
    """Remembers collectives, as (kind, bytes), and the sizes of all dimensions."""

    def __init__(self):
        super().__init__()
        self.collectives, self.sizes = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # seen again as operations on local tensors
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, out)) if isinstance(x, torch.Tensor)
                   and not isinstance(x, FakeTensor)]  # with which DTensor finds out shapes
        name = func.name().split(":")[-1].replace("_", "")
        if func.namespace in ("c10d", "_c10d_functional") and name[:4] not in ("wait", "wrap"):
            self.collectives.append((name, max(t.nbytes for t in tensors)))
        self.sizes |= {size for x in tensors for size in x.shape}
        return out


def make(changes):
    """A model with random biases and gains, two sequences, their targets and documents."""
    torch.manual_seed(2)
    model = GPT(ModelConfig(**changes))
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, std=0.3)
    ids = torch.randint(0, 2500, (2, 33))
    targets = torch.where(ids[:, 1:] % 5 == 0, -100, ids[:, 1:])
    return model, ids[:, :-1], targets, (torch.arange(32) > 20).int().expand(2, 32)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def models_on_a_rank(kinds):
    return [model_on_a_rank(kind) for kind in kinds]


def model_on_a_rank(kind):
    """What a rank computes, its gradients made whole; what passed in forward, backward and behind it."""
    model, ids, targets, docs = make(MODELS[kind])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensor_parallel.apply(model, mesh)
    with Watch() as forward:
        loss = model(ids, targets, docs=docs, z_loss=0.1)
    with Watch() as backward:
        loss.backward()
    with Watch() as end:
        tensor_parallel.sum_shared_gradients(model, mesh.get_group())
    with torch.no_grad():
        return dict(
            loss=loss.detach(), nats=model(ids, targets, docs=docs, reduction="none"),
            vectors=model.embed(torch.arange(2560)), sample=generate(sharding.whole(model), **PROMPT),
            grads={name: whole(p.grad) for name, p in model.named_parameters()},
            numbers=sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters()),
            sizes=forward.sizes | backward.sizes, forward=forward.collectives, backward=backward.collectives,
            end=end.collectives)


@pytest.mark.parametrize("n, kinds", [(2, list(MODELS)), (4, ["untied"])])
def test_model_equals_the_single_one(n, kinds, tmp_path):
    """Vectors to the bit; loss, loss per token, every gradient, a sample of the whole; the collectives are those of the
    module's docstring and no others; a rank holds its share; no tensor has a dimension for the whole vocabulary."""
    ranks, close = runs.call_ranks(n, tmp_path, models_on_a_rank, kinds), dict(rtol=1e-5, atol=1e-6)
    for kind, *results in zip(kinds, *ranks, strict=True):
        model, ids, targets, docs = make(MODELS[kind])
        loss = model(ids, targets, docs=docs, z_loss=0.1)
        loss.backward()
        with torch.no_grad():
            wanted = [loss.detach(), model(ids, targets, docs=docs, reduction="none")]
        everywhere = sum(p.numel() for name, p in model.named_parameters()
                         if "norm" in name or "pos_embed" in name or name.endswith(("wo.bias", "w_down.bias")))
        divided = sum(p.numel() for p in model.parameters()) - everywhere
        N, NC, L = ids.numel(), 4 * ids.numel() * 32, 2
        for got in results:
            torch.testing.assert_close([got[key] for key in ("loss", "nats")], wanted, **close)
            for name, p in model.named_parameters():
                torch.testing.assert_close(got["grads"][name], p.grad, **close, msg=lambda m, name=name: f"{name}: {m}")
            assert torch.equal(got["vectors"], model.embed.weight)
            assert got["sample"] == generate(model, **PROMPT)
            assert got["forward"] == [("allreduce", NC)] * (1 + 2 * L) + [("allreduce", 4 * N), ("allreduce", 8 * N)]
            assert got["backward"] == [("allreduce", NC)] * (1 + 2 * L)
            assert got["end"] == [("allreduce", 4 * 2 * L * 8)] * model.cfg.qk_norm
            assert got["numbers"] == everywhere + divided / n
            assert not got["sizes"] & {2500, 2560}


def test_what_cannot_be_cut_is_refused(tiny):
    """With the number given, the one needed, and what to do."""
    found = tensor_parallel.problems(tiny_config(dropout=0.1, d_ff=97), 4)
    assert [line.split(" ")[0] for line in found] == ["n_kv_heads", "d_ff", "the", "dropout"]
    assert "320 rows and tp (4) needs a multiple of 128 * 4 = 512. Set --vocab_multiple=512" in found[2]
    assert tensor_parallel.problems(ModelConfig(), 2) == []
    with pytest.raises(ValueError, match="float16.*With tp .2. use --dtype=bfloat16 or float32"):
        sharding.parallelize(tiny(), Ranks(0, 0, 2, tp=2), torch.device("cpu"), dtype=torch.float16)


def test_plan():
    """A line for each kind of module."""
    text = tensor_parallel.plan(ModelConfig(), 2)
    assert "embed         rows: 16,384 of 32,768 ids" in text and "wq            outputs: 4 of 8 heads" in text


# ---------------------------------------------------------------------------------------------------------------------
# Training

CUT = dict(n_heads=4, n_kv_heads=2, vocab_multiple=256)


@pytest.mark.parametrize("n, dp, changes", [
    (2, "ddp", dict()), (2, "ddp", dict(optimizer="adamw", tie_embeddings=False)),
    (2, "ddp", dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False)),
    (4, "ddp", dict(optimizer="adamw")), (4, "fsdp", dict(tie_embeddings=False))])
def test_training_is_one_process(data, single, tmp_path, n, dp, changes):  # noqa: F811
    """tp=2, alone and with two copies: losses, norms before clipping, held-out losses and weights after 5 steps."""
    out = run_ranks(data, tmp_path, n=n, prepare=in_fp32, tp=2, dp=dp, **SAME | CUT | changes)
    assert_close(single(**CUT | changes), out)
    assert check_output(tmp_path, n).count("tensor parallel over 2 ranks") == 1  # one rank speaks
    assert "Warning" not in check_output(tmp_path, n) and "W1" not in check_output(tmp_path, n)


def stop_after_one_step():
    in_fp32()
    schedule = train.schedule

    def stop(*args):
        if read_ranks().rank == 1:
            os.kill(os.getpid(), 15)
        return schedule(*args)
    train.schedule = stop
    # for compile=True: traced and differentiated as for the compiler, whose code would take half a minute
    compiled_module.compile_or_not = lambda f, random: torch.compile(f, backend="aot_eager", dynamic=False)


def test_resume_across_layouts(data, single, tmp_path, monkeypatch):  # noqa: F811
    """tp=2 compiled, tp=2 over two shards, tp=2 with recomputation, one process: a step each and it is the same run."""
    changes, resume = SAME | CUT, "--init_from=resume"
    run_ranks(data, tmp_path, prepare=stop_after_one_step, n=2, tp=2, compile=True, **changes)
    run_ranks(data, tmp_path, resume, prepare=stop_after_one_step, n=4, tp=2, dp="fsdp", **changes)
    run_ranks(data, tmp_path, resume, prepare=stop_after_one_step, n=2, tp=2, remat="block", **changes)
    monkeypatch.setattr(optim, "fastest_matmul_dtype", lambda device: torch.float32)
    assert_close(single(**CUT), runs.run(data, tmp_path / "run", init_from="resume", **changes))
