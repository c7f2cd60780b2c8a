"""AReaL: overrides of an experiment's YAML file, with a backend string for each engine.

Keys are those of areal 1.0.4 (package index, wheel): `areal/api/cli_args.py` (`PPOConfig` and the sections it names)
and the grammar of `areal/api/alloc_mode.py`. That release deprecates `allocation_mode` for `rollout.backend` and
`actor.backend`; the last line of the file's head shows the old form for older launchers.

Its staleness manager admits `(max_head_offpolicyness + version + 1) * consumer_batch_size` prompts, which is the
planner's own admission rule, so `max_head_offpolicyness` is eta.
"""

from planner.export.exported import Exported, Value, argument, commented, override_lines
from planner.export.uniform import Abilities, Uniform, uniform
from planner.plan import Plan
from planner.problem import Problem
from planner.solution import Feasible

_ABLE = Abilities(name="AReaL")


def export(plan: Feasible | Plan, problem: Problem) -> Exported:
    """One file, `areal.overrides`: one `++key=value` a line. Raises InvalidInput as `uniform` does."""
    shape = uniform(plan, problem, _ABLE)
    settings: dict[str, Value] = {
        **_engines(shape),
        **_rollout(shape, problem),
        **_actor(shape, problem),
        **_algorithm(shape, problem),
    }
    old = f"{settings['rollout.backend']}+{settings['actor.backend']}"
    head = commented(
        (
            "areal 1.0.4: overrides of an experiment of yours, from a modelled plan.",
            "  python3 examples/math/gsm8k_rl.py --config examples/math/gsm8k_grpo.yaml scheduler.type=ray \\",
            "    $(grep -v '^#' areal.overrides) actor.path=... train_dataset.path=...",
            f"Yours to set: the model's path ({argument(problem.model.name)}), data, reward, optimiser, scheduler.",
            f"Launchers that still read it: allocation_mode={old}",
        )
    )
    # "++" adds a key that the experiment's file leaves out and overrides one that it has.
    text = head + override_lines(settings, prefix="++")
    return Exported(target="areal", files={"areal.overrides": text}, notes=(*shape.notes, *_notes(shape, problem)))


def dimensions(*, dp: int, tp: int, pp: int) -> str:
    """AReaL's spelling of a degree of each, such as "d4t2p2"; degrees of 1 but dp are left out."""
    return f"d{dp}" + (f"t{tp}" if tp > 1 else "") + (f"p{pp}" if pp > 1 else "")


def _engines(shape: Uniform) -> dict[str, Value]:
    grid, pool = shape.train, shape.rollout
    # AReaL's FSDP takes tp but no pipeline.
    backend = "fsdp" if grid.sharded and grid.pp == 1 else "megatron"
    return {
        "cluster.n_nodes": len(shape.nodes),
        "cluster.n_gpus_per_node": shape.devices_per_node,
        "rollout.backend": f"vllm:{dimensions(dp=pool.engines, tp=pool.tp, pp=pool.pp)}",
        "actor.backend": f"{backend}:{dimensions(dp=grid.dp, tp=grid.tp, pp=grid.pp)}",
    }


def _rollout(shape: Uniform, problem: Problem) -> dict[str, Value]:
    w, pool = problem.workload, shape.rollout
    settings: dict[str, Value] = {
        "train_dataset.batch_size": w.prompts_per_step,
        "train_dataset.max_length": w.prompt.max_tokens,
        "rollout.consumer_batch_size": w.prompts_per_step,
        "rollout.max_head_offpolicyness": w.eta if w.mode == "async" else 0,
        # AReaL counts prompts here, each with all its responses.
        "rollout.max_concurrent_rollouts": max(1, -(-shape.running_samples // w.responses_per_prompt)),
        "gconfig.n_samples": w.responses_per_prompt,
        "gconfig.max_new_tokens": w.response.max_tokens,
        "gconfig.max_tokens": shape.longest_tokens,
        "vllm.gpu_memory_utilization": pool.memory_share,
        "vllm.max_model_len": shape.longest_tokens,
    }
    if pool.max_running is not None:
        settings["vllm.max_num_seqs"] = pool.max_running
    return settings


def _actor(shape: Uniform, problem: Problem) -> dict[str, Value]:
    w = problem.workload
    return {
        "actor.gradient_checkpointing": shape.train.recompute,
        "actor.mb_spec.max_tokens_per_mb": shape.train.micro_batch_tokens,
        "actor.ppo_n_minibatches": 1,  # one optimiser step a batch, as eta counts
        "actor.max_new_tokens": w.response.max_tokens,
        "actor.use_decoupled_loss": w.proximal_forward,
        "actor.recompute_logprob": w.proximal_forward,
    }


def _algorithm(shape: Uniform, problem: Problem) -> dict[str, Value]:
    w = problem.workload
    settings: dict[str, Value] = {}
    if w.algorithm == "grpo":
        settings["actor.reward_norm.mean_level"] = "group"
        settings["actor.reward_norm.std_level"] = "group"
        settings["actor.reward_norm.group_size"] = w.responses_per_prompt
    beside = [*(["ref"] if w.reference_model else []), *(["critic"] if w.algorithm == "ppo" else [])]
    actor = _engines(shape)["actor.backend"]
    for role in beside:
        settings[f"{role}.backend"] = actor
        settings[f"{role}.scheduling_strategy.type"] = "colocation"
        settings[f"{role}.scheduling_strategy.target"] = "actor"
        settings[f"{role}.mb_spec.max_tokens_per_mb"] = shape.train.micro_batch_tokens
    if w.algorithm == "ppo":
        settings["critic.is_critic"] = True
        settings["critic.ppo_n_minibatches"] = 1
    if not w.reference_model:
        settings["actor.kl_ctl"] = 0.0
    return settings


def _notes(shape: Uniform, problem: Problem) -> tuple[str, ...]:
    w, grid, name = problem.workload, shape.train, _ABLE.name
    notes = []
    if len(set(grid.layers)) > 1:
        notes.append(
            f"The plan gives its stages {'+'.join(map(str, grid.layers))} layers; {name} splits layers by a rule of its own."
        )
    if problem.capabilities.trainer == "fsdp" and grid.pp > 1:
        notes.append(f"The plan's trainer is FSDP with a pipeline; {name} needs Megatron for that.")
    if not grid.sharded:
        notes.append(
            f"The plan counts whole optimiser states on every dp rank; {name}'s Megatron shards them and needs less memory."
        )
    if len({d.kind for d in problem.cluster.devices}) > 1:
        notes.append(
            "Under Slurm, rollout.scheduling_spec and actor.scheduling_spec take a nodelist, which ties each to its nodes."
        )
    if w.algorithm == "ppo":
        notes.append(f"The plan's step time holds no critic of its own placement; {name} puts it beside the actor.")
    if w.mode == "async" and w.eta:
        notes.append(
            f"{name} admits prompts by the plan's own rule, but masks no token older than eta {w.eta} where it is trained."
        )
    return tuple(notes)
