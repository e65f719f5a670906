"""How many threads a run's arithmetic has, and how long they wait for each other in a loop.

OpenMP's threads meet after every operation, and who arrives first spins.  Beside another program that keeps a core busy
one of them is late each time, and all lose far more than its share: two threads on two cores make 30 to 42 % of what
they make alone, one thread 64 %.  So the spinning is bounded, in every command, and training takes the cores that
nobody else uses (docs/lab-notes.md has the measurements).  This file is read before torch, and with it OpenMP, loads.

The number of threads changes how sums are ordered, and with it the last digit of a loss: a checkpoint keeps it, and the
run that goes on takes it from there.  OMP_NUM_THREADS, which torchrun sets for several processes, decides instead.
"""

import os
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "3000")

STAT = Path("/proc/stat")
SHORTEST = 0.5  # seconds: over less than that the kernel's clock, which ticks every 10 ms, says too little


def read_busy() -> tuple[float, float, float] | None:
    """(seconds on a clock, CPU seconds of all programs on this process's cores, those of this process and of its
    children that ended); None where the system does not tell."""
    try:
        lines = [line.split() for line in STAT.read_text().splitlines()]
        mine = {f"cpu{n}" for n in os.sched_getaffinity(0)}
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return None
    # user, nice, system of each core; what interrupts and other machines on this one take is nobody's to give back
    busy = sum(int(ticked) for name, *rest in lines if name in mine for ticked in rest[:3]) / ticks
    return time.monotonic(), busy, sum(os.times()[:4])


AT_START = read_busy()


def cores() -> int:
    """Those that this process may use; where the system does not tell, all of the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_cores() -> int | None:
    """Cores of this process of which no other program has kept three quarters busy since the start; None where that
    cannot be told."""
    now = read_busy()
    if now is None or AT_START is None or now[0] - AT_START[0] < SHORTEST:
        return None
    seconds, busy, own = (after - before for before, after in zip(AT_START, now, strict=True))
    return max(cores() - int((busy - own) / seconds + 0.25), 1)


def take(saved: int | None, at_exit, say) -> int:
    """Give PyTorch the threads of a run on a CPU, until at_exit, an ExitStack, closes; says where they are others than
    PyTorch took by itself, or than before.  Of several ranks none counts the others' work as other programs'.

    saved: those that the checkpoint was trained with, which go before what is free: the same sums in the same order.
    """
    import torch  # not above: it must load behind this file
    here = torch.get_num_threads()
    n = here
    if "OMP_NUM_THREADS" not in os.environ and saved:
        n, why = min(saved, cores()), f"the run had {saved} so far, and sums go by their number"
    elif "OMP_NUM_THREADS" not in os.environ and os.environ.get("WORLD_SIZE", "1") == "1":
        n, why = min(here, free_cores() or here), "other programs keep the other cores busy, and the run stays so"
    at_exit.callback(torch.set_num_threads, here)
    torch.set_num_threads(n)
    if n != here:
        say(f"{n} thread{'s' * (n > 1)} instead of {here}: {why}. Set OMP_NUM_THREADS to choose.")
    elif saved not in (None, n):
        say(f"the run had {saved} thread{'s' * (saved > 1)} so far and goes on with {n}: the last digits of its losses "
            "change")
    return n
