"""Values that travel between flow, replicas, trainer and reward workers. Pure: nothing here imports torch or ray.

A sample is one response to a prompt; `group` is the prompt's ordinal in the run, `member` the response's place in its
group. Token positions count response tokens from 0. Versions count optimiser steps.

Values that hold tokens cross processes with these packed as bytes (`runtime.rl.arrays`); pickle's own way takes them one by one.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from planner.record import record
from runtime.rl.arrays import (
    Runs,
    pack_logprobs,
    pack_runs,
    pack_tokens,
    unpack_logprobs,
    unpack_runs,
    unpack_tokens,
)


class SampleId(NamedTuple):
    """Identity of a sample for the whole run; also the counter of its sampling noise."""

    group: int
    member: int


FinishReason = Literal["eos", "length"]


@record
class WeightsRef:
    """One immutable weight generation on disk. A replica loads it, hashes it and reports (version, digest)."""

    lineage: int
    version: int
    path: str  # folder with manifest.json and safetensors
    digest: str  # hash over the manifest's per-tensor hashes


@record
class ChannelOffer:
    """Where a trainer serves its weights directly (`runtime.rl.weights`). The token is the leave to connect."""

    host: str
    port: int
    token: str
    trainer_epoch: int


@record
class ChannelMember:
    """Who an engine's worker says it is on a trainer's channel."""

    replica: str
    epoch: int
    rank: int = 0  # of a tensor parallel engine
    device_kind: str = ""  # "" unknown
    device: str = "cpu"  # or "cuda"


@record
class Lease:
    """Leave for one replica to decode one sample. Tokens already journalled come along: the sample continues from them."""

    sample: SampleId
    epoch: int  # lease epoch; an append with another is refused
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...] = ()  # response tokens so far (from the journal)
    max_new_tokens: int  # of the whole response, prefix included

    def __reduce__(self) -> tuple[Any, ...]:
        packed = pack_tokens(self.prompt_tokens), pack_tokens(self.tokens)
        return _lease, (*self.sample, self.epoch, *packed, self.max_new_tokens)


class Append(NamedTuple):
    """Response tokens [start, start + len(tokens)) of one sample, all sampled from logits of weights `version`.

    A named tuple, not a record: one is made a token, and a frozen dataclass takes six times as long to make.
    """

    sample: SampleId
    epoch: int
    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]  # of the sampled token under the behaviour policy (temperature applied)
    version: int
    finished: FinishReason | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        packed = pack_tokens(self.tokens), pack_logprobs(self.logprobs)
        return _append, (*self.sample, self.epoch, self.start, *packed, self.version, self.finished)


@record
class EngineStats:
    """Level figures of one engine, cumulative where they count."""

    running: int = 0
    waiting: int = 0  # leased, not yet prefilled
    slots: int = 0  # most samples decoded at once
    kv_used_share: float = 0.0  # 0..1
    decoded_tokens: int = 0  # since the process started, flushed or not
    prefill_tokens: int = 0  # prompt tokens and recomputed prefixes
    decode_tokens_per_s: float = 0.0  # over the last seconds while not idle
    decode_running: float = 0.0  # mean samples of a decode step over the same seconds
    updates: int = 0  # weight generations taken
    host_lag_share: float | None = None  # paced: how far behind its clock, share of wall time; None: not paced
    decode_steps: int = 0  # that decoded something, since the process started
    busy_s: float = 0.0  # decoding and what comes between two steps, pace included: no rest, no weight loading
    direct_updates: int = 0  # of `updates`, those that came straight from the trainer
    update_pause_s: float | None = None  # of the last update: how long nothing was decoded
    update_receive_s: float | None = None  # of the last direct one: from the trainer's "go" to all checksums
    update_bytes: int = 0  # of the last direct one
    plain_steps: int = 0  # of an engine that tells them apart: steps that only decoded, since the process started
    plain_step_s: float = 0.0  # they took together
    plain_host_s: float = 0.0  # processor time of the thread that made them


@record
class ExchangeRequest:
    """One call of a replica to flow: a flush of the journal, its level and a plea for work. At most two are unacknowledged."""

    replica: str
    epoch: int  # incarnation of the replica process
    seq: int  # flush number, from 1; a repeated seq is acknowledged again, not applied again
    appends: tuple[Append, ...] = ()
    released: tuple[SampleId, ...] = ()  # suspended here: flow may lease them elsewhere
    version: int | None = None  # of the weights loaded and verified; None: none yet
    digest: str | None = None
    stats: EngineStats = EngineStats()
    pid: int = 0
    refill_s: float | None = None  # from an exchange to the answer of the next, lately; None: not known yet


ReplicaOrder = Literal["serve", "drain", "stop"]


@record
class ExchangeReply:
    """Flow's answer. After the fsync: everything up to `ack_seq` is durable."""

    ack_seq: int
    order: ReplicaOrder
    leases: tuple[Lease, ...] = ()
    cancel: tuple[SampleId, ...] = ()  # leases no longer held; stop decoding them, do not append
    weights: WeightsRef | None = None  # the newest generation on disk; load it if it is newer than the one reported
    direct: WeightsRef | None = None  # a newer one that went straight to engines: serve it if it is here
    channel: ChannelOffer | None = None  # where such generations come from
    slots: int | None = None  # samples to decode at once, as the plan has it; None: as many as the engine was made for


@record
class TrainSample:
    """One sample of a global batch. Per-token tuples have the length of `tokens`."""

    sample: SampleId
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    weights: tuple[float, ...]  # 1.0 trained, 0.0 masked (older than eta at this step)
    reward: float
    advantage: float  # over the whole group
    finish: FinishReason

    def __reduce__(self) -> tuple[Any, ...]:
        packed = pack_tokens(self.prompt_tokens), pack_tokens(self.tokens), pack_logprobs(self.logprobs)
        runs = pack_runs(self.versions), pack_runs(self.weights)
        return _train_sample, (*self.sample, *packed, *runs, self.reward, self.advantage, self.finish)


