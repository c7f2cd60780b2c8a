"""What was measured on a device kind, as values: one point a row, shapes in whole numbers, results in SI units.

Kernel times are of one device. Collectives and links belong to the machine they were measured on: the same card in
another machine has other ones, so nothing here is ever carried over from one kind to another.
"""

import dataclasses
import math
from typing import Literal

from planner.errors import InvalidInput
from planner.record import record, replace

How = Literal["measured", "paced", "simulated"]
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"]
Path = Literal["host_to_device", "device_to_host", "peer", "node_to_node"]
Phase = Literal["decode", "prefill", "recompute"]
UpdatePath = Literal["direct", "store"]


def _checked(point: object) -> None:
    """Whole numbers at least 1, results finite and positive; the error names the point and the field."""
    for field in dataclasses.fields(point):  # type: ignore[arg-type]
        value = getattr(point, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not (math.isfinite(value) and value > 0):
            raise InvalidInput(f"{type(point).__name__}.{field.name} must be positive", got=value, expected="> 0")


@record
class GemmPoint:
    """C[m, n] = A[m, k] B[k, n] on one device."""

    m: int
    n: int
    k: int
    dtype: str  # of A and B: "bf16", "fp8", "fp32"
    seconds: float

    def __post_init__(self) -> None:
        _checked(self)


@record
class PrefillPoint:
    """Causal attention of one layer over `batch` prompts of `tokens` each; heads are those on one device."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    seconds: float
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        _checked(self)


@record
class DecodePoint:
    """Attention of one layer for one new token of each of `batch` samples with `context` tokens each."""

    batch: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    seconds: float
    dtype: str = "bf16"  # of the KV cache

    def __post_init__(self) -> None:
        _checked(self)

    @property
    def kv_bytes(self) -> float:
        """Bytes of KV cache read."""
        width = {"fp8": 1, "fp32": 4}.get(self.dtype, 2)
        return 2.0 * self.batch * self.context * self.kv_heads * self.head_dim * width


@record
class CollectivePoint:
    """A collective over `ranks` devices, `nodes` machines of them.

    `size_bytes` is the whole tensor: what a rank holds after an all-gather and before a reduce-scatter.
    """

    op: CollectiveOp
    ranks: int
    size_bytes: float
    seconds: float
    nodes: int = 1

    def __post_init__(self) -> None:
        _checked(self)


@record
class CopyPoint:
    """A copy inside device memory: bytes copied, and bytes read plus bytes written a second."""

    size_bytes: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _checked(self)


@record
class LinkPoint:
    """A transfer of so many bytes, one way. `streams`: how many ran at once, `bytes_per_s` all together."""

    path: Path
    size_bytes: float
    bytes_per_s: float
    streams: int = 1
    latency_s: float | None = None  # of an empty message; None: not measured
    to: str = ""  # kind at the other end of a node-to-node link; empty: the same

    def __post_init__(self) -> None:
        _checked(self)


@record
class EngineRate:
    """Tokens a second that the inference engine reached, all running samples and all devices of the replica together.

    Of prefill and recomputation: tokens that the engine computed, over the seconds by which running samples were held up.
    `recompute`: the prefixes of `running` samples of `context` tokens each, no two of which began alike, after an update that
    threw their KV away.
    """

    phase: Phase
    model: str
    params: int  # of the model
    tp: int
    running: int  # samples decoded (or prompts prefilled) at once, in the mean
    context: int  # mean tokens of context while it ran (prefill: of a prompt; recompute: of a prefix)
    tokens_per_s: float
    pp: int = 1
    engine: str = "torch"  # "torch", "vllm", or "vllm-eager" without CUDA graphs
    held: int | None = None  # samples it had: those beyond `running` waited to be let in; None: not told
    slowest: float | None = None  # share of that rate in the slowest of several spells; None: there was one

    def __post_init__(self) -> None:
        _checked(self)


@record
class UpdateTime:
    """What new weights cost a replica that runs: for how long it samples nothing. `direct`: the trainer sent them into the
    engine's second buffer, and this is the swap alone; `store`: by a file, reading and verifying it included. What is
    computed anew afterwards is a rate of its own (`EngineRate`, "recompute")."""

    path: UpdatePath
    model: str
    params: int  # of the model
    swap_s: float
    tp: int = 1
    engine: str = "torch"  # as of an `EngineRate`

    def __post_init__(self) -> None:
        _checked(self)


@record
class TrainerRate:
    """Tokens a second that the trainer reached, all devices together, optimiser included: samples x sequence_tokens over the
    seconds of a step. `samples` None: of a batch of unknown size, steps alone. Else of whole turns of a run: gradients, update,
    the publication and the words with whoever gives the batches; and a checkpoint's share where `checkpoint_s` does not say
    what one takes."""

    model: str
    params: int
    devices: int
    sequence_tokens: int
    micro_batch: int  # sequences
    recompute: bool
    tokens_per_s: float
    tp: int = 1
    pp: int = 1
    samples: int | None = None  # of a batch
    response_tokens: int | None = None  # of each sample's sequence
    rows: int | None = None  # micro-batches that the batch was cut into
    attention: str = ""  # kernel that was chosen
    compiled: bool = False
    checkpoint_s: float | None = None  # of one checkpoint; then `tokens_per_s` is of turns without any

    def __post_init__(self) -> None:
        _checked(self)

    @property
    def step_s(self) -> float | None:
        """Seconds of a turn, without a checkpoint that is told apart; None where the size of its batch is not known."""
        return None if self.samples is None else self.samples * self.sequence_tokens / self.tokens_per_s


@record
class Provenance:
    """Where figures come from. `how` is never left out: a paced or simulated figure is labelled as one."""

    source: str  # who or what measured: a command, a publication with its commit
    how: How
    device: str = ""  # name as the driver gives it
    host: str = ""  # the machine whose links and collectives these are; empty: not told
    driver: str = ""
    torch: str = ""
    measured_on: str = ""  # date, ISO 8601 as text

    def __post_init__(self) -> None:
        if not self.source:
            raise InvalidInput("provenance.source is empty", expected="who or what measured")


@record
class KindTables:
    """All measured points of one device kind."""

    kind: str
    provenance: Provenance
    gemm: tuple[GemmPoint, ...] = ()
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    collectives: tuple[CollectivePoint, ...] = ()
    hbm_copy: tuple[CopyPoint, ...] = ()
    links: tuple[LinkPoint, ...] = ()
    engine: tuple[EngineRate, ...] = ()
    trainer: tuple[TrainerRate, ...] = ()
    updates: tuple[UpdateTime, ...] = ()

    def __post_init__(self) -> None:
        if not self.kind:
            raise InvalidInput("tables without a device kind", expected="a name, such as H100")

    def beside(self, older: "KindTables") -> "KindTables":
        """These tables, with those that are empty here from an older measurement of the same card in the same machine with the
        same software; its rates stay too, but for models that were measured anew. Of another one nothing is taken."""
        same = ("how", "device", "host", "driver", "torch")
        if any(getattr(self.provenance, n) != getattr(older.provenance, n) for n in same):
            return self
        kept = {
            n: getattr(self, n) or getattr(older, n)
            for n in ("gemm", "prefill", "decode", "collectives", "hbm_copy", "links")
        }
        engines = {(r.model, r.engine) for r in self.engine}
        trained = {r.model for r in self.trainer}
        updated = {(r.model, r.engine, r.path) for r in self.updates}
        return replace(
            self,
            **kept,
            engine=self.engine + tuple(r for r in older.engine if (r.model, r.engine) not in engines),
            trainer=self.trainer + tuple(r for r in older.trainer if r.model not in trained),
            updates=self.updates + tuple(r for r in older.updates if (r.model, r.engine, r.path) not in updated),
        )


@record
class Calibration:
    """Measured tables by device kind. The cost model prefers them to the tables that come with the package."""

    kinds: tuple[KindTables, ...] = ()

    def __post_init__(self) -> None:
        names = [t.kind for t in self.kinds]
        for name in names:
            if names.count(name) > 1:
                raise InvalidInput("two tables for one device kind", where="calibration.kinds", got=name)

    def of(self, kind: str) -> KindTables | None:
        """The tables of a kind; None where it was not measured."""
        return next((t for t in self.kinds if t.kind == kind), None)

    def merged(self, newer: "Calibration") -> "Calibration":
        """These tables with those of `newer` in place of the ones it has too."""
        kept = tuple(t for t in self.kinds if newer.of(t.kind) is None)
        return Calibration(kinds=kept + newer.kinds)
