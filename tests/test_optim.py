"""Optimizers: equal to torch's own, step for step; every parameter in one group; the schedule exact at its corners."""

import copy
import io
import math
from dataclasses import replace

import pytest
import torch

from stack import optim
from stack.optim import Muon, make_optimizers, schedule
from stack.train_config import TrainConfig

SHAPES = [(48, 32), (32, 48), (32, 32), (48, 32), (16, 32), (32, 32), (32, 48)]  # tall, wide, square; repeated


def matrices(seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape, generator=g) * 0.1) for shape in SHAPES]


def set_grads(params, seed):
    g = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g)


def reference(params, **kw):
    return torch.optim.Muon(params, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **kw)


def run(params, opt, steps=4, first=0):
    for step in range(first, first + steps):
        set_grads(params, step)
        opt.param_groups[0]["lr"] = 0.01 / (step + 1)
        if isinstance(opt, torch.optim.Muon):  # ours does so itself
            opt.param_groups[0]["momentum"] = 0.85 + 0.1 * min(step / 300, 1)
        opt.step()
    return params


def largest_difference(a, b):
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True))


def test_muon_is_torchs_muon_in_fp32(monkeypatch):
    """torch casts to bf16 for the iteration; with that cast taken out both do the same arithmetic in fp32."""
    ours, theirs, start = matrices(), matrices(), matrices()
    run(ours, Muon(ours, lr=1.0, weight_decay=0.1, ns_dtype=torch.float32))
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    run(theirs, reference(theirs, lr=1.0))
    assert largest_difference(ours, start) > 1e-2
    assert largest_difference(ours, theirs) < 2e-6


def test_muon_is_torchs_muon_in_bf16():
    ours, theirs, start = matrices(), matrices(), matrices()
    run(ours, Muon(ours, lr=1.0, ns_dtype=torch.bfloat16))
    run(theirs, reference(theirs, lr=1.0))
    assert largest_difference(ours, theirs) < 0.02 * largest_difference(theirs, start)


def test_stacking_changes_nothing(monkeypatch):
    stacked, single = matrices(), matrices()
    run(stacked, Muon(stacked, lr=1.0, ns_dtype=torch.float32))
    monkeypatch.setitem(optim.STACK_ELEMENTS, "cpu", 1)
    run(single, Muon(single, lr=1.0, ns_dtype=torch.float32))
    assert largest_difference(stacked, single) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_update_is_nearly_orthogonal_with_the_rms_of_adamw(dtype):
    for shape in ((64, 192), (192, 64), (96, 96)):
        p = torch.nn.Parameter(torch.zeros(shape))
        p.grad = torch.randn(shape) * 1e3  # of any size: only the direction counts
        Muon([p], lr=1.0, ns_dtype=dtype).step()
        update = p.detach() / (0.2 * math.sqrt(max(shape)))
        values = torch.linalg.svdvals(update)
        assert values.max() < 1.25 and (values > 0.6).float().mean() > 0.95
        assert float(p.detach().square().mean().sqrt()) == pytest.approx(0.2, rel=0.15)


def test_no_gradient_no_change_and_zero_gradient_only_decay():
    params, start = matrices(), matrices()
    opt = Muon(params, lr=0.5, weight_decay=0.1)
    set_grads(params, 0)
    params[0].grad = None
    params[1].grad.zero_()
    opt.step()
    assert torch.equal(params[0], start[0]) and params[0] not in opt.state
    assert torch.allclose(params[1], start[1] * 0.95)
    assert all(p.isfinite().all() for p in params)


