"""Learning-rate schedule against hand-worked values."""

import pytest
from pydantic import ValidationError

from runtime.config.schema import AlgorithmSection
from runtime.rl.train.schedule import learning_rate


def rates(steps, **algorithm):
    return [learning_rate(AlgorithmSection(**algorithm), s) for s in steps]


def test_constant_by_default():
    assert rates([0, 1, 10**6], learning_rate=0.5) == [0.5, 0.5, 0.5]


def test_rise_then_fall_then_floor():
    got = rates([0, 1, 3, 4, 5, 9, 14, 1000], learning_rate=1.0, warmup_steps=4, decay_steps=10, learning_rate_min=0.1)
    assert got == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.91, 0.55, 0.1, 0.1])


def test_falls_to_zero_without_a_floor():
    assert rates([0, 5, 10, 11], learning_rate=2.0, decay_steps=10) == pytest.approx([2.0, 1.0, 0.0, 0.0])


def test_floor_above_the_peak_is_an_error():
    with pytest.raises(ValidationError, match="learning_rate_min"):
        AlgorithmSection(learning_rate=1e-3, decay_steps=10, learning_rate_min=2e-3)
