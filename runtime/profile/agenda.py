"""What is measured on a machine, in which order, and about how long it takes. Pure: `--dry-run` prints it."""

from typing import Literal

from planner.cluster import part_name
from planner.record import record
from runtime.cards import parts_by_default

Part = Literal[
    "gemm", "copy", "prefill", "decode", "host_links", "peer", "collectives", "engine", "trainer", "paced",
    "run_trainer", "run_engine", "run_beside",
]  # fmt: skip

OWN: tuple[Part, ...] = ("run_trainer", "run_engine", "run_beside")
Shape = tuple[int, ...]

# Seconds of one point, warm-up included, and of what an item needs before its first point.
POINT_S, QUICK_POINT_S = 0.25, 0.08
START_S = 0.3
RANKS_START_S = 8.0  # processes that import torch
ENGINE_S, QUICK_ENGINE_S = 4.0, 1.5
PACED_S, QUICK_PACED_S = 12.0, 5.0  # of one kind: three batches, prefill and the trainer, at the pace of the device

# A run's own trainer and engine: seconds of work, and those before it on a GPU (compiling; vLLM with graphs and without) and on
# a CPU, where three trainers and an engine are made.
RUN_TRAINER_S, QUICK_RUN_TRAINER_S = 20.0, 8.0
RUN_ENGINE_S, QUICK_RUN_ENGINE_S = 10.0, 6.0
COMPILE_S, CPU_START_S = 40.0, 4.0
# And a parameter, on a GPU: three trainers made on the host and two checkpoints written (one of 0.5B, 6 GB, took 8 to 12 s on one
# disk); an engine's weights made and read.
TRAINER_PARAM_S, ENGINE_PARAM_S = 6e-8, 2e-8
LIMIT_S = 170.0  # what is not begun by then is left out: a node takes less than three minutes, unless a run's own model is large
QUICK_LIMIT_S = 60.0
# Where both are at work the trainer is made once more, and compiles while the engine comes up.
AGAIN_S, AGAIN_MAKES = 10.0, 4 / 3
ENGINE_START_S = {"torch": 2.0, "vllm": 85.0, "vllm-eager": 75.0}

_GPU_GEMM: tuple[Shape, ...] = tuple(
    (m, n, k)
    for n, k in ((4096, 4096), (1536, 8960), (8960, 1536), (12288, 4096), (4096, 14336), (28672, 4096))
    for m in (1, 16, 64, 256, 1024, 4096, 8192)
)
_CPU_GEMM: tuple[Shape, ...] = tuple(
    (m, n, k) for n, k in ((384, 128), (1024, 384), (1024, 1024)) for m in (1, 16, 64, 256, 1024)
)
# batch, tokens (or context), heads, key-value heads, head size
_GPU_PREFILL: tuple[Shape, ...] = ((1, 512, 32, 8, 128), (1, 2048, 32, 8, 128), (1, 8192, 32, 8, 128), (8, 1024, 32, 8, 128),
                                   (4, 4096, 16, 8, 128))  # fmt: skip
_CPU_PREFILL: tuple[Shape, ...] = ((1, 128, 6, 2, 64), (1, 512, 6, 2, 64), (8, 128, 6, 2, 64))
_GPU_DECODE: tuple[Shape, ...] = tuple(
    (b, c, 32, 8, 128) for b, c in ((1, 1024), (1, 8192), (16, 1024), (64, 1024), (64, 4096), (256, 1024), (128, 4096))
)
_CPU_DECODE: tuple[Shape, ...] = ((1, 128, 6, 2, 64), (16, 128, 6, 2, 64), (64, 256, 6, 2, 64))
_MB = 2**20


@record
class Card:
    """One GPU that may be measured."""

    uuid: str
    kind: str
    name: str  # as the driver gives it
    memory_bytes: float


@record
class Machine:
    """A machine as it was found. Without cards its CPU is measured, as kind "host-cpu"."""

    host: str
    cards: tuple[Card, ...] = ()
    driver: str = ""
    cores: int = 1
    notes: tuple[str, ...] = ()  # what was left out, and why


@record
class OwnRun:
    """A run whose own model, engine and trainer are measured."""

    model: str  # for people
    engine: str  # as rates name it
    params: float
    cpu_kind: str = "host-cpu"  # what its configuration calls the CPU
    parts: int | None = None  # devices that each card counts as; None: as many as a run makes of them by itself


