"""Whatever ends a run, the resumed one is the run that never ended: stops, kills, full disks, changed settings."""

import json
import math
import os
import random
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import runs
import torch
from safetensors.torch import load_file

import train
from model import ModelConfig
from stack import spikes
from stack.checkpoint import folder
from stack.checkpoint.folder import read_state
from stack.config import load
from stack.train_config import TrainConfig

# ---------------------------------------------------------------------------------------------------------------------
# Exact resume


def stop_at(monkeypatch, *steps):
    """A SIGTERM to this process during each of these steps."""
    runs.at(monkeypatch, lambda step: step + 1 in steps and os.kill(os.getpid(), signal.SIGTERM))


SETUPS = {
    "muon": {},
    "adamw": dict(optimizer="adamw", schedule="cosine", grad_clip=0.3),
    "accumulation": dict(micro_batch_size=1, doc_mask=False),
    "dropout": dict(dropout=0.2, tie_embeddings=False),
    "gpt2": dict(pos="learned", norm="layernorm", mlp="gelu", bias=True, qk_norm=False, dropout=0.1),
    "fp16": dict(dtype="float16"),
    "bf16": dict(dtype="bfloat16"),
    "best_fit": dict(packing="best_fit"),
    "lines": dict(log_interval=4, eval_first=True),
    "epochs": dict(),  # 160 sequences of a data set of 62
}


@pytest.mark.parametrize("setup", SETUPS)
def test_20_steps_are_7_and_6_and_7(data, tmp_path, monkeypatch, setup):
    """Weights, moments, scaler, log lines, batches, best and evaluations are those of the straight run, to the bit."""
    if setup == "epochs":
        data = runs.make_data(tmp_path / "data", train_tokens=2000)
    changes = SETUPS[setup] | dict(max_steps=20, eval_interval=7, sample_interval=13, eval_tokens=256, warmup_steps=3)
    batches = runs.spy_batches(monkeypatch)
    straight = runs.run(data, tmp_path / "straight", **changes)
    expected = batches.copy()
    del batches[:]
    for init_from, stop in (("scratch", 7), ("resume", 13), ("resume", None)):
        with monkeypatch.context() as patch:
            stop_at(patch, stop)
            runs.run(data, tmp_path / "parts", init_from=init_from, **changes)
        assert runs.progress(tmp_path / "parts")["step"] == (stop or 20)
    assert batches == expected
    runs.assert_same_checkpoint(straight, tmp_path / "parts")
    runs.assert_same_checkpoint(straight, tmp_path / "parts", "ckpt_best")
    assert runs.log(straight) == runs.log(tmp_path / "parts")


def test_dropout_depends_on_the_position_alone(data, tmp_path, monkeypatch):
    """Random numbers drawn by anything else between steps change nothing; every micro step has a seed of its own."""
    seeds, manual_seed = [], torch.manual_seed
    monkeypatch.setattr(torch, "manual_seed", lambda seed: seeds.append(seed) or manual_seed(seed))
    one = runs.log(runs.run(data, tmp_path / "one", dropout=0.3, max_steps=3))
    assert len(set(seeds)) == len(seeds) == 1 + 3 * 4
    runs.at(monkeypatch, lambda step: torch.rand(step + 1) is None)
    assert runs.log(runs.run(data, tmp_path / "two", dropout=0.3, max_steps=3)) == one


def test_a_finished_run_has_nothing_to_do(data, tmp_path, capsys):
    """Resuming it says so, changes no file and succeeds; with a longer horizon it goes on."""
    out = runs.run(data, tmp_path / "run", max_steps=3, eval_interval=1)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    for max_steps in (3, 2):
        runs.run(data, out, max_steps=max_steps, eval_interval=1, init_from="resume")
        assert f"nothing to do: {out / 'ckpt_last'} is at step 3 of {max_steps}" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    runs.run(data, out, max_steps=4, eval_interval=1, init_from="resume")
    assert [line["step"] for line in runs.log(out, key="loss")] == [1, 2, 3, 4]


