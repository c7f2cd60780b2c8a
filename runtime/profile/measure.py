"""Measures one machine: its agenda item by item, with progress. An item that fails is named and left out."""

import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from planner.calibration import KindTables, Provenance
from planner.cluster import whole_of
from planner.errors import HexError
from planner.record import record, replace
from runtime.config.schema import Config
from runtime.errors import first_line
from runtime.profile.agenda import (
    OWN,
    POINT_S,
    QUICK_POINT_S,
    QUICK_RUN_ENGINE_S,
    QUICK_RUN_TRAINER_S,
    RUN_ENGINE_S,
    RUN_TRAINER_S,
    Card,
    Item,
    Machine,
    Order,
    agenda,
    limit_s,
)

logger = logging.getLogger(__name__)
OVER_S = 15.0  # an item that would take longer beyond the limit is not begun


@record
class Progress:
    """How far a machine is."""

    done: int
    of: int
    what: str  # being measured; "" when all is
    left_s: float


@record
class Measured:
    """What a machine showed. `notes`: what was left out, and why."""

    host: str
    tables: tuple[KindTables, ...]
    notes: tuple[str, ...]
    seconds: float


class _Talk:
    """What an item says of itself: what of it is under way, and what is left out."""

    def __init__(self, start: Progress, on_progress: Callable[[Progress], None], notes: list[str]) -> None:
        self._start, self._on_progress, self._notes, self._began_s = start, on_progress, notes, time.monotonic()

    def phase(self, text: str) -> None:
        """This is under way."""
        left_s = max(0.0, self._start.left_s - (time.monotonic() - self._began_s))
        self._on_progress(replace(self._start, what=f"{self._start.what}: {text}", left_s=left_s))

    def note(self, text: str) -> None:
        """This is missing."""
        self._notes.append(f"left out: {self._start.what}: {text}")


