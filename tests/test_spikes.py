"""What counts as a spike of the gradient's norm: far above its own recent distribution, whatever the scale of that."""

import json
import math
import random

import pytest

from stack import spikes


def judge(norms, skip=0.0, known=None):
    """The indices of the spikes among these norms."""
    return [i for i, (spike, _) in enumerate(verdicts(norms, skip, known)) if spike]


def verdicts(norms, skip=0.0, known=None):
    known = spikes.unseen() if known is None else known
    return [spikes.judge(known, norm, skip) for norm in norms]


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
        found = [math.exp(0.3 * sigmas)]
        assert judge(norms + found) == ([500] if sigmas > 6 else [])
        assert judge(norms + found, 4)[-1:] == ([500] if sigmas > 4 else [])


def test_what_is_skipped_never_hides_what_is_counted():
    """With a threshold above the usual one the spikes below it are counted and not skipped; under it, and at it, all
    that are counted are skipped; the first judgement is the same one for both."""
    norms = noise(500, 0.3) + [math.exp(0.3 * 9)] + noise(200, 0.3, seed=2) + [math.exp(0.3 * 20)]
    assert [(i, skip) for i, (spike, skip) in enumerate(verdicts(norms, 14)) if spike or skip] == [
        (500, False), (701, True)]
    assert judge(norms, 14) == judge(norms, 1000) == judge(norms) == [500, 701]
    assert not any(skip for _, skip in verdicts(norms) + verdicts(norms, 1000))
    for threshold in (3, 6):
        assert all(spike == skip for spike, skip in verdicts(norms, threshold)) and judge(norms, threshold)
    early = [1.0] * (spikes.LEAST - 1) + [1e9]
    assert verdicts(early, 10)[-1] == (False, False) and verdicts([1.0, *early], 10)[-1] == (True, True)


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