def test_a_new_horizon(data, tmp_path, capsys):
    """The rate is the new schedule's at the resumed step, and the run says what that means."""
    out = runs.run(data, tmp_path / "run", max_steps=10, schedule="cosine", adamw_lr=1e-3)
    runs.run(data, out, max_steps=20, schedule="cosine", adamw_lr=1e-3, init_from="resume")
    at_10 = (1 + math.cos(math.pi * 8 / 18)) / 2
    assert runs.log(out)[10]["lr"] == pytest.approx(at_10 * 1e-3)
    told = capsys.readouterr().out
    assert "changed since the checkpoint: max_steps 10 -> 20" in told
    assert f"cosine over 20 steps: {at_10:.3g} of its peak here, where the old one had 0" in told


def spike_at(monkeypatch, *steps):
    """A gradient 30, then 900 times as long in these steps, judged after so few steps as a test can wait for."""
    monkeypatch.setattr(spikes, "LEAST", 5)
    runs.at(monkeypatch, lambda step: 30.0 ** (1 + steps.index(step + 1)) if step + 1 in steps else None)


@pytest.mark.parametrize("skip", [0, 8, 1e4])
def test_spikes(data, tmp_path, monkeypatch, capsys, skip):
    """A finite spike is said, logged and counted; with --skip_spikes the step leaves weights and moments alone, if it
    is high enough.  What is usual is part of the checkpoint: stopped before and after, the run is the straight one."""
    same = dict(max_steps=20, warmup_steps=3, save_interval=1, keep=20, skip_spikes=skip, log_interval=4)
    with monkeypatch.context() as patch:
        spike_at(patch, 12, 16)
        straight = runs.run(data, tmp_path / "straight", **same)
    assert [(line["step"], line["skipped"]) for line in runs.log(straight, key="spike")] == [
        (12, skip == 8), (16, skip == 8)]
    assert [line["spikes"] for line in runs.log(straight, key="loss")] == [0, 0, 1, 2, 2]
    said = capsys.readouterr().out
    assert "step 11: spike 1, a gradient norm of" in said and said.count("; skipped") == (2 if skip == 8 else 0)
    before, after = (load_file(straight / f"ckpt_step_00000{step}" / "model.safetensors") for step in (11, 12))
    assert all(torch.equal(before[name], after[name]) for name in before) == (skip == 8)
    for init_from, max_steps in (("scratch", 9), ("resume", 12), ("resume", 14), ("resume", 20)):
        with monkeypatch.context() as patch:
            spike_at(patch, 12, 16)
            real = train.schedule
            patch.setattr(train, "schedule", lambda cfg, step, real=real, stop=max_steps: (
                step + 1 == stop < 20 and os.kill(os.getpid(), signal.SIGTERM), real(cfg, step))[1])
            runs.run(data, tmp_path / "parts", init_from=init_from, **same)
        assert runs.progress(tmp_path / "parts")["step"] == max_steps
    runs.assert_same_checkpoint(straight, tmp_path / "parts")
    assert runs.log(straight) == runs.log(tmp_path / "parts")


