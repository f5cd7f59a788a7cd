"""Every option there is, in one table: where it is read, what it may be, what it is for.

A row of OPTIONS gives an option its name, its environment variable HVDLITE_X (and Horovod's HOROVOD_X where that means
the same), the launcher's flag, type, default and help. Flags, validation and documentation come from the row, so a new
option is one row. An option is here only when it does something; Horovod's other variables are in SUPERSEDED with the
reason why nothing is to be set any more, until they get a row.

This is the only file that reads os.environ. It uses the standard library alone and imports quickly, because the
launcher takes its flags from it. Values are checked when they are read (at init, never at import): a value that cannot
be is an HvdOptionError naming variable and value; a HVDLITE_ variable nobody knows is warned about with the nearest
name, not refused, since an environment may well be made for another version.

`agreed` marks what must be the same on all ranks; init compares those and names the ranks that differ.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .errors import HvdOptionError

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

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    @property
    def alias_variable(self) -> str | None:
        """Horovod's environment variable of the same meaning, if there is one."""
        return None if self.alias is None else ALIAS_PREFIX + (self.alias or self.name.upper())


def _whole(text: str) -> int:
    return int(text, 10)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _power_of_two(text: str) -> int:
    value = int(text, 10)
    if value < 1 or value & (value - 1):
        raise ValueError(text)
    return value


def _memory(text: str) -> int:
    return ("auto", "dev_shm").index(text)


def _key(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) != 32:
        raise ValueError(text)
    return value


def _job(text: str) -> int:
    value = int(text, 16)
    if len(text) != 16 or value < 0:
        raise ValueError(text)
    return value


_WANTED = {
    _whole: "a whole number",
    _number: "a number",
    _power_of_two: "a power of two",
    _memory: "auto or dev_shm",
    _key: "64 hexadecimal digits",
    _job: "16 hexadecimal digits",
    str: "text",
}
_SECRET = {"secret_key"}

OPTIONS = (
    Option("rank", _whole, None, "Number of this rank in the job.", scope="rank", low=0),
    Option("size", _whole, None, "Number of ranks in the job.", scope="rank", low=1),
    Option("local_rank", _whole, None, "Number of this rank on its host.", scope="rank", low=0),
    Option("local_size", _whole, None, "Number of ranks on this host.", scope="rank", low=1),
    Option("cross_rank", _whole, None, "Number of this host.", scope="rank", low=0),
    Option("cross_size", _whole, None, "Number of hosts.", scope="rank", low=1),
    Option("store_addr", str, None, "Address of the launcher's rendezvous store.", scope="rank", alias=None),
    Option("store_port", _whole, None, "Port of the store.", scope="rank", alias=None, low=1, high=65535),
    Option("secret_key", _key, None, "Proves that a connection belongs to the job.", scope="rank", alias=None),
    Option("job_id", _job, None, "Tells this job from others.", scope="rank", alias=None),
    Option(
        "fusion_threshold",
        _whole,
        128 << 20,
        "Size of a bucket of tensors that travel together, at most; 0: each travels alone.",
        flag="--fusion-threshold-mb",
        flag_unit=1 << 20,
        agreed=True,
        low=0,
    ),
    Option(
        "cache_capacity",
        _whole,
        8192,
        "Tensors that are remembered, so that later steps say one bit for each, and members of a group at most.",
        flag="--cache-capacity",
        agreed=True,
        low=1,
        high=1 << 20,
    ),
    Option(
        "start_timeout",
        _number,
        30.0,
        "Seconds in which all ranks must have called init().",
        flag="--start-timeout",
        low=0.1,
        high=1e6,
    ),
    Option(
        "leave_timeout",
        _number,
        2.0,
        "Seconds that shutdown() waits for the other ranks to acknowledge at most.",
        alias=None,
        flag="--leave-timeout",
        low=0,
        high=1e6,
    ),
    Option(
        "shared_memory",
        _memory,
        0,
        "Where ranks of a host share memory. auto: memfds, which no mount limits; dev_shm: /dev/shm, whose size does.",
        alias=None,
        flag="--shared-memory",
    ),
    Option(
        "spin_us",
        _whole,
        -1,
        "Microseconds that a waiting rank spins before it sleeps; -1: decided from CPUs and ranks.",
        alias=None,
        flag="--spin-us",
        low=-1,
        high=1_000_000,
    ),
    Option(
        "trace_events",
        _power_of_two,
        4096,
        "Events that the trace ring of a rank remembers, a power of two.",
        alias=None,
        flag="--trace-events",
        low=64,
        high=1 << 24,
    ),
    Option(
        "failure_grace",
        _number,
        2.0,
        "Seconds that the other ranks get to fail by themselves after the first failure, before SIGTERM.",
        scope="launcher",
        alias=None,
        flag="--failure-grace",
        low=0,
        high=1e6,
    ),
)

# Variables of Horovod that hvdlite knows and needs no value of. A variable that gets a meaning moves to OPTIONS.
SUPERSEDED = {
    "CYCLE_TIME": "there is no cycle: rounds are driven by events",
    "CONTROLLER": "chosen at run time",
    "CPU_OPERATIONS": "chosen at run time",
    "HOSTNAME": "set by the launcher for scripts that read it",
    "GLOO_IFACE": "there is no Gloo",
    "GLOO_TIMEOUT_SECONDS": "there is no Gloo",
    "GLOO_RENDEZVOUS_ADDR": "ranks meet in the store of hvdlite-run",
    "GLOO_RENDEZVOUS_PORT": "ranks meet in the store of hvdlite-run",
    "BATCH_D2D_MEMCOPIES": "always on where it applies",
    "ENABLE_ASYNC_COMPLETION": "always on where it applies",
    "SECRET_KEY": "hvdlite-run makes a secret of its own",
}
_QUIET_ALIASES = {"HOROVOD_HOSTNAME"}


