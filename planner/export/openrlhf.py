"""OpenRLHF: flags of its Ray trainer.

Flags are those of openrlhf 0.11.2 (package index, wheel): `openrlhf/cli/train_ppo_ray.py`, whose flags have sections
("--vllm.num_engines"); releases before wrote "--vllm_num_engines".

Its asynchronous trainer hands out `async_queue_size` slots, one a batch, and takes a slot back when it starts to train
on that batch. A batch begun under version i waits behind at most queue size - 1 others and is trained in step i + queue
size at the latest, so the queue size is eta. Without the flag it is synchronous.
"""

from planner.export.exported import Exported, Value, argument, commented, plain
from planner.export.uniform import Abilities, Uniform, uniform
from planner.plan import Plan
from planner.problem import Problem
from planner.solution import Feasible

_ABLE = Abilities(name="OpenRLHF", trainer_pp=False, engine_pp=False)


def export(plan: Feasible | Plan, problem: Problem) -> Exported:
    """One file, `openrlhf.flags`: one flag a line. Raises InvalidInput as `uniform` does."""
    shape = uniform(plan, problem, _ABLE)
    flags: dict[str, Value] = {
        **_placement(shape),
        **_beside_the_actor(shape, problem),
        **_batch(shape, problem),
        **_algorithm(problem),
        **_asynchrony(problem),
    }
    head = commented(
        (
            "openrlhf 0.11.2: flags of openrlhf.cli.train_ppo_ray, from a modelled plan.",
            "  python3 -m openrlhf.cli.train_ppo_ray $(grep -v '^#' openrlhf.flags) \\",
            "    --actor.model_name_or_path ... --reward.remote_url ... --data.prompt_dataset ...",
            f"Yours to set: the model's path ({argument(problem.model.name)}), data, reward, optimiser.",
        )
    )
    lines = "".join(_line(flag, value) for flag, value in flags.items())
    return Exported(
        target="openrlhf", files={"openrlhf.flags": head + lines}, notes=(*shape.notes, *_notes(shape, problem))
    )


def _line(flag: str, value: Value) -> str:
    if isinstance(value, bool):
        return f"--{flag}\n" if value else ""  # store_true: absent is false
    return f"--{flag} {plain(value)}\n"


def _placement(shape: Uniform) -> dict[str, Value]:
    grid, pool = shape.train, shape.rollout
    return {
        "actor.num_nodes": grid.blocks.groups,
        "actor.num_gpus_per_node": grid.blocks.per_group,
        "ds.tensor_parallel_size": grid.tp,
        "vllm.num_engines": pool.engines,
        "vllm.tensor_parallel_size": pool.tp,
        "vllm.gpu_memory_utilization": pool.memory_share,
    }


def _beside_the_actor(shape: Uniform, problem: Problem) -> dict[str, Value]:
    w, blocks = problem.workload, shape.train.blocks
    models = [*(["ref"] if w.reference_model else []), *(["critic", "reward"] if w.algorithm == "ppo" else [])]
    flags: dict[str, Value] = {}
    for model in models:
        flags[f"{model}.num_nodes"] = blocks.groups
        flags[f"{model}.num_gpus_per_node"] = blocks.per_group
    # In asynchronous mode "all" means all but the engines.
    flags["train.colocate_all"] = w.algorithm == "ppo"
    flags["train.colocate_actor_ref"] = w.algorithm != "ppo" and w.reference_model
    return flags


def _batch(shape: Uniform, problem: Problem) -> dict[str, Value]:
    w = problem.workload
    return {
        "rollout.batch_size": w.prompts_per_step,  # in prompts
        "rollout.n_samples_per_prompt": w.responses_per_prompt,
        "train.batch_size": w.samples_per_step,  # in samples: one optimiser step a rollout batch
        "data.max_len": shape.longest_tokens,
        "rollout.max_new_tokens": w.response.max_tokens,
        "ds.packing_samples": True,
        "train.dynamic_batch_enable": True,
        "train.max_tokens_per_gpu": shape.train.micro_batch_tokens,
        "actor.gradient_checkpointing_enable": shape.train.recompute,
        "ds.zero_stage": 3 if shape.train.sharded else 2,
    }


def _algorithm(problem: Problem) -> dict[str, Value]:
    w = problem.workload
    flags: dict[str, Value] = {"algo.advantage.estimator": _estimator(problem)}
    if w.reference_model:
        flags["algo.kl.use_loss"] = w.algorithm == "grpo"
    else:
        flags["algo.kl.init_coef"] = 0  # any other value starts a reference model
    return flags


def _estimator(problem: Problem) -> str:
    w = problem.workload
    if w.algorithm == "ppo":
        return "gae"
    return "group_norm" if w.responses_per_prompt > 1 else "reinforce"


def _queue(problem: Problem) -> int:
    """Batches ahead of the trainer; 0 is the synchronous trainer."""
    w = problem.workload
    eta = w.eta if w.mode == "async" else 0
    # Co-location that leaves the engines alone exists in asynchronous mode only.
    return max(1, eta) if w.algorithm == "ppo" else eta


def _asynchrony(problem: Problem) -> dict[str, Value]:
    queue = _queue(problem)
    if queue == 0:
        return {}
    return {
        "train.async_enable": True,
        "train.async_queue_size": queue,
        "train.partial_rollout_enable": problem.workload.mode == "async",
    }


def _notes(shape: Uniform, problem: Problem) -> tuple[str, ...]:
    w, name = problem.workload, _ABLE.name
    eta = w.eta if w.mode == "async" else 0
    notes = []
    if not shape.train.sharded:
        notes.append(
            "The plan counts whole optimiser states on every dp rank; ZeRO stage 2 shards them and needs less memory."
        )
    if w.algorithm == "grpo" and w.responses_per_prompt == 1:
        notes.append(f"{name} refuses group advantages for one response a prompt; the estimator is reinforce instead.")
    if w.algorithm == "ppo":
        notes.append(f"The plan's step time holds no critic of its own placement; {name} puts it beside the actor.")
    if _queue(problem) > eta:
        notes.append(
            f"{name} puts a critic beside the actor and away from the engines in asynchronous mode only: batches are up to"
            f" one step old where the plan has none."
        )
    if eta:
        notes.append(
            f"{name} bounds whole batches to eta {eta} steps, one batch generated after the other, where the plan admits"
            f" prompts one by one."
        )
    if w.proximal_forward:
        notes.append(
            f"{name} always runs the actor's forward pass before an update; algo.advantage.is_correction_level decides"
            f" whether it corrects for the engine's log-probabilities."
        )
    notes.append(f"{name} has no flag for the samples an engine decodes at once; the engine's own default rules.")
    return tuple(notes)
