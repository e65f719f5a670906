"""Faults at length, the long form of test_faults.py and test_prepare_continued.py: each many times, in one table.

    make faults                                    all of them, some 10 minutes on two cores and 4 GB of disk
    python tests/faults.py kills disk              some of them, by name

"survived" counts the times when what was to happen did: the run went on or ended as it should, the resumed run was that
of an uninterrupted one to the bit.  "lost" is work done twice because of the fault.  Exit code 1 if anything did not
survive.  A fault that this machine cannot inject (no root for a small tmpfs) says so and injects nothing.
"""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/parallel")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import runs  # noqa: E402
import test_faults  # noqa: E402
import test_parallel  # noqa: E402
from test_faults import wait_for  # noqa: E402

import train  # noqa: E402
from prepare import verify  # noqa: E402


def kills(data, folder, n=50):
    """SIGKILL at random moments of a run that saves every step; it is resumed each time"""
    seen = test_faults.kill_and_resume(data, folder, n, random.Random(1), max_steps=400)
    straight = runs.run(data, folder / "straight", max_steps=400, save_interval=1, eval_interval=5, keep=2)
    runs.assert_same_checkpoint(straight, folder / "run")
    assert runs.log(straight) == runs.log(folder / "run")
    rest = {p.name for p in (folder / "run").iterdir()} - {p.name for p in straight.iterdir()}
    assert not rest, rest
    return n, seen["kills"], f"{seen['steps lost']} steps ({seen['amid a save']} kills fell into a save)"


def signals(data, folder, n=20):
    """SIGTERM or SIGINT at random moments: exit code 0 within a step, saved; resumed each time"""
    rng, survived, step = random.Random(2), 0, 0
    configs = runs.settings(data, folder / "run", max_steps=10**6, decay_fraction=0)
    for i in range(n):
        output = folder / f"output.{i}"
        process = runs.start(configs, output, *["--init_from=resume"] * (i > 0))
        wait_for(output, f"step {step + rng.randint(1, 5):>6}/")
        time.sleep(rng.uniform(0, 0.05))
        os.kill(process.pid, (signal.SIGTERM, signal.SIGINT)[i % 2])
        code, = runs.finish(process)
        logged, step = runs.log(folder / "run", key="loss")[-1]["step"], runs.progress(folder / "run")["step"]
        survived += code == 0 and logged == step
    assert [line["step"] for line in runs.log(folder / "run", key="loss")] == list(range(1, step + 1))
    return n, survived, "0 steps"


def ranks(data, folder, n=5):
    """SIGKILL one of two ranks: the other ends within 30 s with an error; the job is resumed each time"""
    rng, survived, lost, step = random.Random(3), 0, 0, 0
    configs = runs.settings(data, folder / "run", max_steps=60, save_interval=3)
    for i in range(n + 1):
        output, flags = folder / f"output.{i}", ["--init_from=resume"] * (i > 0)
        processes = runs.start_ranks(2, configs, output, *flags)
        if i == n:
            assert runs.finish(*processes) == [0, 0], output.with_name(f"{output.name}.0").read_text()
            break
        wait_for(output.with_name(f"{output.name}.0"), f"step {max(step, 3) + rng.randint(1, 5):>6}/")
        processes[i % 2].kill()
        asked = time.monotonic()
        codes = runs.finish(*processes)
        survived += codes[1 - i % 2] not in (0, None) and time.monotonic() - asked < 30
        step = runs.progress(folder / "run")["step"]
        lost += runs.log(folder / "run", key="loss")[-1]["step"] - step
    configs = runs.settings(data, folder / "straight", max_steps=60, save_interval=3)
    assert runs.finish(*runs.start_ranks(2, configs, folder / "out")) == [0, 0]
    runs.assert_same_checkpoint(folder / "straight", folder / "run")
    return n, survived, f"{lost} steps, saving every 3"


