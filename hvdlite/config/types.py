"""Types of options: the fields of a row, the texts that it accepts, and the error for a wrong one.

The rows themselves are in options.py. A type is a function from text to a value that raises ValueError; WANTED says in
words what each takes, for the error. Some take words of their own: a key, a job's number, a signal, what a message
costs. What is on or off is a `switch`, and has two flags.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from typing import Any, NamedTuple

PREFIX = "HVDLITE_"
ALIAS_PREFIX = "HOROVOD_"


class Option(NamedTuple):
    """One row. `low` and `high` bound numbers; the value of `flag` times `flag_unit` is the value of the variable."""

    name: str
    type: Callable[[str], Any]
    default: Any
    help: str
    scope: str = "engine"  # engine: read by init; rank: set for each rank by the launcher; launcher: read by it alone
    alias: str | None = ""  # HOROVOD_ name without the prefix; "": the same name; None: Horovod has no such variable
    flag: str | None = None
    flag_unit: int = 1
    agreed: bool = False
    low: float | None = None
    high: float | None = None
    is_path: Callable[[str], bool] | None = None  # whether a value names a file or folder; None: none does

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    @property
    def alias_variable(self) -> str | None:
        """Horovod's environment variable of the same meaning, if there is one."""
        return None if self.alias is None else ALIAS_PREFIX + (self.alias or self.name.upper())

    @property
    def default_text(self) -> str | None:
        """The default as the variable takes it; None: there is none."""
        if self.default is None or isinstance(self.default, str):
            return self.default
        words = WORDS.get(self.type)
        return words[self.default] if words else str(self.default).removesuffix(".0")

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off; its flag is --x or --no-x then."""
        return self.type is switch


WIRES = ("none", "fp16", "bf16", "int8", "int4")  # compressors of hvd.Compression
_SWITCH, _MEMORY, _GUARD = ("0", "1"), ("auto", "dev_shm"), ("off", "warn", "raise", "nan")


def whole(text: str) -> int:
    return int(text, 10)


def finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def power_of_two(text: str) -> int:
    value = int(text, 10)
    if value < 1 or value & (value - 1):
        raise ValueError(text)
    return value


def switch(text: str) -> bool:
    return bool(_SWITCH.index(text))


def memory(text: str) -> int:
    return _MEMORY.index(text)


def guard(text: str) -> int:
    """A number of the core's HVD_GUARD_*."""
    return _GUARD.index({"0": "off", "1": "raise"}.get(text, text))


def check(text: str) -> str:
    words = ("off", "warn", "raise")
    return words[words.index(text)]


def wire(text: str) -> str:
    return WIRES[WIRES.index(text)]


def slots(text: str) -> str:
    words = ("pool", "hashed")
    return words[words.index(text)]


def modules(text: str) -> str:
    """auto, off, or names with commas between."""
    if not all(part.strip().isidentifier() for name in text.split(",") for part in name.split(".")):
        raise ValueError(text)
    return text


def file_name(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def has_folder(text: str) -> bool:
    """Whether a library is named by its path, and is not looked for."""
    return os.sep in text


def key(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != 32:
        raise ValueError(text)
    return value


def link_cost(text: str) -> list[int]:
    """Nanoseconds, and picoseconds for each byte."""
    alpha, beta = (finite_number(part) for part in text.split(","))
    cost = [round(alpha * 1000), round(beta * 1000)]
    if not all(1 <= number <= 10**12 for number in cost):
        raise ValueError(text)
    return cost


def signal_number(text: str) -> int:
    """SIGUSR2, USR2, RTMIN+5 or a number, but none that ends a process in any case or that others need."""
    word = text.upper().removeprefix("SIG")
    base, plus, more = word.partition("+")
    if plus and base == "RTMIN" and more.isdecimal():
        value = signal.SIGRTMIN + int(more)
    else:
        value = int(text, 10) if text.isdecimal() else int(getattr(signal, f"SIG{word}", 0))
    taken = {signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGSEGV}
    if not 1 <= value <= signal.SIGRTMAX or value in taken:
        raise ValueError(text)
    return int(value)


def job(text: str) -> int:
    value = int(text, 16)
    if len(text) != 16 or value < 0:
        raise ValueError(text)
    return value


WANTED = {
    whole: "a whole number",
    finite_number: "a number",
    power_of_two: "a power of two",
    switch: "0 or 1",
    memory: "auto or dev_shm",
    guard: "off, warn, raise (or 1), or nan",
    check: "off, warn or raise",
    wire: "none, fp16, bf16, int8 or int4",
    slots: "pool or hashed",
    modules: "auto, off, or names of modules with commas between",
    link_cost: "two numbers greater than zero, not beyond all measure, with a comma between, as in 50,8",
    key: "64 hexadecimal digits",
    job: "16 hexadecimal digits",
    signal_number: "a signal that is free, such as SIGUSR2 or RTMIN+5",
    file_name: "the name of a file",
    str: "text",
}
WORDS: dict[Callable[[str], Any], tuple[str, ...]] = {switch: _SWITCH, memory: _MEMORY, guard: _GUARD}  # by value
SECRET = {"secret_key"}
