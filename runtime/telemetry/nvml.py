"""Reading GPUs through a library object with pynvml's surface. Initialised once; identity is the UUID.

The object is a parameter, so that tests give one of their own. Functions it may lack (older or newer drivers) and calls a
card does not support are None, asked again after a while.
"""

from collections.abc import Callable
from typing import Any

from planner.record import record
from runtime.telemetry.reading import GpuReading, LibraryState
from runtime.telemetry.throttle import decode
from runtime.telemetry.values import Sieve

SLOW_POLLS = 60  # between two looks at what changes rarely
RETRY_POLLS = 60  # polls after which a call that was not supported is tried again
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
_DIVIDED = "MIG is on: its instances are devices of their own"
_PROCESSES = ("nvmlDeviceGetComputeRunningProcesses",)


class NvmlProblem(Exception):
    """The library as a whole does not work. `state` says in which way."""

    def __init__(self, state: LibraryState, message: str) -> None:
        super().__init__(message)
        self.state: LibraryState = state
        self.message = message


@record
class Gpu:
    """A card of the newest enumeration."""

    id: str
    index: int
    name: str
    pci: str | None
    handle: Any
    note: str = ""  # why nobody computes on it as a whole


class Nvml:
    """The library, opened once. Every method may block for as long as the driver hangs: call from abandonable threads."""

    def __init__(
        self, library: Any, sieve: Sieve | None = None, *, driver_on_disk: Callable[[], str] = lambda: ""
    ) -> None:
        self._lib = library
        self._sieve = sieve or Sieve()
        self._open = False
        self._unsupported: dict[tuple[str, str], int] = {}
        self._polls: dict[str, int] = {}
        self._names: dict[tuple[str, int], tuple[str, str | None]] = {}  # by UUID and index: name, PCI bus
        self._memory_notes: dict[str, str] = {}  # by UUID: what is wrong with a card's memory
        self._driver_on_disk = driver_on_disk
        self.driver = ""

    @property
    def rejected(self) -> int:
        """Implausible figures so far."""
        return self._sieve.rejected

    def enumerate(self) -> tuple[Gpu, ...]:
        """All cards now, MIG instances behind the card they are cut from. NvmlProblem when the library or the driver fails as a
        whole; the next call tries again."""
        lib = self._lib
        try:
            if not self._open:
                lib.nvmlInit()
                self._open = True
                self.driver = _text(lib.nvmlSystemGetDriverVersion())
            cards = [g for i in range(int(lib.nvmlDeviceGetCount())) if (g := self._card(i)) is not None]
            return tuple(g for card in cards for g in (card, *(self._instances(card) if card.note else ())))
        except lib.NVMLError as e:
            raise self._problem(e) from e

    def _card(self, index: int) -> Gpu | None:
        lib = self._lib
        try:
            handle = lib.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(lib.nvmlDeviceGetUUID(handle))
        except lib.NVMLError as e:
            if self._is(e, "NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_NOT_FOUND", "NVML_ERROR_NO_PERMISSION"):
                return None  # fell off the bus, or not ours: the others still count
            raise
        note = _DIVIDED if self._divided(uuid, handle) else ""
        if (uuid, index) not in self._names:  # the same for as long as the card is where it is
            name, pci = (
                self._try(uuid, lib, "nvmlDeviceGetName", handle),
                self._try(uuid, lib, "nvmlDeviceGetPciInfo", handle),
            )
            if name is None or pci is None:
                return Gpu(id=uuid, index=index, name=_text(name or "GPU"), pci=_bus(pci), handle=handle, note=note)
            self._names[uuid, index] = _text(name), _bus(pci)
        name, bus = self._names[uuid, index]
        return Gpu(id=uuid, index=index, name=name, pci=bus, handle=handle, note=note)

    def _divided(self, uuid: str, handle: Any) -> bool:
        """Whether MIG is on. A card that knows no MIG says "not supported", which is no mode. Of one that needs a reset its
        reading tells: the others still count."""
        try:
            mode = self._try(uuid, self._lib, "nvmlDeviceGetMigMode", handle)
        except self._lib.NVMLError as e:
            if self._is(e, "NVML_ERROR_UNINITIALIZED"):
                raise
            return False
        return mode is not None and int(mode[0]) == 1  # [current, after the next reset]

    def _instances(self, card: Gpu) -> tuple[Gpu, ...]:
        """The MIG instances of a card that there are now; places may be empty, and one may go while it is asked for."""
        lib, found = self._lib, []
        for place in range(self._places(card)):
            try:
                handle = lib.nvmlDeviceGetMigDeviceHandleByIndex(card.handle, place)
                uuid = _text(lib.nvmlDeviceGetUUID(handle))
                name = _text(lib.nvmlDeviceGetName(handle))
            except lib.NVMLError as e:
                if self._is(e, "NVML_ERROR_UNINITIALIZED"):
                    raise
                continue
            found.append(Gpu(id=uuid, index=card.index, name=name, pci=card.pci, handle=handle))
        return tuple(found)

    def _places(self, card: Gpu) -> int:
        """For MIG instances on a card."""
        try:
            return int(self._lib.nvmlDeviceGetMaxMigDeviceCount(card.handle))
        except self._lib.NVMLError as e:
            if self._is(e, "NVML_ERROR_UNINITIALIZED"):
                raise
            return 0

    def read(self, gpu: Gpu) -> GpuReading:
        """One card's figures; whatever it does not give is None."""
        lib, sieve, uuid = self._lib, self._sieve, gpu.id
        self._polls[uuid] = self._polls.get(uuid, 0) + 1
        util = self._try(uuid, lib, "nvmlDeviceGetUtilizationRates", gpu.handle)
        memory = self._try(uuid, lib, "nvmlDeviceGetMemoryInfo", gpu.handle)
        mask = next((m for n in _REASONS if (m := self._try(uuid, lib, n, gpu.handle)) is not None), None)
        throttled, reasons = decode(mask) if isinstance(mask, int) and 0 <= mask < 2**32 - 1 else (None, ())
        total = sieve.number(getattr(memory, "total", None), 1, 2**44)
        return GpuReading(
            id=uuid,
            index=gpu.index,
            name=gpu.name,
            pci=gpu.pci,
            util_share=sieve.number(getattr(util, "gpu", None), 0.0, 1.0, 0.01),
            memory_used_bytes=sieve.number(getattr(memory, "used", None), 0, total or 2**44),
            memory_total_bytes=total,
            power_w=sieve.number(self._try(uuid, lib, "nvmlDeviceGetPowerUsage", gpu.handle), 0.0, 3000.0, 1e-3),
            temperature_c=sieve.number(self._try(uuid, lib, "nvmlDeviceGetTemperature", gpu.handle, 0), -20, 150),
            throttled=throttled,
            throttle_reasons=reasons,
            pids=self._pids(uuid, gpu.handle),
            note=gpu.note or self._memory_note(uuid, gpu.handle),
            age_s=0.0,
        )

    def _pids(self, uuid: str, handle: Any) -> tuple[int, ...] | None:
        rows = self._try(uuid, self._lib, _PROCESSES[0], handle)
        if rows is None:
            return None
        pids = [self._sieve.pid(getattr(r, "pid", None)) for r in rows]
        return tuple(p for p in pids if p is not None)

    def _memory_note(self, uuid: str, handle: Any) -> str:
        """Whether rows of a card's memory wait to be replaced by spare ones, or there are none left; looked up now and then.
        Uncorrectable errors came before either."""
        if self._polls[uuid] % SLOW_POLLS == 1:
            rows = self._try(uuid, self._lib, "nvmlDeviceGetRemappedRows", handle)
            _, _, pending, failed = rows or (0, 0, 0, 0)
            self._memory_notes[uuid] = (
                "memory rows could not be remapped: replace the GPU"
                if failed
                else "memory rows wait to be remapped: the GPU needs a reset"
                if pending
                else ""
            )
        return self._memory_notes.get(uuid, "")

    def _try(self, uuid: str, lib: Any, name: str, *args: Any) -> Any:
        """One call; None when it is not supported, not permitted or not there. Losing the card or the library raises."""
        key, now = (uuid, name), self._polls.get(uuid, 0)
        if (since := self._unsupported.get(key)) is not None and now - since < RETRY_POLLS:
            return None
        function = getattr(lib, name, None)
        if function is None:
            return None
        try:
            value = function(*args)
        except lib.NVMLError as e:
            if self._is(e, "NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_UNINITIALIZED", "NVML_ERROR_RESET_REQUIRED"):
                raise
            if self._is(e, "NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_FUNCTION_NOT_FOUND", "NVML_ERROR_NO_PERMISSION"):
                self._unsupported[key] = now
            return None
        except TypeError:
            return None  # a binding with another signature
        self._unsupported.pop(key, None)
        return value

    def lost(self, error: BaseException) -> str | None:
        """What an error of `read` means for the card, in words; None when it is not NVML's."""
        if not isinstance(error, self._lib.NVMLError):
            return None
        if self._is(error, "NVML_ERROR_GPU_IS_LOST"):
            return "GPU fell off the bus; the node needs a reboot"
        if self._is(error, "NVML_ERROR_RESET_REQUIRED"):
            return "GPU needs a reset"
        return f"driver error: {error}"

    def _is(self, error: BaseException, *codes: str) -> bool:
        value = getattr(error, "value", None)
        return value is not None and value in {getattr(self._lib, c, object()) for c in codes}

    def _problem(self, e: BaseException) -> NvmlProblem:
        if self._is(e, "NVML_ERROR_LIB_RM_VERSION_MISMATCH"):
            loaded = self._driver_on_disk()
            there = f" (kernel module {loaded})" if loaded else ""
            return NvmlProblem(
                "version-mismatch",
                f"the NVML library is newer than the loaded kernel module{there}: reboot or reload the module; running jobs go on",
            )
        if self._is(e, "NVML_ERROR_LIBRARY_NOT_FOUND"):
            return NvmlProblem(
                "no-library", "no NVML library (libnvidia-ml.so.1); install the NVIDIA driver or set HEXCTL_NVML"
            )
        if self._is(e, "NVML_ERROR_DRIVER_NOT_LOADED"):
            return NvmlProblem("no-driver", "the NVIDIA kernel module is not loaded")
        if self._is(e, "NVML_ERROR_NO_PERMISSION"):
            return NvmlProblem("no-permission", "no permission to talk to the NVIDIA driver")
        was_open, self._open = self._open, False
        if was_open:
            self._shutdown()
            return NvmlProblem("access-lost", f"access to the GPUs was lost ({e}); in a container: recreate it")
        return NvmlProblem("error", f"NVML does not start: {e}")

    def _shutdown(self) -> None:
        """Give the handle back before the next initialisation, so that retries leak nothing."""
        try:
            self._lib.nvmlShutdown()
        except self._lib.NVMLError:
            return


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _bus(info: Any) -> str | None:
    bus = getattr(info, "busId", None)
    return None if bus is None else _text(bus)
