"""Flow's figures of a simulated run, as the runtime's flow would tell them."""

from collections import Counter
from collections.abc import Mapping

from runtime.backends.simulated.fleet import SimBody
from runtime.rl.flow.figures import STEPS_WINDOW, staleness
from runtime.rl.types import EngineStats, FlowStatus, ReplicaStatus, WeightsRef
from runtime.sim.figures import StepSeen
from runtime.sim.flow import SimulatedFlow

RATE_STEPS = 6  # ends of steps over which the trained rate is told


def flow_status(
    flow: SimulatedFlow,
    *,
    generated_tokens_per_s: float,
    trainer_wait_share: float,
    admission_wait_share: float,
    steps: int | None,
    orders: Mapping[tuple[str, int], tuple[SimBody, int | None]],
) -> FlowStatus:
    """The status, without who trains. Rates and shares that need two looks are the caller's; `orders`: replica bodies and
    their numbers in the flow."""
    books, groups = flow.books, flow.groups
    ages: Counter[int] = Counter()
    for s in books.steps[-STEPS_WINDOW:]:
        ages.update(s.ages)
    seen = staleness(ages)
    running = int(flow.decoding.n.sum())
    samples = len(books.steps) * groups.members * flow.policy.prompts_per_step
    return FlowStatus(
        step=flow.version,
        lineage=0,
        weights=WeightsRef(lineage=0, version=flow.version, path="", digest="simulated"),
        eta=flow.policy.eta,
        generated_tokens=books.generated_tokens + flow.partial_tokens(),
        trained_tokens=books.trained_tokens,
        masked_tokens=books.masked_tokens,
        in_flight_tokens=flow.in_flight_tokens(),
        wasted_tokens=dict(books.wasted),
        redone_tokens=books.redone_tokens,
        samples_by_state={
            "PENDING": groups.fresh_count,
            "LEASED": running,
            "SUSPENDED": len(groups.suspended),
            "DONE": int((groups.members - groups.left[groups.live]).sum()),
            "APPLIED": samples,
        },
        queue_groups=flow.queue_groups,
        admitted_groups=groups.admitted,
        staleness_mean=seen.mean,
        staleness_p95=seen.p95,
        staleness_max=max((age for s in books.steps for age in s.ages), default=None),
        spans_two_versions_share=None,
        reward_mean=None,
        generated_tokens_per_s=generated_tokens_per_s,
        trained_tokens_per_s=_trained_rate(flow, books.steps),
        trainer_wait_share=trainer_wait_share,
        admission_wait_share=admission_wait_share,
        waits=flow.training.waits_for,
        replicas=tuple(_replica(flow, b, i) for b, i in orders.values()),
        trainer_epoch=None,
        trainer_state="absent",
        trainer_age_s=None,
        finished=steps is not None and flow.version >= steps,
        last_metrics={},
        steps_done=flow.version,
    )


def _trained_rate(flow: SimulatedFlow, steps: list[StepSeen]) -> float:
    """Tokens/s of virtual time between the ends of the last steps, falling once the next one is overdue."""
    last = steps[-RATE_STEPS:]
    if len(last) < 2:
        return 0.0
    period = (last[-1].ended_s - last[0].ended_s) / (len(last) - 1)
    span = max(last[-1].ended_s, flow.now_s - period) - last[0].ended_s
    return sum(s.trained_tokens + s.masked_tokens for s in last[1:]) / span if span > 0 else 0.0


def _replica(flow: SimulatedFlow, b: SimBody, i: int | None) -> ReplicaStatus:
    d = flow.decoding
    running = 0 if i is None else int(d.n[i])
    decoded = 0 if i is None else int(d.decoded[i])
    return ReplicaStatus(
        replica=b.id,
        epoch=b.epoch,
        order="drain" if b.phase in ("draining", "drained") else "serve",
        version=None if i is None else int(d.version[i]),
        digest=None,
        verified=b.phase == "serving",
        leased=running,
        stats=EngineStats(running=running, slots=0 if i is None else flow.granting.most(i), decoded_tokens=decoded),
        last_exchange_age_s=0.0,
        unflushed_tokens=0,
        pid=b.pid,
    )