def test_from_a_chosen_checkpoint(data, tmp_path, capsys):
    """resume:ckpt_step_N is the run itself from there, to the bit; what was later, and the log of it, stand aside and
    are in nobody's way, whatever the new line becomes."""
    same = dict(max_steps=10, save_interval=2, keep=9, eval_interval=3, log_interval=4, decay_fraction=0)
    straight, out = (runs.run(data, tmp_path / name, **same) for name in ("straight", "run"))
    runs.run(data, out, init_from="resume:ckpt_step_4", **same)
    assert "goes back to ckpt_step_0000004, step 4: what is later moves to" in capsys.readouterr().out
    runs.assert_same_checkpoint(straight, out)
    runs.assert_same_checkpoint(straight, out, "ckpt_best")
    assert runs.log(straight) == runs.log(out) == runs.log(out / "previous/1")
    for name in ("ckpt_last", "ckpt_best", "ckpt_step_0000006", "ckpt_step_0000010"):
        runs.assert_same_checkpoint(straight, out / "previous/1", name)

    runs.run(data, out, init_from="resume:ckpt_step_0000006", **same | dict(max_steps=7, muon_lr=1e-4))
    steps = {path.name: runs.progress(out, path.name)["step"] for path in out.glob("ckpt_*")}
    assert steps.pop("ckpt_last") == 7 and max(steps.values()) <= 7
    assert [line["step"] for line in runs.log(out)][-1] == 7 and len(runs.log(out / "previous/2")) == len(
        runs.log(straight))
    runs.run(data, out, init_from="resume", **same | dict(muon_lr=1e-4))  # and goes on as any other
    assert runs.progress(out)["step"] == 10
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    with pytest.raises(FileNotFoundError, match="ckpt_step_0000005 not found.*\n.*There is: .*ckpt_step_0000004"):
        runs.run(data, out, init_from="resume:ckpt_step_0000005", **same | dict(max_steps=12))
    with pytest.raises(ValueError, match="seed 1337 -> 7"):
        runs.run(data, out, init_from="resume:ckpt_step_0000004", **same | dict(seed=7))
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


def test_a_branch(data, tmp_path, monkeypatch):
    """init_from=RUN/ckpt_step_N with keep_moments: its weights and moments at step 0 of a schedule of its own, data
    from their start; without, the weights alone."""
    run = runs.run(data, tmp_path / "run", max_steps=4, save_interval=2, keep=9)
    source, batches = run / "ckpt_step_0000002", runs.spy_batches(monkeypatch)
    start = torch.load(source / "optim.pt", weights_only=True)["optimizers"]
    kept, load = [], train.load_optimizers

    def loaded(path, model, optimizers, *args, **kwargs):
        load(path, model, optimizers, *args, **kwargs)
        kept.append({name: optimizer.state[p] for optimizer in optimizers for name, p in model.named_parameters()
                     if p in optimizer.state})
    monkeypatch.setattr(train, "load_optimizers", loaded)
    for keep in (True, False):
        branch = runs.run(data, tmp_path / f"branch{keep}", init_from=str(source), keep_moments=keep, max_steps=3)
        assert [(line["step"], line["lr_scale"]) for line in runs.log(branch)][:2] == [(1, 0.5), (2, 1.0)]
        assert runs.progress(branch)["seqs_seen"] == 3 * 8
        steps = [entry["state"]["step"] for entry in torch.load(
            branch / "ckpt_last/optim.pt", weights_only=True)["optimizers"].values() if "step" in entry["state"]]
        assert steps and set(map(int, steps)) == {2 + 3 if keep else 3}
    assert len(kept) == 1 and kept[0].keys() == start.keys()
    runs.run(data, tmp_path / "first", max_steps=3)
    assert batches[:12] == batches[12:24] == batches[24:36]
    with pytest.raises(ValueError, match="is Muon's, the run uses AdamW"):
        runs.run(data, tmp_path / "other", init_from=str(source), keep_moments=True, optimizer="adamw")


def test_hyper_parameters_come_from_the_command_line(data, tmp_path, monkeypatch, capsys):
    """Moments are the checkpoint's; rates, decay, betas and batch size are this command's, and the change is told.
    A step of another size goes on behind the sequences that were seen."""
    out = runs.run(data, tmp_path / "run", max_steps=2)
    kept, make = [], train.make_optimizers

    def keep(*args, **kwargs):
        kept.append(make(*args, **kwargs))
        return kept[-1]
    monkeypatch.setattr(train, "make_optimizers", keep)
    batches = runs.spy_batches(monkeypatch)
    runs.run(data, out, max_steps=3, adamw_lr=5e-4, muon_lr=1e-3, weight_decay=0.3, beta2=0.9, batch_tokens=128,
             init_from="resume", decay_fraction=0)
    groups = [group for optimizer in kept[0] for group in optimizer.param_groups]
    assert [(g["peak_lr"], g["lr"], g["weight_decay"]) for g in groups] == [
        (1e-3, 1e-3, 0.3), (5e-4, 5e-4, 0.3), (5e-4, 5e-4, 0.0)]
    assert groups[1]["betas"] == (0.9, 0.9)
    assert "adamw_lr 0.003 -> 0.0005" in (told := capsys.readouterr().out) and "batch_tokens 256 -> 128" in told
    assert runs.progress(out)["seqs_seen"] == 2 * 8 + 4
    resumed = batches[:2]
    del batches[:]
    runs.run(data, tmp_path / "straight", max_steps=3, batch_tokens=256)
    assert resumed == batches[8:10]


