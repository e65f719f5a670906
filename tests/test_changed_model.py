"""Changes of model.py, or of an optimizer: every path computes the changed model, or says that it does not.

What each command says of the changes on docs/hacking.md is in test_hacking.py; these are kinds, held against numbers.
"""

import math
import warnings

import pytest
import runs
import torch
import torch.nn.functional as F
from conftest import tiny_config

import model as model_py
from model import GPT, Attention, Block, KVCache, generate
from stack import counts, twins
from stack.checkpoint.tensors import forgotten, optimizer_state
from stack.compiled import compile_or_not
from stack.optim import Optimizer, make_optimizers
from stack.parallel.sharding import recomputed
from stack.quantize import Int8Linear, quantize_int8

SHAPES = {"defaults": {}, "gpt2": dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False),
          "nope": dict(nope_every=2, logit_softcap=2.0, tie_embeddings=False)}


def lively(**changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(tiny_config(**changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def tokens(n: int, rows: int = 1):
    return torch.randint(0, 300, (rows, n), generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------------------------------------------------------
# GPT.mask


def window(size: int, key: int = 0):
    """GPT.mask with a window, and with an attention sink."""
    plain = GPT.mask

    def mask(self, where, n, docs):
        keys = torch.arange(n, device=where.device)
        return plain(self, where, n, docs) & ((keys > where[:, None] - size) | (keys < key))
    return mask


@torch.no_grad()
@pytest.mark.parametrize("mask", [window(5), window(31), window(4, 1)])
def test_a_changed_mask_holds_without_documents_and_with_a_cache(monkeypatch, mask):
    """One document is no documents; token by token is all at once; and the mask is used at all."""
    before = lively()(tokens(32))
    monkeypatch.setattr(GPT, "mask", mask)
    model, ids = lively(), tokens(32)
    want = model(ids, docs=torch.zeros_like(ids))
    cache = KVCache(model.cfg, 1, 32, "cpu", torch.float32)
    step_by_step = torch.cat([model(part, cache=cache) for part in ids.split([9, 6, *[1] * 17], 1)], 1)
    assert (want - before).norm() > 1e-3 * before.norm()
    torch.testing.assert_close(model(ids), want)
    torch.testing.assert_close(step_by_step, want)
    assert twins.check_cache(model).cached


@pytest.mark.parametrize("size", [5, 31])
def test_flops_follow_a_changed_mask(monkeypatch, size):
    full = counts.flops_per_token(tiny_config(), 32)
    monkeypatch.setattr(GPT, "mask", window(size))
    flops = counts.flops_per_token(tiny_config(), 32)
    assert flops["6n"] == full["6n"] and flops["palm"] - full["6n"] == (full["palm"] - full["6n"]) * size / 32


# ---------------------------------------------------------------------------------------------------------------------
# What a cache cannot follow


def mix_neighbours(monkeypatch):
    def forward(self, x, rope, mask, cache=None):
        return plain(self, x + F.pad(x, (0, 0, 1, 0))[:, :-1], rope, mask, cache)
    plain = Attention.forward
    monkeypatch.setattr(Attention, "forward", forward)


def count_from_zero(monkeypatch):
    def forward(self, x, *more):
        return plain(self, x + torch.arange(x.shape[1])[:, None].sin(), *more)
    plain = Block.forward
    monkeypatch.setattr(Block, "forward", forward)


def align_top_left(monkeypatch):
    def attend(self, q, k, v, mask):
        T, S = q.shape[2], k.shape[2]
        bias = -(torch.arange(T)[:, None] - torch.arange(T)).abs() * 0.3  # (T, T), which T = 1 broadcasts
        seen = torch.ones(T, S, dtype=torch.bool).tril(S - T) if mask is None else mask
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        scores = scores + (bias if T == S else bias[-1:, -1:])
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    monkeypatch.setattr(Attention, "attend", attend)


def scale_in_forward(monkeypatch):
    def forward(self, ids, targets=None, **more):
        h = -0.5 * self.hidden(ids, docs=more.get("docs"), cache=more.get("cache"))
        return self.logits(h) if targets is None else None
    monkeypatch.setattr(GPT, "forward", forward)


@pytest.mark.parametrize("change", [mix_neighbours, count_from_zero, align_top_left, scale_in_forward])
def test_generated_is_what_forward_says(monkeypatch, change):
    """What a cache, or generate, cannot follow is said, and the text is that of model(ids)."""
    change(monkeypatch)
    model, ids = lively(), tokens(6)[0].tolist()
    with pytest.warns(UserWarning, match="with the cache of generate this model computes other logits"):
        twins.check_cache(model)
    context = list(ids)
    with torch.no_grad():
        for _ in range(20):
            context.append(int(model(torch.tensor([context]))[0, -1].argmax()))
    assert generate(model, [ids], max_new_tokens=20) == [context[6:]]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_as_it_is_has_a_cache(name, dtype):
    """No warning, weights as they were, also for a context of one token."""
    for length in (1, 2, 32):
        model = lively(max_seq_len=length, **SHAPES[name]).to(dtype)
        before = [p.clone() for p in model.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert twins.check_cache(model).cached
        assert all(p.dtype == dtype and torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers of its own


def noise(monkeypatch):
    """Drops branches of whole sequences, by numbers that the settings do not speak of."""
    def forward(self, x, rope, mask, cache=None):
        kept = torch.empty(len(x), 1, 1).bernoulli_(0.5) if self.training else 1
        x = x + self.attn(self.norm1(x), rope, mask, cache)
        return x + self.mlp(self.norm2(x) * kept)
    monkeypatch.setattr(Block, "forward", forward)


def test_random_numbers_are_seen(monkeypatch):
    model, state = lively().train(), torch.get_rng_state()
    assert not twins.draws(model) and twins.draws(lively(dropout=0.1)) and model.training
    torch.set_rng_state(state)
    noise(monkeypatch)
    assert twins.draws(model) and torch.equal(torch.get_rng_state(), state)
    asked = []
    monkeypatch.setattr(twins.compiled, "compile_or_not", lambda forward, random=False: asked.append(random) or forward)
    twins.compile_blocks(model, torch.device("cpu"))
    assert asked == [True, True]


@pytest.mark.parametrize("how", ["block", "selective", "compiled"])
def test_backward_meets_the_forwards_random_numbers(monkeypatch, how):
    """A branch that was dropped gives no gradient, one that was not does."""
    noise(monkeypatch)
    model, x = lively().train(), torch.randn(32, 4, 64)
    block, random = model.blocks[0], twins.draws(model)
    forward = (compile_or_not(block.forward, random) if how == "compiled" else recomputed(block.forward, how, random))
    gates = []
    block.mlp.register_forward_pre_hook(lambda _, args: gates.append(args[0].detach().abs().sum((1, 2)) > 0))
    per_row = []
    for row in range(0, 32, 8):
        torch.manual_seed(row)
        part = x[row:row + 8].clone().requires_grad_()
        y = forward(part, None, None)
        torch.manual_seed(row)
        again = part.detach().requires_grad_()
        want, = torch.autograd.grad(block.forward(again, None, None).sum(), again)
        got, = torch.autograd.grad(y.sum(), part)
        per_row.append((got - want).norm() / want.norm())
    assert max(per_row) < 1e-5


def test_a_resumed_run_draws_the_same(monkeypatch, data, tmp_path):
    noise(monkeypatch)
    runs.run(data, tmp_path / "whole", max_steps=4)
    runs.run(data, tmp_path / "parts", max_steps=4, save_interval=2, keep=2)
    runs.run(data, tmp_path / "parts", max_steps=4, save_interval=2, keep=2, init_from="resume:ckpt_step_0000002")
    weights = [runs.load_file(tmp_path / name / "ckpt_last/model.safetensors") for name in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# ---------------------------------------------------------------------------------------------------------------------
# Shared layers, 8 bits, optimizers


def test_shared_layers_are_multiplied_each_time(monkeypatch):
    """Parameters are counted once, FLOPs as often as they are met: those of as many layers of their own."""
    own = counts.flops_per_token(tiny_config(n_layers=3), 32, 10)
    monkeypatch.setattr(model_py.nn, "ModuleList", lambda blocks: torch.nn.Sequential(*[next(blocks)] * 3))
    cfg = tiny_config(n_layers=3)
    assert counts.num_params(cfg)["total"] == counts.num_params(tiny_config(n_layers=1))["total"]
    assert counts.flops_per_token(cfg, 32, 10) == own


class Clamped(torch.nn.Linear):
    def forward(self, x):
        return F.linear(x.clamp(-8, 8), self.weight)


class Counting(torch.nn.Linear):
    """Multiplies by one matrix as by another, by how many rows there are."""

    def forward(self, x):
        return F.linear(x, self.weight) * (1 if x.shape[-2] < 4 else 2)


@torch.no_grad()
@pytest.mark.parametrize("kind, kept", [(Clamped, 2), (Counting, 14)])
def test_8_bits_are_the_rounded_weights_or_nothing(kind, kept):
    """A linear of a fork's that a plain one is not: alone, or where only the whole model shows it, with a warning."""
    model = lively()
    for block in model.blocks:
        plain = block.mlp.w_up
        block.mlp.w_up = kind(64, 96, bias=False)
        block.mlp.w_up.weight = plain.weight
    before = {name: p.clone() for name, p in model.named_parameters()}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quantize_int8(model)
    assert sum(isinstance(part, torch.nn.Linear) for part in model.modules()) == kept
    assert [str(w.message)[:24] for w in said] == ["with linears of 8 bits t"] * (kept == 14)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@torch.no_grad()
def test_8_bits_take_no_rows():
    """As of an expert that no token goes to."""
    assert Int8Linear(torch.nn.Linear(64, 128))(torch.empty(0, 64)).shape == (0, 128)


class Warming(Optimizer):
    """Counts its steps in a place of its own."""

    def __init__(self, params, place: str):
        super().__init__(params, {"lr": 0.1})
        self.place = place
        if place == "attribute":
            self.t = 0
        else:
            self.param_groups[0]["t"] = torch.zeros(())

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        if self.place == "attribute":
            self.t += 1
        else:
            group["t"] += 1


@pytest.mark.parametrize("place", ["attribute", "group"])
def test_what_no_checkpoint_keeps_is_said(monkeypatch, place):
    model = lively()
    monkeypatch.setattr("stack.optim.AdamW", lambda groups, **settings: Warming(groups, place))
    for optimizer in ("muon", "adamw"):
        made = make_optimizers(model, optimizer=optimizer)
        for opt in made:
            for group in opt.param_groups:
                group["lr"] *= 0.5
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer_state(model, made, None)
        made[-1].step()
        with pytest.warns(UserWarning, match="Warming changes .*t.*, which no checkpoint keeps"):
            optimizer_state(model, made, None)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_our_optimizers_keep_all_in_their_state(optimizer):
    model = lively()
    made = make_optimizers(model, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(tokens(8), tokens(8)).backward()
            for opt in made:
                opt.step()
            optimizer_state(model, made, None)


@pytest.mark.parametrize("draw, persistent, said", [
    (torch.randn, False, True), (torch.randn, True, False), (torch.ones, False, False)])
def test_a_buffer_that_comes_out_otherwise_is_said(monkeypatch, draw, persistent, said):
    """Random and kept by no checkpoint: eval.py and a resumed run would have another one."""
    init = Attention.__init__

    def changed(self, cfg):
        init(self, cfg)
        self.register_buffer("codes", draw(4), persistent=persistent)
    monkeypatch.setattr(Attention, "__init__", changed)
    torch.manual_seed(1)
    lines = forgotten(GPT(tiny_config()))
    assert (len(lines) > 0 and "blocks.0.attn.codes" in lines[0]) if said else lines == []
