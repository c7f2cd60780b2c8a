"""Figures for people. Unknown (None, NaN) is a dash, never a zero; SI units come in, readable ones go out."""

import math

NA = "—"
MINUS = "−"


def _fixed(value: float, decimals: int = 0) -> str:
    """Grouped in threes, with a true minus, and no sign on what rounds to nothing."""
    text = f"{abs(value):,.{decimals}f}"
    return MINUS + text if value < 0 and text.strip("0.,") else text


def grouped(value: float | None, decimals: int = 0) -> str:
    """1842.4 -> "1,842"."""
    return NA if value is None or not math.isfinite(value) else _fixed(value, decimals)


def compact(value: float | None) -> str:
    """A count in at most five cells (and a sign): 950, 12.3k, 4.57M, 1.2G."""
    if value is None or not math.isfinite(value):
        return NA
    size = abs(value)
    if size < 999.5:
        return _fixed(value)
    for suffix in "kMGT":
        size /= 1000
        if size < 999.5 or suffix == "T":
            decimals = 0 if size >= 99.95 else 1 if size >= 9.995 else 2
            return _fixed(math.copysign(size, value), decimals) + suffix
    raise AssertionError("T takes all that is left")


def rate(tokens_per_s: float | None) -> str:
    """Tokens per second: 1842 -> "1,842", 3.25 -> "3.2", 1.25e6 -> "1.25M"."""
    if tokens_per_s is None or not math.isfinite(tokens_per_s):
        return NA
    if abs(tokens_per_s) >= 1e6:
        return compact(tokens_per_s)
    return _fixed(tokens_per_s, 0 if abs(tokens_per_s) >= 99.5 or tokens_per_s == 0 else 1)


def tokens_per_s(value: float | None) -> str:
    """1842 -> "1,842 tok/s"."""
    text = rate(value)
    return text if text == NA else f"{text} tok/s"


def dollars(value: float | None) -> str:
    """0.482 -> "$0.48", 1234.5 -> "$1,234", 0.0042 -> "$0.0042"."""
    if value is None or not math.isfinite(value):
        return NA
    size = abs(value)
    sign = MINUS if value < 0 else ""
    if size == 0:
        return "$0"
    if size < 0.01:
        return f"{sign}${size:.2g}"
    return f"{sign}${size:,.2f}" if size < 1000 else f"{sign}${size:,.0f}"


def price(value: float | None) -> str:
    """`dollars` where a column's head already has the sign: 0.482 -> "0.48", 1234.5 -> "1,234", 1.25e6 -> "1.25M"."""
    if value is not None and abs(value) >= 999_999.5:
        return compact(value)
    return dollars(value).replace("$", "")


def dollars_per(value: float | None, unit: str) -> str:
    """(0.48, "Mtok") -> "$0.48/Mtok"."""
    text = dollars(value)
    return text if text == NA else f"{text}/{unit}"


def percent(share: float | None, decimals: int | None = None) -> str:
    """0.974 -> "97 %"; below ten percent with one decimal unless told otherwise: 0.006 -> "0.6 %"."""
    if share is None or not math.isfinite(share):
        return NA
    value = share * 100
    if decimals is None:
        decimals = 1 if 0 < abs(value) < 9.95 else 0
    return f"{_fixed(value, decimals)} %"


def signed_percent(share: float | None) -> str:
    """0.021 -> "+2 %", -0.22 -> "−22 %", nearly nothing -> "±0 %"."""
    if share is None or not math.isfinite(share):
        return NA
    value = round(share * 100)
    if value == 0:
        return "±0 %"
    return f"{'+' if value > 0 else ''}{_fixed(value)} %"


def gibibytes(value: float | None) -> str:
    """Bytes as GiB without the unit: 61 GiB -> "61", 3.2 GiB -> "3.2"."""
    if value is None or not math.isfinite(value):
        return NA
    size = value / 2**30
    return _fixed(size, 1 if abs(size) < 9.95 and size != int(size) else 0)


def byte_size(value: float | None) -> str:
    """Bytes with a unit: "512 MiB", "2.1 GiB"."""
    if value is None or not math.isfinite(value):
        return NA
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1023.5:
            return f"{_fixed(size, 0 if abs(size) >= 9.95 or unit == 'B' else 1)} {unit}"
        size /= 1024
    return f"{_fixed(size, 1)} TiB"


def age(seconds: float | None) -> str:
    """How old a value is: 0.41 -> "0.4 s", 41 -> "41 s", 190 -> "3 min", 7300 -> "2 h", 200000 -> "2 d"."""
    if seconds is None or not math.isfinite(seconds):
        return NA
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    for limit, divisor, unit in (
        (99.5, 1, "s"),
        (99.5 * 60, 60, "min"),
        (48 * 3600, 3600, "h"),
        (math.inf, 86400, "d"),
    ):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    raise AssertionError("the last limit is infinite")


def clock(seconds: float | None) -> str:
    """A length of time: 761 -> "12:41", 11561 -> "3:12:41", 200000 -> "2 d 07:33"."""
    if seconds is None or not math.isfinite(seconds):
        return NA
    whole = max(0, int(seconds))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def time_of_day(at_s: float, utc_offset_s: int) -> str:
    """Unix seconds as the wall clock of a zone that is `utc_offset_s` east of Greenwich: "12:29:40"."""
    whole = int(at_s + utc_offset_s) % 86400
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def seconds(value: float | None) -> str:
    """A duration of work: 0.0123 -> "12 ms", 4.21 -> "4.2 s", 93 -> "93 s"."""
    if value is None or not math.isfinite(value):
        return NA
    if abs(value) < 0.0995:
        return f"{_fixed(value * 1000)} ms"
    return f"{_fixed(value, 1 if abs(value) < 9.95 else 0)} s"


def figure(value: float | None) -> str:
    """A metric of unknown size in about six cells: 0.0123, 1.25, 842, 1.2e-07."""
    if value is None or not math.isfinite(value):
        return NA
    size = abs(value)
    if size == 0:
        text = "0"
    elif size < 1e-3:
        text = f"{size:.1e}"
    elif size < 1:
        text = f"{size:.4f}"
    elif size < 100:
        text = f"{size:.2f}"
    else:
        text = compact(size) if size >= 1e5 else f"{size:,.0f}"
    return MINUS + text if value < 0 else text