CHANGES = {
    "seq_len": (dict(seq_len=16), "seq_len 32 -> 16: windows begin elsewhere"),
    "packing": (dict(packing="best_fit"), "packing 'stream' -> 'best_fit': windows hold other tokens"),
    "seed": (dict(seed=7), "seed 1337 -> 7: the order changes"),
    "optimizer": (dict(optimizer="adamw"), "optimizer 'muon' -> 'adamw': parameters that change hands"),
    "rope_theta": (dict(rope_theta=5e4), "rope_theta 10000.0 -> 50000.0: the weights were trained otherwise"),
    "n_layers": (dict(n_layers=3), "n_layers 2 -> 3"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_another_run_is_refused(data, tmp_path, capsys, change):
    """Refused with the difference, before anything is touched; --allow_changes goes on and says what it gives up,
    except where weights do not fit."""
    changes, told = CHANGES[change]
    out = runs.run(data, tmp_path / "run", max_steps=2)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    with pytest.raises(ValueError) as refusal:
        runs.run(data, out, max_steps=4, init_from="resume", **changes)
    assert told in str(refusal.value) and "--allow_changes" in str(refusal.value)
    allow = dict(max_steps=4, init_from="resume", allow_changes=True, **changes)
    if change == "n_layers":
        with pytest.raises(ValueError, match="blocks.2.*|missing"):
            runs.run(data, out, **allow)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    if change != "n_layers":
        runs.run(data, out, **allow)
        assert f"resumed with {told}" in (said := capsys.readouterr().out)
        assert ("start without optimizer state" in said) == (change == "optimizer")
        state = runs.progress(out)
        assert state["step"] == 4 and state["seqs_seen"] == (64 if change == "seq_len" else 32)


def test_a_setting_younger_than_the_checkpoint_had_its_default(data, tmp_path):
    """A run saved before there was a packing is a stream."""
    out = runs.run(data, tmp_path / "run", max_steps=1, warmup_steps=1)
    state = json.loads((out / "ckpt_last/state.json").read_text())
    del state["checksum"], state["train"]["packing"]
    (out / "ckpt_last/state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="packing 'stream' -> 'best_fit'"):
        runs.run(data, out, init_from="resume", packing="best_fit")


def test_other_data_is_refused(data, tmp_path, capsys):
    """The same tokenizer over other text is other data; best starts anew on it."""
    other = tmp_path / "data"
    other.mkdir()
    meta = json.loads((data / "meta.json").read_text())
    for name in ("tokenizer.json", "train_000000.bin", "val_000000.bin"):
        (other / name).write_bytes((data / name).read_bytes())
    meta["data_fingerprint"] = "f" * 64
    (other / "meta.json").write_text(json.dumps(meta))
    out = runs.run(data, tmp_path / "run", max_steps=2, eval_interval=2)
    with pytest.raises(ValueError, match=r"data '\w{12}' -> 'ffffffffffff': the position is one in the new data"):
        runs.run(other, out, max_steps=4, init_from="resume")
    runs.run(other, out, max_steps=4, init_from="resume", allow_changes=True)
    moved = tmp_path / "moved"
    data_again = data.rename(moved)  # the same data elsewhere is the same data
    try:
        runs.run(moved, tmp_path / "run2", max_steps=1)
        runs.run(moved, tmp_path / "run2", max_steps=2, init_from="resume")
    finally:
        data_again.rename(data)


# ---------------------------------------------------------------------------------------------------------------------
# Signals and kills, on real processes


def slow_steps():
    """In the process: a fifth of a second a step, and a line on stdout at the start of each."""
    schedule = train.schedule

    def slow(cfg, step):
        print(f"at {step}", flush=True)
        time.sleep(0.2)
        return schedule(cfg, step)
    train.schedule = slow


def endless_step():
    schedule = train.schedule

    def slow(cfg, step):
        print(f"at {step}", flush=True)
        while step == 1 and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # as the first signal leaves it
            time.sleep(0.01)
        if step == 1:
            print("asked", flush=True)
            time.sleep(3600)
        return schedule(cfg, step)
    train.schedule = slow


def wait_for(path, text, timeout=600):
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.002)
    raise TimeoutError(f"{path} never said {text!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_saves_and_leaves(data, tmp_path, number):
    """The step is finished, saved and left with exit code 0; resuming ends where the straight run does."""
    configs = runs.settings(data, tmp_path / "run", max_steps=100)
    process = runs.start(configs, tmp_path / "output", prepare=slow_steps)
    wait_for(tmp_path / "output", "at 2")
    os.kill(process.pid, number)
    assert runs.finish(process) == [0]
    step = runs.progress(tmp_path / "run")["step"]
    output = (tmp_path / "output").read_text()
    assert step == int(re.findall(r"^at (\d+)$", output, re.MULTILINE)[-1]) + 1 < 100
    assert f"stopped at step {step} of 100" in output and "Traceback" not in output
    if number == signal.SIGTERM:
        same = dict(max_steps=step + 2, decay_fraction=0)
        runs.run(data, tmp_path / "run", init_from="resume", **same)
        runs.run(data, tmp_path / "straight", **same)
        assert runs.log(tmp_path / "run", key="loss") == runs.log(tmp_path / "straight", key="loss")


def test_a_second_signal_leaves_at_once(data, tmp_path):
    """Also amid a step that takes long; what was saved before is intact."""
    process = runs.start(runs.settings(data, tmp_path / "run", save_interval=1), tmp_path / "output",
                         prepare=endless_step)
    wait_for(tmp_path / "output", "at 1")
    os.kill(process.pid, signal.SIGTERM)
    wait_for(tmp_path / "output", "asked")
    assert process.exitcode is None
    os.kill(process.pid, signal.SIGTERM)
    assert runs.finish(process) == [-signal.SIGTERM]
    assert runs.progress(tmp_path / "run")["step"] == 1


def test_a_signal_amid_an_evaluation(data, tmp_path, monkeypatch):
    """The evaluation is cut short and not logged, the weights are saved; the resumed run evaluates at that step."""
    real, windows = train.iterate_windows, []

    def signalled(*args, **kwargs):
        for i, window in enumerate(real(*args, **kwargs)):
            if i == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            windows.append(i)
            yield window
    monkeypatch.setattr(train, "iterate_windows", signalled)
    out = runs.run(data, tmp_path / "run", eval_interval=2)
    assert windows == [0, 1] and runs.progress(out)["step"] == 2 and runs.log(out, key="val_loss") == []
    monkeypatch.undo()
    runs.run(data, out, eval_interval=2, init_from="resume")
    assert runs.log(out) == runs.log(runs.run(data, tmp_path / "straight", eval_interval=2))


def kill_and_resume(data, folder, kills: int, rng, **changes) -> dict:
    """SIGKILL a run that saves every step at random moments until `kills`, resuming each time; then let it finish.

    Returns what was seen; raises AssertionError where a resumed run did not start from a complete checkpoint.
    """
    configs = runs.settings(data, folder / "run", save_interval=1, eval_interval=5, keep=2, **changes)
    out, seen = folder / "run", {"kills": 0, "amid a save": 0, "steps lost": 0, "starts": 0}
    lower = 0  # a step that was saved once is never lost
    while True:
        flags = ["--init_from=resume"] if out.joinpath("ckpt_last").exists() or list(out.glob("ckpt_last.*")) else []
        output = folder / f"output.{seen['starts']}"
        process = runs.start(configs, output, *flags)
        seen["starts"] += 1
        if seen["kills"] < kills:
            wait_for(output, f"step {lower + rng.randint(1, 8):>6}/")
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, output.read_text()
            seen["kills"] += 1
            seen["amid a save"] += bool([*out.glob("*.new"), *out.glob("*.replaced")])
            if out.exists() and (flags or list(out.glob("ckpt_last*"))):
                step = read_state(out, "last")["progress"]["step"]
                assert step >= lower
                logged = [line["step"] for line in runs.log(out, key="loss")]
                seen["steps lost"] += max(logged[-1] - step, 0) if logged else 0
                lower = step
        else:
            assert runs.finish(process) == [0], output.read_text()
            break
    return seen


def test_sigkill_at_random_moments(data, tmp_path):
    """A run that saves every step and is killed 5 times ends as the straight run, and leaves nothing else behind."""
    seen = kill_and_resume(data, tmp_path, 5, random.Random(3), max_steps=80)
    assert seen["kills"] == 5 and seen["steps lost"] <= 5
    same = dict(max_steps=80, save_interval=1, eval_interval=5, keep=2)
    straight = runs.run(data, tmp_path / "straight", **same)
    runs.assert_same_checkpoint(straight, tmp_path / "run")
    assert runs.log(straight) == runs.log(tmp_path / "run")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == sorted(p.name for p in straight.iterdir())


def test_rest_of_a_cut_off_save_is_cleared_at_the_start(data, tmp_path, monkeypatch):
    """Half-written folders go when the run is resumed, not only at its next save."""
    out = runs.run(data, tmp_path / "run", max_steps=2)
    for rest in ("ckpt_last.new", "ckpt_best.new"):
        (out / rest).mkdir()
        (out / rest / "model.safetensors").write_bytes(b"half")
    left = []
    runs.at(monkeypatch, lambda step: left.extend(p.name for p in out.glob("*.new")))
    runs.run(data, out, max_steps=3, init_from="resume")
    assert left == [] and runs.progress(out)["step"] == 3


def tell_peak():
    """In the process: the highest resident memory so far, on stdout at the start of each step."""
    schedule = train.schedule

    def told(cfg, step):
        status = Path("/proc/self/status").read_text()
        print(f"kB {status.split('VmHWM:')[1].split()[0]} at {step}", flush=True)
        return schedule(cfg, step)
    train.schedule = told


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory")
def test_resuming_needs_no_more_memory_than_the_run(data, tmp_path):
    """Weights and moments are not there twice, or the machine that could train could not resume."""
    big = dict(d_model=384, n_layers=6, n_heads=6, n_kv_heads=6, head_dim=64, d_ff=1536, max_steps=4)  # 14M: 57 + 57 MB
    peaks = []
    for flags, max_steps in (((), 4), (("--init_from=resume",), 8), (("--init_from=resume",), 12)):
        output = tmp_path / f"output.{max_steps}"
        process = runs.start(runs.settings(data, tmp_path / "run", **big | dict(max_steps=max_steps)), output, *flags,
                             prepare=tell_peak)
        assert runs.finish(process) == [0], output.read_text()
        peaks.append(int(re.findall(r"kB (\d+) at", output.read_text())[-1]) / 1e3)
    assert min(peaks[1:]) < 1.03 * peaks[0], peaks  # of two: beside other tests one may come to 1.031


# ---------------------------------------------------------------------------------------------------------------------
# Disks


def small_files():
    """In the process: no file may grow beyond 100 kB, as on a disk that is full; writes fail half way."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def test_no_room_for_the_last_checkpoint(data, tmp_path):
    """Exit code 1 and a message with the place; the checkpoint before it still loads, and with room the run ends."""
    out = runs.run(data, tmp_path / "run", max_steps=2)
    configs = runs.settings(data, out, max_steps=6, save_interval=2)
    process = runs.start(configs, tmp_path / "output", "--init_from=resume", prepare=small_files)
    assert runs.finish(process) == [1]
    output = (tmp_path / "output").read_text()
    assert "tries again the next time" in output and output.count("could not be saved") == 2
    assert "Traceback" not in output and runs.progress(out)["step"] == 2
    runs.run(data, out, max_steps=6, init_from="resume")
    assert [line["step"] for line in runs.log(out, key="loss")] == list(range(1, 7))


def test_a_flipped_byte(data, tmp_path, capsys, monkeypatch):
    """Damaged weights are refused with the file's name and exit code 2, and nothing is overwritten."""
    out = runs.run(data, tmp_path / "run", max_steps=2)
    file = out / "ckpt_last" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    configs = runs.settings(data, out, init_from="resume", max_steps=4)
    monkeypatch.setattr(train, "load", lambda *args, **kwargs: configs)
    with pytest.raises(SystemExit) as exit_code:
        train.main()
    error = capsys.readouterr().err
    assert exit_code.value.code == 2 and str(file) in error and "damaged" in error and "Traceback" not in error
    assert file.read_bytes() == content and len(runs.log(out)) == 2


def test_a_moved_run_goes_on_where_it_is(data, tmp_path):
    """Named as a config, a copy of a run is resumed itself; the run that it was copied from stays as it is."""
    out = runs.run(data, tmp_path / "run", max_steps=2)
    shutil.copytree(out, tmp_path / "copy")
    train.run(*load((ModelConfig, TrainConfig), [str(tmp_path / "copy"), "--init_from=resume", "--max_steps=3"]))
    assert runs.progress(tmp_path / "copy")["step"] == 3 and runs.progress(out)["step"] == 2
    settings = json.loads((tmp_path / "copy/config.json").read_text())
    assert settings["init_from"] == "scratch"  # naming it repeats the run


def test_one_at_a_time(data, tmp_path):
    """Where one trains, another is refused, and afterwards no longer."""
    with folder.occupied(tmp_path / "run"):
        with pytest.raises(OSError, match="another process is training in"):
            runs.run(data, tmp_path / "run", max_steps=2)
    assert not (tmp_path / "run").exists()
    runs.run(data, tmp_path / "run", max_steps=2)
    assert not (tmp_path / "run/.lock").exists()


def test_what_is_damaged_is_in_nobodys_way(data, tmp_path):
    """Damage in a later checkpoint or in the best one, or a file of the user's, stops no resume from a whole one."""
    out = runs.run(data, tmp_path / "run", max_steps=4, save_interval=2, keep=9, eval_interval=2)
    for name in ("ckpt_last", "ckpt_best"):
        (out / name / "state.json").write_text("{")
    (out / "ckpt_notes.txt").touch()
    runs.run(data, out, init_from="resume:ckpt_step_0000002", max_steps=5, save_interval=2, keep=9, eval_interval=2)
    assert runs.progress(out)["step"] == 5 and (out / "previous/1/ckpt_last").is_dir()
    (out / "ckpt_best/state.json").write_text("{")
    runs.run(data, out, init_from="resume", max_steps=6, eval_interval=2)
    assert runs.progress(out)["step"] == 6


def test_removed_is_taken(data, tmp_path):
    """A file of that name, where replaced checkpoints would wait, stops no save."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.removed").touch()
    out = runs.run(data, tmp_path / "run", max_steps=4, save_interval=1)
    assert runs.progress(out)["step"] == 4 and not list(out.glob("*.replaced"))


def test_asked_to_stop_while_it_is_evaluated_at_the_end(data, tmp_path, monkeypatch, capsys):
    """Trained to the end there is nothing to go on with: that the score is missing is said, and how to get it."""
    real = train.evaluate

    def stop_last(*args, **options):
        if runs.progress(out)["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **options)
    monkeypatch.setattr(train, "evaluate", stop_last)
    out = tmp_path / "run"
    runs.run(data, out, max_steps=4, eval_interval=2, save_interval=2)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"saved in {out}, stopped without a last evaluation: python eval.py {out}"
    assert [line["step"] for line in runs.log(out, key="val_loss")] == [2] and runs.progress(out)["step"] == 4
    page = (out / "report.html").read_text(encoding="utf-8")  # of what step its score is
    assert "finished at step 4" in page and re.search(r"<th>held-out loss, nats per token<td>[\d.]+, step 2\n", page)
