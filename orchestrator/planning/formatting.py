"""Numbers as people read them: bytes, seconds, counts and shares."""

from __future__ import annotations


def format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:z.1f} %"


def format_number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def format_count(value: float) -> str:
    """'2.6 M'"""
    for unit, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:g}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number of things, such as '1 rank' or '1,024 ranks'."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_bytes(amount: float) -> str:
    """Bytes as '71.3 MiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def format_duration(seconds: float | None) -> str:
    """'59 ms', '2.3 s', '1 h 20 min'"""
    if seconds is None:
        return "-"
    if seconds < 0.9995:  # 0.9996 rounds to 1 s at three digits
        return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.3g} us"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
