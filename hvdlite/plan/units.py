"""Units as users write them ("25gbit,20us"): times, rates and sizes, in ns, ns per byte and bytes.

Every unit is one that the tools of networks use: us and ms; GB/s (10^9 bytes), Gb/s, Gbps and gbit (10^9 bits, as tc
has it); k, M and G are 2^10, 2^20 and 2^30 bytes, KB, MB and GB are 10^3, 10^6 and 10^9. A number without a unit is
refused, but for sizes, where it counts bytes, and so is gb/s, which may be either: a rate in wrong units would give a
wrong answer and no error.
"""

from __future__ import annotations

import re

TIMES = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
RATES = {  # bytes a second
    "kB/s": 1e3, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12,
    "Kb/s": 125.0, "Mb/s": 125e3, "Gb/s": 125e6, "Tb/s": 125e9,
    "Kbps": 125.0, "Mbps": 125e3, "Gbps": 125e6, "Tbps": 125e9,
    "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9,
    "kbit/s": 125.0, "mbit/s": 125e3, "gbit/s": 125e6, "tbit/s": 125e9,
}  # fmt: skip
SIZES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
    "tib": 1 << 40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{0,9})?(?:e-?[0-9]{1,2})?)\s*([a-z/]{0,8})\s*", re.IGNORECASE)
_EITHER = re.compile(r"([kmgt])b(?:/s|ps)", re.IGNORECASE)  # bits or bytes


def _read(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    found = _NUMBER.fullmatch(str(text)[:40])
    each = units.get(found[2], units.get(found[2].lower())) if found else None
    if not found or each is None:
        either = _EITHER.fullmatch(found[2]) if found and units is RATES else None
        if found and either:
            k = either[1].upper()
            example = f"{found[1]}{k}b/s, which are bits, or as {found[1]}{k}B/s, which are bytes"
        raise ValueError(f"{str(text)[:40]!r} is not a {what}: write it as {example} [HVD008]")
    return float(found[1]) * each


def time_ns(text: str | float) -> float:
    """ns of "20us"; a number is taken as ns. Raises ValueError."""
    if isinstance(text, (int, float)):
        text = f"{text}ns"
    return _read(text, TIMES, "time", "20us or 0.5ms")


def ns_a_byte(text: str | float) -> float:
    """ns a byte of "25gbit" or "1GB/s"; a number is taken as ns a byte. Raises ValueError, also for a rate of zero."""
    if isinstance(text, (int, float)):
        if not 0 < text < float("inf"):
            raise ValueError(f"{text!r} ns per byte is not a rate: it must be above zero [HVD008]")
        return float(text)
    rate = _read(text, RATES, "rate", "25gbit or 1GB/s")
    if rate <= 0:
        raise ValueError(f"a rate of {text!r} would never move a byte [HVD008]")
    return 1e9 / rate


def size_bytes(text: str | float) -> int:
    """Bytes of "16M" (2^20 each), "16MB" (10^6 each) or a number. Raises ValueError."""
    return int(_read(str(text), SIZES, "size", "4k, 16M or 16MB"))


def link(text: str) -> tuple[float, float]:
    """(ns, ns a byte) of "20us,25gbit", in any order. Raises ValueError."""
    parts = str(text).split(",")
    if len(parts) != 2:
        raise ValueError(f"{str(text)[:40]!r} is not a link: write a time and a rate, such as 20us,25gbit [HVD008]")
    first = _NUMBER.fullmatch(parts[0])
    late, rate = (parts[0], parts[1]) if first and first[2].lower() in TIMES else (parts[1], parts[0])
    return time_ns(late), ns_a_byte(rate)
