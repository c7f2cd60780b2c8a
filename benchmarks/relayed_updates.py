"""`python -m benchmarks.relayed_updates`: how long new weights take by the best direct link, along the tree, and in a simulated run.

The table of docs/concepts/cost-model.md: machines of one region of HetRL's scenarios train and all others generate (Qwen3-4B, async GRPO,
all weights in each update), and two shipped fleets with their own plan. Nothing is timed: the same figures on every machine.
"""

from benchmarks.bench_planner import _shipped
from benchmarks.papers.fleets import hetrl
from planner import solve
from planner.cost.model import CostModel
from planner.cost.network import best_link, worst_of
from planner.cost.update import update_s
from planner.override import Override
from planner.plan import Plan
from planner.problem import Problem
from planner.record import replace
from planner.solution import Feasible
from runtime.sim import Options, simulate
from runtime.sim.timeline import Timeline

STEPS = 12
ROWS = (("S4", "oregon"), ("S4", "virginia"), ("S3", "ireland"), ("S2", "virginia"))


def trained_in(scenario: str, region: str) -> Problem:
    """A scenario of HetRL's whose machines of one region train."""
    p = hetrl(scenario, "4B", "grpo", "async")
    pins = tuple(
        Override(device=d.id, kind="pin", role="train" if d.region == region else "rollout") for d in p.cluster.devices
    )
    return replace(p, overrides=pins)


def direct_s(problem: Problem, plan: Plan) -> float:
    """Seconds of the longest update where each replica takes the weights from the trainer itself."""
    cost, train = CostModel(problem), plan.train
    assert train is not None
    root = cost.places_of(train.devices)
    longest = 0.0
    for r in plan.rollouts:
        over = worst_of(best_link(problem.cluster, root, (place,)) for place in cost.places_of(r.devices))
        longest = max(longest, update_s(cost.context, r.kind, over))
    return longest


def simulated_s(problem: Problem, plan: Plan) -> float:
    """Seconds of the longest transfer of weights in a run."""
    timeline = Timeline()
    simulate(problem, plan, Options(steps=STEPS), timeline=timeline)
    return max(e["dur"] for e in timeline.events() if str(e.get("name", "")).startswith("weights")) / 1e6


def row(name: str, where: str, problem: Problem) -> str:
    """One row of the table."""
    found = solve(problem)
    if not isinstance(found, Feasible):
        return f"| {name} | {where} | no plan: {found.message} |"
    seconds = direct_s(problem, found.plan), found.prediction.update_s, simulated_s(problem, found.plan)
    return f"| {name} | {where} | " + " | ".join(f"{s:.1f} s" for s in seconds) + " |"


def main() -> None:
    """Print the table."""
    print(
        "| fleet | trains in | best direct link, as it was | tree | longest transfer, simulated |\n|---|---|---|---|---|"
    )
    for scenario, region in ROWS:
        print(row(f"hetrl-{scenario.lower()}", region.capitalize(), trained_in(scenario, region)), flush=True)
    for name in ("h100-8-a100-8-two-regions", "areal-hex-56"):
        print(row(name, "its plan", _shipped(name)), flush=True)


if __name__ == "__main__":
    main()
