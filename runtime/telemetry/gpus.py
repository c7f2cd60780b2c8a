"""The level of all GPUs: enumeration and every card polled apart, with a deadline; gone, hung and unknown kept apart."""

import time
from collections.abc import Callable
from typing import Any

from planner.record import record, replace
from runtime.telemetry.nvml import Gpu, Nvml, NvmlProblem
from runtime.telemetry.polling import Poller
from runtime.telemetry.reading import GpuReading, LibraryState

HANG_S = 3.0  # a call that takes longer is said to hang
SETTLE_S = 0.5  # longest wait of one poll for all cards together


@record
class GpuLevel:
    """All cards ever seen, with the library's state."""

    library: LibraryState
    message: str
    gpus: tuple[GpuReading, ...]
    rejected: int
    driver: str


class GpuWatch:
    """Polls through `open_library() -> pynvml-like object`. `poll` never takes longer than about half a second."""

    def __init__(
        self,
        open_library: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
        *,
        driver_on_disk: Callable[[], str] = lambda: "",
        settle_s: float = SETTLE_S,
        hang_s: float = HANG_S,
    ) -> None:
        self._open_library, self._clock, self._driver_on_disk = open_library, clock, driver_on_disk
        self._settle_s, self._hang_s = settle_s, hang_s
        self._nvml: Nvml | None = None
        self._list: Poller[tuple[Gpu, ...]] = Poller("list", self._enumerate, clock)
        self._cards: dict[str, Poller[GpuReading]] = {}
        self._known: dict[str, Gpu] = {}
        self._last: dict[str, GpuReading] = {}

    def _enumerate(self) -> tuple[Gpu, ...]:
        if self._nvml is None:
            self._nvml = Nvml(self._open_library(), driver_on_disk=self._driver_on_disk)
        return self._nvml.enumerate()

    def _reader(self, uuid: str) -> Callable[[], GpuReading]:
        def read() -> GpuReading:
            assert self._nvml is not None
            return self._nvml.read(self._known[uuid])

        return read

    def poll(self) -> GpuLevel:
        """Ask everything, wait briefly, return the level."""
        until = time.monotonic() + self._settle_s
        self._list.ask()
        self._list.settle(until - time.monotonic())
        present = self._list.value if self._list.error is None else None
        for gpu in present or ():
            self._known[gpu.id] = gpu
            if gpu.id not in self._cards:
                self._cards[gpu.id] = Poller(gpu.id, self._reader(gpu.id), self._clock)
        here = {g.id for g in present} if present is not None else set()
        for uuid in here:
            self._cards[uuid].ask()
        for uuid in here:
            self._cards[uuid].settle(until - time.monotonic())
        state, message = self._library()
        answered = self._list.hung_s() <= self._hang_s and present is not None
        return GpuLevel(
            library=state,
            message=message,
            gpus=tuple(self._reading(u, present=u in here if answered else None) for u in self._order()),
            rejected=self._nvml.rejected if self._nvml is not None else 0,
            driver=self._nvml.driver if self._nvml is not None else "",
        )

    def _order(self) -> tuple[str, ...]:
        return tuple(sorted(self._known, key=lambda u: (self._known[u].index, u)))

    def _library(self) -> tuple[LibraryState, str]:
        if (hung := self._list.hung_s()) > self._hang_s:
            return "error", f"driver not answering {hung:.0f} s (nvmlDeviceGetCount)"
        error = self._list.error
        if isinstance(error, NvmlProblem):
            return error.state, error.message
        if error is not None:
            return "error", f"{type(error).__name__}: {error}"
        if self._list.value is None:
            return "off", "not asked yet"
        return "ok", "" if self._list.value else "the driver shows no GPU"

    def _reading(self, uuid: str, *, present: bool | None) -> GpuReading:
        """A card's newest figures with their age; a hung or lost card says so and keeps its last figures."""
        card, gpu = self._cards[uuid], self._known[uuid]
        if card.value is not None:
            self._last[uuid] = card.value
        base = self._last.get(uuid) or GpuReading(id=uuid, index=gpu.index, name=gpu.name, pci=gpu.pci)
        note = gpu.note or base.note
        if present is False:
            note = "gone: the driver no longer lists it"
        elif (hung := card.hung_s()) > self._hang_s:
            note = f"driver not answering {hung:.0f} s"
        elif card.error is not None:
            note = (self._nvml.lost(card.error) if self._nvml is not None else None) or str(card.error)
            if "fell off the bus" in note:
                present = False
        elif self._library()[0] not in ("ok", "off"):
            note = self._library()[1]
        return replace(base, index=gpu.index, present=present, note=note, age_s=card.age_s())
