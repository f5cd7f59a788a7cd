"""What does "25gbit,20us" mean? Times, rates and sizes as users write them, in ns, ns a byte and bytes.

Every unit is one that the tools of networks use: us and ms; GB/s (10^9 bytes) and gbit (10^9 bits, as tc has it); k, M
and G are 2^10, 2^20 and 2^30 bytes, KB, MB and GB are 10^3, 10^6 and 10^9. A number without a unit is refused, but for
sizes, where it counts bytes: a rate in wrong units would give a wrong answer and no error.
"""

from __future__ import annotations

import re

TIMES = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
RATES = {  # bytes a second
    "kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9, "tb/s": 1e12,
    "kbit": 125.0, "mbit": 125e3, "gbit": 125e6, "tbit": 125e9,
    "kbit/s": 125.0, "mbit/s": 125e3, "gbit/s": 125e6, "tbit/s": 125e9,
}  # fmt: skip
SIZES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
    "tib": 1 << 40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{0,9})?(?:e-?[0-9]{1,2})?)\s*([a-z/]{0,8})\s*")


def _read(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    found = _NUMBER.fullmatch(str(text)[:40].lower())
    if not found or found[2] not in units:
        raise ValueError(f"{str(text)[:40]!r} is no {what}: write it as {example} [HVD008]")
    return float(found[1]) * units[found[2]]


def time_ns(text: str | float) -> float:
    """ns of "20us"; a number is taken as ns. Raises ValueError."""
    if isinstance(text, (int, float)):
        text = f"{text}ns"
    return _read(text, TIMES, "time", "20us or 0.5ms")


def ns_a_byte(text: str | float) -> float:
    """ns a byte of "25gbit" or "1GB/s"; a number is taken as ns a byte. Raises ValueError, also for a rate of zero."""
    if isinstance(text, (int, float)):
        if not 0 < text < float("inf"):
            raise ValueError(f"{text!r} ns a byte is no rate: it must be above zero [HVD008]")
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
        raise ValueError(f"{str(text)[:40]!r} is no link: give a time and a rate, as 20us,25gbit [HVD008]")
    first = _NUMBER.fullmatch(parts[0].lower())
    late, rate = (parts[0], parts[1]) if first and first[2] in TIMES else (parts[1], parts[0])
    return time_ns(late), ns_a_byte(rate)