def gradients(data, folder, n=5):
    """an inf in the gradient of one of two ranks: both skip that step and stay equal"""
    survived = 0
    for i in range(n):
        (folder / str(i)).mkdir()
        out = test_parallel.run_ranks(data, folder / str(i), prepare=test_parallel.spoil_a_gradient_on_rank_1,
                                      **test_parallel.SAME | dict(seed=i))
        survived += [line["step"] for line in runs.log(out, key="loss") if line["grad_norm"] is None] == [3]
    return n, survived, f"{n} steps, skipped"


def paced():
    """In the process: 20 steps a second, and a line on stdout at each."""
    schedule = train.schedule
    train.schedule = lambda cfg, step: print(f"at {step}.", flush=True) or time.sleep(0.05) or schedule(cfg, step)


@contextlib.contextmanager
def small_disk(folder, size):
    """A folder with a disk of its own of `size`, such as 4m; None where this machine does not allow that."""
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder])


def disk(data, folder, n=5):
    """the disk fills up during a run and is emptied again: the run goes on and saves at the next interval"""
    with small_disk(folder / "small", "4m") as mount:
        if mount is None:
            return 0, 0, "not injected: a small tmpfs needs root"
        configs = runs.settings(data, mount / "run", max_steps=10**6, save_interval=2, decay_fraction=0)
        output, survived, step = folder / "output", 0, 0
        process = runs.start(configs, output, prepare=paced)
        for i in range(n):
            wait_for(output, f"at {step + 4}.")
            with open(mount / "ballast", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
                while True:
                    ballast.write(bytes(1 << 14))
            end = time.monotonic() + 60
            while output.read_text().count("could not be saved") < i + 1 and time.monotonic() < end:
                time.sleep(0.01)
            before = runs.progress(mount / "run")["step"]
            (mount / "ballast").unlink()
            while runs.progress(mount / "run")["step"] <= before and time.monotonic() < end:
                time.sleep(0.01)
            step = runs.progress(mount / "run")["step"]
            survived += step > before
        process.terminate()
        assert runs.finish(process) == [0], output.read_text()
        return n, survived, "0 steps"


def damage(data, folder, n=60):
    """a byte flipped or the end cut off, in weights, moments or shards: refused by name, and nothing is changed"""
    rng, survived, set_folder = random.Random(6), 0, folder / "data"
    shutil.copytree(data, set_folder)
    out = runs.run(data, folder / "run", max_steps=2)
    files = [out / "ckpt_last" / "model.safetensors", out / "ckpt_last" / "optim.pt", set_folder / "train_000000.bin"]
    for i in range(n):
        file = files[i % 3]
        whole = file.read_bytes()
        at = rng.randrange(len(whole))
        file.write_bytes(whole[:at] + (bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1:]) * (i % 2))
        try:
            verify(set_folder) if file.suffix == ".bin" else runs.run(data, out, max_steps=4, init_from="resume")
        except ValueError as error:
            survived += str(file) in str(error)
        file.write_bytes(whole)
    verify(set_folder)
    runs.run(data, out, max_steps=4, init_from="resume")
    assert [line["step"] for line in runs.log(out, key="loss")] == [1, 2, 3, 4]
    return n, survived, "0 steps"


def prepare(data, folder, n=20):
    """SIGKILL at random moments of prepare.py; the same command continues each time, to the same bytes"""
    command = [sys.executable, str(ROOT / "prepare.py"), "stdlib", "--vocab_size", "2048", "--shard_tokens", "300000"]
    began = time.monotonic()
    subprocess.run([*command, "--out", folder / "straight"], check=True, capture_output=True)
    whole, rng, killed = time.monotonic() - began, random.Random(4), 0
    while True:
        process = subprocess.Popen([*command, "--out", folder / "killed"], stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(0.2, whole) if killed < n else None)
            assert process.returncode == 0
            if killed >= n:
                break
            shutil.rmtree(folder / "killed")  # it was faster than the kills: once more from the start
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    for path in (folder / "straight").iterdir():
        assert path.read_bytes() == (folder / "killed" / path.name).read_bytes(), path.name
    assert len(list((folder / "straight").iterdir())) == len(list((folder / "killed").iterdir()))
    return n, killed, "0 tokens"


