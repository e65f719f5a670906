"""Loss spikes that are finite: a gradient whose norm, before clipping, lies far outside of what it was lately.

The norm's logarithm is followed by a mean and a variance that forget within some MEMORY steps.  A spike is more than
USUAL standard deviations above that mean, fewer where fewer are to be skipped, and at least twice what it stands for.
A spike moves both as if it were only that high: one alone leaves the mean nearly as it was and the deviation a third
wider, so that of a burst the lower ones may pass; a lasting change is the new normal after some ten steps, so that
training cannot skip its way to the end.  The three numbers are part of a run's state.
"""

import math

MEMORY, LEAST, USUAL = 50, 50, 6.0  # steps; steps before the first judgement; standard deviations


def unseen() -> dict:
    """What is known of a run's gradient norms before its first step."""
    return {"seen": 0, "mean": 0.0, "variance": 0.0}


def judge(known: dict, norm: float, skip: float = 0.0) -> tuple[bool, bool]:
    """(whether this step's norm is a spike, whether also one beyond `skip` standard deviations, if that is not 0), of
    which `known` learns.  A norm that is not finite is none: it is worse."""
    if not 0 < norm < math.inf:
        return False, False
    value, mean, variance = math.log(norm), known["mean"], known["variance"]
    high, skipped = (mean + max(deviations * math.sqrt(variance), math.log(2)) if known["seen"] >= LEAST else math.inf
                     for deviations in (min(skip or USUAL, USUAL), skip or math.inf))
    weight, off = 1 / min(known["seen"] + 1, MEMORY), min(value, high) - mean
    known |= {"seen": known["seen"] + 1, "mean": mean + weight * off,
              "variance": (1 - weight) * (variance + weight * off * off)}
    return value > high, value > skipped