def test_momentum_rises_and_a_resumed_run_goes_on_with_it(monkeypatch):
    used, update = [], Muon._update
    monkeypatch.setattr(Muon, "_update", lambda self, params, group, momentum, sharding: (
        used.append(momentum), update(self, params, group, momentum, sharding)))

    def steps(params, opt, n):
        for p in params:
            p.grad = torch.ones_like(p)
        for _ in range(n):
            opt.step()
        return params
    (first, late), (again, _) = ([torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)] for _ in range(2))
    opt, resumed = Muon([first], lr=0.1), Muon([again], lr=0.1)
    steps([first], opt, 150)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    steps([first], opt, 200)
    assert used[::50] == pytest.approx([0.85 + 0.1 * i / 6 for i in range(7)])
    assert used[-1] == 0.95 and opt.state[first]["step"] == 350
    straight, used[:] = used[150:], []
    steps([again], resumed, 200)
    assert used == straight
    opt.add_param_group({"params": [late]})  # a parameter that begins later begins its own count
    steps([first, late], opt, 1)
    assert used[200:] == [0.95, pytest.approx(0.85)]
    del opt.state[first]["step"], opt.state[late]["step"]  # as a checkpoint from before there was a count
    steps([first, late], opt, 1)
    assert used[202:] == [0.95, 0.95]


def test_buffers_are_kept_between_steps():
    params = matrices()
    opt = Muon(params, lr=0.1)
    run(params, opt, 1)
    before = {key: b.data_ptr() for key, b in opt._buffers.items()}
    momenta = [opt.state[p]["momentum_buffer"].data_ptr() for p in params]
    run(params, opt, 2)
    assert before == {key: b.data_ptr() for key, b in opt._buffers.items()}
    assert momenta == [opt.state[p]["momentum_buffer"].data_ptr() for p in params]


def test_state_is_per_parameter_and_weights_only(tiny):
    def train(model, optimizers, first, steps):
        for step in range(first, first + steps):
            set_grads(list(model.parameters()), step)
            for opt in optimizers:
                opt.step()
    straight, resumed = tiny(), tiny()
    opts = make_optimizers(straight)
    train(straight, opts, 0, 2)
    file = io.BytesIO()
    torch.save([opt.state_dict() for opt in opts], file)
    file.seek(0)
    resumed.load_state_dict(straight.state_dict())
    again = make_optimizers(resumed)
    for opt, state in zip(again, torch.load(file, weights_only=True), strict=True):
        opt.load_state_dict(state)
    for p in opts[0].param_groups[0]["params"]:
        buffer = opts[0].state[p]["momentum_buffer"]
        assert buffer.shape == p.shape and buffer.untyped_storage().nbytes() == p.numel() * 4
    train(straight, opts, 2, 2)
    train(resumed, again, 2, 2)
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("changes, blocks, tables, vectors", [
    ({}, 2 * 7, ["embed.weight"], 2 * 4 + 1),
    ({"tie_embeddings": False}, 2 * 7, ["embed.weight", "head.weight"], 2 * 4 + 1),
    (dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False), 2 * 6,
     ["embed.weight", "pos_embed.weight"], 2 * (2 * 2 + 6) + 2),
])
def test_every_parameter_is_in_the_group_it_belongs_to(tiny, changes, blocks, tables, vectors):
    model = tiny(**changes)
    muon, adamw = make_optimizers(model, muon_lr=0.5, adamw_lr=0.25, weight_decay=0.125)
    (group,), (table_group, vector_group) = muon.param_groups, adamw.param_groups
    assert len(group["params"]) == blocks and all(".attn.w" in n or ".mlp.w_" in n for n in group["param_names"])
    assert table_group["param_names"] == tables and len(vector_group["params"]) == vectors
    assert (group["peak_lr"], table_group["peak_lr"], vector_group["peak_lr"]) == (0.5, 0.25, 0.25)
    assert [g["weight_decay"] for g in (group, table_group, vector_group)] == [0.125, 0.125, 0.0]
    assert table_group["betas"] == (0.9, 0.95) and table_group["eps"] == 1e-8
    (adamw,) = make_optimizers(model, optimizer="adamw", weight_decay=0.125)
    for opts in ([adamw], [muon, make_optimizers(model)[1]]):
        held = [p for opt in opts for g in opt.param_groups for p in g["params"]]
        assert len(held) == len(set(held)) == len(list(model.parameters()))
    assert all((p.ndim == 1) == (g["weight_decay"] == 0) for g in adamw.param_groups for p in g["params"])


