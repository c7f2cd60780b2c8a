"""Rollout: decode as a roofline of compute and HBM with KV reads and a launch floor, prefill, prefix recomputation."""

from planner.cluster import DeviceKind, Link
from planner.cost.assumptions import Assumptions
from planner.cost.flops import compute_rate, decode_flops, hbm_rate, head_flops, layer_flops
from planner.cost.lengths import Moments
from planner.cost.memory import replica_kv_bytes_per_token
from planner.cost.network import ring_s, send_s
from planner.model import ModelSpec
from planner.record import record


@record
class ReplicaShape:
    """A rollout configuration: devices of one kind, `tp` of them in one machine for each of `pp` stages."""

    kind: str
    tp: int
    pp: int = 1

    @property
    def devices(self) -> int:
        """Devices one replica takes."""
        return self.tp * self.pp


@record
class Level:
    """A replica at one concurrency."""

    running: int  # samples decoded at once
    rate_tokens_per_s: float  # sampled tokens, prefill of new samples included
    tau_s: float  # mean generation time of a sample
    recompute_s: float  # recomputing the prefixes of running samples once


def decode_step_s(
    kind: DeviceKind,
    model: ModelSpec,
    m: Moments,
    shape: ReplicaShape,
    running: int,
    local: Link,
    remote: Link,
    a: Assumptions,
) -> float:
    """Seconds for one more token of every running sample, through all stages of the pipeline."""
    stage_batch = max(1.0, running / shape.pp)  # the stages work on different parts of the batch
    read = (model.layers * model.layer_params + model.vocab * model.hidden) * model.dtype_bytes / (shape.tp * shape.pp)
    kv = stage_batch * m.context * replica_kv_bytes_per_token(model, shape.tp, shape.pp)
    memory_s = (read + kv) / hbm_rate(kind, a)
    flops = stage_batch * decode_flops(model, m.context) / (shape.tp * shape.pp)
    compute_s = flops / compute_rate(kind, model, stage_batch, shape.tp, a)
    layers = model.layers / shape.pp
    hidden = stage_batch * model.hidden * model.dtype_bytes
    floor_s = layers * kind.launch_s
    floor_s += 2 * layers * ring_s(local, hidden, shape.tp, 2, a)
    floor_s += 0.0 if kind.paced else stage_batch * a.host_s_per_sample
    if shape.pp > 1:
        floor_s += send_s(remote, hidden, a)
    return shape.pp * (max(memory_s, compute_s) + floor_s)


def prefill_s(
    kind: DeviceKind, model: ModelSpec, shape: ReplicaShape, tokens: float, tokens2: float, local: Link, a: Assumptions
) -> float:
    """Seconds to prefill sequences with `tokens` = sum of lengths and `tokens2` = sum of squares, by compute."""
    flops = model.layers * layer_flops(model, tokens, tokens2) + head_flops(model, 1)
    rate = compute_rate(kind, model, a.prefill_chunk_tokens, shape.tp, a)
    reduce = 2 * model.layers * ring_s(local, tokens * model.hidden * model.dtype_bytes, shape.tp, 2, a)
    return flops / (rate * shape.devices) + reduce / shape.pp


def replica_level(
    kind: DeviceKind,
    model: ModelSpec,
    m: Moments,
    shape: ReplicaShape,
    running: int,
    local: Link,
    remote: Link,
    a: Assumptions,
) -> Level:
    """What a replica does with `running` samples at once."""
    step = decode_step_s(kind, model, m, shape, running, local, remote, a)
    # A sample that ends is replaced: its prompt's prefill stops the others, once a response.
    start = prefill_s(kind, model, shape, m.prompt, m.prompt**2, local, a)
    token_s = step + running * start / m.response
    again = prefill_s(kind, model, shape, running * m.context, running * m.context2, local, a)
    return Level(running=running, rate_tokens_per_s=running / token_s, tau_s=m.response * token_s, recompute_s=again)


def concurrency_grid(limit: int) -> tuple[int, ...]:
    """The concurrency levels of a replica: the memory limit and halvings of it, most first."""
    grid: list[int] = []
    while limit >= 1 and len(grid) < 8:
        grid.append(limit)
        limit //= 2
    return tuple(grid)
