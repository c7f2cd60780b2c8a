"""verl: Hydra overrides of its fully asynchronous trainer.

Keys are those of verl 0.9.1 (package index, wheel): `verl/experimental/fully_async_policy/config/*.yaml` over
`verl/trainer/config/ppo_trainer.yaml` and `ppo_megatron_trainer.yaml`. A plan keeps training and rollout on devices of
their own, which is this trainer and not the hybrid engine of `main_ppo`; a synchronous plan is its threshold 0.

Its rollouter stops at `ppo_mini_batch_size * require_batches * (staleness_threshold + 1) *
trigger_parameter_sync_step` prompts that are in flight or queued. With one batch a step and an update after every step
that is (threshold + 1) batches, so the threshold is eta itself.
"""

from planner.export.exported import Exported, Value, argument, commented, override_lines
from planner.export.uniform import Abilities, Uniform, uniform
from planner.plan import Plan
from planner.problem import Problem
from planner.solution import Feasible

_ABLE = Abilities(name="verl", engine_pp=False)  # its engines refuse pipeline_model_parallel_size > 1
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def export(plan: Feasible | Plan, problem: Problem) -> Exported:
    """One file, `verl.overrides`: one `key=value` a line. Raises InvalidInput as `uniform` does."""
    shape = uniform(plan, problem, _ABLE)
    megatron = not shape.train.sharded or shape.train.tp * shape.train.pp > 1
    settings: dict[str, Value] = {
        **_batch(shape, problem),
        **_asynchrony(shape, problem),
        **_rollout(shape),
        **_trainer(shape, megatron),
        **_algorithm(problem),
    }
    config = "fully_async_ppo_megatron_trainer" if megatron else "fully_async_ppo_trainer"
    head = commented(
        (
            "verl 0.9.1: overrides of verl.experimental.fully_async_policy.fully_async_main, from a modelled plan.",
            f"  python3 -m verl.experimental.fully_async_policy.fully_async_main --config-name={config} \\",
            "    $(grep -v '^#' verl.overrides) data.train_files=... data.val_files=... actor_rollout_ref.model.path=...",
            f"Yours to set: the model's path ({argument(problem.model.name)}), data, reward, optimiser,"
            " rollout.total_rollout_steps.",
        )
    )
    notes = (*shape.notes, *_notes(shape, problem, megatron))
    return Exported(target="verl", files={"verl.overrides": head + override_lines(settings)}, notes=notes)


def _batch(shape: Uniform, problem: Problem) -> dict[str, Value]:
    w = problem.workload
    return {
        "data.train_batch_size": 0,  # required by the fully asynchronous trainer
        "data.gen_batch_size": 1,
        "data.max_prompt_length": w.prompt.max_tokens,
        "data.max_response_length": w.response.max_tokens,
        f"{_ROLLOUT}.n": w.responses_per_prompt,
        f"{_ACTOR}.ppo_mini_batch_size": w.prompts_per_step,  # in prompts
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": shape.train.micro_batch_tokens,
    }


def _asynchrony(shape: Uniform, problem: Problem) -> dict[str, Value]:
    w, pool = problem.workload, shape.rollout
    running = pool.max_running or -(-shape.running_samples // pool.engines)
    return {
        "actor_rollout_ref.hybrid_engine": False,
        "async_training.staleness_threshold": w.eta if w.mode == "async" else 0,
        "async_training.trigger_parameter_sync_step": 1,
        "async_training.require_batches": 1,
        "async_training.partial_rollout": w.mode == "async",
        # In prompts, each with all its responses.
        "async_training.concurrent_samples_per_replica": max(1, -(-running // w.responses_per_prompt)),
    }


def _rollout(shape: Uniform) -> dict[str, Value]:
    pool = shape.rollout
    settings: dict[str, Value] = {
        "rollout.nnodes": pool.blocks.groups,
        "rollout.n_gpus_per_node": pool.blocks.per_group,
        f"{_ROLLOUT}.name": "vllm",
        f"{_ROLLOUT}.tensor_model_parallel_size": pool.tp,
        f"{_ROLLOUT}.gpu_memory_utilization": pool.memory_share,
        f"{_ROLLOUT}.max_model_len": shape.longest_tokens,
    }
    if pool.max_running is not None:
        settings[f"{_ROLLOUT}.max_num_seqs"] = pool.max_running
    return settings


def _trainer(shape: Uniform, megatron: bool) -> dict[str, Value]:
    grid = shape.train
    settings: dict[str, Value] = {
        "trainer.nnodes": grid.blocks.groups,
        "trainer.n_gpus_per_node": grid.blocks.per_group,
    }
    if not megatron:
        return {
            **settings,
            f"{_ACTOR}.strategy": "fsdp2",
            "actor_rollout_ref.model.enable_gradient_checkpointing": grid.recompute,
        }
    settings[f"{_ACTOR}.megatron.tensor_model_parallel_size"] = grid.tp
    settings[f"{_ACTOR}.megatron.pipeline_model_parallel_size"] = grid.pp
    override = f"{_ACTOR}.megatron.override_transformer_config"
    if grid.recompute:
        settings[f"{override}.recompute_granularity"] = "full"
        settings[f"{override}.recompute_method"] = "uniform"
        settings[f"{override}.recompute_num_layers"] = 1
    layers = expressible_layers(grid.layers)
    if len(set(layers)) > 1:
        settings[f"+{override}.num_layers_in_first_pipeline_stage"] = layers[0]
        settings[f"+{override}.num_layers_in_last_pipeline_stage"] = layers[-1]
    return settings


def expressible_layers(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Layers a stage as two keys can say them: any first and last stage, the stages between all alike.

    Where the plan's stages between differ, the split with the smallest largest stage takes its place; () stays ().
    """
    between = layers[1:-1]
    if len(set(between)) <= 1:
        return layers
    total, pp = sum(layers), len(layers)
    splits = []
    for each in {max(1, total // pp), -(-total // pp)}:
        ends = total - each * (pp - 2)
        if ends >= 2:
            splits.append((ends // 2, *[each] * (pp - 2), ends - ends // 2))
    return min(splits, key=lambda split: (max(split), split))


def _algorithm(problem: Problem) -> dict[str, Value]:
    w = problem.workload
    return {
        "algorithm.adv_estimator": "grpo" if w.algorithm == "grpo" else "gae",
        f"{_ACTOR}.use_kl_loss": w.reference_model,
        "algorithm.use_kl_in_reward": False,
        # Bypassed, the engine's log-probabilities stand for those of the proximal policy: no forward pass.
        "algorithm.rollout_correction.bypass_mode": not w.proximal_forward,
    }


def _notes(shape: Uniform, problem: Problem, megatron: bool) -> tuple[str, ...]:
    w, grid = problem.workload, shape.train
    notes = []
    layers = expressible_layers(grid.layers)
    if layers != grid.layers:
        notes.append(
            f"The plan gives its stages {'+'.join(map(str, grid.layers))} layers; verl's keys set the first and the last"
            f" stage alone, which makes it {'+'.join(map(str, layers))} here."
        )
    if megatron and problem.capabilities.trainer == "fsdp":
        notes.append("The plan's trainer is FSDP with tensor or pipeline parallelism; verl needs Megatron for that.")
    if not grid.sharded:
        notes.append(
            "The plan counts whole optimiser states on every dp rank; verl's Megatron shards them and needs less memory."
        )
    if w.mode == "async" and w.eta:
        notes.append(
            f"verl bounds the samples in flight and queued to {w.eta + 1} batches, as the plan does, but masks no token"
            f" older than eta {w.eta} where it is trained."
        )
    return tuple(notes)
