"""Exported settings read by the targets' own packages, where they are installed: a key that does not exist, or a value
of the wrong type, fails here. None of them is a dependency."""

import argparse
import ast
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from fleets import workload
from test_planner_export import ALIKE, SPLIT, asked, engine, says, stage, trainer

from planner import Capabilities, Problem
from planner.export import export
from planner.plan import Plan

pytestmark = pytest.mark.optional

UNEVEN = Plan(
    placements=(trainer(*(stage(2 * i, dp=1, tp=2, layers=n) for i, n in enumerate((9, 6, 5, 4)))), engine(8))
)
ONE_NODE = Plan(placements=(trainer(stage(0, dp=4, tp=1)), engine(4, tp=2, kind="big"), engine(6, tp=2, kind="big")))
CASES: list[tuple[Plan, Problem]] = [
    (SPLIT, asked()),
    (SPLIT, asked(workload=workload(algorithm="ppo", reference_model=True, proximal_forward=True))),
    (SPLIT, asked(workload=workload(mode="sync", reference_model=True))),
    (UNEVEN, asked()),
    (ONE_NODE, asked(ALIKE, capabilities=Capabilities(trainer="fsdp"))),
]


def package(name: str) -> Path:
    """The folder of an installed package, without importing it; skips where there is none."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{name} is not installed: its schema is not asked")
    return Path(next(iter(found.submodule_search_locations)))


def lines(target: str, plan: Plan, p: Problem) -> list[str]:
    [text] = export(target, plan, p).files.values()
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.fixture
def hydra() -> Iterator[Any]:
    found = pytest.importorskip("hydra", reason="hydra is not installed")
    yield found
    found.core.global_hydra.GlobalHydra.instance().clear()


@pytest.mark.parametrize(("plan", "p"), CASES)
def test_verl_composes(plan: Plan, p: Problem, hydra: Any) -> None:
    """verl's configuration is closed: an override of a key that is not there is refused."""
    folder = package("verl")
    overrides = lines("verl", plan, p)
    megatron = any(".megatron." in line for line in overrides)
    name = "fully_async_ppo_megatron_trainer" if megatron else "fully_async_ppo_trainer"
    configs = folder / "experimental" / "fully_async_policy" / "config"
    search = f"hydra.searchpath=[file://{folder / 'trainer' / 'config'}]"
    with hydra.initialize_config_dir(config_dir=str(configs), version_base=None):
        with pytest.raises(Exception, match="no_such_key"):
            hydra.compose(config_name=name, overrides=[search, "rollout.no_such_key=1"])
        cfg = hydra.compose(config_name=name, overrides=[search, *overrides])
    assert plan.train is not None
    assert cfg.trainer.nnodes * cfg.trainer.n_gpus_per_node == len(plan.train.devices)
    assert cfg.data.train_batch_size == 0  # what its rollouter asserts at the start
    assert cfg.data.gen_batch_size == 1
    assert cfg.actor_rollout_ref.hybrid_engine is False
    actor = cfg.actor_rollout_ref.actor
    required = actor.ppo_mini_batch_size * cfg.async_training.require_batches
    outstanding = (
        required * (cfg.async_training.staleness_threshold + 1) * cfg.async_training.trigger_parameter_sync_step
    )
    w = p.workload
    assert outstanding == w.prompts_per_step * ((w.eta if w.mode == "async" else 0) + 1)


