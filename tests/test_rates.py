"""Sizes: what a model computes is as large, and moves as far, at every width and depth; the rates that make it so.

    python tests/test_rates.py        the whole coordinate check, some minutes: docs/scaling-laws.md has its table
"""

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import runs  # noqa: E402

from model import GPT, ModelConfig  # noqa: E402
from stack.config import ConfigError, load  # noqa: E402
from stack.optim import KNOWN, make_optimizers, rates  # noqa: E402
from stack.resume import rated  # noqa: E402
from stack.train_config import TrainConfig  # noqa: E402

STEPS = 10
FLAT = ["table", "first v", "first up", "last v", "last up", "stream", "logits"]


def coordinates(width: int, depth: int) -> dict[str, tuple[float, float]]:
    """(RMS, RMS of its change) of what a model computes of fixed ids after ten steps by make_optimizers and rates."""
    torch.manual_seed(0)
    cfg = ModelConfig(vocab_size=512, d_model=width, n_layers=depth, n_heads=width // 32, n_kv_heads=width // 64,
                      head_dim=32, d_ff=width * 11 // 4, max_seq_len=32)
    model, seen = GPT(cfg), {}
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.rand(4, 33, generator=generator) ** 3 * 512).long() for _ in range(STEPS)]  # some are frequent
    *_, tokens, batch_tokens = KNOWN["muon"]
    muon_lr, adamw_lr = rates(cfg, tokens, batch_tokens)
    optimizers = make_optimizers(model, muon_lr=muon_lr, adamw_lr=adamw_lr)
    first, last = model.blocks[0], model.blocks[-1]
    for name, module in {"table": model.embed, "first v": first.attn.wv, "first up": first.mlp.w_up,
                         "last v": last.attn.wv, "last up": last.mlp.w_up, "stream": last}.items():
        module.register_forward_hook(lambda module, inputs, output, name=name: seen.update({name: output.detach()}))

    def look():
        with torch.no_grad():
            return {"logits": model(batches[0][:, :-1])} | seen
    before = look()
    for ids in batches:
        model(ids[:, :-1], ids[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = look()
    return {name: tuple(float(t.square().mean().sqrt()) for t in (after[name], after[name] - before[name]))
            for name in FLAT}


@pytest.mark.parametrize("shapes", [[(64, 4), (256, 4)], [(64, 4), (64, 32)]], ids=["width", "depth"])
def test_coordinate_check(shapes):
    """Activations, and how far ten steps move them, stay within a factor of 2 from the narrowest to the widest model
    and from the shallowest to the deepest."""
    of = [coordinates(*shape) for shape in shapes]
    for name in FLAT:
        for what, values in zip(("size", "change"), zip(*(c[name] for c in of), strict=True), strict=True):
            assert max(values) < 2 * min(values), (name, what, values)


def print_the_check():
    """The table of docs/scaling-laws.md."""
    torch.set_num_threads(1)
    axes = {"width": [(width, 4) for width in (64, 128, 256, 512, 1024)],
            "depth": [(64, depth) for depth in (4, 8, 16, 32)]}
    print(f"| width x depth | {' | '.join(FLAT)} |\n|---|{'---|' * len(FLAT)}")
    for axis, shapes in axes.items():
        of = {shape: coordinates(*shape) for shape in shapes}
        for shape, c in of.items():
            print(f"| {shape[0]:,} x {shape[1]} | {' | '.join('{:.3f}, {:.3f}'.format(*c[name]) for name in FLAT)} |")
        spread = {name: [max(v) / min(v) for v in zip(*(c[name] for c in of.values()), strict=True)] for name in FLAT}
        print(f"| largest by smallest, {axis} | {' | '.join('{:.2f}, {:.2f}'.format(*spread[n]) for n in FLAT)} |",
              flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Rates


def test_rates_at_what_is_known_and_away_from_it():
    """KNOWN's own run, of the demo's shape, and GPT-2 small have the rates that are known; each law is a power of its
    own variable."""
    demo, _ = load((ModelConfig, TrainConfig), ["configs/demo.py"])
    T, B = KNOWN["muon"][4:]
    muon, adamw = rates(demo, T, B)
    assert (muon, adamw) == (5e-3, 4e-3)
    gpt2, cfg = load((ModelConfig, TrainConfig), ["configs/gpt2.py"])
    assert rates(gpt2, cfg.max_steps * cfg.batch_tokens, cfg.batch_tokens, "adamw") == (None, pytest.approx(6e-4))
    few = 10 ** 0.3 * math.sqrt(1.16 * (T / 1000) ** 0.571 / B)  # a step's tokens count up to twice the critical batch
    for changed, tokens, batch_tokens, of_muon, of_adamw in [
            ({}, 100 * T, B, 100 ** -0.3, 100 ** -0.3), ({}, T, 4 * B, 2, 2), (dict(d_model=512), T, B, 0.5, 1),
            (dict(n_layers=12), T, B, 0.5, 1), ({}, T / 10, B, 10 ** 0.3, 10 ** 0.3),
            ({}, T / 1000, B, few, few)]:  # no debugging run of ten steps at eight times the rate
        got = rates(replace(demo, **changed), tokens, batch_tokens)
        assert got == (pytest.approx(muon * of_muon), pytest.approx(adamw * of_adamw)), changed
    assert rates(replace(gpt2, d_model=384), T, B, "adamw")[1] == pytest.approx(2 * rates(gpt2, T, B, "adamw")[1])


def test_configs_say_the_rates_they_get():
    """The configs that leave the rates open name the numbers that come out: a fifth of a first run's where they begin
    from a run."""
    for name, part in {"stack100m": 1, "stack100m_24gb": 1, "gpt2": 1, "chat": 5, "stack100m_chat": 5}.items():
        model_cfg, cfg = load((ModelConfig, TrainConfig), [f"configs/{name}.py"])
        assert (cfg.muon_lr, cfg.adamw_lr) == (None, None)
        text = Path(f"configs/{name}.py").read_text()
        said = []
        cfg = rated(model_cfg, cfg, None, None, said.append)
        there = [float(word) for word in re.findall(r"\d+e-\d|\d\.\d+e-\d", text)]
        for number in filter(None, (cfg.muon_lr, cfg.adamw_lr)):
            assert float(f"{number / part:.2g}") in there and str(number) in said[0], (name, number)


def test_rates_left_open(data, tmp_path, capsys):
    """None becomes numbers that are printed and saved; what goes on keeps them, whatever the length; a new text begins
    at a fifth of its own; numbers that are given always win."""
    def saved(out):
        _, cfg = load((ModelConfig, TrainConfig), [str(out / "config.json")])
        return cfg.muon_lr, cfg.adamw_lr
    model_cfg, cfg = runs.settings(data, tmp_path / "a")
    open_rates = dict(muon_lr=None, adamw_lr=None, save_interval=3, keep=2)
    a = runs.run(data, tmp_path / "a", **open_rates)
    want = tuple(float(f"{value:.4g}") for value in rates(model_cfg, 6 * 256, 256))
    assert saved(a) == want and f"muon_lr {want[0]}, adamw_lr {want[1]}: for 1,536 tokens" in capsys.readouterr().out
    given = runs.run(data, tmp_path / "given", **open_rates | dict(muon_lr=want[0], adamw_lr=want[1]))
    assert runs.log(a) == runs.log(given)
    long = dict(max_steps=40_000, muon_lr=None, adamw_lr=None)
    assert rated(*runs.settings(data, a, **long), None, None, print).muon_lr < want[0]
    halves = rated(*runs.settings(data, a, **long, ramp_steps=40_000), None, None, print)  # no step has the whole
    assert halves.muon_lr == float(f"{rates(model_cfg, 40_000 * 128, 128)[0]:.4g}")
    runs.run(data, a, **open_rates | dict(max_steps=8, init_from="resume"))
    assert saved(a) == want
    branch = runs.run(data, tmp_path / "b", **open_rates | dict(init_from=str(a / "ckpt_step_0000006"), max_steps=2,
                                                                keep_moments=True))
    assert saved(branch) == want
    tuned = runs.run(data, tmp_path / "c", **open_rates | dict(init_from=str(a), max_steps=2))
    assert saved(tuned) == tuple(pytest.approx(value / 5, rel=1e-3) for value in rates(model_cfg, 2 * 256, 256))
    mixed = runs.run(data, tmp_path / "d", **open_rates | dict(max_steps=1, muon_lr=0.5))
    assert saved(mixed) == (0.5, float(f"{rates(model_cfg, 256, 256)[1]:.4g}"))
    adamw = runs.run(data, tmp_path / "e", **open_rates | dict(max_steps=1, optimizer="adamw"))
    assert saved(adamw) == (None, float(f"{rates(model_cfg, 256, 256, 'adamw')[1]:.4g}"))
    runs.run(data, a, **open_rates | dict(max_steps=9, init_from="resume", optimizer="adamw", allow_changes=True))
    assert saved(a) == (None, float(f"{rates(model_cfg, 9 * 256, 256, 'adamw')[1]:.4g}"))  # the table's was another
    with pytest.raises(ConfigError, match=r"muon_lr \(-1.0\) must be positive, or None"):
        load((ModelConfig, TrainConfig), ["--muon_lr=-1"])


def test_an_older_run_keeps_its_numbers(data, tmp_path):
    """A checkpoint from before rates could be left open has numbers, and they stay."""
    a = runs.run(data, tmp_path / "a", muon_lr=1e-3, adamw_lr=2e-3, max_steps=2)
    runs.run(data, a, muon_lr=None, adamw_lr=None, max_steps=4, init_from="resume")
    _, cfg = load((ModelConfig, TrainConfig), [str(a / "config.json")])
    assert (cfg.muon_lr, cfg.adamw_lr) == (1e-3, 2e-3)


if __name__ == "__main__":
    print_the_check()
