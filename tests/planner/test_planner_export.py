"""Plans as launch settings: the text parses, its figures add up to the plan, and what it cannot say is said.

With a target's package installed, its own schema reads the settings too (marker `optional`).
"""

import json
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fleets import SMALL, cluster, kind, problem, problems, workload
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hexctl.cli.main import main
from planner import Capabilities, Feasible, Problem, solve
from planner.errors import InvalidInput, UnknownName
from planner.export import EXPORTERS, Exported, export
from planner.export.uniform import Abilities, blocks_of, uniform
from planner.export.verl import expressible_layers
from planner.plan import Placement, Plan, Stage
from planner.problem import Budget
from planner.record import replace

BIG, WIDE = kind("big", tflops=800, usd=5.0), kind("wide", tflops=100, hbm=4e12, memory=96e9, usd=2.0)
# d0..d7 on node a, d8..d15 on b, d16..d23 on c
FLEET = cluster(*[("big", "a")] * 8, *[("wide", "b")] * 8, *[("wide", "c")] * 8, kinds=(BIG, WIDE))
ALIKE = cluster(*[("big", "a")] * 8, kinds=(BIG,))
MODEL = replace(SMALL, name="some model", heads=16, kv_heads=8)


def ids(first: int, count: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(first, first + count))


def trainer(*stages: Stage) -> Placement:
    return Placement(
        role="train", kind="+".join(dict.fromkeys(s.kind for s in stages)), tp=stages[0].tp, dp=stages[0].dp,
        pp=len(stages), devices=tuple(d for s in stages for d in s.devices), stages=stages,
    )  # fmt: skip


def stage(first: int, *, dp: int, tp: int, layers: int = 24, kind: str = "big") -> Stage:
    return Stage(devices=ids(first, dp * tp), kind=kind, dp=dp, tp=tp, layers=layers)


def engine(first: int, *, tp: int = 1, pp: int = 1, kind: str = "wide", running: int = 16) -> Placement:
    return Placement(
        role="rollout", kind=kind, devices=ids(first, tp * pp), tp=tp, pp=pp, max_running=running,
        rate_tokens_per_s=100.0 * tp * pp,
    )  # fmt: skip


def asked(at: Any = FLEET, **changes: Any) -> Problem:
    return problem(at, **{"model": MODEL, "capabilities": Capabilities(trainer="replicated"), **changes})


# A pipeline of two stages on node a, and eight engines of two devices on nodes b and c.
SPLIT = Plan(
    placements=(
        trainer(stage(0, dp=2, tp=2, layers=14), stage(4, dp=2, tp=2, layers=10)),
        *(engine(first, tp=2) for first in range(8, 24, 2)),
    )
)


