"""A fork that tensor parallelism would train as another model is refused by name; one that it trains right is not."""

import contextlib

import pytest
import runs
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from conftest import tiny_config
from test_tensor_parallel import CUT
from torch.distributed.device_mesh import init_device_mesh

import model as model_module
from model import GPT, MLP, Attention, Block
from stack.parallel import sharding
from stack.parallel.ranks import Ranks

CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Forks


class Temperature(Attention):
    """A parameter between the cut matrices: each rank sees a part of its gradient."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.temp = nn.Parameter(torch.ones(cfg.head_dim))

    def attend(self, q, k, v, mask):
        return super().attend(q * self.temp, k, v, mask)


class Slope(MLP):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.w_down(F.silu(self.slope * self.w_gate(x)) * self.w_up(x))


class Experts(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.router, self.experts = nn.Linear(cfg.d_model, 2), nn.ModuleList(MLP(cfg) for _ in range(2))

    def forward(self, x):
        shares = self.router(x).softmax(-1).unbind(-1)
        return sum(share[..., None] * expert(x) for share, expert in zip(shares, self.experts, strict=True))


class Together(Attention):
    """One matrix for queries, keys and values."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.wqkv = nn.Linear(cfg.d_model, (cfg.n_heads + 2 * cfg.n_kv_heads) * cfg.head_dim)
        del self.wq, self.wk, self.wv


class Alibi(Attention):
    """Slopes from the number of heads that are there."""

    def attend(self, q, k, v, mask):
        H, T = q.shape[1:3]
        where = torch.arange(T)
        bias = (where - where[:, None]) * 2.0 ** -torch.arange(1.0, H + 1)[:, None, None]
        seen = where <= where[:, None] if mask is None else mask
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, attn_mask=torch.where(seen, bias, -torch.inf))


class AlibiUnderDocuments(Alibi):
    def attend(self, q, k, v, mask):
        return (Attention if mask is None else Alibi).attend(self, q, k, v, mask)


class Scaled(Attention):
    """One argument more, which reaches what is between the cut matrices; the branch is silent when it begins."""

    def __init__(self, cfg):
        super().__init__(cfg)
        nn.init.zeros_(self.wo.weight)
        self.scale = None

    def forward(self, x, rope, mask, cache=None, scale=None):
        self.scale = scale
        return super().forward(x, rope, mask, cache)

    def attend(self, q, k, v, mask):
        return super().attend(q * self.scale, k, v, mask)


class Scaling(Block):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.temp = nn.Parameter(torch.ones(()))

    def forward(self, x, rope, mask, cache=None):
        x = x + self.attn(self.norm1(x), rope, mask, cache, self.temp)
        return x + self.mlp(self.norm2(x))


class LogitBias(GPT):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.logit_bias = nn.Parameter(torch.zeros(cfg.padded_vocab_size, 1))

    def forward(self, ids, targets, *, docs=None, reduction="mean", **options):
        h = F.pad(self.hidden(ids, docs=docs).flatten(0, 1), (0, 1), value=1.0)
        return self.cross_entropy(h, torch.cat((self.head_weight, self.logit_bias), dim=1), targets.flatten(),
                                  n_valid_vocab=self.cfg.vocab_size, reduction=reduction)


class Asserting(Block):
    def forward(self, x, *args):
        assert not hasattr(self.mlp.w_up.weight, "placements")
        return super().forward(x, *args)


class Broken(Block):
    def forward(self, x, rope, mask, cache=None):
        raise KeyError("a mistake of the fork's own")


class Gains(Block):
    """Parameters outside of attn and mlp, and a second argument for both, which they take."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gains, self.silent = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(cfg.d_model))

    def forward(self, x, rope, mask, cache=None):
        x = x + self.gains[0] * self.attn(self.norm1(x) + self.silent, rope, mask, cache, None)
        return x + self.gains[1] * self.mlp(self.norm2(x), 0)


class MoreArguments(Attention):
    def forward(self, x, rope, mask, cache=None, more=None):
        return super().forward(x, rope, mask, cache)


class Squared(nn.Module):
    """No gate, not even None for it; a second argument."""

    def __init__(self, cfg):
        super().__init__()
        self.w_up, self.w_down = nn.Linear(cfg.d_model, cfg.d_ff), nn.Linear(cfg.d_ff, cfg.d_model)

    def forward(self, x, more):
        return self.w_down(F.relu(self.w_up(x)).square())


class Counting(GPT):
    """Buffers that a forward pass changes, stored and not; a table that is not trained; random numbers."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("seen", torch.ones(cfg.d_model), persistent=False)
        self.embed.weight.requires_grad_(False)
        nn.init.zeros_(self.blocks[0].mlp.w_down.weight)

    def hidden(self, ids, **options):
        self.steps += 1
        self.seen.mul_(0.5)
        return super().hidden(ids, **options) + torch.randn(self.cfg.d_model) * self.seen


