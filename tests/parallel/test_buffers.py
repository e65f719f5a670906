"""A buffer that a fork registers, as nanoGPT its mask, trains, saves, loads and samples; whatever else a fork adds or
takes away is named where a checkpoint does not have it."""

import inspect
import warnings

import pytest
import runs
import torch
from safetensors.torch import load_file
from test_fsdp import SAME, single  # noqa: F401 (a fixture)
from test_parallel import in_fp32, run_ranks
from test_tensor_parallel import CUT

import model as model_module
import train
from model import Attention, generate
from stack import optim
from stack.checkpoint import folder, tensors
from stack.checkpoint.tensors import load_model, load_optimizers, load_weights, save
from stack.counts import num_params
from stack.data.tokenizer import Tokenizer
from stack.optim import make_optimizers


class Masked(Attention):
    """What Attention computes, by a causal mask kept in a buffer."""

    def __init__(self, cfg, persistent=True):
        super().__init__(cfg)
        n = cfg.max_seq_len
        self.register_buffer("bias", torch.tril(torch.ones(n, n)).view(1, 1, n, n), persistent=persistent)

    def forward(self, x, rope, mask, cache=None):
        where, size = (torch.arange(x.shape[1]), x.shape[1]) if cache is None else (cache[2], cache[0].shape[2])
        seen = self.bias[:, :, where, :size] > 0  # (1, 1, T, S)
        return super().forward(x, rope, seen if mask is None else seen & mask, cache)


class Unsaved(Masked):
    def __init__(self, cfg):
        super().__init__(cfg, persistent=False)


