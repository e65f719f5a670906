"""Loss spikes that are finite: a gradient whose norm, before clipping, lies far outside of what it was lately.

The norm's logarithm is followed by a mean and a variance that forget within some MEMORY steps.  A spike is more than
`threshold` standard deviations above that mean, and at least twice what it stands for.  A spike moves both as if it
were only that high: one alone leaves them nearly as they were, while a lasting change is the new normal after some ten
steps, so that training cannot skip its way to the end.  The three numbers are part of a run's state.
"""

import math

MEMORY, LEAST, USUAL = 50, 50, 6.0  # steps; steps before the first judgement; standard deviations


def unseen() -> dict:
    """What is known of a run's gradient norms before its first step."""
    return {"seen": 0, "mean": 0.0, "variance": 0.0}


def is_spike(known: dict, norm: float, threshold: float) -> bool:
    """Whether this step's norm is one, which `known` learns of.  A norm that is not finite is none: it is worse."""
    if not 0 < norm < math.inf:
        return False
    value, mean, variance = math.log(norm), known["mean"], known["variance"]
    bound = mean + max(threshold * math.sqrt(variance), math.log(2)) if known["seen"] >= LEAST else math.inf
    weight, off = 1 / min(known["seen"] + 1, MEMORY), min(value, bound) - mean
    known |= {"seen": known["seen"] + 1, "mean": mean + weight * off,
              "variance": (1 - weight) * (variance + weight * off * off)}
    return value > bound
