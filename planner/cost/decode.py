"""Rollout: decode as a roofline of compute and HBM with KV reads and a launch floor, prefill, prefix recomputation."""

from planner.calibration.records import EngineRate
from planner.cost.context import Context
from planner.cost.flops import attend_flops, compute_rate, hbm_rate, head_flops, layer_flops, token_flops
from planner.cost.memory import replica_kv_bytes_per_token
from planner.cost.network import local_link, ring_s, send_s
from planner.record import record, replace


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

    running: int  # samples it has at once
    rate_tokens_per_s: float  # sampled tokens, prefill of new samples included
    tau_s: float  # mean generation time of a sample
    recompute_s: float  # recomputing the prefixes of running samples once


def decode_step_s(ctx: Context, shape: ReplicaShape, running: float) -> float:
    """Seconds for one more token of every running sample, through all stages of the pipeline.

    Where the user measured the engine with this model and shape, scaled so that the measured rates come out.
    """
    fix = ctx.rates.engine_fix(ctx.kind(shape.kind), ctx.model, shape.tp, shape.pp, lambda p: _modelled(ctx, shape, p))
    return _step_s(ctx, shape, running) * (1.0 if fix is None else float(fix.at(running)))


def _modelled(ctx: Context, shape: ReplicaShape, point: EngineRate) -> float:
    """Tokens/s that the model says at a measured point's concurrency and context."""
    there = replace(ctx, m=replace(ctx.m, context=float(point.context)))
    return point.running / _step_s(there, shape, point.running)


def _step_s(ctx: Context, shape: ReplicaShape, running: float) -> float:
    model, m, kind = ctx.model, ctx.m, ctx.kind(shape.kind)
    devices = shape.devices
    batch = max(1.0, running / shape.pp)  # the stages work on different parts of the batch
    if ctx.rates.curves(kind) is not None:
        return _kernels_s(ctx, shape, batch)
    read = (model.layers * model.layer_params + model.vocab * model.hidden) * model.dtype_bytes / devices
    kv = batch * m.context * replica_kv_bytes_per_token(model, shape.tp, shape.pp)
    hbm, rate = hbm_rate(ctx, kind), compute_rate(ctx, kind, batch, shape.tp) * devices
    # Matrix products and attention run one after the other, each under its own roof.
    matmul_s = max(read / hbm, batch * token_flops(model) / rate)
    attention_s = max(kv / hbm, batch * attend_flops(model, m.context) / rate)
    layers = model.layers / shape.pp
    hidden = batch * model.hidden * model.dtype_bytes
    floor_s = layers * (kind.launch_s + kind.decode_floor_s)
    floor_s += 2 * layers * ring_s(local_link(ctx.cluster, kind), hidden, shape.tp, 2, ctx.a)
    floor_s += 0.0 if kind.paced else batch * ctx.a.host_s_per_sample
    if shape.pp > 1:
        floor_s += send_s(ctx.cluster.same_kind.bulk(), hidden, ctx.a)
    return shape.pp * (matmul_s + attention_s + floor_s)


def _kernels_s(ctx: Context, shape: ReplicaShape, batch: float) -> float:
    """`decode_step_s` by the kind's measured kernels: their sum, less what a CUDA graph saves of their launches, and what a
    calibration says that our own engine costs besides."""
    model, kind, rates = ctx.model, ctx.kind(shape.kind), ctx.rates
    layers, hidden = model.layers / shape.pp, batch * model.hidden * model.dtype_bytes
    reduce = rates.reduce_s(kind, model, shape.tp, batch)
    if reduce is None:
        reduce = ring_s(local_link(ctx.cluster, kind), hidden, shape.tp, 2, ctx.a)
    layer = rates.decode_layer_s(kind, model, shape.tp, batch, ctx.m.context) + 2 * reduce
    layer = max(layer - ctx.a.graph_credit_s, layer / 2)  # a small layer is not all launch
    card_s = layers * layer + rates.head_s(kind, model, shape.tp, batch) / shape.pp
    # What the host does takes no longer where others use the card too.
    stage = card_s / kind.card_share + layers * kind.decode_floor_s + batch * ctx.a.host_s_per_sample
    if shape.pp > 1:
        stage += send_s(ctx.cluster.same_kind.bulk(), hidden, ctx.a)
    return shape.pp * stage


def prefill_s(ctx: Context, shape: ReplicaShape, tokens: float, tokens2: float) -> float:
    """Seconds to prefill sequences with `tokens` = sum of lengths and `tokens2` = sum of squares, by compute."""
    model, kind = ctx.model, ctx.kind(shape.kind)
    flops = model.layers * layer_flops(model, tokens, tokens2) + head_flops(model, 1)
    rate = compute_rate(ctx, kind, ctx.a.prefill_chunk_tokens, shape.tp)
    hidden = tokens * model.hidden * model.dtype_bytes
    reduce = 2 * model.layers * ring_s(local_link(ctx.cluster, kind), hidden, shape.tp, 2, ctx.a)
    return (flops / (rate * shape.devices) + reduce / shape.pp) / kind.prefill_efficiency


def prefill_felt(ctx: Context, shape: ReplicaShape) -> float:
    """Share of a prompt's prefill that those who decode wait for."""
    return ctx.a.prefill_share if ctx.rates.curves(ctx.kind(shape.kind)) is not None else 1.0


def begin_s(ctx: Context, shape: ReplicaShape) -> float:
    """Seconds of decoding that a sample's beginning costs the others: the prefill of what its group has not computed yet, and what
    an engine needs for it besides (a step outside the CUDA graph, the host's work on a request)."""
    m, kind, shared = ctx.m, ctx.kind(shape.kind), ctx.shared
    found, found2 = shared.each_spared * shared.tokens, shared.each_spared * shared.tokens2
    tokens_s = prefill_felt(ctx, shape) * prefill_s(ctx, shape, m.prompt - found, m.prompt2 - found2)
    return (tokens_s + kind.prefill_sample_s) / kind.rollout_efficiency


def replica_level(ctx: Context, shape: ReplicaShape, running: int) -> Level:
    """What a replica does that has `running` samples at once, `slots_used` of which decode while the others wait to be let in."""
    m, kind, shared = ctx.m, ctx.kind(shape.kind), ctx.shared
    decoding = running * kind.slots_used
    step = decode_step_s(ctx, shape, decoding) / kind.rollout_efficiency
    # A sample that ends is replaced: its beginning stops the others, once a response.
    token_s = step + decoding * begin_s(ctx, shape) / m.response
    held, held2 = (
        decoding * m.context - shared.spared_tokens(decoding),
        decoding * m.context2 - shared.spared_tokens2(decoding),
    )
    again = prefill_s(ctx, shape, held, held2) / kind.recompute_efficiency + decoding * kind.recompute_sample_s
    tau_s = m.response * token_s / kind.slots_used
    return Level(
        running=running, rate_tokens_per_s=decoding / token_s, tau_s=tau_s, recompute_s=again / kind.rollout_efficiency
    )


def concurrency_grid(limit: int) -> tuple[int, ...]:
    """The concurrency levels of a replica: the memory limit and halvings of it, most first."""
    grid: list[int] = []
    while limit >= 1 and len(grid) < 8:
        grid.append(limit)
        limit //= 2
    return tuple(grid)


def sync_grid(limit: int) -> tuple[int, ...]:
    """The same where a step waits for its last sample: the limit and all powers of two below, most first."""
    powers = [1 << i for i in range(max(limit, 0).bit_length()) if 1 << i < limit]
    return (limit, *reversed(powers)) if limit >= 1 else ()
