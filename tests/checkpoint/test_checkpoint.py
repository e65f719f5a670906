"""Checkpoints: whole or absent whatever interrupts a save, refused by file name when damaged, exact when loaded."""

import dataclasses
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

from stack.checkpoint import folder as on_disk
from stack.checkpoint import tensors
from stack.checkpoint.folder import go_back, read_state, recover, start_fresh
from stack.checkpoint.tensors import load_model, load_optimizers, load_weights, save
from stack.data.tokenizer import PATTERN, SPECIALS, Tokenizer
from stack.optim import make_optimizers
from stack.train_config import TrainConfig

FILES = ["model.safetensors", "optim.pt", "state.json", "tokenizer.json"]


def make_tokenizer(specials=SPECIALS) -> Tokenizer:
    return Tokenizer(PATTERN, {bytes([i]): i for i in range(256)}, {name: 256 + i for i, name in enumerate(specials)})


def write(run_dir, model, step=1, name="ckpt_last", **more):
    options = dict(tokenizer=make_tokenizer(), train_cfg=TrainConfig(), state={"progress": {"step": step}})
    save(run_dir, name, model=model, model_cfg=tensors.unwrap(model).cfg, **{**options, **more})


def fill(model, value: float):
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def train(model, optimizers, seeds):
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=g)
        for opt in optimizers:
            opt.step()


