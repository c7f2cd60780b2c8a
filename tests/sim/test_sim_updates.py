"""What a weight update costs a step: the planner's rule beside runs in virtual time whose traces are worked out by hand.

One replica that runs all samples at once, each for 10 s; a trainer of T seconds; transfers of U seconds. In each run the
staleness bound paces: samples of batch v + eta wait for version v.
"""

import math

import numpy as np
import pytest

from planner.cost.decode import Level
from planner.cost.step import Rules, make_offer
from runtime.policy.staleness import StalenessPolicy
from runtime.sim.flow import SimulatedFlow
from runtime.sim.lengths import LengthModel
from runtime.sim.rules import FlowRules, WeightsPath
from runtime.sim.speed import ReplicaSpeed, TrainerSpeed

TAU_S, TOKENS, GROUPS, SLOTS = 10.0, 1000, 4, 64


def simulated_s(
    *, eta: int, train_s: float, update_s: float, overlapped: bool, pause_all: bool, swap_s: float = 0.0
) -> float:
    """Mean seconds a step, warm-up apart. `swap_s`: of the update, where it is overlapped."""
    rules = FlowRules(
        policy=StalenessPolicy(eta=eta, prompts_per_step=GROUPS),
        responses_per_prompt=1,
        prompt=LengthModel(family="constant", mean_tokens=1, max_tokens=1),
        response=LengthModel(family="constant", mean_tokens=TOKENS, max_tokens=TOKENS),
        recompute=False,
        pause_all=pause_all,
        overlapped=overlapped,
        windows=64,
        steps=60,
    )
    flow = SimulatedFlow(rules, 0)
    base_s = np.full(SLOTS + 1, TAU_S / TOKENS)
    speed = ReplicaSpeed(slots=SLOTS, base_s=base_s, kv_s=np.zeros(SLOTS + 1), kv_tokens=math.inf)
    flow.add_replica("r", speed, WeightsPath(link="wire", bytes_per_s=1.0, size_bytes=update_s - swap_s, swap_s=swap_s))
    flow.set_trainer(TrainerSpeed(train_s=train_s))
    assert flow.advance(math.inf) == "steps"
    ends = [s.ended_s for s in flow.books.steps]
    return (ends[-1] - ends[19]) / (len(ends) - 20)


def planned_s(
    *, eta: int, train_s: float, update_s: float, overlapped: bool, pause_all: bool, swap_s: float = 0.0
) -> float:
    """The shortest period in which the planner lets such a replica run."""
    rules = Rules(
        work_tokens=1.0, sync=eta == 0, eta=eta, tail_group=1.0, tail_batch=1.0, reward_s=0.0,
        pause_all=pause_all and eta > 0, overlapped=overlapped and eta > 0,
    )  # fmt: skip
    level = Level(running=SLOTS, rate_tokens_per_s=1e9, tau_s=TAU_S, recompute_s=0.0)
    return max(train_s, rules.required_s(make_offer(level, update_s, swap_s, rules), train_s))


@pytest.mark.parametrize(
    ("eta", "train_s", "update_s", "mode", "period_s"),
    [
        # eta 0: publish, transfer, generate, train, one after the other, whatever is said of overlap.
        (0, 2.0, 5.0, "rolling", 5 + 10 + 2),
        (0, 2.0, 5.0, "overlapped", 5 + 10 + 2),
        # Both periods of a round of eta + 1 have a pause: 2 P = 2 U + 10 + T.
        (1, 2.0, 5.0, "rolling", 5 + 12 / 2),
        (1, 2.0, 5.0, "pause", 5 + 12 / 2),
        # Samples that are complete before the trainer is free do not wait for it: the trainer paces.
        (1, 16.0, 5.0, "rolling", 16),
        (3, 20.0, 5.0, "rolling", 20),
        (3, 20.0, 5.0, "pause", 20 + 5),
        # Nobody stops, but samples wait for the transfer: 2 P = U + 10 + T.
        (1, 2.0, 1.0, "overlapped", (1 + 12) / 2),
        # A transfer longer than a period: the next leaves when it has come, so a round of eta + 1 versions takes two.
        (1, 2.0, 30.0, "overlapped", 30),
        (3, 2.0, 30.0, "overlapped", 60 / 4),
    ],
)
def test_a_step_by_hand_by_the_planner_and_in_virtual_time(
    eta: int, train_s: float, update_s: float, mode: str, period_s: float
) -> None:
    flags = {"overlapped": mode == "overlapped", "pause_all": mode == "pause"}
    assert planned_s(eta=eta, train_s=train_s, update_s=update_s, **flags) == pytest.approx(period_s)
    got = simulated_s(eta=eta, train_s=train_s, update_s=update_s, **flags)
    assert got == pytest.approx(period_s, rel=0.02)


def test_a_direct_update_costs_a_replica_the_swap_alone() -> None:
    """1 s on the way beside generation, then 0.5 s in which it stops. Once a period it stops, and samples wait for the way:
    2 P = 2 * 0.5 + 1 + 10 + 2. On the file's way all of it is a pause: 2 P = 2 * 1.5 + 10 + 2."""
    case = {"eta": 1, "train_s": 2.0, "update_s": 1.5, "pause_all": False}
    for got, period_s in (
        (planned_s(**case, overlapped=True, swap_s=0.5), 7.0),  # type: ignore[arg-type]
        (simulated_s(**case, overlapped=True, swap_s=0.5), 7.0),  # type: ignore[arg-type]
        (planned_s(**case, overlapped=False), 7.5),  # type: ignore[arg-type]
        (simulated_s(**case, overlapped=False), 7.5),  # type: ignore[arg-type]
    ):
        assert got == pytest.approx(period_s, rel=0.02)


def test_steps_that_come_in_bursts_save_a_pause() -> None:
    """Four periods a round, 4 P = 4 U + 10 + T by the planner's rule. Constant lengths let steps follow each other while the
    replica still loads; of three versions published meanwhile it takes the last only: one pause fewer, 4 P = 3 U + 10 + T."""
    case = {"eta": 3, "train_s": 2.0, "update_s": 5.0, "overlapped": False, "pause_all": False}
    assert planned_s(**case) == pytest.approx((4 * 5 + 12) / 4)  # type: ignore[arg-type]
    assert simulated_s(**case) == pytest.approx((3 * 5 + 12) / 4, rel=0.02)  # type: ignore[arg-type]
