"""Bytes a plan moves between regions, and what the links between them bill for it.

Counted a step: new weights once into each region that rolls out, by the relay tree (`planner.cost.arrivals`), prompts there and
samples back, activations and their gradients between stages in two regions, gradients of a stage that spans regions. A prompt
token is 4 bytes, a sampled one 8 (its number and its log-probability). Prompts start, and samples end, in the region of the
trainer's first device.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from planner.cost.arrivals import stops_of, weight_arrivals
from planner.cost.network import Place
from planner.cost.update import update_bytes
from planner.plan import Placement, Plan
from planner.problem import Problem
from planner.workflow import TRAINING, tasks_of

_PROMPT_BYTES, _SAMPLED_BYTES = 4, 8


def bytes_between_regions(problem: Problem, plan: Plan) -> Mapping[tuple[str, str], float]:
    """(from, to): bytes a step. Empty where everything lies in one region."""
    region = {d.id: d.region for d in problem.cluster.devices}
    moved: dict[tuple[str, str], float] = defaultdict(float)
    if plan.train is None:
        return moved
    home = region[plan.train.devices[0]]
    for pair, n in itertools.chain(
        _samples(problem, plan, region, home), *(_group(problem, plan, p, region) for p in plan.sides)
    ):
        moved[pair] += n
    return {pair: n for pair, n in moved.items() if pair[0] != pair[1]}


def linked_egress_usd(problem: Problem, plan: Plan) -> float:
    """What the cluster's own links bill for a step, in USD."""
    cluster = problem.cluster
    if not any(link.egress_usd_per_gb for link in (*cluster.regions.values(), cluster.cross_region)):
        return 0.0
    moved = bytes_between_regions(problem, plan)
    prices = {(a, b): cluster.regions.get((min(a, b), max(a, b)), cluster.cross_region) for a, b in moved}
    return math.fsum(n / 1e9 * prices[pair].egress_usd_per_gb for pair, n in moved.items())


def _samples(
    problem: Problem, plan: Plan, region: Mapping[str, str], home: str
) -> Iterator[tuple[tuple[str, str], float]]:
    """Weights along their tree, prompts to the regions that generate, samples back."""
    work = problem.workload
    weights = update_bytes(problem.model, problem.capabilities.weights_full_every)
    train = plan.train
    assert train is not None
    at = {d.id: Place(node=d.node, kind=d.kind, region=d.region) for d in problem.cluster.devices}
    stops, _ = stops_of((at[d] for d in train.devices), (at[d] for r in plan.rollouts for d in r.devices))
    for hop in weight_arrivals(problem.cluster, stops)[0]:
        yield (hop.source.region, hop.target.region), weights
    shares: dict[str, float] = defaultdict(float)
    for r in plan.rollouts:
        shares[region[r.devices[0]]] += r.share or 0.0
    for there, share in shares.items():
        samples = work.samples_per_step * share
        yield (home, there), samples * work.prompt.mean_tokens * _PROMPT_BYTES
        yield (there, home), samples * work.response.mean_tokens * _SAMPLED_BYTES


def _group(
    problem: Problem, plan: Plan, group: Placement, region: Mapping[str, str]
) -> Iterator[tuple[tuple[str, str], float]]:
    """Activations between the stages of a group and gradients inside a stage, for each task of it. The actor's shape stands for
    every model's."""
    work, model = problem.workload, problem.model
    tokens = work.samples_per_step * (work.prompt.mean_tokens + work.response.mean_tokens)
    for task in tasks_of(plan, work)[group]:
        trains = task in TRAINING
        for a, b in itertools.pairwise(group.stages):
            here, there = region[a.devices[0]], region[b.devices[0]]
            for pair in ((here, there), (there, here)) if trains else ((here, there),):
                yield pair, tokens * model.hidden * model.dtype_bytes
        for s in group.stages if trains else ():
            first = region[s.devices[0]]
            for other in {region[d] for d in s.devices} - {first}:
                for pair in ((first, other), (other, first)):
                    yield pair, s.layers * model.layer_params * model.dtype_bytes