@record
class Order:
    """What is asked for. `paced`: kinds of a configuration's paced fleet, which are measured beside the CPU."""

    quick: bool = False
    paced: tuple[str, ...] = ()
    cpu: bool = True  # the CPU's kernels, where there is no card
    only: tuple[Part, ...] = ()  # none: everything
    run: OwnRun | None = None  # its rates in place of those at reference sizes


@record
class Item:
    """One thing to measure: a part on one kind, over some points."""

    part: Part
    kind: str
    what: str  # for people
    seconds: float  # about
    card: int = 0  # index of the card; 0 on a machine without
    shapes: tuple[Shape, ...] = ()
    ranks: int = 1
    sizes_bytes: tuple[int, ...] = ()
    model: str = ""


def agenda(machine: Machine, order: Order) -> tuple[Item, ...]:
    """Everything to measure on that machine: kernels of each kind of card once, then what cards do together."""
    items: list[Item] = []
    kinds: dict[str, int] = {}
    for i, card in enumerate(machine.cards):
        kinds.setdefault(card.kind, i)
    items += [_paced(kind, order) for kind in order.paced]
    if order.run is not None and order.cpu:
        items += _run(order.run, machine, tuple(kinds) or (order.run.cpu_kind,), kinds, order)
    if order.cpu and not machine.cards:
        items += _kernels("host-cpu", 0, order, gpu=False)
        items += _engine("host-cpu", 0, ("reference-1m", "reference-10m"), order) if order.run is None else []
        items += _collectives("host-cpu", min(4, max(2, machine.cores)), order, gpu=False)
    for kind, index in kinds.items():
        items += _kernels(kind, index, order, gpu=True)
        memory = machine.cards[index].memory_bytes
        # AdamW with float32 masters of bf16 weights takes 18 bytes a parameter; half of the memory is left to activations.
        fits = tuple(
            m for m, params in (("reference-0.6b", 6e8), ("reference-1.7b", 1.7e9)) if 18 * params < memory / 2
        )
        alike = sum(c.kind == kind for c in machine.cards)
        if alike > 1:
            items.append(_peer(kind, index, order))
            items += _collectives(kind, alike, order, gpu=True)
        # Last of a kind: a trainer that compiles may take longer than it is said to, and what is not begun by then is left out.
        items += _engine(kind, index, fits, order) if order.run is None else []
    chosen = [i for i in items if not order.only or i.part in order.only]
    return tuple(chosen)


def expected_s(items: tuple[Item, ...]) -> float:
    """About how long they take together, in seconds."""
    return sum(i.seconds for i in items)


def limit_s(items: tuple[Item, ...], order: Order) -> float:
    """Seconds after which no item is begun. A run's own model gets what it takes, since plans rest on it; where that is more than all
    else may take, so does what follows it."""
    if order.quick:
        return QUICK_LIMIT_S
    return expected_s(items) if sum(i.seconds for i in items if i.part in OWN) > LIMIT_S else LIMIT_S


def _points(count: int, order: Order) -> float:
    return START_S + count * (QUICK_POINT_S if order.quick else POINT_S)


def _thinned(shapes: tuple[Shape, ...], order: Order, keep: int) -> tuple[Shape, ...]:
    """All of them; in a hurry every n-th, the last one included."""
    if not order.quick or len(shapes) <= keep:
        return shapes
    step = (len(shapes) - 1) / (keep - 1)
    return tuple(shapes[round(i * step)] for i in range(keep))


def _kernels(kind: str, card: int, order: Order, *, gpu: bool) -> list[Item]:
    gemm = _thinned(_GPU_GEMM if gpu else _CPU_GEMM, order, 6)
    prefill = _thinned(_GPU_PREFILL if gpu else _CPU_PREFILL, order, 2)
    decode = _thinned(_GPU_DECODE if gpu else _CPU_DECODE, order, 3)
    copies = tuple(n * _MB for n in ((16, 64, 256, 1024) if gpu else (1, 16, 64)))
    dtype = "bf16" if gpu else "fp32"
    memory = "HBM" if gpu else "RAM"
    out = [
        Item(part="gemm", kind=kind, card=card, what=f"matrix products in {dtype}", shapes=gemm, seconds=_points(len(gemm), order)),
        Item(part="copy", kind=kind, card=card, what=f"{memory} copy", sizes_bytes=copies, seconds=_points(len(copies), order)),
        Item(part="prefill", kind=kind, card=card, what="attention, prefill", shapes=prefill, seconds=_points(len(prefill), order)),
        Item(part="decode", kind=kind, card=card, what="attention, decode", shapes=decode, seconds=_points(len(decode), order)),
    ]  # fmt: skip
    if gpu:
        sizes = (_MB, 64 * _MB, 512 * _MB)
        out.append(
            Item(part="host_links", kind=kind, card=card, what="host to device and back", sizes_bytes=sizes,
                 seconds=_points(2 * len(sizes), order))
        )  # fmt: skip
    return out