def prepare_disk(data, folder, n=5):
    """the disk is full while prepare.py writes: a sentence, exit code 2; with room it continues, byte for byte"""
    command = [sys.executable, str(ROOT / "prepare.py"), "stdlib", "--tokenizer", data, "--shard_tokens", "500000"]
    subprocess.run([*command, "--out", folder / "straight"], check=True, capture_output=True)
    whole = sum(path.stat().st_size for path in (folder / "straight").iterdir())
    survived = 0
    with small_disk(folder / "small", whole // 4) as mount:
        if mount is None:
            return 0, 0, "not injected: a small tmpfs needs root"
        for i in range(n + 1):
            done = subprocess.run([*command, "--out", mount / "out"], capture_output=True, text=True)
            survived += done.returncode == 2 and "is full" in done.stderr and "Traceback" not in done.stderr
            room = whole // 4 + (i + 1) * whole // 2 // n if i < n - 1 else 2 * whole
            subprocess.run(["mount", "-o", f"remount,size={room}", mount], check=True)
        assert done.returncode == 0, done.stderr
        for path in (folder / "straight").iterdir():
            assert path.read_bytes() == (mount / "out" / path.name).read_bytes(), path.name
    return n, survived, "0 tokens"


def memory(data, folder, size=2 * 10**9, limit_mb=600):
    """2 GB of text through prepare.py, which may not allocate more than 600 MB and must not be resident with more"""
    text = "".join(p.read_text(errors="ignore") for p in sorted(Path(os.__file__).parent.glob("*.py")))
    rng, written = random.Random(5), 0
    with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
        while written < size:
            start = rng.randrange(len(text) - 20_000)
            document = f"{written}\n{text[start:start + rng.randrange(1_000, 20_000)]}"
            written += file.write(json.dumps({"text": document}) + "\n")

    def cap():  # of heap, stacks and anonymous maps: beyond it the system refuses more
        resource.setrlimit(resource.RLIMIT_DATA, (limit_mb * 10**6, limit_mb * 10**6))
    command = [sys.executable, str(ROOT / "prepare.py"), str(folder / "corpus.jsonl"), "--out", str(folder / "data")]
    with open(folder / "output", "w") as output:
        process, peak = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=cap), 0
    while process.poll() is None:
        with contextlib.suppress(OSError, IndexError):  # it has just ended
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6  # the highest it has ever been
        time.sleep(0.2)
    assert process.returncode == 0, (folder / "output").read_text()[-1000:]
    return 1, int(0 < peak <= limit_mb), f"0 tokens, peak {peak:,.0f} MB"


def main():
    faults = {f.__name__: f for f in (kills, signals, ranks, gradients, damage, disk, prepare,
                                         prepare_disk, memory)}
    unknown = set(sys.argv[1:]) - faults.keys()
    if unknown:
        sys.exit(f"faults.py: there is no {', '.join(sorted(unknown))}. There is: {', '.join(faults)}.")
    rows, sound = [], True
    with tempfile.TemporaryDirectory() as scratch:
        data = runs.make_data(Path(scratch) / "data")
        for name in sys.argv[1:] or faults:
            folder, began = Path(scratch) / name, time.monotonic()
            folder.mkdir()
            print(f"{name}: {faults[name].__doc__} ...", file=sys.stderr, flush=True)
            with open(os.devnull, "w") as quiet:  # the runs in this process talk
                out, sys.stdout = sys.stdout, quiet
                try:
                    injected, survived, lost = faults[name](data, folder)
                except (AssertionError, TimeoutError, subprocess.CalledProcessError) as error:
                    injected, survived, lost = "?", f"no: {error}"[:300], "?"
                finally:
                    sys.stdout = out
            sound = sound and injected == survived
            rows.append((faults[name].__doc__, injected, survived, lost, f"{time.monotonic() - began:.0f}"))
    print("| fault | injected | survived | lost | seconds |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    sys.exit(not sound)


if __name__ == "__main__":
    main()
