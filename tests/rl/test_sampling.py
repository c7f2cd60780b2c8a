"""Noise: uniform, independent over every coordinate, a function of coordinates alone. Sampling: the right distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.rl.sampling import noise, sample

COORDINATE = st.integers(0, 2**40)


def splitmix_chain(seed: int, group: int, member: int, position: int) -> float:
    """The documented formula in plain integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    h = mix((seed + 0x9E3779B97F4A7C15) & mask)
    for coordinate in (group, member, position):
        h = mix(((h ^ coordinate) + 0x9E3779B97F4A7C15) & mask)
    return (h >> 11) / 2**53


def test_splitmix64_of_the_reference_stream() -> None:
    """First outputs of SplitMix64 seeded with 0, as published: mix(γ), mix(2γ). The chain's first link is mix(seed + γ)."""
    from runtime.rl import sampling

    gamma = 0x9E3779B97F4A7C15
    states = np.array([gamma, 2 * gamma % 2**64], dtype=np.uint64)
    assert [hex(int(x)) for x in sampling._mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


@given(seed=st.integers(0, 2**64 - 1), group=COORDINATE, member=COORDINATE, position=COORDINATE)
def test_noise_is_the_documented_formula(seed: int, group: int, member: int, position: int) -> None:
    assert noise(seed, group, member, position)[0] == splitmix_chain(seed, group, member, position)


@given(st.lists(st.tuples(COORDINATE, COORDINATE, COORDINATE), min_size=1, max_size=20))
def test_a_number_does_not_depend_on_the_batch_around_it(rows: list[tuple[int, int, int]]) -> None:
    together = noise(7, *zip(*rows, strict=True))
    assert [noise(7, *row)[0] for row in rows] == list(together)
    assert ((together >= 0) & (together < 1)).all()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations above the mean of its distribution."""
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = counts.size - 1
    return (statistic - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize("varying", ["seed", "group", "member", "position"])
def test_noise_is_uniform_along_every_coordinate(varying: str) -> None:
    n = np.arange(200_000)
    at = {"group": 3, "member": 1, "position": 2} | ({varying: n} if varying != "seed" else {})
    u = np.concatenate([noise(int(s), **at) for s in range(5_000)]) if varying == "seed" else noise(11, **at)
    counts, _ = np.histogram(u, bins=64, range=(0, 1))
    assert abs(chi_square(counts, np.full(64, u.size / 64))) < 4


@pytest.mark.parametrize("other", ["group", "member", "position", "seed"])
def test_neighbours_are_independent(other: str) -> None:
    """Pairs (u at x, u at x + 1) fill the unit square evenly, for each coordinate that is moved by one."""
    n = np.arange(100_000)
    base = {"group": n // 100, "member": n % 10, "position": (n // 10) % 10}
    moved = base if other == "seed" else base | {other: base[other] + (1000 if other == "group" else 10)}
    u, v = noise(5, **base), noise(6 if other == "seed" else 5, **moved)
    counts, _, _ = np.histogram2d(u, v, bins=10, range=((0, 1), (0, 1)))
    assert abs(chi_square(counts.ravel(), np.full(100, u.size / 100))) < 4
    assert abs(np.corrcoef(u, v)[0, 1]) < 4 / u.size**0.5


def test_coordinates_are_not_interchangeable() -> None:
    assert (
        len({float(noise(s, g, m, p)[0]) for s, g, m, p in [(1, 2, 3, 4), (2, 1, 3, 4), (1, 3, 2, 4), (1, 2, 4, 3)]})
        == 4
    )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_tempered_distribution(temperature: float) -> None:
    logits = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.1, -2.5], dtype=torch.float64)
    n = 60_000
    u = torch.from_numpy(noise(1, np.arange(n), 0, 0))
    tokens, logprobs = sample(logits.expand(n, -1), u, temperature=temperature)
    wanted = torch.softmax(logits / temperature, -1)
    assert abs(chi_square(np.bincount(tokens, minlength=6), (n * wanted).numpy())) < 4
    torch.testing.assert_close(logprobs, wanted[tokens].log(), rtol=0, atol=1e-12)


def test_sampling_inverts_the_cumulative_distribution() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)).expand(6, -1)
    u = torch.tensor([0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-53], dtype=torch.float64)
    assert sample(logits, u, temperature=1.0)[0].tolist() == [0, 0, 1, 1, 2, 2]


@given(st.integers(2, 200), st.integers(0, 2**32))
def test_impossible_tokens_are_never_drawn(vocab: int, seed: int) -> None:
    """Not at either end of the unit interval either, whatever rounding does to the sum."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, vocab, generator=generator, dtype=torch.float64) * 5
    logits[:, :: max(2, vocab // 3)] = float("-inf")
    logits[:, -1] = float("-inf")
    logits[:, 1] = 0.0 if vocab > 2 else float("-inf")
    logits[:, 0] = 0.0 if vocab == 2 else float("-inf")
    u = torch.tensor([0.0, 1 - 2**-53] * 4, dtype=torch.float64)
    for accumulate in (torch.float64, torch.float32):
        tokens, logprobs = sample(logits, u, temperature=1.0, accumulate=accumulate)
        assert torch.isfinite(logits.gather(1, tokens[:, None])).all()
        assert torch.isfinite(logprobs).all()


def test_a_row_is_drawn_alike_alone_and_in_a_batch() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = torch.from_numpy(noise(3, np.arange(50), 1, 2))
    tokens, logprobs = sample(logits, u, temperature=0.7)
    for i in range(50):
        token, logprob = sample(logits[i : i + 1], u[i : i + 1], temperature=0.7)
        assert token[0] == tokens[i]
        assert logprob[0] == logprobs[i]
