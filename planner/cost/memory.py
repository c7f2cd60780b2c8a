"""What fits in a device: the one part of the cost model that the judge shares with the search."""

import math
from collections.abc import Sequence

from planner.cost.context import Context
from planner.model import ModelSpec
from planner.plan import Task
from planner.workflow import TRAINING

_ROUNDING = 1 + 1e-12


def tp_divides(model: ModelSpec, tp: int) -> bool:
    """Whether heads and MLP split evenly over `tp` devices (key-value heads are replicated beyond their number)."""
    kv = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    return tp >= 1 and model.heads % tp == 0 and model.intermediate % tp == 0 and kv


def state_bytes_per_param(model: ModelSpec) -> float:
    """Weights, gradients, fp32 master copy (of weights below fp32) and two Adam moments."""
    w = model.dtype_bytes
    return w + w + (4 if w < 4 else 0) + 2 * max(4, w)


def replica_layers(model: ModelSpec, pp: int) -> int:
    """Layers of the fullest stage of a rollout pipeline."""
    return math.ceil(model.layers / pp)


def replica_weight_bytes(model: ModelSpec, tp: int, pp: int) -> float:
    """Bytes of weights on the fullest device of a rollout replica."""
    ends = model.vocab * model.hidden * (1 if model.tied or pp > 1 else 2)
    return (replica_layers(model, pp) * model.layer_params + ends + model.hidden) * model.dtype_bytes / tp


def replica_kv_bytes_per_token(model: ModelSpec, tp: int, pp: int) -> float:
    """Bytes of KV one token of context takes on one device."""
    heads = max(model.kv_heads / tp, 1.0)
    return 2 * replica_layers(model, pp) * heads * model.head_dim * model.dtype_bytes


def replica_resident_bytes(ctx: Context, tp: int, pp: int) -> float:
    """Bytes a replica holds on its fullest device, KV apart: weights and the staging buffer of an update."""
    return replica_weight_bytes(ctx.model, tp, pp) + min(ctx.a.bucket_bytes, ctx.model.weight_bytes / (tp * pp))


def replica_kv_capacity_bytes(ctx: Context, kind: str, tp: int, pp: int, beside_bytes: float = 0.0) -> float:
    """Bytes left for KV on one device of a replica; negative when the weights alone do not fit.

    `beside_bytes`: what the models of tasks on the same devices hold all the time.
    """
    memory = ctx.kind(kind).memory_bytes
    usable = memory * ctx.a.rollout_memory_share - ctx.a.overhead(memory)
    return usable - replica_resident_bytes(ctx, tp, pp) - beside_bytes


def running_limit(ctx: Context, kind: str, tp: int, pp: int, beside_bytes: float = 0.0) -> int:
    """Most samples a replica may decode at once; 0 when it cannot hold the longest sequence.

    The most b with b * mean - spared(b) + sigmas * sqrt(b) * sd <= capacity over the context of running samples, which are
    met length-biased; of what a group's samples share only one copy is held. Outstanding samples never exceed (eta + 1) B.
    """
    m, a, workload = ctx.m, ctx.a, ctx.workload
    capacity = replica_kv_capacity_bytes(ctx, kind, tp, pp, beside_bytes) / replica_kv_bytes_per_token(
        ctx.model, tp, pp
    )
    if capacity < m.longest:
        return 0
    outstanding = (workload.eta + 1 if workload.mode == "async" else 1) * workload.samples_per_step

    def fits(b: int) -> bool:
        held = b * m.context - ctx.shared.spared_tokens(b)
        return held + a.kv_sigmas * math.sqrt(b) * m.context_sd <= capacity * _ROUNDING

    low, high = 1, min(a.max_running * pp, outstanding) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def stage_params(model: ModelSpec, layers: int, *, first: bool, last: bool) -> int:
    """Parameters of a pipeline stage; a tied embedding is held at both ends of a longer pipeline."""
    table = model.vocab * model.hidden
    ends = (table if first else 0) + (table if last and not (model.tied and first) else 0)
    return layers * model.layer_params + ends + (model.hidden if last else 0)