@pytest.mark.parametrize(("plan", "p"), CASES)
def test_areal_reads(plan: Plan, p: Problem, tmp_path: Path) -> None:
    """Through AReaL's own loader: Hydra over a file, then its typed dataclasses; backends through its own grammar."""
    package("areal")
    cli = pytest.importorskip("areal.api.cli_args", exc_type=ImportError, reason="areal does not import here")
    modes = pytest.importorskip("areal.api.alloc_mode", exc_type=ImportError, reason="areal does not import here")
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text("experiment_name: e\ntrial_name: t\ntrain_dataset:\n  batch_size: 1\n")
    loaded, _ = cli.parse_cli_args(["--config", str(experiment), *lines("areal", plan, p)])
    cfg = cli.to_structured_cfg(loaded, cli.GRPOConfig)
    assert plan.train is not None
    train, rollout = (modes.ModelAllocation.from_str(x) for x in (cfg.actor.backend, cfg.rollout.backend))
    assert train.world_size == len(plan.train.devices)
    assert rollout.world_size == sum(len(r.devices) for r in plan.rollouts)
    assert cfg.train_dataset.batch_size * cfg.gconfig.n_samples == p.workload.samples_per_step
    old = modes._AllocationMode.from_str(f"{cfg.rollout.backend}+{cfg.actor.backend}")
    assert old.world_size == train.world_size + rollout.world_size
    loaded, _ = cli.parse_cli_args(["--config", str(experiment), "++rollout.no_such_key=1"])
    with pytest.raises(Exception, match="no_such_key"):
        cli.to_structured_cfg(loaded, cli.GRPOConfig)


@pytest.mark.parametrize(("plan", "p"), CASES)
def test_openrlhf_parses(plan: Plan, p: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's own parser and checks; only its last line, which starts the training, hands the arguments back."""
    folder = package("openrlhf")
    script = folder / "cli" / "train_ppo_ray.py"
    tree = ast.parse(script.read_text())
    [entry] = [n for n in tree.body if isinstance(n, ast.If) and "__main__" in ast.unparse(n.test)]
    code = compile(ast.Module(body=entry.body, type_ignores=[]), str(script), "exec")
    hierarchize = folder / "utils" / "config.py"
    yours = ["--actor.model_name_or_path", "m", "--reward.remote_url", "http://r"]
    flags = [word for line in lines("openrlhf", plan, p) for word in line.split()]
    got: list[Any] = []
    spec = importlib.util.spec_from_file_location("openrlhf.utils.config", hierarchize)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("openrlhf", "openrlhf.utils"):  # the packages import torch and Ray; this module does not
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    monkeypatch.setitem(sys.modules, "openrlhf.utils.config", module)
    scope = {"argparse": argparse, "datetime": datetime, "train": got.append}
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", *yours, "--no-such-flag"])
    with pytest.raises(SystemExit):
        exec(code, dict(scope))
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", *yours, *flags])
    exec(code, dict(scope))
    [args] = got
    assert plan.train is not None
    assert args.actor.num_nodes * args.actor.num_gpus_per_node == len(plan.train.devices)
    assert args.vllm.num_engines * args.vllm.tensor_parallel_size == sum(len(r.devices) for r in plan.rollouts)
    assert args.rollout.batch_size * args.rollout.n_samples_per_prompt == args.train.batch_size
    if args.algo.kl.init_coef > 0:  # a reference model starts: on the actor's devices
        assert args.train.colocate_actor_ref or args.train.colocate_all
        assert (args.actor.num_nodes, args.actor.num_gpus_per_node) == (args.ref.num_nodes, args.ref.num_gpus_per_node)


@pytest.mark.parametrize(("plan", "p"), CASES)
def test_prime_rl_validates(plan: Plan, p: Problem) -> None:
    """Its pydantic models forbid unknown keys."""
    package("prime_rl")
    rl = pytest.importorskip("prime_rl.configs.rl", exc_type=ImportError, reason="prime-rl does not import here")
    exported = export("prime-rl", plan, p)
    [text] = exported.files.values()
    document = tomllib.loads(text)
    document["orchestrator"]["renderer"] = {"name": "default"}  # the made-up model has no renderer of its own
    cfg = rl.RLConfig.model_validate(document)
    assert cfg.orchestrator.batch_size == p.workload.samples_per_step
    assert says(exported, "critic") == (p.workload.algorithm == "ppo")