class Scaled(Attention):
    """A parameter more."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.gain = torch.nn.Parameter(torch.ones(1))


class Started(Attention):
    """Start values of its own: a silent projection, a gain, numbers in three dimensions."""

    def __init__(self, cfg):
        super().__init__(cfg)
        torch.nn.init.zeros_(self.wo.weight)
        self.gain = torch.nn.Parameter(torch.tensor([0.1]))
        self.cube = torch.nn.Parameter(torch.full((2, 2, 2), 0.3))

    def forward(self, *args):
        return super().forward(*args) * self.gain * self.cube.mean()


def fork(attention):
    in_fp32()
    model_module.Attention = attention


def masked():
    fork(Masked)


def unsaved():
    fork(Unsaved)


def started():
    fork(Started)


@pytest.fixture
def forked(monkeypatch):
    """forked(class): what the model has for Attention from now on."""
    monkeypatch.setattr(optim, "fastest_matmul_dtype", lambda device: torch.float32)
    return lambda attention: monkeypatch.setattr(model_module, "Attention", attention)


def assert_same_run(plain, model, run):
    """Logs and weights are those of the run without it; its values are what the constructor made; samples agree."""
    for x, y in zip(runs.log(plain), runs.log(run), strict=True):
        assert x == pytest.approx(y, rel=1e-5)
    other = load_model(run)[0]
    for x, y in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    for block in other.blocks:
        assert torch.equal(block.attn.bias, torch.ones(1, 1, 32, 32).tril())
    prompt = dict(prompts=[[7, 8, 9], [1]], max_new_tokens=4)
    assert generate(model, **prompt) == generate(other, **prompt)


@pytest.mark.parametrize("attention", [Masked, Unsaved])
def test_on_one_process(data, single, tmp_path, forked, attention):  # noqa: F811
    """Trained, stopped, resumed and loaded it is the run of the model without it."""
    plain = single(decay_fraction=0.0)
    model = load_model(plain)[0]
    forked(attention)
    runs.run(data, tmp_path / "run", **SAME | dict(max_steps=4, decay_fraction=0.0))
    runs.run(data, tmp_path / "run", init_from="resume", **SAME | dict(decay_fraction=0.0))
    stored = load_file(tmp_path / "run/ckpt_last/model.safetensors")
    assert ("blocks.0.attn.bias" in stored) == (attention is Masked)
    assert_same_run(plain, model, tmp_path / "run")


@pytest.mark.parametrize("n, prepare, changes", [(2, masked, dict(dp="fsdp")), (2, unsaved, dict(dp="fsdp")),
                                                 (2, unsaved, dict(tp=2)), (4, masked, dict(tp=2, dp="fsdp"))])
def test_on_several_ranks(data, single, tmp_path, forked, n, prepare, changes):  # noqa: F811
    """Built without memory its values are there too: four steps on sharded ranks, the last on one process."""
    plain = single(**CUT | dict(decay_fraction=0.0))
    model = load_model(plain)[0]
    run_ranks(data, tmp_path, prepare=prepare, n=n, **SAME | CUT | dict(decay_fraction=0.0, max_steps=4) | changes)
    forked(Masked if prepare is masked else Unsaved)
    runs.run(data, tmp_path / "run", init_from="resume", **SAME | CUT | dict(decay_fraction=0.0))
    assert_same_run(plain, model, tmp_path / "run")


@pytest.mark.parametrize("changes", [dict(dp="fsdp"), dict(dp="ddp")])
def test_start_values(data, tiny, tmp_path, forked, changes):
    """What a constructor sets is what training starts from, on one process and on several."""
    forked(Started)
    for block in tiny().blocks:
        assert not block.attn.wo.weight.any() and block.attn.gain == 0.1 and (block.attn.cube == 0.3).all()
        assert block.attn.wq.weight.any()
    runs.run(data, tmp_path / "one", **SAME)
    several = run_ranks(data, tmp_path, prepare=started, n=2, **SAME | changes)
    for x, y in zip(runs.log(tmp_path / "one"), runs.log(several), strict=True):
        assert x == pytest.approx(y, rel=1e-5)


class Plain(Attention):
    """A mask that nobody registered, made by a look at a value."""

    def __init__(self, cfg):
        super().__init__(cfg)
        n = int(torch.tensor(cfg.max_seq_len).item())
        self.seen = torch.tril(torch.ones(n, n, dtype=torch.bool))

    def attend(self, q, k, v, mask):
        seen = self.seen[:q.shape[2], :k.shape[2]]
        return super().attend(q, k, v, seen if mask is None and q.shape[2] > 1 else mask)


def test_a_tensor_that_is_no_buffer(data, tiny, tmp_path, forked):
    """It is there in a model that was loaded, too, and what is counted without memory is counted."""
    forked(Plain)
    model = tiny()
    write(tmp_path, model, data)
    before = torch.get_rng_state()
    loaded = load_model(tmp_path)[0]
    assert torch.equal(before, torch.get_rng_state())
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids), model.eval()(ids))
    assert num_params(model.cfg)["total"] == sum(p.numel() for p in model.parameters())


def test_another_model_py_is_said(data, tiny, tmp_path, monkeypatch):
    """Who loads weights with another model.py than they were saved with is told; comments make it no other."""
    write(tmp_path, tiny(), data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(tmp_path)
    text = inspect.getsource(model_module)

    def code(text):
        monkeypatch.setattr(inspect, "getsource", lambda module: text)
        return folder.model_code.__wrapped__()
    assert code(text) == code(text.replace("# the lookup", "# another").replace('"""The decoder', '"""A decoder')
                              + "# more\n") != code(text.replace("1 if", "2 if") + "x = 1\n")
    monkeypatch.setattr(tensors, "model_code", lambda: "another")
    with pytest.warns(UserWarning, match="model.py was changed since .*ckpt_last was saved"):
        load_model(tmp_path)


def write(run, model, data, **more):
    save(run, "ckpt_last", model=model, tokenizer=Tokenizer.load(data), model_cfg=model.cfg, state={}, **more)
    return run


@pytest.mark.parametrize("attention", [Masked, Unsaved])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_values(data, tiny, tmp_path, forked, attention, dtype):
    """A stored buffer is as it was saved, another one as it is made; both in the format asked for.  Loading draws no
    random number, and one tensor under two names is saved."""
    forked(attention)
    model = tiny()
    model.blocks[1].attn.bias = model.blocks[0].attn.bias
    model.blocks[0].attn.bias[..., 3, :] = 7
    write(tmp_path, model, data)
    before = torch.get_rng_state()
    for block in load_model(tmp_path, dtype=dtype)[0].blocks:
        assert block.attn.bias.dtype == (dtype or torch.float32)
        assert (block.attn.bias[..., 3, :] == 7).all() == (attention is Masked)
        assert torch.equal(block.attn.bias[..., 5:, :], torch.ones(1, 1, 32, 32).tril()[..., 5:, :].to(dtype))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("saved, built, says", [
    (Scaled, Attention, "unexpected: blocks.0.attn.gain\n"), (Attention, Scaled, "missing: blocks.1.attn.gain\n"),
    (Masked, Attention, "unexpected: blocks.0.attn.bias\n"),
    (Attention, Masked, "missing: blocks.0.attn.bias (a buffer: register it with persistent=False")])
def test_what_a_fork_adds_or_takes_away_is_named(data, tiny, tmp_path, forked, saved, built, says):
    """With what to do, from one file and from parts, and nothing is copied."""
    forked(saved)
    model = tiny()
    write(tmp_path, model, data, optimizers=make_optimizers(model))
    forked(built)
    model = tiny()
    torch.nn.init.constant_(model.norm.weight, 0.5)
    for load in (lambda: load_weights(model, tmp_path), lambda: load_model(tmp_path)):
        with pytest.raises(ValueError) as error:
            load()
        assert str(tmp_path) in str(error.value) and says in str(error.value)
        assert "Use the model.py and the settings it was saved with, or train the changed model" in str(error.value)
    assert (model.norm.weight == 0.5).all()
    if "gain" in says:
        with pytest.raises(ValueError, match="the state of\n  blocks.0.attn.gain .*\n.*\n  Resume with the settings"):
            load_optimizers(tmp_path, model, make_optimizers(model))


def test_a_sharded_run_names_it_too(data, tmp_path, forked):
    run = run_ranks(data, tmp_path, prepare=masked, dp="fsdp", **SAME | dict(max_steps=1, warmup_steps=1))
    with pytest.raises(ValueError, match="ckpt_last does not fit.*\n  unexpected: blocks.0.attn.bias\n.*\n  Use"):
        load_model(run)
    forked(Scaled)
    with pytest.raises(ValueError, match="missing: blocks.0.attn.gain"):
        train.run(*runs.settings(data, tmp_path / "other", init_from=str(run)))
