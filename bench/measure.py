"""How the row of a table is measured and printed.

A time means little without its neighbours: whatever slows the machine today slows every row.  So a table is always
one sitting, every row runs in a process of its own (no allocator, compiler cache or thread pool warmed by the row
before), the first call is thrown away (compilation, first touch) and the median of the others counts.  Peak memory is
what a call needs above its inputs, or a training step above the imports: on CUDA the allocator's own peak; on Linux the
kernel's high-water mark of resident memory, set back before the call, after freed memory was returned.
"""

import contextlib
import ctypes
import datetime
import gc
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch

from stack.config import ROOT
from stack.device import machine

# What is timed for the ceilings: far beyond any cache, and long against starting a kernel
MATMUL_SIZE, READ_BYTES = {"cpu": 2048, "cuda": 8192}, {"cpu": 1 << 30, "cuda": 8 << 30}


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call, device, repeats: int) -> list[float]:
    """Wall-clock of each of `repeats` calls, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times


def reset_peak(device):
    """Forget the highest use of memory so far.  Returns a function: MiB of the highest use since the last reset above
    what is in use now, None where it cannot be measured."""
    def resident(key):  # bytes; VmRSS: now, VmHWM: the highest
        return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        now, highest = torch.cuda.memory_allocated(device), lambda: torch.cuda.max_memory_allocated(device)
    elif device.type == "cpu" and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the warm-up freed is not what the call needs
        Path("/proc/self/clear_refs").write_text("5")  # 5: set the high-water mark back to now
        now, highest = resident("VmRSS"), lambda: resident("VmHWM")
    else:
        return lambda: None
    # not below 0: where memory is short the system takes back pages of libraries that were in use at the reset
    return lambda: max(round((highest() - now) / 2**20, 1), 0.0)


def matmul_rate(device, dtype) -> float:
    """FLOP/s of one large square matmul, the machine's practical ceiling."""
    size = MATMUL_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / statistics.median(seconds(lambda: torch.mm(a, b, out=out), device, 9))


