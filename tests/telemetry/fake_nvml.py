"""A library object with pynvml's surface, made of one card's real readings (an H200, idle and at full load)."""

import threading
from typing import Any

from planner.record import record


@record
class CardFacts:
    """What one card answers. A value may be an exception to raise, or an event to hang on."""

    uuid: str
    name: Any = "NVIDIA H200"
    gpu: Any = 98
    total: Any = 150754820096
    used: Any = 78617903104
    power_mw: Any = 539310
    temperature: Any = 53
    mask: Any = 0
    pids: Any = (417,)
    bus: str = "00000000:00:06.0"
    mig: Any = -1000 - 3  # (current, pending); a card that knows none says that it is not supported
    rows: Any = (0, 0, 0, 0)  # remapped after corrected and after uncorrected errors, pending, failed
    instances: tuple["CardFacts | None", ...] = ()  # by place


IDLE = CardFacts(
    uuid="GPU-9725b7a4-76b7-a784-ec9f-17bc0113660c",
    gpu=0,
    used=644939776,
    power_mw=79991,
    temperature=36,
    mask=1,
    pids=(),
)
BUSY = CardFacts(uuid="GPU-9725b7a4-76b7-a784-ec9f-17bc0113660c")


class _Value:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class FakeNvml:
    """Cards can be exchanged between polls; `errors` maps a function's name to the error it raises."""

    NVML_ERROR_UNINITIALIZED = 1
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18
    NVML_ERROR_UNKNOWN = 999

    class NVMLError(Exception):
        """As pynvml's."""

        def __init__(self, value: int) -> None:
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self, *cards: CardFacts, driver: str = "580.159.04") -> None:
        self.cards = list(cards)
        self.driver = driver
        self.errors: dict[str, int] = {}
        self.inits = self.shutdowns = 0
        self.calls: dict[str, int] = {}

    def _answer(self, name: str, value: Any) -> Any:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name in self.errors:
            raise self.NVMLError(self.errors[name])
        if isinstance(value, threading.Event):
            value.wait()
            return None
        if isinstance(value, int) and value < -1000:  # an error of this card's own, written as -1000 - code
            raise self.NVMLError(-1000 - value)
        return value

    def nvmlInit(self) -> None:
        self._answer("nvmlInit", None)
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return int(self._answer("nvmlDeviceGetCount", len(self.cards)))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> CardFacts:
        card: CardFacts = self._answer("nvmlDeviceGetHandleByIndex", self.cards[index])
        return card

    def nvmlDeviceGetUUID(self, card: CardFacts) -> str:
        return str(self._answer("nvmlDeviceGetUUID", card.uuid))

    def nvmlDeviceGetName(self, card: CardFacts) -> Any:
        return self._answer("nvmlDeviceGetName", card.name)

    def nvmlDeviceGetPciInfo(self, card: CardFacts) -> Any:
        return _Value(busId=card.bus.encode())

    def nvmlDeviceGetRemappedRows(self, card: CardFacts) -> Any:
        return self._answer("nvmlDeviceGetRemappedRows", card.rows)

    def nvmlDeviceGetMigMode(self, card: CardFacts) -> Any:
        return self._answer("nvmlDeviceGetMigMode", card.mig)

    def nvmlDeviceGetMaxMigDeviceCount(self, card: CardFacts) -> int:
        return len(card.instances)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: CardFacts, place: int) -> CardFacts:
        found = self._answer("nvmlDeviceGetMigDeviceHandleByIndex", card.instances[place])
        if found is None:
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        instance: CardFacts = found
        return instance

    def nvmlDeviceGetUtilizationRates(self, card: CardFacts) -> Any:
        return _Value(gpu=self._answer("nvmlDeviceGetUtilizationRates", card.gpu), memory=46)

    def nvmlDeviceGetMemoryInfo(self, card: CardFacts) -> Any:
        used = self._answer("nvmlDeviceGetMemoryInfo", card.used)
        return _Value(total=card.total, used=used, free=0)

    def nvmlDeviceGetPowerUsage(self, card: CardFacts) -> Any:
        return self._answer("nvmlDeviceGetPowerUsage", card.power_mw)

    def nvmlDeviceGetTemperature(self, card: CardFacts, sensor: int) -> Any:
        return self._answer("nvmlDeviceGetTemperature", card.temperature)

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: CardFacts) -> Any:
        return self._answer("nvmlDeviceGetCurrentClocksEventReasons", card.mask)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: CardFacts) -> Any:
        return self._answer("nvmlDeviceGetCurrentClocksThrottleReasons", card.mask)

    def nvmlDeviceGetComputeRunningProcesses(self, card: CardFacts) -> Any:
        pids = self._answer("nvmlDeviceGetComputeRunningProcesses", card.pids)
        return [_Value(pid=p, usedGpuMemory=2**64 - 1) for p in pids]