def edit_weights(folder, change):
    """Rewrite model.safetensors and make state.json vouch for it: a file from elsewhere, not a damaged one."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    file.unlink()
    save_file(tensors, file)
    state = json.loads((folder / "state.json").read_text())
    state["files"]["model.safetensors"] = {"bytes": file.stat().st_size, "sha256": on_disk._sha256(file)}
    del state["checksum"]
    (folder / "state.json").write_text(json.dumps(state))


# --- what is stored -------------------------------------------------------------------------------------------------


def test_round_trip(tiny, tmp_path):
    model = tiny(dropout=0.1)
    write(tmp_path / "run", model, optimizers=make_optimizers(model), state={"progress": {"step": 7}, "data": "f"})
    assert os.listdir(tmp_path / "run") == ["ckpt_last"] and sorted(os.listdir(tmp_path / "run/ckpt_last")) == FILES
    assert len({(tmp_path / "run/ckpt_last" / file).stat().st_mode for file in FILES}) == 1
    os.rename(tmp_path / "run", tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere", tmp_path / "elsewhere/ckpt_last", str(tmp_path / "elsewhere")):
        loaded, tokenizer, state = load_model(path)
        assert same(loaded, model) and not loaded.training and loaded.cfg == model.cfg
        assert tokenizer.encode("hé <|end|>") == make_tokenizer().encode("hé <|end|>")
        assert state["progress"]["step"] == 7 and state["data"] == "f" and state == read_state(path)
        assert state["train"] == dataclasses.asdict(TrainConfig()) and state["tokenizer"] == tokenizer.fingerprint
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids), model.eval()(ids))


@pytest.mark.parametrize("saved, wanted", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_dtype_converts_on_the_way(tiny, tmp_path, saved, wanted):
    model = tiny().to(saved)
    write(tmp_path, model)
    loaded, _, _ = load_model(tmp_path, dtype=wanted)
    assert {p.dtype for p in loaded.parameters()} == {wanted}
    assert all(torch.equal(a.to(wanted), b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_only_tensors_and_plain_values(tiny, tmp_path):
    model = tiny()
    state = {"progress": {"step": np.int64(3), "best_val": np.float64(2.5)}, "where": tmp_path,
             "loss": torch.tensor(1.5)}
    write(tmp_path, model, optimizers=make_optimizers(model), state=state)
    stored = read_state(tmp_path)
    assert stored["progress"] == {"step": 3, "best_val": 2.5}
    assert (stored["where"], stored["loss"]) == (str(tmp_path), 1.5)
    torch.load(tmp_path / "ckpt_last/optim.pt", weights_only=True)
    with pytest.raises(TypeError, match="plain values only, no set"):
        write(tmp_path, model, state={"progress": {"step": 4}, "seen": {1, 2}})
    assert read_state(tmp_path)["progress"]["step"] == 3


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "mixed"])
def test_wrapper_prefixes_are_stripped(tiny, tmp_path, prefix):
    model = tiny()
    write(tmp_path, model)
    prefixes = ["", "module.", "_orig_mod.module."] if prefix == "mixed" else [prefix]
    edit_weights(tmp_path / "ckpt_last", lambda tensors: {
        prefixes[i % len(prefixes)] + key: t for i, (key, t) in enumerate(tensors.items())})
    assert same(load_model(tmp_path)[0], model)


def test_only_leading_prefixes_are_stripped(tiny, tmp_path):
    for name in ("inner.module.weight", "module_norm.weight", "blocks.0.module"):
        assert tensors.plain_name(f"module.{name}") == tensors.plain_name(name) == name
    write(tmp_path, tiny())
    edit_weights(tmp_path / "ckpt_last", lambda t: {**t, "module.norm.weight": t["norm.weight"].clone()})
    with pytest.raises(ValueError, match="twice"):
        load_weights(tiny(), tmp_path)


def test_wrapped_models_save_plain_names(tiny, tmp_path):
    model, plain = tiny(), tiny()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        write(tmp_path, torch.compile(torch.nn.parallel.DistributedDataParallel(model)))
    finally:
        torch.distributed.destroy_process_group()
    model.blocks[0] = torch.compile(model.blocks[0])
    write(tmp_path, torch.compile(model), name="ckpt_best", optimizers=make_optimizers(model))
    for name in ("last", "best"):
        assert set(load_file(tmp_path / f"ckpt_{name}/model.safetensors")) == set(plain.state_dict())
    assert set(torch.load(tmp_path / "ckpt_best/optim.pt")["optimizers"]) == {n for n, _ in plain.named_parameters()}
    load_weights(torch.compile(fill(plain, 0)), tmp_path)
    assert same(plain, model)


def test_everything_that_does_not_fit_is_listed(tiny, tmp_path):
    model = tiny()
    write(tmp_path, model)
    edit_weights(tmp_path / "ckpt_last", lambda t: {
        "extra.weight": torch.zeros(1), "norm.weight": torch.zeros(65),
        **{k: v for k, v in t.items() if k not in ("norm.weight", "blocks.1.attn.wq.weight")}})
    before = fill(tiny(), 0.5)
    with pytest.raises(ValueError) as error:
        load_weights(before, tmp_path)
    for part in ("missing: blocks.1.attn.wq.weight", "unexpected: extra.weight",
                 "norm.weight is (65,), the model's (64,)"):
        assert part in str(error.value)
    assert same(before, fill(tiny(), 0.5))  # nothing was copied


# --- the tied table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"],
                                   ["module.head.weight"]])
def test_a_tied_table_is_stored_once_and_read_under_either_name(tiny, tmp_path, names):
    model = tiny()
    write(tmp_path, model)
    assert "head.weight" not in load_file(tmp_path / "ckpt_last/model.safetensors")
    edit_weights(tmp_path / "ckpt_last", lambda t: {**{k: v for k, v in t.items() if k != "embed.weight"},
                                                    **{name: t["embed.weight"].clone() for name in names}})
    loaded, _, _ = load_model(tmp_path)
    assert same(loaded, model) and loaded.head_weight is loaded.embed.weight


def test_tables_that_differ_cannot_be_tied_nor_one_be_split(tiny, tmp_path):
    write(tmp_path / "tied", tiny())
    with pytest.raises(ValueError, match=r"missing: head.weight \(the file's tables are tied"):
        load_weights(tiny(tie_embeddings=False), tmp_path / "tied")
    untied = tiny(tie_embeddings=False)
    write(tmp_path / "untied", untied)
    assert same(load_model(tmp_path / "untied")[0], untied)
    with pytest.raises(ValueError, match="embed.weight and head.weight differ"):
        load_weights(tiny(), tmp_path / "untied")


# --- optimizer state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_resumed_steps_are_the_straight_run_s(tiny, tmp_path, optimizer):
    straight, resumed = tiny(), fill(tiny(), 9)
    opts = make_optimizers(straight, optimizer=optimizer)
    train(straight, opts, range(3))
    write(tmp_path, straight, optimizers=opts)
    train(straight, opts, range(3, 6))
    again = make_optimizers(resumed, optimizer=optimizer, adamw_lr=1.0)
    load_weights(resumed, tmp_path)
    assert load_optimizers(tmp_path, resumed, again) == []
    assert again[-1].param_groups[0]["lr"] == 1.0  # hyper-parameters are the new run's
    for new, old in zip(again, opts, strict=True):
        for group, wanted in zip(new.param_groups, old.param_groups, strict=True):
            group["lr"] = wanted["lr"]
    train(resumed, again, range(3, 6))
    assert same(straight, resumed)


@pytest.mark.parametrize("first, second", [(True, False), (False, True)])
def test_fused_and_plain_resume_each_other(tiny, tmp_path, first, second):
    straight, resumed = tiny(), tiny()
    opt = torch.optim.AdamW(straight.parameters(), lr=1e-3, fused=first)
    train(straight, [opt], range(3))
    write(tmp_path, straight, optimizers=[opt])
    again = torch.optim.AdamW(reversed(list(resumed.parameters())), lr=1e-3, fused=second)  # order does not matter
    load_weights(resumed, tmp_path)
    load_optimizers(tmp_path, resumed, [again])
    train(straight, [opt], range(3, 5))
    train(resumed, [again], range(3, 5))
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_state_goes_by_name_and_what_does_not_fit_is_listed(tiny, tmp_path):
    model = tiny()
    opts = make_optimizers(model)
    train(model, opts, range(2))
    write(tmp_path, model, optimizers=opts)
    untied = tiny(tie_embeddings=False, vocab_size=400)
    with pytest.raises(ValueError) as error:
        load_optimizers(tmp_path, untied, make_optimizers(untied))
    assert "head.weight is not there" in str(error.value) and "embed.weight is of another shape" in str(error.value)
    again = make_optimizers(untied)
    assert load_optimizers(tmp_path, untied, again, strict=False) == ["embed.weight", "head.weight"]
    name = "blocks.1.mlp.w_up.weight"
    new, old = (muon.state[m.get_parameter(name)]["momentum_buffer"]
                for muon, m in ((again[0], untied), (opts[0], model)))
    assert torch.equal(new, old) and untied.embed.weight not in again[1].state
    train(untied, again, range(2))  # fresh and restored state side by side
    with pytest.raises(ValueError, match="is Muon's, the run uses AdamW"):
        load_optimizers(tmp_path, model, make_optimizers(model, optimizer="adamw"))


def test_optimizers_that_never_stepped(tiny, tmp_path):
    model = tiny()
    write(tmp_path, model, optimizers=make_optimizers(model))
    assert load_optimizers(tmp_path, model, make_optimizers(model)) == []


def test_loss_scaler_is_kept_and_may_be_absent(tiny, tmp_path):
    model = tiny()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaler.scale(torch.ones(1))
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 2})
    write(tmp_path / "with", model, optimizers=(), scaler=scaler)
    write(tmp_path / "without", model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    new = torch.amp.GradScaler("cpu")
    load_optimizers(tmp_path / "with", model, [], new)
    assert (new.get_scale(), new.state_dict()["_growth_tracker"]) == (1024.0, 2)
    for run, to in (("without", new), ("with", torch.amp.GradScaler("cpu", enabled=False)), ("with", None)):
        load_optimizers(tmp_path / run, model, [], to)
    assert new.get_scale() == 1024.0


# --- damage ---------------------------------------------------------------------------------------------------------


def damage(folder, file, how):
    path = folder / file
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 4
    elif how == "cut":
        data = data[:len(data) // 2]
    path.unlink()
    if how != "remove":
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file_is_named(tiny, tmp_path, file, how):
    model = tiny()
    write(tmp_path, model, optimizers=make_optimizers(model))
    damage(tmp_path / "ckpt_last", file, how)
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        load_model(tmp_path)
        load_optimizers(tmp_path, model, make_optimizers(model))
    assert str(tmp_path / "ckpt_last" / file) in str(error.value)


def test_an_edited_state_is_refused_unless_meant(tiny, tmp_path):
    write(tmp_path, tiny(), step=1234)
    file = tmp_path / "ckpt_last/state.json"
    text = file.read_text()
    file.write_text(text.replace('"step": 1234', '"step": 1235'))
    with pytest.raises(ValueError, match="damaged or was edited.*\n.*checksum"):
        read_state(tmp_path)
    state = json.loads(text.replace('"step": 1234', '"step": 1235'))
    del state["checksum"]
    file.write_text(json.dumps(state))
    assert read_state(tmp_path)["progress"]["step"] == 1235


def test_another_tokenizer_in_the_folder_is_refused(tiny, tmp_path):
    write(tmp_path, tiny())
    make_tokenizer((*SPECIALS, "<|new|>")).save(tmp_path / "ckpt_last")
    with pytest.raises(ValueError) as error:
        load_model(tmp_path)
    assert "tokenizer.json" in str(error.value) and "state.json" in str(error.value)


def test_unknown_versions_and_settings_are_refused(tiny, tmp_path):
    write(tmp_path, tiny())
    file = tmp_path / "ckpt_last/state.json"
    state = json.loads(file.read_text())
    del state["checksum"]  # an edit on purpose
    for change, says in (({"format": 99}, "format 99"), ({"model": {**state["model"], "n_experts": 8}}, "n_experts")):
        file.write_text(json.dumps({**state, **change}))
        for read in (load_model, read_state):
            with pytest.raises(ValueError, match=says):
                read(tmp_path)


@pytest.mark.parametrize("key", ["model", "train", "tokenizer", "files"])
def test_a_state_that_lacks_something_is_damaged(tiny, tmp_path, key):
    write(tmp_path, tiny())
    file = tmp_path / "ckpt_last/state.json"
    state = json.loads(file.read_text())
    del state["checksum"], state[key]
    file.write_text(json.dumps(state))
    with pytest.raises(ValueError, match=f"state.json is damaged.*{key}"):
        read_state(tmp_path)


# --- interruption ---------------------------------------------------------------------------------------------------


def expect(run_dir, steps, *others):
    """A reader gets one of `steps`, whole; after recovery nothing but whole checkpoints stands there, and `others`."""
    def read(name="ckpt_last"):
        model, _, state = load_model(Path(run_dir) / name)
        step = state["progress"]["step"]
        assert step in steps and all((p == step).all() for p in model.parameters())
        return step
    step = read()
    recover(run_dir)
    assert read() == step
    for name in {*os.listdir(run_dir)} - {*others}:
        assert name == "ckpt_last" or name == f"ckpt_step_{read(name):07d}"


class Killed(BaseException):
    """Not an Exception: nothing after it runs, as after SIGKILL."""


def count_calls(monkeypatch, *names, **more) -> dict:
    """Count the calls of these functions of os, and of those by the name of their module; see killed_before."""
    counter = {"calls": 0, "stop_at": None}

    def counted(owner, name):
        original = getattr(owner, name)

        def call(*args, **kw):
            counter["calls"] += 1
            if counter["calls"] == counter["stop_at"]:
                raise Killed
            return original(*args, **kw)
        monkeypatch.setattr(owner, name, call)
    for name in names:
        counted(os, name)
    for name, owner in more.items():
        counted(owner, name)
    return counter


def killed_before(counter, n: int, act) -> bool:
    """Whether act() was ended before the nth of the calls that are counted, or got through."""
    counter |= {"calls": 0, "stop_at": n}
    try:
        act()
    except Killed:
        return True
    finally:
        counter["stop_at"] = None
    return False


@pytest.mark.parametrize("keep", [0, 1])
def test_killed_before_any_call_that_touches_the_disk(tiny, tmp_path, monkeypatch, keep):
    """Deterministic form of SIGKILL: stop before the 1st, 2nd, ... call of a save, until one gets through."""
    model = tiny()
    counter = count_calls(monkeypatch, "rename", "fsync", "replace", "mkdir", "unlink", "rmdir", "link", save=torch)
    for n in range(1, 99):
        write(tmp_path, fill(model, 1), step=1, keep=keep)
        if not killed_before(counter, n, lambda: write(tmp_path, fill(model, 2), step=2, keep=keep)):
            break
        expect(tmp_path, (1, 2))
    assert 10 < n < 98
    expect(tmp_path, (2,))


def test_first_save_killed_leaves_nothing_behind(tiny, tmp_path, monkeypatch):
    def killed(*args, **kw):
        raise Killed
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(torch, "save", killed)
        write(tmp_path, tiny())
    assert os.listdir(tmp_path) == ["ckpt_last.new"]
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path)
    recover(tmp_path)
    assert os.listdir(tmp_path) == []


SAVER = f"""
import os, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}, {str(ROOT / 'tests/checkpoint')!r}]
import torch
torch.set_num_threads(1)
from conftest import tiny_config
from model import GPT
from stack.optim import make_optimizers
from test_checkpoint import fill, train, write
from stack.checkpoint.folder import read_state, recover
run_dir, model = sys.argv[1], GPT(tiny_config())
opts = make_optimizers(model)
train(model, opts, [0])
for line in sys.stdin:  # one process per line, forked: importing torch anew takes seconds
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        os.waitpid(pid, 0)
        continue
    recover(run_dir)
    step = read_state(run_dir)["progress"]["step"] if os.path.exists(run_dir) else 0
    while True:
        step += 1
        write(run_dir, fill(model, step), step=step, optimizers=opts)
        time.sleep(0.02)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sigkill_at_random_moments_of_a_run_that_always_saves(tmp_path):
    """Eight kills; in between, readers look while the run saves; each start goes on from where the last one was."""
    script, run_dir, chance = tmp_path / "saver.py", tmp_path / "run", random.Random(0)
    script.write_text(SAVER)
    server = subprocess.Popen([sys.executable, script, run_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def reached():
        try:
            return read_state(run_dir)["progress"]["step"]
        except FileNotFoundError:
            return 0
    step = 0
    for _ in range(8):
        server.stdin.write(b"start\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        while reached() <= step:
            time.sleep(0.001)
        for _ in range(3):
            time.sleep(chance.uniform(0, 0.03))
            model, _, state = load_model(run_dir)  # while it is being replaced
            assert all((p == state["progress"]["step"]).all() for p in model.parameters())
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        step = reached()
    server.stdin.close()
    assert server.wait() == 0
    expect(run_dir, (reached(),))


@pytest.mark.parametrize("module, after", [(on_disk, "_parse_state"), (tensors, "verify")])
def test_a_save_in_the_middle_of_a_load(tiny, tmp_path, monkeypatch, module, after):
    """Never the state of one checkpoint with the weights of another."""
    write(tmp_path, fill(tiny(), 1), step=1)
    original = getattr(module, after)

    def replaced_meanwhile(*args):
        result = original(*args)
        if args[-1] in (tmp_path / "ckpt_last", "model.safetensors"):
            monkeypatch.setattr(module, after, original)
            write(tmp_path, fill(tiny(), 2), step=2)
        return result
    monkeypatch.setattr(module, after, replaced_meanwhile)
    expect(tmp_path, (2,))


def half(*args, **kw):
    Path(args[1]).write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wrapped(*args, **kw):
    Path(args[1]).write_bytes(b"half")
    raise RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 64 vs 0")


@pytest.mark.parametrize("failure, number", [(half, errno.ENOSPC), (wrapped, errno.EIO)])
def test_a_write_that_fails_halfway(tiny, tmp_path, monkeypatch, failure, number):
    model = tiny()
    write(tmp_path, fill(model, 1), step=1)
    with monkeypatch.context() as patch, pytest.raises(OSError) as error:
        patch.setattr(torch, "save", failure)
        write(tmp_path, fill(model, 2), step=2)
    assert error.value.errno == number
    assert str(tmp_path) in str(error.value) and "MiB are needed" in str(error.value)
    assert os.listdir(tmp_path) == ["ckpt_last"]
    expect(tmp_path, (1,))
    write(tmp_path, fill(model, 3), step=3)  # once there is room again
    expect(tmp_path, (3,))


def test_a_full_disk_is_seen_before_anything_is_written(tiny, tmp_path, monkeypatch):
    model = tiny()
    write(tmp_path, fill(model, 1), step=1)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="1 MiB are needed.*0 MiB are free") as error:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        patch.setattr(torch, "save", None)
        write(tmp_path, fill(model, 2), step=2)
    assert error.value.errno == errno.ENOSPC
    expect(tmp_path, (1,))


def test_a_folder_that_cannot_be_written(tiny, tmp_path, monkeypatch):
    model = tiny()
    write(tmp_path, fill(model, 1), step=1)
    make = Path.mkdir

    def refuse(self, *args, **kw):
        if self.name == "ckpt_last.new":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return make(self, *args, **kw)
    with monkeypatch.context() as patch, pytest.raises(PermissionError, match="Permission denied.*\n.*MiB are needed"):
        patch.setattr(Path, "mkdir", refuse)
        write(tmp_path, fill(model, 2), step=2)
    expect(tmp_path, (1,))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not be saved: [^.]*[.]\n"):  # and nothing about one before it
        write(tmp_path / "file", model)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs RLIMIT_FSIZE")
def test_the_system_refuses_to_write_more(tiny, tmp_path):
    """A real failure inside the writers, at several sizes: they report it in three different exception types."""
    import resource
    model = tiny()
    opts = make_optimizers(model)
    train(model, opts, [0])
    write(tmp_path, fill(model, 1), step=1, optimizers=opts)
    sizes = {file: (tmp_path / "ckpt_last" / file).stat().st_size for file in FILES}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (100, sizes["model.safetensors"] // 2, sizes["optim.pt"] - 10):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            with pytest.raises(OSError, match="could not be saved.*The one before it is intact") as error:
                write(tmp_path, fill(model, 2), step=2, optimizers=opts)
            assert error.value.errno == errno.EFBIG or limit > sizes["model.safetensors"]  # torch.save hides the number
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        expect(tmp_path, (1,))


# --- several checkpoints --------------------------------------------------------------------------------------------


def test_numbered_checkpoints_are_kept_and_pruned(tiny, tmp_path):
    model = tiny()
    for step in (5, 100, 9_999_999, 10_000_000, 10_000_001):
        write(tmp_path, fill(model, step % 97), step=step, keep=2)
    write(tmp_path, model, step=20_000_000, name="ckpt_best", keep=2)  # of which no copies are kept
    assert sorted(os.listdir(tmp_path)) == ["ckpt_best", "ckpt_last", "ckpt_step_10000000", "ckpt_step_10000001"]
    loaded, _, state = load_model(tmp_path, which="step_10000000")
    assert state["progress"]["step"] == 10_000_000 and (loaded.embed.weight == 10_000_000 % 97).all()
    write(tmp_path, model, step=12)  # keep=0 leaves older ones alone
    assert len(os.listdir(tmp_path)) == 4
    write(tmp_path, model, step=13, keep=9)
    assert (tmp_path / "ckpt_step_0000013/model.safetensors").samefile(tmp_path / "ckpt_last/model.safetensors")


def test_without_hard_links_numbered_checkpoints_are_copies(tiny, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(errno.EPERM, "no links here")
    monkeypatch.setattr(os, "link", refuse)
    write(tmp_path, fill(tiny(), 3), step=3, keep=1)
    assert (load_model(tmp_path, which="step_0000003")[0].embed.weight == 3).all()


def test_which_checkpoint_is_meant(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.*\n.*train.py"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="ckpt_last not found"):
        load_model(tmp_path)
    for name, step in (("ckpt_step_0000009", 9), ("ckpt_step_0000010", 10), ("ckpt_best", 3), ("ckpt_last", 5)):
        write(tmp_path, tiny(), step=step, name=name)
        expected = {9: 9, 10: 10, 3: 3, 5: 5}[step]
        assert read_state(tmp_path)["progress"]["step"] == expected  # last before best before the newest number
    assert read_state(tmp_path, "best")["progress"]["step"] == 3
    assert read_state(tmp_path / "ckpt_step_0000009")["progress"]["step"] == 9
    with pytest.raises(FileNotFoundError, match="There is: .*ckpt_best"):
        read_state(tmp_path, "bets")
    with pytest.raises(FileNotFoundError, match="There is: .*ckpt_best"):
        read_state(tmp_path / "ckpt_bets")


def test_a_new_run_in_an_old_folder_keeps_the_old_ones(tiny, tmp_path):
    """Whatever a run left, checkpoints or only a log, is kept under a number of its own; what is no run's stays."""
    assert start_fresh(tmp_path) == start_fresh(tmp_path / "absent") == ""  # nothing there yet
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path / "previous", tiny(), step=77)  # as it was kept once, without a number
    write(tmp_path, tiny(), step=1)
    write(tmp_path, tiny(), step=1, name="ckpt_best")
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert start_fresh(tmp_path).endswith(f"moved to {tmp_path / 'previous/1'}: ckpt_best, ckpt_last, log.jsonl")
    assert sorted(os.listdir(tmp_path)) == ["notes.txt", "previous"]
    write(tmp_path, tiny(), step=2)
    start_fresh(tmp_path)
    for name, step in (("1", 1), ("2", 2), (".", 77)):
        assert read_state(tmp_path / "previous" / name)["progress"]["step"] == step
    (tmp_path / "log.jsonl").touch()
    assert start_fresh(tmp_path) == ""  # a start that never saved or logged costs nothing
    (tmp_path / "log.jsonl").write_text("{}\n")
    assert start_fresh(tmp_path) and os.listdir(tmp_path / "previous/3") == ["log.jsonl"]


def test_going_back_killed_anywhere(tiny, tmp_path, monkeypatch):
    """Before any of its calls that touch the disk: the run stands at the chosen step or where it was, nothing is lost,
    and the same command does what is left."""
    model, counter = tiny(), count_calls(monkeypatch, "rename", "fsync", "mkdir", "unlink", "rmdir", "link")
    for n in range(1, 99):
        run_dir = tmp_path / str(n)
        for step in (2, 4, 6):
            write(run_dir, fill(model, step), step=step, keep=9)
        through = not killed_before(counter, n, lambda run_dir=run_dir: go_back(run_dir, "ckpt_step_0000004"))
        recover(run_dir)
        assert read_state(run_dir)["progress"]["step"] in ((4,) if through else (4, 6))
        go_back(run_dir, "ckpt_step_0000004")
        assert sorted(p.name for p in run_dir.glob("ckpt_*")) == ["ckpt_last", "ckpt_step_0000002", "ckpt_step_0000004"]
        kept = {(p.name, read_state(p)["progress"]["step"]) for p in run_dir.glob("previous/*/ckpt_*")}
        assert kept == {("ckpt_last", 6), ("ckpt_step_0000006", 6)}
        expect(run_dir, (2, 4), "previous")
        if through:
            break
    assert 10 < n < 98


def nfs(monkeypatch):
    """A folder as a network file system has it: what a process has open is not deleted but renamed, and keeps its
    folder from being removed.  Returns the list of open files."""
    unlink, opened = os.unlink, set()

    def silly(path, *, dir_fd=None):
        stat = os.stat(path, dir_fd=dir_fd)
        if (stat.st_dev, stat.st_ino) in opened:
            os.rename(path, f".nfs{stat.st_ino}", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            unlink(path, dir_fd=dir_fd)
    monkeypatch.setattr(os, "unlink", silly)
    return opened


def test_saves_go_on_while_somebody_reads(tiny, tmp_path, monkeypatch):
    """On a network file system, where the checkpoint that is replaced or pruned cannot be deleted: every save is whole
    and in its place, and once nobody reads any more the rest is gone."""
    opened, model = nfs(monkeypatch), tiny()
    write(tmp_path, fill(model, 1), step=1, keep=2)
    opened |= {((s := p.stat()).st_dev, s.st_ino) for p in tmp_path.rglob("*") if p.is_file()}
    for step in range(2, 7):
        write(tmp_path, fill(model, step), step=step, keep=2)
        assert read_state(tmp_path)["progress"]["step"] == step
        stat = (tmp_path / "ckpt_last/model.safetensors").stat()
        opened.add((stat.st_dev, stat.st_ino))
        assert sorted(p.name for p in tmp_path.glob("ckpt_*")) == ["ckpt_last"] + [
            f"ckpt_step_{n:07d}" for n in (step - 1, step)]
    assert list((tmp_path / ".removed").rglob(".nfs*"))
    opened.clear()
    recover(tmp_path)
    assert ".removed" not in os.listdir(tmp_path)


def test_pruning_that_fails_is_no_failed_save(tiny, tmp_path, monkeypatch):
    """Whatever keeps an old numbered checkpoint from going away, by renaming or at all."""
    rename, rmtree = os.rename, shutil.rmtree

    def refuse(source, target):
        if Path(source).name == "ckpt_step_0000001":
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **options: Path(folder).name == "ckpt_step_0000001" or rmtree(
        folder, **options))
    for step in (1, 2, 3):
        write(tmp_path, fill(tiny(), step), step=step, keep=1)
    assert read_state(tmp_path)["progress"]["step"] == 3
    assert sorted(os.listdir(tmp_path)) == ["ckpt_last", "ckpt_step_0000001", "ckpt_step_0000003"]