def read_rate(device) -> float:
    """Bytes/s at which one large tensor is summed: as fast as weights can be read."""
    x = torch.ones(READ_BYTES[device.type] // 4, device=device)
    return x.nbytes / statistics.median(seconds(x.sum, device, 5))


def copy_rate(device) -> float:
    """Bytes/s, read and written, of copying one large tensor."""
    a, b = torch.ones(2, READ_BYTES[device.type] // 8, device=device)
    return 2 * a.nbytes / statistics.median(seconds(lambda: a.copy_(b), device, 5))


def spread(times: list[float]) -> dict:
    return dict(seconds=statistics.median(times), seconds_min=min(times), seconds_max=max(times))


def choose(args, rows: list[str]) -> list[str]:
    """Those of the rows that were asked for."""
    chosen = args.rows.split(",") if args.rows else rows
    if unknown := [row for row in chosen if row not in rows]:
        raise ValueError(f"there is no row {unknown[0]!r} here. Choose from: {', '.join(rows)}.")
    return chosen


def run_row(command: list[str], row: str, timeout: float | None = None, cache: str | None = None) -> dict:
    """What `bench COMMAND --row NAME` prints, in a process of its own; {"row", "failed": why} where it fails, "late"
    where it was not ready in time; "before": the lines of `bench gpu` that it printed before that one.

    cache: a folder for what was compiled, where the first call's time does not matter.  What else the process leaves in
    the folder for temporary files goes with it.
    """
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as fresh:
            run = subprocess.Popen([sys.executable, "-m", "bench", *command, "--row", row], cwd=ROOT, errors="replace",
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0,
                                   env={**os.environ, "TMPDIR": fresh, "TORCHINDUCTOR_CACHE_DIR": cache or fresh})
            try:
                # what it started may hold its output open after it
                threading.Thread(target=lambda: (run.wait(), end_group(run)), daemon=True).start()
                out, err = run.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                end_group(run)
                out = ""
                with contextlib.suppress(subprocess.TimeoutExpired):  # what waits in the driver cannot be killed
                    out, _ = run.communicate(timeout=10)
                return dict(row=row, failed=f"not ready after {timeout:.0f} s", late=True, **printed(objects(out)))
            finally:
                end_group(run)
    except OSError as error:  # no place for its files, no process
        return dict(row=row, failed=f"{type(error).__name__}: {error}")
    if run.returncode:
        lines = err.strip().splitlines() or [f"exit code {run.returncode}"]
        raised = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception): |bench: ", line)]
        failed = beginning("\n".join(lines[raised[-1] if raised else -1:]))
        if run.returncode < 0 and err.strip():  # killed: what it said last need not be why
            failed = f"exit code {run.returncode}, said last: {lines[-1]}"
        return dict(row=row, failed=failed, **printed(objects(out)))
    for line in err.splitlines():
        if "compiled" in line and "Warning" in line:  # a row that says compiled and is not
            print(f"bench: row {row!r}: {line}", file=sys.stderr)
    found = objects(out)
    if not found:
        return dict(row=row, failed="it printed no result")
    result = found[-1] | printed(found[:-1])
    if result.get("compiled") is False:
        print(f"bench: row {row!r}: nothing is compiled", file=sys.stderr)
    return result


def printed(found: list[dict]) -> dict:
    """before: a row's lines of `bench gpu` that found no place in its file; or nothing."""
    before = [line for line in found if line.get("bench") == "gpu"]
    return dict(before=before) if before else {}


def end_group(run):
    """Kill a row's process, and what it started: where it was killed itself, nothing else would end that."""
    with contextlib.suppress(ProcessLookupError, PermissionError, AttributeError):  # the last: Windows has none
        os.killpg(run.pid, signal.SIGKILL)
    run.kill()


def objects(text: str) -> list[dict]:
    """Those of the lines that are JSON objects: train.py, too, writes into a row's output."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found += [json.loads(line)] if line.startswith("{") else []
    return found


def beginning(text: str) -> str:
    """An error's first line, and the following ones where it only announces them: \"... in loading state_dict:\"."""
    told = []
    for line in text.strip().splitlines():
        told.append(line.strip())
        if not line.rstrip().endswith(":") or len(told) == 4:
            break
    return " ".join(told)


@contextlib.contextmanager
def listening():
    """A list of what is warned of meanwhile, as text, each shown once."""
    heard, show = [], warnings.showwarning

    def hear(message, *where, **more):
        if str(message) not in heard:
            heard.append(str(message))
            show(message, *where, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = hear
        yield heard


def uncompiled(heard: list[str]) -> dict:
    """compiled=False where compiling was tried, failed, and was gone on without; else nothing."""
    return dict(compiled=False) if any(re.match("nothing (is|can be) compiled", text) for text in heard) else {}


def run_rows(args, device, rows: list[str], table, derive=None, cache: str | None = None, **facts) -> bool:
    """Run each row, let derive add to its object, and print table(all of them), or with --json each at once together
    with facts.  A row that fails is reported and left out; returns whether one did."""
    results = []
    for row in rows:
        result = run_row([*sys.argv[1:], f"--folder={args.folder}"], row, cache=cache)
        if "failed" in result:
            print(f"bench: row {row!r} failed: {result['failed']}", file=sys.stderr)
            continue
        if derive:
            derive(result)
        results.append(result)
        if args.json:
            print_json(args.command, device, **result, **facts, repeats=args.repeats)
    if results and not args.json:
        print_table(device, *table(results))
    return len(results) < len(rows)


def print_json(bench: str, device, **row):
    print(json.dumps(dict(bench=bench, **row, device=machine(device), torch=torch.__version__,
                          date=str(datetime.date.today()))), flush=True)


def cell(x: dict, key) -> str:
    """x[key], or key(x) of a function; a key with % behind it is a share; what is None or not there is empty."""
    value = key(x) if callable(key) else x.get(key.rstrip("%"))
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(key, str) and key.endswith("%"):
        return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_table(device, what: str, columns: dict, results: list[dict]):
    """A markdown table, header -> key as in `cell`, under what was measured where, how and when.  Empty columns go."""
    print(f"{what}. {machine(device)}, torch {torch.__version__}, {datetime.date.today()}, "
          f"`python -m bench {shlex.join(sys.argv[1:])}`:\n")
    filled = [[name, *(cell(x, key) for x in results)] for name, key in columns.items()]
    filled = [[text.ljust(max(map(len, column))) for text in column] for column in filled if any(column[1:])]
    header, *body = ["| " + " | ".join(line) + " |" for line in zip(*filled, strict=True)]
    print(header, "|" + "|".join("-" * (len(column[0]) + 2) for column in filled) + "|", *body, sep="\n", flush=True)