def values(exported: Exported) -> dict[str, Any]:
    """The settings of any target as a flat mapping; fails on a line that the target's users could not pass on."""
    [(name, text)] = exported.files.items()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    if name.endswith(".toml"):
        return _flat(tomllib.loads(text))
    if name.endswith(".flags"):
        return _flags(shlex.split("\n".join(lines)))
    found = {}
    for line in lines:
        assert shlex.split(line) == [line], "a shell passes it on as one argument"
        match = re.fullmatch(r"(?:\+{0,2})([A-Za-z_][\w.]*)=(\S+)", line)
        assert match, line
        found[match[1]] = _read(match[2])
    assert len(found) == len(lines), "no key twice"
    return found


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _flags(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            assert word[2:] not in found
            found[word[2:]] = True if following.startswith("--") else _read(following)
    return found


def _read(text: str) -> Any:
    return json.loads(text) if re.fullmatch(r"true|false|-?\d+(\.\d+)?", text) else text


def figures(target: str, v: dict[str, Any]) -> SimpleNamespace:
    """What each target would start, from its settings alone."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    if target == "verl":
        train, infer = (
            v["trainer.nnodes"] * v["trainer.n_gpus_per_node"],
            v["rollout.nnodes"] * v["rollout.n_gpus_per_node"],
        )
        tp = v[f"{rollout}.tensor_model_parallel_size"]
        grid = v.get(f"{actor}.megatron.tensor_model_parallel_size", 1) * v.get(
            f"{actor}.megatron.pipeline_model_parallel_size", 1
        )
        assert v["rollout.n_gpus_per_node"] % tp == 0
        return SimpleNamespace(
            train=train, infer=infer, engine=tp, grid=grid, eta=v["async_training.staleness_threshold"],
            samples=v[f"{actor}.ppo_mini_batch_size"] * v[f"{rollout}.n"], memory=v[f"{rollout}.gpu_memory_utilization"],
            longest=v["data.max_prompt_length"] + v["data.max_response_length"],
        )  # fmt: skip
    if target == "areal":
        d, e = _degrees(v["actor.backend"]), _degrees(v["rollout.backend"])
        assert v["train_dataset.batch_size"] == v["rollout.consumer_batch_size"]
        return SimpleNamespace(
            train=d["d"] * d["t"] * d["p"], infer=e["d"] * e["t"] * e["p"], engine=e["t"] * e["p"], grid=d["t"] * d["p"],
            eta=v["rollout.max_head_offpolicyness"], samples=v["train_dataset.batch_size"] * v["gconfig.n_samples"],
            memory=v["vllm.gpu_memory_utilization"], longest=v["gconfig.max_tokens"],
        )  # fmt: skip
    if target == "openrlhf":
        assert v["rollout.batch_size"] * v["rollout.n_samples_per_prompt"] == v["train.batch_size"]
        assert v.get("train.async_enable", False) == ("train.async_queue_size" in v)
        return SimpleNamespace(
            train=v["actor.num_nodes"] * v["actor.num_gpus_per_node"], grid=v["ds.tensor_parallel_size"],
            infer=v["vllm.num_engines"] * v["vllm.tensor_parallel_size"], engine=v["vllm.tensor_parallel_size"],
            eta=v.get("train.async_queue_size", 0), samples=v["train.batch_size"], memory=v["vllm.gpu_memory_utilization"],
            longest=v["data.max_len"],
        )  # fmt: skip
    assert target == "prime-rl"
    # What its validators ask: read in its source, since the package cannot be installed from an index.
    assert v["orchestrator.max_inflight_rollouts"] >= v["orchestrator.group_size"]
    assert v["orchestrator.batch_size"] % v["orchestrator.group_size"] == 0
    one = v["deployment.type"] == "single_node"
    unit = 1 if one else v["deployment.gpus_per_node"]
    train, infer = ("num_train_gpus", "num_infer_gpus") if one else ("num_train_nodes", "num_infer_nodes")
    if one:
        assert v[f"deployment.{train}"] + v[f"deployment.{infer}"] <= v["deployment.gpus_per_node"]
    else:
        assert "slurm.job_name" in v
        assert unit % v["inference.parallel.tp"] == 0
    return SimpleNamespace(
        train=v[f"deployment.{train}"] * unit, infer=v[f"deployment.{infer}"] * unit, grid=1,
        engine=v["inference.parallel.tp"], eta=v["orchestrator.max_off_policy_steps"], samples=v["orchestrator.batch_size"],
        memory=v["inference.gpu_memory_utilization"], longest=v["seq_len"],
    )  # fmt: skip


def _degrees(backend: str) -> dict[str, int]:
    match = re.fullmatch(r"(?:vllm|fsdp|megatron):((?:[dtp]\d+)+)", backend)
    assert match, backend
    assert not (backend.startswith("fsdp") and "p" in match[1])
    return {"d": 1, "t": 1, "p": 1} | {k: int(n) for k, n in re.findall(r"([dtp])(\d+)", match[1])}


def check_adds_up(target: str, exported: Exported, plan: Plan, p: Problem) -> None:
    f, w = figures(target, values(exported)), p.workload
    assert plan.train is not None
    assert f.train == len(plan.train.devices)
    assert f.infer == sum(len(r.devices) for r in plan.rollouts)
    assert f.infer % f.engine == 0
    assert f.train % f.grid == 0
    assert f.samples == w.samples_per_step
    assert f.longest == w.prompt.max_tokens + w.response.max_tokens
    assert 0 < f.memory < 1
    eta = w.eta if w.mode == "async" else 0
    assert f.eta == (max(1, eta) if target == "openrlhf" and w.algorithm == "ppo" else eta)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(p=problems(most=6, overrides=True), algorithm=st.sampled_from(["grpo", "ppo"]), reference=st.booleans())
def test_the_figures_of_any_plan_add_up(p: Problem, algorithm: Any, reference: bool) -> None:
    p = replace(p, workload=replace(p.workload, algorithm=algorithm, reference_model=reference))
    found = solve(p, budget=Budget(evaluations=30))
    assume(isinstance(found, Feasible))
    assert isinstance(found, Feasible)
    for target in EXPORTERS:
        exported = export(target, found, p)
        check_adds_up(target, exported, found.plan, p)
        assert exported == export(target, found.plan, p), "a plan says as much as its solution"
        assert exported.target == target
        assert len(set(exported.notes)) == len(exported.notes)
        for note in exported.notes:
            assert note[0] != " "
            assert note.endswith(".")
            assert "\n" not in note


def test_verl_by_hand() -> None:
    """Megatron dp2 tp2 pp2 with 14 and 10 layers; eight engines of two; 16 prompts of 4; eta 4."""
    v = values(export("verl", SPLIT, asked()))
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    wanted = {
        "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "rollout.nnodes": 2, "rollout.n_gpus_per_node": 8,
        f"{actor}.megatron.tensor_model_parallel_size": 2, f"{actor}.megatron.pipeline_model_parallel_size": 2,
        f"{actor}.megatron.override_transformer_config.num_layers_in_first_pipeline_stage": 14,
        f"{actor}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage": 10,
        f"{actor}.ppo_mini_batch_size": 16, f"{rollout}.n": 4, f"{rollout}.tensor_model_parallel_size": 2,
        f"{rollout}.max_num_seqs": 16, "async_training.concurrent_samples_per_replica": 4,
        "async_training.staleness_threshold": 4, "algorithm.adv_estimator": "grpo", "data.max_prompt_length": 200,
        "data.max_response_length": 2000, "actor_rollout_ref.hybrid_engine": False,
    }  # fmt: skip
    assert {k: v[k] for k in wanted} == wanted


def test_areal_by_hand() -> None:
    """8 engines x 16 running are 128 samples or 32 prompts; (eta + 1) batches would be 80."""
    v = values(export("areal", SPLIT, asked()))
    assert v["actor.backend"] == "megatron:d2t2p2"
    assert v["rollout.backend"] == "vllm:d8t2"
    assert (v["cluster.n_nodes"], v["cluster.n_gpus_per_node"]) == (3, 8)
    assert v["rollout.max_concurrent_rollouts"] == 32
    tight = asked(workload=workload(eta=0))
    assert values(export("areal", SPLIT, tight))["rollout.max_concurrent_rollouts"] == 16


def test_openrlhf_by_hand() -> None:
    """No pipeline: eight devices at tp 2 are dp 4."""
    exported = export("openrlhf", SPLIT, asked())
    v = values(exported)
    wanted = {
        "actor.num_nodes": 1, "actor.num_gpus_per_node": 8, "ds.tensor_parallel_size": 2, "vllm.num_engines": 8,
        "vllm.tensor_parallel_size": 2, "rollout.batch_size": 16, "train.batch_size": 64, "train.async_queue_size": 4,
        "algo.kl.init_coef": 0, "algo.advantage.estimator": "group_norm",
    }  # fmt: skip
    assert {k: v[k] for k in wanted} == wanted
    assert any("2 pipeline stages" in n for n in exported.notes)
    sync = values(export("openrlhf", SPLIT, asked(workload=workload(mode="sync"))))
    assert not any(k.startswith("train.async") for k in sync)


def test_prime_rl_by_hand() -> None:
    """Three whole nodes: one trains, two generate."""
    exported = export("prime-rl", SPLIT, asked())
    v = values(exported)
    assert (v["deployment.gpus_per_node"], v["deployment.num_train_nodes"], v["deployment.num_infer_nodes"]) == (
        8,
        1,
        2,
    )
    assert (v["orchestrator.batch_size"], v["orchestrator.group_size"]) == (64, 4)
    assert (v["inference.parallel.tp"], v["inference.vllm_extra.max_num_seqs"]) == (2, 16)
    assert v["model.name"] == "some model"
    [text] = exported.files.values()
    assert {"trainer", "orchestrator", "inference"} <= tomllib.loads(text).keys(), "the tables its root requires"
    assert any("shards them over all ranks" in n for n in exported.notes)
    assert not any("whole nodes" in n for n in exported.notes)


def test_one_node_is_named_in_devices() -> None:
    plan = Plan(placements=(trainer(stage(0, dp=2, tp=1)), engine(2, tp=2, kind="big"), engine(4, tp=2, kind="big")))
    v = values(export("prime-rl", plan, asked(ALIKE)))
    assert v["deployment.type"] == "single_node"
    names = ("gpus_per_node", "num_train_gpus", "num_infer_gpus")
    assert [v[f"deployment.{n}"] for n in names] == [8, 2, 4]


def test_a_plan_that_a_target_can_say_whole_has_no_note() -> None:
    """One kind, no idle device, equal engines, an FSDP trainer, synchronous: nothing is lost in verl and AReaL."""
    plan = Plan(placements=(trainer(stage(0, dp=4, tp=1)), engine(4, tp=2, kind="big"), engine(6, tp=2, kind="big")))
    p = asked(ALIKE, capabilities=Capabilities(trainer="fsdp"), workload=workload(mode="sync"))
    assert export("verl", plan, p).notes == ()
    assert export("areal", plan, p).notes == ()
    assert values(export("verl", plan, p))["actor_rollout_ref.actor.strategy"] == "fsdp2"
    assert values(export("areal", plan, p))["actor.backend"] == "fsdp:d4"


def says(exported: Exported, *words: str) -> bool:
    return any(all(w in n for w in words) for n in exported.notes)


@pytest.mark.parametrize("target", EXPORTERS)
def test_what_no_target_says_is_noted(target: str) -> None:
    """Kinds mixed in the pipeline, dp by stage, engines of two sizes and unequal shares, an idle device."""
    odd = Plan(
        placements=(
            trainer(stage(0, dp=4, tp=1, layers=20), stage(8, dp=2, tp=1, layers=4, kind="wide")),
            replace(engine(10, tp=2), share=0.5),
            *(replace(engine(first, tp=1, running=9), share=0.1) for first in (12, 13, 14, 15, 16)),
        )
    )
    exported = export(target, odd, asked())
    assert says(exported, "mixes big and wide")
    assert says(exported, "stages differ", "dp4 x tp1 on big", "dp2 x tp1 on wide") or "prime" in target
    assert says(exported, "The plan's engines are", "1 x tp2", "5 x tp1")
    assert says(exported, "9 to 16 samples")
    assert says(exported, "unequal shares", "2.50 times")
    assert says(exported, "11 devices", "idle")
    assert says(exported, "does not choose devices by kind", "a, b (big, wide)", "b, c (wide)")
    assert says(exported, "predicted step time is that of the plan")
    check_adds_up(target, exported, odd, asked())


def test_engines_of_two_sizes_take_the_one_that_yields_most_and_tiles() -> None:
    able = Abilities(name="it")
    four = [engine(8, tp=4), engine(12, tp=4)]
    two = [engine(first, tp=2) for first in range(16, 24, 2)]
    plan = Plan(placements=(trainer(stage(0, dp=8, tp=1)), *four, *two[:3], engine(22, tp=2)))
    shape = uniform(plan, asked(), able)
    assert (shape.rollout.tp, shape.rollout.engines) == (2, 8), "equal output: the smaller"
    fast = [replace(e, rate_tokens_per_s=1000.0) for e in four]
    shape = uniform(Plan(placements=(plan.placements[0], *fast, *two)), asked(), able)
    assert (shape.rollout.tp, shape.rollout.engines) == (4, 4)
    # Without two of node c's devices blocks of four no longer tile it.
    shape = uniform(Plan(placements=(plan.placements[0], *fast, *two[:3])), asked(), able)
    assert (shape.rollout.tp, shape.rollout.engines) == (2, 7)


def test_engines_with_a_pipeline() -> None:
    plan = Plan(placements=(trainer(stage(0, dp=8, tp=1)), engine(8, tp=2, pp=2), engine(16, tp=2, pp=2)))
    assert values(export("areal", plan, asked()))["rollout.backend"] == "vllm:d2t2p2"
    exported = export("verl", plan, asked())
    assert values(exported)["actor_rollout_ref.rollout.tensor_model_parallel_size"] == 4
    assert says(exported, "verl runs engines with tp alone")


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9))
def test_blocks_hold_the_devices_exactly(nodes: list[str]) -> None:
    at = cluster(*[("big", n) for n in nodes], kinds=(BIG,))
    blocks = blocks_of([d.id for d in at.devices], at)
    assert blocks.devices == len(nodes)
    for n in set(nodes):
        assert nodes.count(n) % blocks.per_group == 0


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6).map(tuple))
def test_layers_verl_can_say(layers: tuple[int, ...]) -> None:
    said = expressible_layers(layers)
    assert (sum(said), len(said)) == (sum(layers), len(layers))
    assert min(said) >= 1
    assert len(set(said[1:-1])) <= 1
    if len(set(layers[1:-1])) <= 1:
        assert said == layers


def test_samples_at_once_are_counted_by_engine() -> None:
    """Engines of 16 and of 9 running: 25 samples, not twice the higher limit."""
    plan = Plan(placements=(trainer(stage(0, dp=8, tp=1)), engine(8, tp=1), engine(9, tp=1, running=9)))
    assert values(export("prime-rl", plan, asked()))["orchestrator.max_inflight_rollouts"] == 25
    small = asked(workload=workload(prompts_per_step=2, responses_per_prompt=3, eta=1))
    assert values(export("prime-rl", plan, small))["orchestrator.max_inflight_rollouts"] == 12, "(eta + 1) batches of 6"
    assert says(export("prime-rl", plan, small), "dp8", "more ranks than the 6 samples")


def test_states_that_do_not_fit_whole_are_sharded() -> None:
    """Without its pipeline the trainer holds the whole model, 16 bytes a parameter: bf16 weights and gradients, fp32
    master and moments."""
    card = kind("big", memory=20e9)
    at = cluster(*[("big", "a")] * 8, kinds=(card,))
    model = replace(MODEL, name="two billion", hidden=2048, intermediate=8192, layers=24)
    plan = Plan(
        placements=(
            trainer(*(stage(i, dp=1, tp=1, layers=6) for i in range(4))),
            *(engine(i, kind="big") for i in range(4, 8)),
        )
    )
    p = asked(at, model=model, workload=workload(response=workload().prompt))
    whole = model.params * 16 / card.memory_bytes
    assert 1 < whole < 3, "not whole, but in four parts"
    exported = export("openrlhf", plan, p)
    assert values(exported)["ds.zero_stage"] == 3
    assert says(exported, "shards them here, because whole ones would not fit")
    assert values(export("openrlhf", SPLIT, asked()))["ds.zero_stage"] == 2


def test_ppo_puts_a_critic_beside_the_actor() -> None:
    p = asked(workload=workload(algorithm="ppo", reference_model=True))
    verl = values(export("verl", SPLIT, p))
    assert verl["algorithm.adv_estimator"] == "gae"
    areal = values(export("areal", SPLIT, p))
    assert areal["critic.backend"] == areal["ref.backend"] == areal["actor.backend"]
    openrlhf = values(export("openrlhf", SPLIT, p))
    assert openrlhf["train.colocate_all"]
    for model in ("critic", "ref", "reward"):
        assert openrlhf[f"{model}.num_nodes"] * openrlhf[f"{model}.num_gpus_per_node"] == 8
    assert says(export("prime-rl", SPLIT, p), "without a critic")


def test_what_cannot_be_exported() -> None:
    with pytest.raises(UnknownName, match="areal, openrlhf, prime-rl, verl"):
        export("trl", SPLIT, asked())
    for missing, word in (
        (SPLIT.placements[1:], "needs one trainer"),
        (SPLIT.placements[:1], "needs rollout replicas"),
    ):
        with pytest.raises(InvalidInput, match=word):
            export("verl", Plan(placements=missing), asked())
    with pytest.raises(InvalidInput, match="needs one trainer"):
        export("verl", Plan(placements=(*SPLIT.placements, SPLIT.placements[0])), asked())
    other = replace(SPLIT.placements[-1], role="infer")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="role that no exporter maps"):
        export("verl", Plan(placements=(*SPLIT.placements[:-1], other)), asked())
    with pytest.raises(InvalidInput, match="share devices"):
        export("verl", Plan(placements=(*SPLIT.placements, engine(0, tp=2, kind="big"))), asked())


# The command


def run(capfd: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    capfd.readouterr()
    assert main(list(argv)) == code
    out, err = capfd.readouterr()
    return out, err


@pytest.mark.parametrize("target", EXPORTERS)
def test_the_command_prints_settings_and_notes(target: str, capfd: pytest.CaptureFixture[str]) -> None:
    document = json.loads(run(capfd, "plan", "local", "--export", target, "-o", "json")[0])
    assert sorted(document) == ["files", "notes", "target"]
    [text] = document["files"].values()
    out, _ = run(capfd, "plan", "local", "--export", target)
    notes = [line.removeprefix("# note: ") for line in out.splitlines() if line.startswith("# note: ")]
    assert notes == document["notes"]
    assert notes
    assert out.endswith(text)
    values(Exported(target=target, files={"x" + Path(next(iter(document["files"]))).suffix: out}))


def test_the_command_refuses_what_makes_no_sense(capfd: pytest.CaptureFixture[str]) -> None:
    assert "not one of" in run(capfd, "plan", "local", "--export", "trl", code=2)[1]
    assert "one question at a time" in run(capfd, "plan", "local", "--export", "verl", "--compare", "hex", code=2)[1]
    small = ("--set", "fleet.kinds.fast.memory=1 MB", "--set", "fleet.kinds.old.memory=1 MB")
    small = (*small, "--set", "fleet.kinds.wide.memory=1 MB")
    out, err = run(capfd, "plan", "local", "--export", "verl", *small, code=5)
    assert out == ""
    assert "no plan" in err
