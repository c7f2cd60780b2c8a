"""NVML's clock event mask. Bits that describe idling or a setting are no alarm; the symbols were renamed in newer drivers."""

_BITS = {
    0x001: ("idle", False),
    0x002: ("application clocks", False),
    0x004: ("power cap", False),  # normal at full load
    0x008: ("hardware slowdown", True),
    0x010: ("sync boost", False),
    0x020: ("software thermal slowdown", True),
    0x040: ("hardware thermal slowdown", True),
    0x080: ("power brake", True),
    0x100: ("display clocks", False),
}


def decode(mask: int) -> tuple[bool, tuple[str, ...]]:
    """(slowed by heat or a brake, every reason in words). Bits that are not known are named, not alarmed."""
    reasons = [words for bit, (words, _) in _BITS.items() if mask & bit]
    alarm = any(mask & bit for bit, (_, alarms) in _BITS.items() if alarms)
    if unknown := mask & ~sum(_BITS):
        reasons.append(f"bits {unknown:#x}")
    return alarm, tuple(reasons)