def measure(
    machine: Machine,
    order: Order,
    *,
    config: Config | None,
    today: str,
    folder: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Measured:
    """Work through the machine's agenda. `today`: ISO date for the tables; `folder`: on the disk that a run writes to, by default
    the one for temporary files. KeyboardInterrupt when told to stop."""
    items = agenda(machine, order)
    if machine.cards:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(c.uuid for c in machine.cards)  # before torch is imported
    until_s = limit_s(items, order)
    began, notes = time.monotonic(), list(machine.notes)
    found: dict[str, dict[str, tuple[Any, ...]]] = {}
    for i, item in enumerate(items):
        name, left_s = f"{item.what} ({item.kind})", sum(x.seconds for x in items[i:])
        start = Progress(done=i, of=len(items), what=name, left_s=left_s)
        on_progress(start)
        talk = _Talk(start, on_progress, notes)
        if should_stop():
            raise KeyboardInterrupt
        spent_s = time.monotonic() - began
        needed = item.part in OWN and not order.quick  # the limit is made for it
        if not needed and (spent_s > until_s or spent_s + item.seconds > until_s + OVER_S):
            hint = (
                f", about {item.seconds:.0f} s; it fits without --quick" if order.quick and spent_s <= until_s else ""
            )
            notes.append(f"left out for want of time: {name}{hint}")
            continue
        try:
            disk = folder or Path(tempfile.gettempdir())
            points = _measured(item, machine, order, config, should_stop, disk, talk)
        except Exception as e:
            if should_stop():  # which ends an item in whatever way
                raise KeyboardInterrupt from e
            known = str(e) and isinstance(e, HexError | RuntimeError | OSError)
            talk.note(first_line(e) if known else f"{type(e).__name__}: {first_line(e)}")
            if not known:
                logger.exception("%s failed", name)
            continue
        if should_stop():
            raise KeyboardInterrupt
        for table, more in points.items():
            tables = found.setdefault(item.kind, {})
            tables[table] = tables.get(table, ()) + more
    on_progress(Progress(done=len(items), of=len(items), what="", left_s=0.0))
    shown = {i.kind: machine.cards[i.card] if machine.cards else None for i in items}
    tables_ = tuple(
        KindTables(kind=k, provenance=_provenance(machine, k, shown[k], order, today), **t) for k, t in found.items()
    )
    return Measured(host=machine.host, tables=tables_, notes=tuple(notes), seconds=time.monotonic() - began)


def _measured(  # noqa: PLR0917 - the parts of one item
    item: Item,
    machine: Machine,
    order: Order,
    config: Config | None,
    should_stop: Callable[[], bool],
    folder: Path,
    talk: _Talk,
) -> dict[str, tuple[Any, ...]]:
    """Points of one item by table."""
    budget_s = (QUICK_POINT_S if order.quick else POINT_S) * 0.7  # the rest is for making operands
    if item.part == "collectives":
        from runtime.profile.ranks import collectives

        cards = [c.uuid for c in machine.cards if c.kind == item.kind][: item.ranks]
        backend = "nccl" if cards else "gloo"
        points = collectives(
            item.sizes_bytes, item.ranks, backend, budget_s=budget_s, cards=cards, should_stop=should_stop
        )
        return {"collectives": points}
    import torch

    # A run presents a CPU as two devices that share its cores, and gives a paced device one.
    torch.set_num_threads(1 if item.part == "paced" else max(1, machine.cores // 2))
    device = torch.device(f"cuda:{item.card}" if machine.cards else "cpu")
    if item.part in ("run_trainer", "run_engine", "run_beside"):
        assert config is not None, "a run comes from a configuration"
        return _run_rates(item, device, order, config, should_stop, folder, machine, talk)
    if item.part in ("engine", "trainer", "paced"):
        return _rates(item, device, order, config, should_stop)
    from runtime.profile import kernels

    try:
        match item.part:
            case "gemm":
                return {"gemm": kernels.gemm(item.shapes, device, budget_s)}
            case "copy":
                return {"hbm_copy": kernels.copy(item.sizes_bytes, device, budget_s)}
            case "prefill":
                return {"prefill": kernels.prefill(item.shapes, device, budget_s)}
            case "decode":
                return {"decode": kernels.decode(item.shapes, device, budget_s)}
            case "host_links":
                return {"links": kernels.host_links(item.sizes_bytes, device, budget_s)}
            case _:
                second = next(i for i, c in enumerate(machine.cards) if c.kind == item.kind and i != item.card)
                return {"links": kernels.peer(item.sizes_bytes, device, torch.device(f"cuda:{second}"), budget_s)}
    finally:
        _release(device)


def _rates(
    item: Item, device: Any, order: Order, config: Config | None, should_stop: Callable[[], bool]
) -> dict[str, tuple[Any, ...]]:
    from runtime.profile import workload

    how: dict[str, Any] = {"seconds": item.seconds * 0.8, "quick": order.quick, "stop": should_stop}
    try:
        if item.part == "engine":
            return {"engine": workload.engine_rates(item.model, device, **how)}
        if item.part == "trainer":
            return {"trainer": workload.trainer_rates(item.model, device, **how)}
        assert config is not None, "a paced kind comes from a configuration"
        engine, trainer = workload.paced_rates(config, item.kind, **how)
        return {"engine": engine, "trainer": trainer}
    finally:
        _release(device)


def _run_rates(  # noqa: PLR0917 - the parts of one item
    item: Item,
    device: Any,
    order: Order,
    config: Config,
    should_stop: Callable[[], bool],
    folder: Path,
    machine: Machine,
    talk: _Talk,
) -> dict[str, tuple[Any, ...]]:
    import torch

    from runtime.profile import own

    how: dict[str, Any] = {"stop": should_stop, "folder": folder}
    torch.set_num_threads(own.threads_of(item.part, device))
    try:
        if item.part == "run_beside":
            return _run_beside(item, device, order, config, {**how, "phase": talk.phase, "note": talk.note}, machine)
        with torch.cuda.device(device):  # a run's process sees one card
            return _run_part(item, device, order, config, {**how, "quick": order.quick}, machine, talk)
    finally:
        _release(device)


def _run_beside(  # noqa: PLR0917 - the parts of one item
    item: Item, device: Any, order: Order, config: Config, how: dict[str, Any], machine: Machine
) -> dict[str, tuple[Any, ...]]:
    from runtime.profile.beside import EngineTask, measured_beside

    trainer_s, engine_s = (QUICK_RUN_TRAINER_S, QUICK_RUN_ENGINE_S) if order.quick else (RUN_TRAINER_S, RUN_ENGINE_S)
    parts = whole_of(item.kind)[1]
    card = machine.cards[item.card].uuid if machine.cards else ""
    others = _others(item, machine) if parts == 1 else []
    engine, trainer = (machine.cards[others[-1]].uuid, card) if others else (card, "")
    task = EngineTask(seconds=engine_s, quick=order.quick, card=engine, parts=parts, trainer_card=trainer)
    return measured_beside(config, device, task, trainer_s=trainer_s, **how)


def _run_part(  # noqa: PLR0917 - the parts of one item
    item: Item, device: Any, order: Order, config: Config, how: dict[str, Any], machine: Machine, talk: _Talk
) -> dict[str, tuple[Any, ...]]:
    from runtime.profile import own

    if item.part == "run_trainer":
        seconds = QUICK_RUN_TRAINER_S if order.quick else RUN_TRAINER_S
        return {"trainer": own.run_trainer_rates(config, device, seconds=seconds, **how)}
    seconds = QUICK_RUN_ENGINE_S if order.quick else RUN_ENGINE_S
    card = machine.cards[item.card].uuid if machine.cards else ""
    done = own.run_engine_rates(config, device, seconds=seconds, card=card, **how)
    for text in done.notes:
        talk.note(text)
    return {"engine": done.engine, "updates": done.updates}


def _others(item: Item, machine: Machine) -> list[int]:
    """The other cards of its kind."""
    return [i for i, c in enumerate(machine.cards) if c.kind == whole_of(item.kind)[0] and i != item.card]


def _release(device: Any) -> None:
    """Give a card's memory back to the next item."""
    if device.type == "cuda":
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()


def _provenance(machine: Machine, kind: str, card: Card | None, order: Order, today: str) -> Provenance:
    import torch

    return Provenance(
        source="hexctl profile --quick" if order.quick else "hexctl profile",
        how="paced" if kind in order.paced else "measured",
        device=card.name if card is not None else "CPU",
        host=machine.host,
        driver=machine.driver,
        torch=str(torch.__version__),
        measured_on=today,
    )
