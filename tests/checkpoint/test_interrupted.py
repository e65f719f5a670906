"""Checkpoints are whole or absent whatever interrupts a save; which of several is meant; what becomes of the others."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from written import FILES, fill, train, write

from stack.checkpoint import folder as on_disk
from stack.checkpoint import tensors
from stack.checkpoint.folder import go_back, read_state, recover, start_fresh
from stack.checkpoint.tensors import load_model
from stack.optim import make_optimizers

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
from written import fill, train, write
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
