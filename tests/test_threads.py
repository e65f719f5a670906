"""Threads: as many as there are cores that nobody else keeps busy, and after a stop as many as before it."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from runs import ROOT

from stack import threads


@pytest.fixture
def cores(monkeypatch, tmp_path):
    """cores(others, own, seconds, n=4): n cores over so many seconds since the start, on which other programs computed
    `others` seconds and this one `own`; a fifth core is not this process's."""
    def kernel(others=0.0, own=0.0, seconds=2.0, n=4):
        def stat(at):
            each = round(100 * at * (others + own) / n)
            rest = f"9999 0 {at * 500} {at * 500} {at * 300}"  # idle, disks, interrupts, other machines
            lines = [f"cpu{i} {each // 2} 0 {each - each // 2} {rest}" for i in range(n)]
            return "\n".join(["cpu  1 2 3 4", *lines, f"cpu{n} {at * 200} 0 0 0", "intr 5 6"])
        monkeypatch.setattr(threads, "STAT", tmp_path / "stat")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(n)), raising=False)
        for at in (0, 1):
            monkeypatch.setattr(threads.time, "monotonic", lambda at=at: 7 + at * seconds)
            monkeypatch.setattr(os, "times", lambda at=at: (at * own / 2, 0, at * own / 2, 0, at * 50))
            (tmp_path / "stat").write_text(stat(at))
            if not at:
                monkeypatch.setattr(threads, "AT_START", threads.read_busy())
    monkeypatch.delenv("OMP_NUM_THREADS")
    return kernel


@pytest.mark.parametrize("others, own, free", [(0, 2, 4), (2, 2, 3), (1.6, 0, 3), (6, 2, 1), (8, 0, 1), (1.2, 2, 4)])
def test_free_cores_are_those_that_no_other_program_uses(cores, others, own, free):
    """Seconds of CPU over two seconds: neither this program's count, nor interrupts', nor those on others' cores."""
    cores(others, own)
    assert threads.free_cores() == free


def test_nothing_is_guessed(cores, monkeypatch, tmp_path):
    """Where the time is too short for the kernel's ticks, or the system says nothing, PyTorch decides."""
    cores(others=0.3, seconds=0.3)
    assert threads.free_cores() is None
    cores(others=6)
    monkeypatch.setattr(threads, "STAT", tmp_path / "none")
    assert threads.read_busy() is None and threads.free_cores() is None
    monkeypatch.delattr(os, "sched_getaffinity")
    assert threads.read_busy() is None


@pytest.mark.parametrize("saved, others, omp, threads_of_run, said", [
    (None, 0, None, 1, ""), (3, 0, None, 3, "3 threads instead of 1: the run had 3 so far"), (None, 8, None, 1, ""),
    (3, 0, "1", 1, "the run had 3 threads so far and goes on with 1: the last digits"),
    (9, 0, None, 4, "4 threads instead of 1: the run had 9 so far")])
def test_a_checkpoints_threads_go_before_those_that_are_free(cores, monkeypatch, saved, others, omp, threads_of_run,
                                                            said):
    """PyTorch has one thread in these tests; what is set lasts as long as the run."""
    cores(others)
    if omp:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    lines, here = [], torch.get_num_threads()
    with contextlib.ExitStack() as at_exit:
        assert threads.take(saved, at_exit, lines.append) == torch.get_num_threads() == threads_of_run
    assert torch.get_num_threads() == here == 1
    assert "".join(lines).startswith(said) and bool(lines) == bool(said)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_beside_a_busy_program_and_after_it(data, tmp_path):
    """Two loops keep both of a run's two cores busy: it computes with one thread, and goes on with one when they have
    ended; OMP_NUM_THREADS decides otherwise."""
    two = set(sorted(os.sched_getaffinity(0))[:2])
    env = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    small = ["train.py", "configs/demo.py", f"--data_dir={data}", f"--out_dir={tmp_path / 'run'}", "--seq_len=16",
             "--micro_batch_size=2", "--batch_tokens=64", "--eval_interval=0", "--sample_interval=0", "--compile=false",
             "--warmup_steps=0", "--dtype=float32"]

    def train(*flags, **more):
        done = subprocess.run([sys.executable, *small, *flags], cwd=ROOT, env=env | more, text=True,
                              capture_output=True, preexec_fn=lambda: os.sched_setaffinity(0, two))
        assert done.returncode == 0, done.stderr
        return done.stdout
    count = subprocess.run([sys.executable, "-c", "import torch; print(torch.get_num_threads())"], env=env, text=True,
                           capture_output=True, preexec_fn=lambda: os.sched_setaffinity(0, two))
    if int(count.stdout) != 2:
        pytest.skip("PyTorch takes the two for one core")
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"],
                              preexec_fn=lambda core=core: os.sched_setaffinity(0, {core})) for core in two]
    try:
        assert "1 thread instead of 2: other programs keep the other cores busy" in train("--max_steps=2")
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    on = ["--init_from=resume", "--decay_fraction=0"]
    assert "1 thread instead of 2: the run had 1 so far" in train(*on, "--max_steps=3")
    assert " instead of 2" not in train(*on, "--max_steps=4", OMP_NUM_THREADS="2")
    assert " instead of 2" not in train(*on, "--max_steps=5")
