"""What counts as a spike of the gradient's norm: far above its own recent distribution, whatever the scale of that."""

import json
import math
import random

import pytest

from stack import spikes


def judge(norms, threshold=spikes.USUAL, known=None):
    """The indices of the spikes among these norms."""
    known = spikes.unseen() if known is None else known
    return [i for i, norm in enumerate(norms) if spikes.is_spike(known, norm, threshold)]


def noise(n, spread=0.2, seed=0):
    chance = random.Random(seed)
    return [math.exp(chance.gauss(0, spread)) for _ in range(n)]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.3])
def test_one_far_out(scale, spread):
    """A norm ten times the usual is a spike at any scale, and the only one; what comes after it is judged as before."""
    norms = [scale * norm for norm in noise(1000, spread)]
    norms[300], norms[302], norms[600] = 20 * scale, 20 * scale, 1e30 * scale
    assert judge(norms) == [300, 302, 600]


def test_what_is_none():
    """Ordinary noise, a slow rise, any fall, the first steps, and a doubling where there was no noise at all."""
    assert judge(noise(20_000)) == []
    assert judge([1.01**step for step in range(1000)]) == []
    assert judge([1.0] * 100 + [1e-9] * 100) == []
    assert judge([1.0] * (spikes.LEAST - 1) + [1e9]) == []
    assert judge([1.0] * 100 + [1.99]) == [] and judge([1.0] * 100 + [2.01]) == [100]


def test_a_lasting_change_is_the_new_normal():
    """So that skipping cannot go on for ever."""
    for factor in (10, 1e3, 1e6):
        found = judge(noise(200) + [factor * norm for norm in noise(200, seed=1)])
        assert found and found == list(range(200, 200 + len(found))) and len(found) < 15


def test_the_threshold_is_in_standard_deviations():
    norms = noise(500, 0.3)
    for sigmas in (3.5, 5, 8):
        assert judge([*norms, math.exp(0.3 * sigmas)], 6) == ([500] if sigmas > 6 else [])
        assert judge([*norms, math.exp(0.3 * sigmas)], 4)[-1:] == ([500] if sigmas > 4 else [])


def test_not_finite_is_another_matter():
    """Neither a spike nor anything to remember."""
    known = spikes.unseen()
    judge(noise(100), known=known)
    before = dict(known)
    assert judge([math.inf, math.nan, 0.0], known=known) == [] and known == before


def test_what_is_known_survives_a_checkpoint():
    norms = noise(300)
    norms[200] = 30
    known = spikes.unseen()
    first = judge(norms[:150], known=known)
    again = json.loads(json.dumps(known))
    assert first + [150 + i for i in judge(norms[150:], known=again)] == judge(norms) == [200]