def activation_bytes_per_token(model: ModelSpec, tp: int) -> float:
    """Bytes one layer keeps for the backward pass: norms, q, k, v, attention output, gate, up and their product."""
    whole = 4 * model.hidden
    split = 2 * model.head_dim * (model.heads + model.kv_heads) + 4 * model.intermediate
    return (whole + split / tp) * model.dtype_bytes


def layers_of(model: ModelSpec, stages: Sequence[int]) -> tuple[int, ...] | None:
    """Layers of `model` by stage where another model lies as `stages` says: the same shares, in whole layers (largest
    remainder, at least one each); None when there are more stages than layers."""
    total = sum(stages)
    if total == model.layers:
        return tuple(stages)
    if len(stages) > model.layers:
        return None
    ideal = [model.layers * n / total for n in stages]
    out = [max(1, math.floor(x)) for x in ideal]
    while sum(out) != model.layers:
        step = 1 if sum(out) < model.layers else -1
        movable = [i for i in range(len(out)) if out[i] + step >= 1]
        out[max(movable, key=lambda i: step * (ideal[i] - out[i]))] += step
    return tuple(out)


def task_state_bytes(
    ctx: Context, task: Task, beside: Sequence[Task], *, layers: int, tp: int, dp: int, first: bool, last: bool
) -> float:
    """Bytes a task's model holds on each device of a stage all the time; `beside`: the tasks of its group.

    Training holds weights, gradients and optimiser, scoring its weights. Critic values run on the weights that critic
    training holds, if it is there. A critic and a reward model have no vocabulary projection.
    """
    model = ctx.of(task).model
    if task == "proximal" or (task == "critic_values" and "critic_training" in beside):
        return 0.0
    has_head = task in ("actor_training", "reference")
    params = stage_params(model, layers, first=first, last=last and has_head) + (0 if has_head else model.hidden)
    per_param = state_bytes_per_param(model) if task in TRAINING else model.dtype_bytes
    states = params / tp * per_param
    if ctx.trainer == "fsdp":
        states = states / dp + 2 * model.layer_params * model.dtype_bytes / tp  # two layers gathered at a time
    return states


def task_working_bytes(
    ctx: Context, task: Task, *, layers: int, tp: int, last: bool, in_flight: int, tokens: float, recompute: bool
) -> float:
    """Bytes a task needs on each device of a stage while it runs. `tokens` a micro-batch and DP rank, `in_flight`
    micro-batches held for the backward pass."""
    model = ctx.of(task).model
    layer = activation_bytes_per_token(model, tp) * tokens
    border = model.hidden * model.dtype_bytes * tokens
    logits = logits_bytes(ctx.of(task), tokens, tp)
    if task not in TRAINING:
        return layer + border + (logits if last and task == "reference" else 0.0)
    kept = (layers * border * in_flight + layer) if recompute else layers * layer * in_flight
    kept += logits if last and task == "actor_training" else 0.0
    return kept + min(ctx.a.bucket_bytes, model.weight_bytes)


def logits_bytes(ctx: Context, tokens: float, tp: int) -> float:
    """Bytes of a micro-batch's logits, in the model's type and in fp32, on one device. A packing trainer makes them a chunk at a
    time, of the same size whatever the micro-batch."""
    each = ctx.model.vocab * (ctx.model.dtype_bytes + 4) / tp
    return tokens * each if ctx.row_tokens is None else min(ctx.a.head_chunk_bytes / tp, ctx.row_tokens * each)


def stage_bytes(
    ctx: Context,
    *,
    layers: int,
    tp: int,
    dp: int,
    first: bool,
    last: bool,
    in_flight: int,
    tokens: float,
    recompute: bool,
) -> float:
    """Bytes of one device of a stage that trains the actor and nothing else."""
    states = task_state_bytes(ctx, "actor_training", (), layers=layers, tp=tp, dp=dp, first=first, last=last)
    return states + task_working_bytes(
        ctx, "actor_training", layers=layers, tp=tp, last=last, in_flight=in_flight, tokens=tokens, recompute=recompute
    )


def stage_fits(ctx: Context, kind: str, needed_bytes: float) -> bool:
    """Whether a training stage that needs so many bytes a device fits the kind."""
    memory = ctx.kind(kind).memory_bytes
    return needed_bytes <= memory * ctx.a.train_memory_share - ctx.a.overhead(memory)