class Settings(NamedTuple):
    """What `read` found: a value for every option, where it came from (None: the default), and what to tell."""

    values: dict[str, Any]
    origin: dict[str, str | None]
    notes: list[str]

    def agreed(self) -> dict[str, Any]:
        """The options that must be the same on all ranks."""
        return {option.name: self.values[option.name] for option in OPTIONS if option.agreed}


def option_of(name: str) -> Option:
    """The row of an option. KeyError if there is none."""
    for option in OPTIONS:
        if option.name == name:
            return option
    raise KeyError(name)


def parse(option: Option, text: str, source: str) -> Any:
    """The value that `text` stands for, `source` being the variable or flag to blame. Raises HvdOptionError."""
    shown = "(not shown)" if option.name in _SECRET else repr(text)
    try:
        value = option.type(text.strip())
    except ValueError:
        raise HvdOptionError(f"{source}={shown}: must be {_WANTED[option.type]}. {option.help}") from None
    if option.low is not None and value < option.low:
        raise HvdOptionError(f"{source}={shown}: must be at least {option.low}. {option.help}")
    if option.high is not None and value > option.high:
        raise HvdOptionError(f"{source}={shown}: must be at most {option.high}. {option.help}")
    return value


def _nearest(name: str, names: list[str]) -> str:
    import difflib

    found = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    return f" (did you mean {found[0]}?)" if found else ""


def read(environ: Mapping[str, str]) -> Settings:
    """Read and check every option. Raises HvdOptionError naming variable and value."""
    values: dict[str, Any] = {}
    origin: dict[str, str | None] = {}
    honoured = []
    for option in OPTIONS:
        own, alias = environ.get(option.variable), None
        if option.alias_variable is not None:
            alias = environ.get(option.alias_variable)
        source, text = (option.variable, own) if own is not None else (option.alias_variable, alias)
        if source is None or text is None:
            values[option.name], origin[option.name] = option.default, None
            continue
        values[option.name], origin[option.name] = parse(option, text, source), source
        if own is None:
            honoured.append(source)
        elif alias is not None and parse(option, alias, str(option.alias_variable)) != values[option.name]:
            raise HvdOptionError(
                f"{option.variable}={own!r} and {option.alias_variable}={alias!r} disagree: set only one of them."
            )
    return Settings(values, origin, _notes(environ, honoured))


def _notes(environ: Mapping[str, str], honoured: list[str]) -> list[str]:
    """One line on unknown HVDLITE_ variables, one on what became of HOROVOD_ variables; none where all is known."""
    notes = []
    own = [option.variable for option in OPTIONS]
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in own)
    if unknown:
        notes.append("unknown, without effect: " + ", ".join(name + _nearest(name, own) for name in unknown))
    aliases = [option.alias_variable for option in OPTIONS if option.alias_variable is not None]
    ignored = []
    for name in sorted(environ):
        if not name.startswith(ALIAS_PREFIX) or name in aliases or name in _QUIET_ALIASES:
            continue
        why = SUPERSEDED.get(name[len(ALIAS_PREFIX) :])
        ignored.append(f"{name} ({why})" if why else name + _nearest(name, aliases))
    if honoured or ignored:
        parts = ["honoured " + ", ".join(honoured)] if honoured else []
        parts += ["ignored " + ", ".join(ignored)] if ignored else []
        notes.append("of Horovod's variables: " + "; ".join(parts))
    return notes


def load() -> Settings:
    """`read` of this process's environment."""
    return read(os.environ)


def environ() -> dict[str, str]:
    """A copy of this process's environment, for those who look for other variables than the options."""
    return dict(os.environ)


def add_flags(parser: Any) -> None:
    """Give an argparse parser (or group) a flag for every option that has one. Unset flags parse to None."""
    for option in OPTIONS:
        if option.flag is not None:
            default = option.default / option.flag_unit if option.flag_unit != 1 else option.default
            parser.add_argument(
                option.flag,
                dest=option.name,
                metavar="MB" if option.flag_unit == 1 << 20 else option.name.upper(),
                help=f"{option.help} Default {default:g}; environment {option.variable}.",
            )


def variables_of(flags: Mapping[str, Any]) -> dict[str, str]:
    """The variables that parsed flags (`vars(namespace)`) stand for. Raises HvdOptionError naming flag and value."""
    result = {}
    for option in OPTIONS:
        text = flags.get(option.name)
        if option.flag is None or text is None:
            continue
        if option.flag_unit != 1:
            try:
                number = _number(text)
            except ValueError:
                raise HvdOptionError(f"{option.flag} {text!r}: must be a number. {option.help}") from None
            text = str(int(number * option.flag_unit))
        parse(option, text, option.flag)
        result[option.variable] = text.strip()
    return result


def documentation() -> str:
    """The table as Markdown, for docs and `--help` of tools; secrets and what the launcher sets for ranks included."""
    lines = ["| variable | Horovod's name | flag | default | what it does |", "| --- | --- | --- | --- | --- |"]
    for option in OPTIONS:
        default = "" if option.default is None else str(option.default)
        agreed = " The same on all ranks." if option.agreed else ""
        cells = [option.variable, option.alias_variable or "", option.flag or "", default, option.help + agreed]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