@record
class TrainBatch:
    """The reserved batch of optimiser step `step`, sorted by sample; `ids_hash` goes into the checkpoint's manifest."""

    step: int
    ids_hash: str
    samples: tuple[TrainSample, ...]


StepMetrics = Mapping[str, float]


@record
class Applied:
    """The trainer's word that step `step` is made, with the metrics of `metrics.jsonl`. `checkpointed`: it is in a complete
    checkpoint; if not it may have to be made again, from the same batch."""

    step: int
    ids_hash: str
    trainer_epoch: int
    metrics: StepMetrics
    checkpointed: bool = True


TrainOrder = Literal["train", "wait", "quiesce", "stop"]


@record
class NextBatch:
    """Flow's answer to a trainer that asks for work."""

    order: TrainOrder
    batch: TrainBatch | None = None
    waits_for: str = ""  # when order is "wait"


@record
class ReplicaStatus:
    """What flow knows of one replica."""

    replica: str
    epoch: int
    order: ReplicaOrder
    version: int | None
    digest: str | None
    verified: bool
    leased: int
    stats: EngineStats
    last_exchange_age_s: float
    unflushed_tokens: int
    pid: int
    allotted: int | None = None  # slots that it is told to use; None: its own limit
    refill_s: float | None = None  # as its exchanges tell it


@record
class FlowStatus:
    """One consistent reading of flow. The identity holds exactly:
    generated = trained + masked + in_flight + sum(wasted)."""

    step: int  # version i: the next step turns version i into i + 1
    lineage: int
    weights: WeightsRef | None
    eta: int
    generated_tokens: int
    trained_tokens: int
    masked_tokens: int
    in_flight_tokens: int
    wasted_tokens: Mapping[str, int]
    redone_tokens: int
    samples_by_state: Mapping[str, int]  # PENDING, LEASED, SUSPENDED, DONE, RESERVED, APPLIED, DEAD_LETTER
    queue_groups: int  # complete groups (all rewarded) waiting for the trainer
    admitted_groups: int
    staleness_mean: float | None  # over tokens trained in the last 20 steps
    staleness_p95: float | None
    staleness_max: int | None  # over the whole run
    spans_two_versions_share: float | None  # of trained samples, whole run
    reward_mean: float | None  # mean of the last 20 steps
    generated_tokens_per_s: float  # over the last ~10 s
    trained_tokens_per_s: float
    trainer_wait_share: float  # last ~30 s: waiting for data
    admission_wait_share: float  # last ~30 s: rollout slots idle since admission is closed
    waits: str  # which wait is blocking now, in words; "" when none
    replicas: tuple[ReplicaStatus, ...]
    trainer_epoch: int | None
    trainer_state: str  # absent | waiting | training | quiesced
    trainer_age_s: float | None  # since its last call
    finished: bool  # the step limit is reached and everything is settled
    last_metrics: Mapping[str, float]
    steps_done: int = 0  # optimiser steps applied in the run


@record
class RunLimits:
    """What the daemon sets for a run: when it ends by itself, and how long a replica may be silent before its leases go."""

    steps: int | None = None
    lease_s: float = 15.0


@record
class CheckpointMark:
    """A complete checkpoint: the state after optimiser step `step` (so its version is step + 1)."""

    step: int
    ids_hash: str
    lineage: int = 0


@record
class TrainerHello:
    """A trainer's first call. `complete` lists the complete checkpoints it found."""

    trainer: str
    epoch: int
    pid: int
    complete: tuple[CheckpointMark, ...]
    channel: ChannelOffer | None = None  # where it serves its weights directly; None: by disk alone


@record
class TrainerWelcome:
    """Flow's answer: RESERVED steps with a matching checkpoint are settled. Load the checkpoint of `load_step`
    (None: start from version 0) and publish its version if `published` does not name it."""

    load_step: int | None
    lineage: int  # of what is trained from here on
    published: WeightsRef | None
    load_lineage: int | None = None  # lineage of the checkpoint to load, when it differs (a fork); None: `lineage`


def _lease(group: int, member: int, epoch: int, prompt: bytes, tokens: bytes, most: int) -> Lease:  # noqa: PLR0917
    return Lease(
        sample=SampleId(group, member),
        epoch=epoch,
        prompt_tokens=unpack_tokens(prompt),
        tokens=unpack_tokens(tokens),
        max_new_tokens=most,
    )


def _append(  # noqa: PLR0917 - called by pickle
    group: int,
    member: int,
    epoch: int,
    start: int,
    tokens: bytes,
    logprobs: bytes,
    version: int,
    finished: FinishReason | None,
) -> Append:
    return Append(
        sample=SampleId(group, member),
        epoch=epoch,
        start=start,
        tokens=unpack_tokens(tokens),
        logprobs=unpack_logprobs(logprobs),
        version=version,
        finished=finished,
    )


def _train_sample(  # noqa: PLR0917 - called by pickle
    group: int,
    member: int,
    prompt: bytes,
    tokens: bytes,
    logprobs: bytes,
    versions: Runs[int],
    weights: Runs[float],
    reward: float,
    advantage: float,
    finish: FinishReason,
) -> TrainSample:
    return TrainSample(
        sample=SampleId(group, member),
        prompt_tokens=unpack_tokens(prompt),
        tokens=unpack_tokens(tokens),
        logprobs=unpack_logprobs(logprobs),
        versions=unpack_runs(versions),
        weights=unpack_runs(weights),
        reward=reward,
        advantage=advantage,
        finish=finish,
    )
