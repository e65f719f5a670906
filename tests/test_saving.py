"""When a run saves, which of its models is the best, and what it does about numbers that are none."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import runs
import torch
from safetensors.torch import load_file

import train
from model import GPT
from stack.checkpoint import tensors as checkpoint
from stack.log import draw


def test_saved_before_the_last_evaluation(data, tmp_path, monkeypatch):
    """With intervals longer than the run, and an evaluation that dies, the trained weights are on disk."""
    monkeypatch.setattr(train, "evaluate", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.run(data, tmp_path / "run", max_steps=3, eval_interval=1000, save_interval=1000)
    assert runs.progress(tmp_path / "run")["step"] == 3
    checkpoint.load_model(tmp_path / "run")


def test_a_failing_sample_costs_the_sample(data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "generate", lambda *args, **kwargs: 1 / 0)
    with pytest.warns(UserWarning, match="a sample failed") as caught:
        out = runs.run(data, tmp_path / "run", max_steps=4, sample_interval=2)
    assert len(caught) == 1 and runs.progress(out)["step"] == 4


def scripted(values):
    """An evaluate that finds these losses in turn."""
    left = list(values)
    return lambda *args, **kwargs: {"loss": left.pop(0), "ppl": 1.0, "bpb": 1.0, "tokens": 1, "bytes": 1}


def test_best(data, tmp_path, monkeypatch):
    """best is the lowest held-out loss; NaN never is, neither first nor later; a resumed run knows the old one."""
    nan = math.nan
    monkeypatch.setattr(train, "evaluate", scripted([nan, 3.0, 2.5, nan, 2.7, 2.6]))
    out = runs.run(data, tmp_path / "run", max_steps=6, eval_interval=1)
    assert (runs.progress(out, "ckpt_best")["step"], runs.progress(out, "ckpt_best")["best_val"]) == (3, 2.5)
    assert [line["val_loss"] for line in runs.log(out, key="val_loss")] == [None, 3.0, 2.5, None, 2.7, 2.6]
    monkeypatch.setattr(train, "evaluate", scripted([2.6, 2.55, 2.4, 2.9]))  # made again at 6, then 7, 8, 9
    runs.run(data, out, max_steps=9, eval_interval=1, init_from="resume")
    assert (runs.progress(out, "ckpt_best")["step"], runs.progress(out, "ckpt_best")["best_val"]) == (8, 2.4)


def test_best_found_after_the_last_save(data, tmp_path, monkeypatch):
    """A run that died between an evaluation and the next save does not forget the best it had found."""
    monkeypatch.setattr(train, "evaluate", scripted([3.0, 2.0]))
    monkeypatch.setattr(train.RunLog, "close", lambda log, **options: None)

    def die(step):
        if step == 5:
            raise KeyboardInterrupt
        return False
    runs.at(monkeypatch, die)
    with pytest.raises(KeyboardInterrupt):
        runs.run(data, tmp_path / "run", eval_interval=2, save_interval=3)
    assert runs.progress(tmp_path / "run")["step"] == 3 and runs.progress(tmp_path / "run")["best_val"] == 3.0
    monkeypatch.undo()
    monkeypatch.setattr(train, "evaluate", scripted([2.5, 2.1]))
    runs.run(data, tmp_path / "run", eval_interval=2, save_interval=3, init_from="resume")
    assert runs.progress(tmp_path / "run", "ckpt_best")["best_val"] == 2.0


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_bad_gradient_is_skipped(data, tmp_path, monkeypatch, optimizer):
    """One step with an inf changes neither weights nor moments, is told, is null in the log, and training goes on."""
    runs.at(monkeypatch, lambda step: step == 3)
    out = runs.run(data, tmp_path / "run", max_steps=4, save_interval=3, keep=9, optimizer=optimizer)
    before, after = (load_file(out / name / "model.safetensors") for name in ("ckpt_step_0000003", "ckpt_last"))
    assert all(torch.equal(before[k], after[k]) for k in before)
    before, after = (torch.load(out / name / "optim.pt", weights_only=True)["optimizers"]
                     for name in ("ckpt_step_0000003", "ckpt_last"))
    assert all(torch.equal(v, after[k]["state"][n]) for k, e in before.items() for n, v in e["state"].items())
    assert [line["grad_norm"] is None for line in runs.log(out)] == [False, False, False, True]
    assert runs.progress(out)["bad_steps"] == 1
    monkeypatch.undo()
    runs.run(data, out, max_steps=6, init_from="resume", optimizer=optimizer)
    assert runs.progress(out)["bad_steps"] == 0 and runs.log(out)[-1]["grad_norm"] > 0


def test_a_bad_loss_is_skipped(data, tmp_path, monkeypatch, capsys):
    """A loss that is NaN with a gradient that is finite, as of a target outside the vocabulary on a GPU: no step."""
    forward, calls = GPT.forward, []

    def damaged(self, ids, targets=None, **options):
        calls.append(self.training and targets is not None)
        return forward(self, ids, targets, **options) + (math.nan if sum(calls) == 4 and calls[-1] else 0.0)
    monkeypatch.setattr(GPT, "forward", damaged)
    out = runs.run(data, tmp_path / "run", max_steps=4, eval_interval=0, save_interval=1, keep=9, micro_batch_size=8)
    first, bad, last = (load_file(out / f"ckpt_step_000000{step}/model.safetensors")["embed.weight"]
                        for step in (2, 3, 4))
    assert runs.progress(out, "ckpt_last")["bad_steps"] == 1 and torch.equal(bad, last) and not torch.equal(first, bad)
    assert "the loss is not finite" in capsys.readouterr().out


def test_giving_up(data, tmp_path, monkeypatch, capsys):
    """After max_bad_steps in a row the run ends with exit code 1 and names the last good checkpoint, which still is:
    amid bad steps nothing is saved over it."""
    runs.at(monkeypatch, lambda step: step >= 4)
    configs = runs.settings(data, tmp_path / "run", max_steps=20, save_interval=1, max_bad_steps=3)
    monkeypatch.setattr(train, "load", lambda *args, **kwargs: configs)
    with pytest.raises(SystemExit) as exit_code:
        train.main()
    error = capsys.readouterr().err
    assert exit_code.value.code == 1 and "3 steps in a row" in error and "Traceback" not in error
    assert f"{tmp_path / 'run' / 'ckpt_last'} (step 4)" in error
    assert runs.progress(tmp_path / "run") == {**runs.progress(tmp_path / "run"), "step": 4, "bad_steps": 0}


def test_giving_up_before_the_first_save(data, tmp_path, monkeypatch):
    runs.at(monkeypatch, lambda step: True)
    with pytest.raises(train.RunFailed, match="No checkpoint was saved"):
        runs.run(data, tmp_path / "run", max_steps=20, max_bad_steps=2)


@pytest.mark.parametrize("fails", [{3}, {6}])
def test_full_disk_while_saving(data, tmp_path, monkeypatch, capsys, fails):
    """A save that fails on the way is told and tried again at the next interval; the last one failing is exit 1."""
    real = torch.save

    def save(what, path):
        if step[0] in fails:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(what, path)
    monkeypatch.setattr(torch, "save", save)
    step = [0]
    runs.at(monkeypatch, lambda s: step.__setitem__(0, s + 1))
    configs = runs.settings(data, tmp_path / "run", save_interval=3)
    if fails == {6}:
        monkeypatch.setattr(train, "load", lambda *args, **kwargs: configs)
        with pytest.raises(SystemExit) as exit_code:
            train.main()
        assert exit_code.value.code == 1 and "No space left" in capsys.readouterr().err
    else:
        train.run(*configs)
        assert "No space left on device" in (told := capsys.readouterr().out) and "tries again" in told
    assert runs.progress(tmp_path / "run")["step"] == (3 if fails == {6} else 6)
    checkpoint.load_model(tmp_path / "run")
    assert list((tmp_path / "run").glob("*.new")) == list((tmp_path / "run").glob("*.replaced")) == []


def test_a_new_run_keeps_the_old_ones(data, tmp_path, capsys):
    """Training from scratch into a used folder moves all that was there aside, and says so before the first step; the
    third run is as safe as the second."""
    logs = []
    for seed in (1, 2, 3):
        out = runs.run(data, tmp_path / "run", max_steps=2, eval_interval=1, seed=seed)
        said = capsys.readouterr().out
        assert (f"moved to {out / 'previous' / str(seed - 1)}: ckpt_best, ckpt_last, config.json, log.jsonl" in
                said.partition("step      1/2")[0]) == (seed > 1)
        logs.append(runs.log(out))
    assert sorted(p.name for p in (out / "previous").iterdir()) == ["1", "2"]
    for folder, lines in zip((out / "previous/1", out / "previous/2", out), logs, strict=True):
        assert runs.log(folder) == lines and runs.progress(folder)["step"] == 2
        assert {"ckpt_best", "config.json", "loss.png", "report.html"} <= {p.name for p in folder.iterdir()}
    finetuned = runs.run(data, out, init_from=str(out / "previous/1"), max_steps=1)  # a run folder like any other
    assert runs.progress(finetuned)["step"] == 1


def test_shorter_than_its_warm_up(data, tmp_path, capsys):
    """--max_steps alone makes a short run: its warm-up is a tenth of it, said and saved; a longer one has its own."""
    out = runs.run(data, tmp_path / "run", max_steps=20, warmup_steps=100, decay_fraction=0.4)
    assert "warm-up takes 2 of the 20 steps, and not 100" in (said := capsys.readouterr().out)
    assert "decay the last 8" in said and "warmup_steps=2*" in said
    scales = [line["lr_scale"] for line in runs.log(out)]
    assert scales[:3] == [0.5, 1.0, 1.0] and scales[-1] < 0.2
    assert json.loads((out / "config.json").read_text())["warmup_steps"] == 2
    runs.run(data, out, max_steps=100, warmup_steps=100, init_from="resume", save_interval=0)
    assert "warm-up takes" not in capsys.readouterr().out and runs.log(out)[20]["lr_scale"] == pytest.approx(0.21)


def test_the_loss_of_a_line(plain, data, tmp_path, monkeypatch):
    """It is the mean over all tokens since the last line, of which a step with more of them has more."""
    def mask(x, y):
        return x, torch.where(y % 3 == 0, -100, y)
    runs.spy_batches(monkeypatch, mask)
    same = dict(max_steps=12, z_loss=0.0)
    each = runs.log(runs.run(data, tmp_path / "each", **same))
    lines = runs.log(runs.run(data, tmp_path / "lines", log_interval=5, **same))
    tokens = [0] + [line["tokens"] for line in each]
    nats = [line["loss"] * (b - a) for line, a, b in zip(each, tokens, tokens[1:], strict=False)]
    assert [line["step"] for line in lines] == [5, 10, 12] and len(set(np.diff(tokens))) > 1
    for line, first, last in zip(lines, (0, 5, 10), (5, 10, 12), strict=True):
        assert line["loss"] == pytest.approx(sum(nats[first:last]) / (tokens[last] - tokens[first]), rel=1e-9)


def test_the_loss_before_the_first_step(plain, data, tmp_path):
    """--eval_first: the untrained model's, or that of the one to finetune, in log and curve; training is the same."""
    same = dict(max_steps=5, dropout=0.1, decay_fraction=0)
    out = runs.run(data, tmp_path / "run", eval_first=True, **same)
    first, = runs.log(out, key="val_loss")
    assert first["step"] == first["tokens"] == 0 and first["val_loss"] == pytest.approx(math.log(320), abs=0.2)
    assert runs.log(out, key="loss") == runs.log(plain, key="loss")[:5]
    tuned = runs.run(data, tmp_path / "tuned", eval_first=True, init_from=str(plain), max_steps=1, eval_interval=1)
    held = runs.log(tuned, key="val_loss")
    assert [line["step"] for line in held] == [0, 1]
    assert held[0]["val_loss"] == pytest.approx(runs.log(plain, key="val_loss")[-1]["val_loss"], rel=1e-6)
    drawn = draw([tuned]).axes[0].lines
    assert [line.get_xdata().tolist() for line in drawn if line.get_label().endswith("held out")] == [[0, 1]]
