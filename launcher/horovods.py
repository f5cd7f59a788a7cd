"""What do horovodrun's flags of timeline, stall check and log mean here? Those whose values have to be read.

Horovod turns each into a variable of its core, and so does this file, for scripts and for what comes later. Where
hvdlite itself does nothing about it yet, one line says so: there is no timeline, there are no log levels and no reports
of stalls. The time after which a stalled job is ended is there, as `--collective-timeout`; 0, or `--no-stall-check`,
sets no limit, and lifts that of a variable.

Flags that change nothing and never will are in flags.OBSOLETE.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


class HorovodsError(ValueError):
    """A value that cannot be; the text names the flag."""


def add_flags(add: Callable[..., argparse.Action]) -> None:
    """Those that are told in variables; dest is None where the flag was not given."""
    add("--timeline-filename", dest="timeline", metavar="FILE", help="sets HOROVOD_TIMELINE; nothing is written yet")
    for flag, dest, value, what in (
        ("--timeline-mark-cycles", "cycles", "1", "HOROVOD_TIMELINE_MARK_CYCLES=1"),
        ("--no-timeline-mark-cycles", "cycles", "0", "HOROVOD_TIMELINE_MARK_CYCLES=0"),
        ("--stall-check", "stall_check", "1", "--stall-check-shutdown-time-seconds counts (it does by default)"),
        ("--no-stall-check", "stall_check", "0", "--stall-check-shutdown-time-seconds does not count"),
        ("--log-with-timestamp", "log_hide_time", "0", "HOROVOD_LOG_HIDE_TIME=0"),
        ("--log-without-timestamp", "log_hide_time", "1", "HOROVOD_LOG_HIDE_TIME=1"),
        ("--log-hide-timestamp", "log_hide_time", "1", argparse.SUPPRESS),
        ("--no-log-hide-timestamp", "log_hide_time", "0", argparse.SUPPRESS),
    ):
        told = what if what == argparse.SUPPRESS or "HOROVOD" not in what else f"sets {what}; no effect yet"
        add(flag, dest=dest, action="store_const", const=value, help=told)
    add(
        "--stall-check-shutdown-time-seconds",
        dest="stall_shutdown",
        metavar="S",
        help="as --collective-timeout; 0: without limit",
    )
    add(
        "--stall-check-warning-time-seconds",
        dest="stall_warning",
        metavar="S",
        help="sets HOROVOD_STALL_CHECK_TIME_SECONDS; no effect yet",
    )
    add("--log-level", dest="log_level", metavar="LEVEL", help="sets HOROVOD_LOG_LEVEL; no effect yet")


def translate(asked: argparse.Namespace, environ: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """(variables for the ranks, notes for people). May set asked.collective_timeout, or take that out of environ.

    Raises HorovodsError."""
    told: dict[str, str | None] = {
        "TIMELINE": asked.timeline,
        "TIMELINE_MARK_CYCLES": asked.cycles,
        "LOG_LEVEL": asked.log_level,
        "LOG_HIDE_TIME": asked.log_hide_time,
    }
    if asked.log_level is not None:
        told["LOG_LEVEL"] = asked.log_level.upper()
        if told["LOG_LEVEL"] not in LEVELS:
            raise HorovodsError(f"--log-level {asked.log_level}: must be one of {', '.join(LEVELS)}")
    if asked.timeline == "":
        raise HorovodsError("--timeline-filename: needs a name")
    notes = []
    if asked.timeline is not None or asked.cycles == "1":
        notes.append("--timeline-... (the timeline comes with a later version: nothing is written)")
    if asked.log_level is not None or asked.log_hide_time == "0":
        notes.append(
            "--log-... (the core's log levels come with a later version; --verbose tells what the launcher does)"
        )
    warning = _seconds("--stall-check-warning-time-seconds", asked.stall_warning)
    shutdown = _seconds("--stall-check-shutdown-time-seconds", asked.stall_shutdown)
    if warning is not None:
        told["STALL_CHECK_TIME_SECONDS"] = str(warning)
        notes.append("--stall-check-warning-time-seconds (stall reports come with a later version)")
    if asked.collective_timeout is None and (shutdown == 0 or asked.stall_check == "0"):
        environ.pop("HVDLITE_COLLECTIVE_TIMEOUT", None)
    elif asked.collective_timeout is None and shutdown:
        asked.collective_timeout = str(shutdown)
    return {f"HOROVOD_{name}": value for name, value in told.items() if value is not None}, notes


def _seconds(flag: str, text: str | None) -> int | None:
    """Whole seconds, as Horovod takes them."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text[:9]) > 1_000_000 or len(text) > 9:
        raise HorovodsError(f"{flag} {text[:40]}: must be a whole number of seconds, 0 to 1000000")
    return int(text)