def _peer(kind: str, card: int, order: Order) -> Item:
    sizes = (_MB, 64 * _MB, 512 * _MB)
    return Item(
        part="peer", kind=kind, card=card, what="card to card", sizes_bytes=sizes, seconds=_points(len(sizes), order)
    )


def _collectives(kind: str, most: int, order: Order, *, gpu: bool) -> list[Item]:
    sizes = tuple(n * 2**10 for n in ((64, 1024, 16 * 1024, 256 * 1024) if gpu else (64, 1024, 8 * 1024)))
    if order.quick:
        sizes = sizes[1:]
    counts = sorted({2, most} if order.quick else {n for n in (2, 4, 8, most) if n <= most})
    library = "NCCL" if gpu else "gloo"
    return [
        Item(
            part="collectives", kind=kind, ranks=n, what=f"{library} collectives over {n} ranks", sizes_bytes=sizes,
            seconds=RANKS_START_S + _points(4 * len(sizes), order),
        )
        for n in counts
    ]  # fmt: skip


def _engine(kind: str, card: int, models: tuple[str, ...], order: Order) -> list[Item]:
    models = models[-1:] if order.quick else models
    seconds = QUICK_ENGINE_S if order.quick else ENGINE_S
    out: list[Item] = []
    for model in models:
        out.append(
            Item(part="engine", kind=kind, card=card, model=model, what=f"torch engine, {model}", seconds=3 * seconds)
        )
        out.append(
            Item(part="trainer", kind=kind, card=card, model=model, what=f"torch trainer, {model}", seconds=2 * seconds)
        )
    return out  # fmt: skip


def _run(run: OwnRun, machine: Machine, names: tuple[str, ...], cards: dict[str, int], order: Order) -> list[Item]:
    """The run's trainer and engine on each kind. On two cards of a kind, on parts of one and on the CPU each works while the other is
    measured, as in the run, and both are one item; on one whole card they come one after the other, and with two in a hurry, which
    has time for the trainer but not for vLLM's start."""
    gpu = bool(machine.cards)
    parts = (run.parts or parts_by_default(len(machine.cards))) if gpu else 1
    start = ENGINE_START_S[run.engine] if gpu or run.engine != "torch" else CPU_START_S
    trainer_s = QUICK_RUN_TRAINER_S if order.quick else RUN_TRAINER_S
    engine_s = QUICK_RUN_ENGINE_S if order.quick else RUN_ENGINE_S
    trainer_more_s, engine_more_s = (run.params * s if gpu else 0.0 for s in (TRAINER_PARAM_S, ENGINE_PARAM_S))
    out: list[Item] = []
    for kind in names:
        first = cards.get(kind, 0)
        alike = [i for i, c in enumerate(machine.cards) if c.kind == kind]
        trained = 18 * run.params < (machine.cards[first].memory_bytes / parts if gpu else float("inf"))

        def item(part: Part, who: str, card: int, seconds: float, name: str = kind) -> Item:
            what = f"the run's {who}, {run.model}"
            return Item(part=part, kind=name, card=card, model=run.model, what=what, seconds=seconds)

        if trained and (parts > 1 or not gpu or (len(alike) > 1 and not order.quick)):
            more_s = AGAIN_S + AGAIN_MAKES * trainer_more_s + engine_more_s if gpu else 3 * CPU_START_S
            seconds = start + trainer_s + engine_s + more_s
            who = f"trainer and engine beside each other, {run.engine}"
            out.append(item("run_beside", who, first, seconds, part_name(kind, parts)))
            continue
        if parts > 1:
            continue  # an optimiser that does not fit a part: nothing runs there
        if trained:
            out.append(item("run_trainer", "trainer", first, COMPILE_S + trainer_s + trainer_more_s))
        out.append(item("run_engine", f"engine, {run.engine}", first, start + engine_s + engine_more_s))
    return out


def _paced(kind: str, order: Order) -> Item:
    seconds = QUICK_PACED_S if order.quick else PACED_S
    return Item(part="paced", kind=kind, what="paced engine and trainer", seconds=seconds)
