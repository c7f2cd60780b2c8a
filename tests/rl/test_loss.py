"""Losses against a NumPy float64 reference written here from the papers' formulas, and by finite differences."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.rl.train.advantage import STD_FLOOR, group_advantages
from runtime.rl.train.loss import Objective, kl_from_behaviour, policy_loss, token_logprobs, token_terms


def reference(logits, case, o: Objective):
    """Token by token, in plain loops: (loss, per-token ratio, importance, clipped)."""
    total, ratios, importances, clips = 0.0, [], [], []
    for i, row in enumerate(logits):
        t, mu, prox, a, w = (float(case[k][i]) for k in ("tokens", "behaviour", "proximal", "advantages", "weights"))
        z = np.asarray(row, dtype=np.float64) / case["temperature"]
        p = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        current = math.log(p[int(t)])
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        if o.decoupled:
            u, importance = math.exp(current - prox), min(math.exp(prox - mu), o.importance_cap)
        else:
            u, importance = math.exp(current - mu), 1.0
        bounded = min(max(u, 1 - o.clip_low), 1 + o.clip_high)
        total += w * (importance * min(u * a, bounded * a) + o.entropy_coefficient * entropy)
        ratios.append(u)
        importances.append(importance)
        clips.append(bounded * a < u * a)
    return -total / case["denominator"], ratios, importances, clips


def loss_of(logits, case, o: Objective):
    current, entropy = token_logprobs(logits, case["tokens"], temperature=case["temperature"])
    terms = token_terms(
        current, proximal=case["proximal"], behaviour=case["behaviour"], advantages=case["advantages"], objective=o
    )
    loss = policy_loss(
        terms,
        entropy,
        case["weights"],
        denominator=case["denominator"],
        entropy_coefficient=o.entropy_coefficient,
    )
    return loss, terms


def a_case(seed: int, n: int = 12, vocabulary: int = 7):
    """Random tokens whose three policies differ enough for both clips and the cap to bind."""
    r = np.random.default_rng(seed)
    logits = r.normal(size=(n, vocabulary)) * 2
    tokens = r.integers(0, vocabulary, size=n)
    temperature = float(r.choice([0.7, 1.0, 1.5]))
    scaled = logits / temperature
    current = scaled[np.arange(n), tokens] - np.log(np.exp(scaled).sum(-1))
    proximal = np.minimum(current + r.normal(size=n) * 0.5, -1e-3)
    behaviour = np.minimum(proximal + r.normal(size=n) * 1.2, -1e-3)
    tensor = {
        "behaviour": torch.tensor(behaviour),
        "proximal": torch.tensor(proximal),
        "advantages": torch.tensor(r.normal(size=n)),
        "weights": torch.ones(n, dtype=torch.float64),
        "tokens": torch.tensor(tokens),
    }
    return torch.tensor(logits), tensor | {"temperature": temperature, "denominator": float(r.uniform(n, 3 * n))}


OBJECTIVES = [
    Objective(decoupled=True, importance_cap=1.5, entropy_coefficient=0.01),
    Objective(decoupled=True, clip_low=0.1, clip_high=0.4),
    Objective(decoupled=False, entropy_coefficient=0.0),
    Objective(decoupled=False, clip_low=0.3, clip_high=0.3, entropy_coefficient=0.5),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(10))
def test_loss_equals_the_numpy_reference(objective, seed):
    logits, case = a_case(seed)
    loss, terms = loss_of(logits, case, objective)
    expected, ratios, importances, clips = reference(logits.numpy(), case, objective)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(terms.ratio.numpy(), ratios, rtol=1e-12)
    np.testing.assert_allclose(terms.importance.numpy(), importances, rtol=1e-12)
    assert terms.clipped.tolist() == clips


def test_the_cases_reach_both_clips_and_the_cap():
    objective = OBJECTIVES[0]
    parts = [loss_of(*a_case(seed), objective)[1] for seed in range(10)]
    ratio = torch.cat([p.ratio for p in parts])
    clipped = torch.cat([p.clipped for p in parts])
    importance = torch.cat([p.importance for p in parts])
    assert bool((clipped & (ratio < 1)).any())
    assert bool((clipped & (ratio > 1)).any())
    assert 0 < int((importance == objective.importance_cap).sum()) < importance.numel()


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_gradient_by_finite_differences(objective, seed):
    logits, case = a_case(seed, n=6, vocabulary=5)
    free = logits.clone().requires_grad_(True)
    loss_of(free, case, objective)[0].backward()
    step = 1e-6
    for at in np.ndindex(*logits.shape):
        up, down = logits.clone(), logits.clone()
        up[at] += step
        down[at] -= step
        slope = (loss_of(up, case, objective)[0] - loss_of(down, case, objective)[0]).item() / (2 * step)
        assert free.grad[at].item() == pytest.approx(slope, abs=1e-7)


def test_a_hand_worked_token():
    # behaviour 0.2, proximal 0.4, current 0.5: ratio 1.25, importance 2 cut to 1.5, advantage 2 -> 1.5 * 1.2 * 2 = 3.6.
    log = lambda p: torch.tensor([math.log(p)], dtype=torch.float64)  # noqa: E731
    o = Objective(clip_low=0.2, clip_high=0.2, importance_cap=1.5)
    terms = token_terms(
        log(0.5),
        proximal=log(0.4),
        behaviour=log(0.2),
        advantages=torch.tensor([2.0], dtype=torch.float64),
        objective=o,
    )
    assert terms.ratio.item() == pytest.approx(1.25)
    assert terms.surrogate.item() == pytest.approx(3.6)
    assert terms.clipped.tolist() == [True]


def test_importance_carries_no_gradient():
    behaviour = torch.tensor([-1.0], dtype=torch.float64)
    current = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    terms = token_terms(
        current, proximal=current.detach(), behaviour=behaviour, advantages=torch.ones(1), objective=Objective()
    )
    terms.surrogate.sum().backward()
    assert current.grad.item() == pytest.approx(math.exp(0.5))  # w * d(ratio)/d(current) at ratio 1


def test_micro_batches_add_up_to_the_global_token_mean():
    logits, case = a_case(4, n=20)
    objective = OBJECTIVES[0]
    whole = loss_of(logits, case, objective)[0].item()
    parts = 0.0
    for a, b in ((0, 3), (3, 11), (11, 20)):
        piece = {k: v[a:b] if isinstance(v, torch.Tensor) else v for k, v in case.items()}
        parts += loss_of(logits[a:b], piece, objective)[0].item()
    assert parts == pytest.approx(whole, abs=1e-12)


@given(st.lists(st.tuples(st.floats(-8, -0.01), st.floats(-8, -0.01)), min_size=1, max_size=20))
def test_kl_estimate_is_never_negative_and_zero_for_equal_policies(pairs):
    current = torch.tensor([a for a, _ in pairs], dtype=torch.float64)
    behaviour = torch.tensor([b for _, b in pairs], dtype=torch.float64)
    assert bool((kl_from_behaviour(current, behaviour) >= 0).all())
    assert bool((kl_from_behaviour(current, current) == 0).all())


def test_kl_estimate_is_unbiased():
    r = np.random.default_rng(0)
    q, p = r.dirichlet(np.ones(6)), r.dirichlet(np.ones(6))
    estimate = kl_from_behaviour(torch.tensor(np.log(p)), torch.tensor(np.log(q))).numpy()
    assert float((q * estimate).sum()) == pytest.approx(float((q * np.log(q / p)).sum()), abs=1e-12)


def test_half_precision_logits_are_raised():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    logp, entropy = token_logprobs(logits, torch.tensor([0, 1, 2, 3]), temperature=0.8)
    assert logp.dtype == entropy.dtype == torch.float32


@given(st.lists(st.floats(0, 1), min_size=2, max_size=16), st.booleans())
def test_advantages_equal_the_formula(rewards, normalise):
    got = np.array(group_advantages(rewards, normalise=normalise))
    r = np.array(rewards, dtype=np.float64)
    expected = r - r.mean()
    if normalise:
        expected = expected / (r.std(ddof=1) + STD_FLOOR)
    np.testing.assert_allclose(got, expected, atol=1e-9)
    assert abs(got.sum()) < 1e-8


def test_equal_rewards_teach_exactly_nothing():
    assert group_advantages([1 / 3] * 8, normalise=True) == (0.0,) * 8
    assert group_advantages([], normalise=True) == ()
