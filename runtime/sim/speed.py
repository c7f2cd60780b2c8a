"""How fast replicas and trainer are, as tables made once from the planner's cost model.

A decode step of n running samples takes `base_s[n] + kv_s[n] * (tokens of context of all of them)`: the cost model's
attention time is linear in the context, everything else does not depend on it. Where an engine lets samples wait before they
decode (`DeviceKind.slots_used`), all that it has grow at the pace of the mean one. So a replica whose running samples all
grow by one token a step needs seconds that are a quadratic of the tokens gained, and no token is ever stepped.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import Context
from planner.cost.decode import ReplicaShape, decode_step_s, prefill_s
from planner.cost.flops import head_flops, layer_flops
from planner.cost.memory import replica_kv_bytes_per_token, replica_kv_capacity_bytes
from planner.errors import InvalidInput
from planner.record import record, replace

Floats = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ReplicaSpeed:
    """One replica shape. Tables have `slots + 1` entries, indexed by the number of samples it has."""

    slots: int
    base_s: Floats  # seconds of one decode step with empty contexts
    kv_s: Floats  # seconds more for each token of context of all running samples together
    kv_tokens: float  # tokens of context that fit
    prefill: tuple[float, float, float] = (0.0, 0.0, 0.0)  # seconds of a prefill: p0 + p1 tokens + p2 tokens^2
    recompute_efficiency: float = 1.0  # of prefixes computed anew after an update, beside that
    recompute_sample_s: float = 0.0  # what each such sample costs on top
    slots_used: float = 1.0  # share of the samples that decode; in base_s and kv_s already

    def __post_init__(self) -> None:
        if self.slots < 1 or len(self.base_s) != self.slots + 1 or len(self.kv_s) != self.slots + 1:
            raise InvalidInput("speed tables need slots + 1 entries", got=(self.slots, len(self.base_s)))

    def step_s(self, running: int, context: float) -> float:
        """Seconds of a decode step of so many samples with that mean context (tokens)."""
        return float(self.base_s[running] + self.kv_s[running] * running * context)


def replica_speed(ctx: Context, shape: ReplicaShape, slots: int) -> ReplicaSpeed:
    """The tables of a shape that decodes at most `slots` samples at once, at the kind's calibrated speed."""
    empty = replace(ctx, m=replace(ctx.m, context=0.0))
    filled = ctx.m.context if ctx.m.context > 0 else 1.0
    there = replace(ctx, m=replace(ctx.m, context=filled))
    used = ctx.kind(shape.kind).slots_used
    ns = range(1, slots + 1)
    base = np.array([0.0] + [decode_step_s(empty, shape, n * used) / used for n in ns])
    full = np.array([0.0] + [decode_step_s(there, shape, n * used) / used for n in ns])
    kv = np.zeros(slots + 1)
    kv[1:] = (full[1:] - base[1:]) / (np.arange(1, slots + 1) * filled)
    kind, none = ctx.kind(shape.kind), prefill_s(ctx, shape, 0.0, 0.0)
    p1, p2 = prefill_s(ctx, shape, 1.0, 0.0) - none, prefill_s(ctx, shape, 0.0, 1.0) - none
    p0 = none + kind.prefill_sample_s
    each = replica_kv_bytes_per_token(ctx.model, shape.tp, shape.pp)
    reached = kind.rollout_efficiency  # divides whole steps and prefills, as in `replica_level`
    return ReplicaSpeed(
        slots=slots,
        base_s=base / reached,
        kv_s=kv / reached,
        kv_tokens=replica_kv_capacity_bytes(ctx, shape.kind, shape.tp, shape.pp) / each,
        prefill=(p0 / reached, p1 / reached, p2 / reached),
        recompute_efficiency=kind.recompute_efficiency,
        recompute_sample_s=kind.recompute_sample_s / reached,
        slots_used=used,
    )


def constant_speed(slots: int, token_s: float, *, kv_tokens: float = float("inf")) -> ReplicaSpeed:
    """A replica whose samples each decode a token in `token_s`, however many run: the M/G/C queue of the closed forms."""
    return ReplicaSpeed(slots=slots, base_s=np.full(slots + 1, token_s), kv_s=np.zeros(slots + 1), kv_tokens=kv_tokens)


@record
class TrainerSpeed:
    """Seconds of a step for the batch at hand, from those of the mean batch: linear in tokens, and quadratic for the share
    that attention takes. `tokens` are whole sequences (prompt and response), `tokens2` their squares, summed over the batch."""

    train_s: float
    tokens: float = 0.0  # of the mean batch; 0: every batch takes train_s
    tokens2: float = 0.0
    quadratic_share: float = 0.0

    def seconds(self, tokens: float, tokens2: float) -> float:
        """Of a batch of so many tokens."""
        if self.tokens <= 0:
            return self.train_s
        linear = (1 - self.quadratic_share) * tokens / self.tokens
        return self.train_s * (linear + (self.quadratic_share * tokens2 / self.tokens2 if self.tokens2 > 0 else 0.0))


def trainer_speed(ctx: Context, train_s: float) -> TrainerSpeed:
    """The speed of a trainer that needs `train_s` for the mean batch."""
    n, m = ctx.workload.samples_per_step, ctx.m
    whole = ctx.model.layers * layer_flops(ctx.model, m.sequence, m.sequence2) + head_flops(ctx.model, m.sequence)
    square = ctx.model.layers * layer_flops(ctx.model, 0.0, m.sequence2)
    return TrainerSpeed(train_s=train_s, tokens=n * m.sequence, tokens2=n * m.sequence2, quadratic_share=square / whole)