@contextlib.contextmanager
def fork(classes):
    """These classes in place of model.py's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, cls in classes.items():
            patch.setattr(model_module, name, cls)
        patch.setattr(sharding, "GPT", model_module.GPT)
        yield


def cut(classes, ranks, doc_mask=True, dp="ddp"):
    """A fork's model over the ranks, compared."""
    with fork(classes):
        torch.manual_seed(3)
        return sharding.parallelize(model_module.GPT(tiny_config(vocab_multiple=512)), ranks, CPU, dp=dp,
                                    doc_mask=doc_mask)


def this_rank():
    n = dist.get_world_size()
    mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("dp", "tp"))
    return Ranks(dist.get_rank(), dist.get_rank(), n, tp=2, mesh=mesh)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused

REFUSED = {  # classes; what the sentence says
    "temperature": (dict(Attention=Temperature), ["does not know blocks.0.attn.temp. Use --dp fsdp or ddp with --tp=1, "
                                                  "or state in tensor_parallel.apply"]),
    "slope": (dict(MLP=Slope), ["does not know blocks.0.mlp.slope. Use"]),
    "experts": (dict(MLP=Experts), ["blocks.0.mlp.w_up (not there), blocks.0.mlp.w_down (not there), "
                                    "blocks.0.mlp.router.weight", " and 4 more. Use"]),
    "together": (dict(Attention=Together), ["blocks.0.attn.wq (not there)", "blocks.0.attn.wqkv.weight"]),
    "alibi": (dict(Attention=Alibi), ["another model would be trained", "the gradient of blocks.", "more do. Use"]),
    "alibi under documents": (dict(Attention=AlibiUnderDocuments), ["another model", "the gradient of blocks."]),
    "passed in": (dict(Attention=Scaled, Block=Scaling), ["another model", "the gradient of blocks.", ".temp differs"]),
    "logit bias": (dict(GPT=LogitBias), ["tp (2) this model does not run", "mixed torch.Tensor and DTensor", "Use"]),
    "assertion": (dict(Block=Asserting), ["tp (2) this model does not run (AssertionError). Use"]),
    "broken": (dict(Block=Broken), ["KeyError: a mistake of the fork's own"])}
ALLOWED = {
    "more": dict(Attention=MoreArguments, MLP=Squared, Block=Gains),
    "counting": dict(GPT=Counting)}


def said(classes, *args):
    try:
        cut(classes, this_rank(), *args)
    except ValueError as error:
        return str(error)
    except KeyError as error:
        return f"KeyError: {error.args[0]}"
    return None


def a_step(classes, dp, checked):
    """What parallelize leaves and what the next step makes of it: weights, buffers, random state; loss, gradients."""
    ranks = this_rank()
    with pytest.MonkeyPatch.context() as patch:
        if not checked:
            patch.setattr(sharding, "check_cut", lambda *args: None)
        model = cut(classes, ranks, dp=dp)
    assert all(p.grad is None for p in model.parameters())
    assert model.embed.weight.requires_grad != (classes == ALLOWED["counting"])
    left = [t.clone() for t in (*map(sharding.local, model.parameters()), *model.buffers(), torch.get_rng_state())]
    ids = torch.randint(0, 300, (2, 33))
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    sharding.finish_gradients(model, ranks)
    return [*left, loss, *(sharding.local(p.grad) for p in model.parameters() if p.grad is not None)]


def on_a_rank(names, dp):
    """What is said of each fork; for each allowed one, and none, whether the check has left a trace."""
    answers = {name: said((REFUSED.get(name) or (ALLOWED[name],))[0], True, dp) for name in names}
    return answers, said(REFUSED["alibi under documents"][0], False, dp), [
        all(torch.equal(a, b) for a, b in zip(a_step(classes, dp, False), a_step(classes, dp, True), strict=True))
        for classes in ({}, *ALLOWED.values())]


@pytest.mark.parametrize("n, dp, names", [(2, "ddp", [*REFUSED, *ALLOWED]),
                                          (4, "fsdp", ["slope", "alibi", "passed in", "logit bias", "more"])])
def test_forks(n, dp, names, tmp_path):
    """One that would be trained as another model is refused: on all ranks, in one sentence with what to do.  Of others
    nothing is said, and weights, buffers, random numbers and the next step are to the bit those without the check."""
    (answers, without_documents, same), *others = runs.call_ranks(n, tmp_path, on_a_rank, names, dp)
    assert all(other == (answers, without_documents, same) for other in others)
    for name in names:
        parts = REFUSED[name][1] if name in REFUSED else []
        assert bool(answers[name]) == bool(parts) and all(part in answers[name] for part in parts), answers[name]
        assert not parts or "\n" not in answers[name]
    assert without_documents is None and all(same) and len(same) == 3


def temperature():
    model_module.Attention = Temperature


def test_train_refuses(data, tmp_path):
    """All ranks end with the sentence and exit code 2, before there is a run folder."""
    processes = runs.start_ranks(2, runs.settings(data, tmp_path / "run", tp=2, **CUT), tmp_path / "output",
                                 prepare=temperature)
    assert runs.finish(*processes) == [2, 2] and not (tmp_path / "run").exists()
    for rank in range(2):
        assert "train.py: tp (2) cuts" in (text := (tmp_path / f"output.{rank}").read_text()), text
        assert "Traceback" not in text and "blocks.0.attn.temp. Use" in text