def test_frozen_parameters_are_left_out_and_strange_input_refused(tiny):
    model = tiny()
    model.blocks.requires_grad_(False)
    (adamw,) = make_optimizers(model)
    assert sum(len(g["params"]) for g in adamw.param_groups) == 2
    with pytest.raises(ValueError, match="adamw"):
        make_optimizers(model, optimizer="adam")
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_batch_is_learnt_by_heart(tiny, optimizer):
    model = tiny()
    ids = torch.randint(0, 300, (4, 17), generator=torch.Generator().manual_seed(1))
    opts = make_optimizers(model, optimizer=optimizer)
    for _ in range(60):
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert loss.item() < 0.5  # from ln(300) = 5.7


EDGES = [(warmup, horizon, fraction, floor) for horizon in (1, 2, 10, 100) for warmup in (0, 1, 3, 10, 250)
         for fraction in (0.1, 0.4, 1.0) for floor in (0.0, 0.1, 1.0)]


@pytest.mark.parametrize("name", ["wsd", "linear", "cosine"])
def test_schedule_rises_then_falls_and_ends_at_the_floor(name):
    for warmup, horizon, fraction, floor in EDGES:
        cfg = TrainConfig(schedule=name, warmup_steps=warmup, max_steps=horizon, decay_fraction=fraction,
                          min_lr_fraction=floor)
        values = [schedule(cfg, step) for step in range(2 * horizon + 2)]
        assert 0 < values[0] <= 1 and max(values) <= 1
        run = values[:horizon]
        peak = run.index(max(run))
        assert all(a <= b + 1e-12 for a, b in zip(run[:peak], run[1:peak + 1], strict=True))
        assert all(a >= b - 1e-12 for a, b in zip(run[peak:], run[peak + 1:], strict=False))
        assert all(v == floor for v in values[horizon:])
        assert min(run) > 0  # no step of the run is wasted on a rate of 0


def test_schedule_corners():
    wsd = TrainConfig(schedule="wsd", warmup_steps=10, max_steps=1000, decay_fraction=0.2, min_lr_fraction=0.1)
    assert [schedule(wsd, s) for s in (0, 4, 9, 10, 799, 800)] == [0.1, 0.5, 1.0, 1.0, 1.0, 1.0]
    assert schedule(wsd, 850) == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(50 / 200)))
    cosine = replace(wsd, schedule="cosine")
    assert [schedule(cosine, s) for s in (0, 9, 10)] == [0.1, 1.0, 1.0]
    assert schedule(cosine, 505) == pytest.approx(0.55)
    flat = replace(wsd, decay_fraction=0.0)
    assert [schedule(flat, s) for s in (500, 999, 1000, 5000)] == [1.0] * 4
    for edge in (cosine, wsd):  # continuous: no jump is larger than the schedule's steepest step
        values = [schedule(edge, s) for s in range(1001)]
        steps = [abs(a - b) for a, b in zip(values, values[1:], strict=False)]
        assert max(steps) < 0.1001
    linear = replace(wsd, schedule="linear")
    assert [schedule(linear, s) for s in (0, 799, 850, 900, 1000)] == pytest.approx([0.1, 1.0, 0.775, 0.55, 0.1])
    to_nothing = replace(linear, warmup_steps=0, decay_fraction=1.0, min_lr_fraction=0.0)  # as an annealing branch
    assert [schedule(to_nothing, s) for s in (0, 250, 999, 1000)] == pytest.approx([1, 0.75, 0.001, 0])
    with pytest.raises(ValueError, match="cosine"):
        schedule(TrainConfig(schedule="polynomial"), 0)
