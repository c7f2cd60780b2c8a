"""`python -m benchmarks.mixed_ranks`: what ranks of two kinds in one trainer are worth, by the cost model.

Prints the table of docs/concepts/planner.md. Nothing is timed: the figures are the same on every machine. Some seconds of a core.
"""

import tempfile
from collections import Counter
from pathlib import Path

import planner
from benchmarks.bench_planner import CONFIGS
from planner.model import load_model_spec
from planner.plan import Placement
from planner.problem import Capabilities, Problem
from planner.record import replace
from planner.solution import Feasible
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config

FLEET = """
[run]
name = "mixed-ranks"
[model]
source = "shape"
path = "{model}"
[algorithm]
name = "grpo"
mode = "async"
eta = 4
prompts_per_step = 64
responses_per_prompt = 8
[lengths]
prompt_mean = 256
prompt_max = 256
response_mean = 1500
response_cv = 0.8
response_max = 16384
[fleet]
source = "declared"
same_kind = {{ bandwidth = "200 Gbit/s", latency = "20 us" }}
cross_kind = {{ bandwidth = "100 Gbit/s", latency = "20 us" }}
[planner]
capabilities = "unrestricted"
"""
MACHINE = """
[[fleet.devices]]
kind = "{kind}"
count = 8
per_node = 8
node = "{kind}"
"""
FLEETS = (("A100-80", "L40S"), ("A100-80", "L40S", "H20"))
TRAINERS = (
    ("FSDP without pipeline", {"trainer": "fsdp", "train_max_kinds": 1}),
    ("FSDP with pipelines", {"trainer": "fsdp"}),
    ("whole states on every rank, pipelines", {"trainer": "replicated"}),
)


def problem_of(kinds: tuple[str, ...]) -> Problem:
    """Async GRPO of a 7B model on a machine of eight of each kind."""
    text = FLEET.format(model=CONFIGS / "models" / "r1-distill-qwen-7b.json")
    text += "".join(MACHINE.format(kind=k) for k in kinds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "fleet.toml")
        path.write_text(text)
        config = load_config(path).config
        return problem_from_config(config, cluster_from_config(config), load_model_spec(config.model.path))


def words(p: Problem, train: Placement) -> str:
    """The trainer's devices by kind, with the share of the tokens of each rank where ranks are of two kinds."""
    kind_of = {d.id: d.kind for d in p.cluster.devices}
    counts = sorted(Counter(kind_of[d] for d in train.devices).items())
    if len(train.stages) > 1:
        return "a pipeline over " + " and ".join(f"{count} {kind}" for kind, count in counts)
    [stage] = train.stages
    share_of = {kind_of[d]: f" ({share:.1%} each)" for d, share in zip(stage.devices, stage.token_shares, strict=False)}
    return " + ".join(f"{count} {kind}{share_of.get(kind, '')}" for kind, count in counts)


def row(kinds: tuple[str, ...], name: str, given: dict[str, object]) -> str:
    """One line: trained tokens/s without and with mixed ranks, and the trainer with them."""
    p = problem_of(kinds)
    found = []
    for mixed in (False, True):
        capabilities: Capabilities = replace(p.capabilities, train_mixed_dp=mixed, **given)
        solution = planner.solve(replace(p, capabilities=capabilities))
        assert isinstance(solution, Feasible)
        found.append(solution)
    without, with_ = (f.prediction.tokens_per_s for f in found)
    train = found[1].plan.train
    assert train is not None
    gain = f" ({with_ / without - 1:+.1%})" if abs(with_ / without - 1) > 5e-4 else ""
    fleet = " + ".join(f"8 {k}" for k in kinds)
    return f"| {fleet} | {name} | {without:,.0f} | {with_:,.0f}{gain} | {words(p, train)} |"


def main() -> None:
    """Print the table."""
    print("| devices | trainer | tokens/s without | with | its trainer |\n|---|---|---|---|---|")
    for kinds in FLEETS:
        for name, given in TRAINERS:
            print(row(kinds, name, dict(given)), flush=True)


if __name__ == "__main__":
    main()
