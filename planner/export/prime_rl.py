"""prime-rl: one TOML file for its `rl` entry point.

Keys are those of the public repository PrimeIntellect-ai/prime-rl, read there: `examples/**/*.toml` at commit
0143423e8f704e57709c1cbe4c72012a0cc10f71 and `packages/prime-rl-configs/src/prime_rl/configs/{rl,orchestrator,trainer}.py`
at commit 004274ec964f016ec9b17b5ae990a4b535314ff1, `inference.py` at 01496f7f4c74299bf5a738002ea649b2364b24e7.

Its trainer is FSDP2 over all training devices, without tensor or pipeline parallelism. Rollouts that started more than
`max_off_policy_steps` policies before training are dropped, so that is eta. On one node it takes numbers of GPUs; over
several, whole nodes for training and whole nodes for inference, started by Slurm.
"""

import math
from collections import Counter

from planner.export.exported import Exported, Value, argument, commented, quoted
from planner.export.uniform import Abilities, Blocks, Uniform, uniform
from planner.plan import Plan
from planner.problem import Problem
from planner.record import record
from planner.solution import Feasible

_ABLE = Abilities(name="prime-rl", trainer_tp=False, trainer_pp=False, engine_pp=False, always_shards=True)


@record
class _Deployment:
    """How the devices are named."""

    table: dict[str, Value]
    tp: int
    several_nodes: bool
    notes: tuple[str, ...] = ()


def export(plan: Feasible | Plan, problem: Problem) -> Exported:
    """One file, `rl.toml`. Raises InvalidInput as `uniform` does."""
    shape = uniform(plan, problem, _ABLE)
    deployment = _deployment(shape, plan.plan if isinstance(plan, Feasible) else plan, problem)
    tables: dict[str, dict[str, Value]] = {
        "": {"seq_len": shape.longest_tokens},
        "model": {"name": problem.model.name},
        "deployment": deployment.table,
        **({"slurm": {"job_name": "rl"}} if deployment.several_nodes else {}),
        "weight_broadcast": {"type": "nccl"},
        "trainer.model": {},  # shared settings reach the trainer only if its table is there
        **({"trainer.model.ac": {"mode": "full", "freq": 1}} if shape.train.recompute else {}),
        "orchestrator": _orchestrator(shape, problem),
        "orchestrator.train.sampling": {"max_completion_tokens": problem.workload.response.max_tokens},
        "inference": {"gpu_memory_utilization": shape.rollout.memory_share},
        "inference.model": {"max_model_len": shape.longest_tokens},
        "inference.parallel": {"tp": deployment.tp},
        **({"inference.vllm_extra": {"max_num_seqs": shape.rollout.max_running}} if shape.rollout.max_running else {}),
    }
    head = commented(
        (
            "prime-rl: configuration of its rl entry point, from a modelled plan.",
            "  uv run rl @ rl.toml",
            f"Yours to set: [model] name ({argument(problem.model.name)}), [[orchestrator.train.env]],"
            f" [orchestrator.renderer], optimiser{', [slurm]' if deployment.several_nodes else ''}.",
        )
    )
    text = head + "\n".join(_table(name, values) for name, values in tables.items())
    notes = (*shape.notes, *deployment.notes, *_notes(problem))
    return Exported(target="prime-rl", files={"rl.toml": text}, notes=notes)


def _table(name: str, values: dict[str, Value]) -> str:
    head = f"[{name}]\n" if name else ""
    return head + "".join(f"{key} = {quoted(value)}\n" for key, value in values.items())


def _orchestrator(shape: Uniform, problem: Problem) -> dict[str, Value]:
    w = problem.workload
    return {
        "batch_size": w.samples_per_step,  # in samples
        "group_size": w.responses_per_prompt,
        "max_off_policy_steps": w.eta if w.mode == "async" else 0,
        "max_inflight_rollouts": max(shape.running_samples, w.responses_per_prompt),  # it refuses less than a group
    }


def _deployment(shape: Uniform, plan: Plan, problem: Problem) -> _Deployment:
    if len(shape.nodes) == 1:
        on_node = sum(d.node == shape.nodes[0] for d in problem.cluster.devices)
        train, infer = shape.train.blocks.devices, shape.rollout.blocks.devices
        table: dict[str, Value] = {
            "type": "single_node",
            "gpus_per_node": on_node,
            "num_train_gpus": train,
            "num_infer_gpus": infer,
        }
        return _Deployment(table=table, tp=shape.rollout.tp, several_nodes=False)
    return _whole_nodes(shape.train.blocks, shape.rollout.blocks, shape.rollout.tp, plan, problem)


def _whole_nodes(train: Blocks, infer: Blocks, tp: int, plan: Plan, problem: Problem) -> _Deployment:
    per_node = math.gcd(train.per_group, infer.per_group)
    table: dict[str, Value] = {
        "type": "multi_node",
        "gpus_per_node": per_node,
        "num_train_nodes": train.devices // per_node,
        "num_infer_nodes": infer.devices // per_node,
    }
    notes = []
    cluster = problem.cluster
    used = Counter(cluster.device(d).node for p in plan.placements for d in p.devices)
    split = [n for n in used if used[n] != per_node]
    if split:
        notes.append(
            f"prime-rl gives whole nodes to training or inference, all with as many GPUs; {', '.join(split[:8])}"
            f"{' and more' if len(split) > 8 else ''} would have to be seen as several nodes of {per_node}."
        )
    if per_node % tp:
        smaller = math.gcd(per_node, tp)
        notes.append(f"Engines of tp{tp} do not tile nodes of {per_node} GPUs; they are tp{smaller} here.")
        tp = smaller
    return _Deployment(table=table, tp=tp, several_nodes=True, notes=tuple(notes))


def _notes(problem: Problem) -> tuple[str, ...]:
    w, name = problem.workload, _ABLE.name
    notes = []
    if w.algorithm == "ppo":
        notes.append(f"The plan is for PPO; {name} trains without a critic, so these settings are those of GRPO.")
    if w.reference_model:
        notes.append(
            f"The plan counts a reference model; {name} takes the KL term against the sampling policy instead."
        )
    if w.proximal_forward:
        notes.append(f"The plan counts a forward pass for proximal log-probabilities; {name} has none.")
    if w.mode == "sync" or w.eta == 0:
        notes.append(
            f"{name} always generates while it trains; max_off_policy_steps 0 drops what is older, it does not wait."
        )
    else:
        notes.append(
            f"{name} drops samples that are older than eta {w.eta}, where the plan admits fewer and masks tokens."
        )
    return tuple(notes)
