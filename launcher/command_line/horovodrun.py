"""Flags of horovodrun for stall check and log, whose values have to be translated.

Horovod turns each into a variable of its core, and so does this file, for scripts and for what comes later. Where
hvdlite itself does nothing about it yet, one line says so: there are no log levels. Stalls are reported after
`--stall-check-time`, and end the job after `--collective-timeout`; 0, or `--no-stall-check`, sets no limit, and lifts
that of a variable. Flags of the timeline are in the table of options.

Flags that change nothing and never will are in flags.OBSOLETE.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


class HorovodsError(ValueError):
    """A value that cannot be; the text names the flag."""


def add_flags(add: Callable[..., argparse.Action]) -> None:
    """Those that are passed on as variables; dest is None where the flag was not given."""
    for flag, dest, value, what in (
        ("--stall-check", "stall_check", "1", "report stalls, and let them end the job (the default)"),
        ("--no-stall-check", "stall_check", "0", "report no stalls; only --collective-timeout ends the job"),
        ("--log-with-timestamp", "log_hide_time", "0", "HOROVOD_LOG_HIDE_TIME=0"),
        ("--log-without-timestamp", "log_hide_time", "1", "HOROVOD_LOG_HIDE_TIME=1"),
        ("--log-hide-timestamp", "log_hide_time", "1", argparse.SUPPRESS),
        ("--no-log-hide-timestamp", "log_hide_time", "0", argparse.SUPPRESS),
    ):
        text = what if what == argparse.SUPPRESS or "HOROVOD" not in what else f"sets {what}; no effect yet"
        add(flag, dest=dest, action="store_const", const=value, help=text)
    add(
        "--stall-check-shutdown-time-seconds",
        dest="stall_shutdown",
        metavar="S",
        help="like --collective-timeout, in seconds; 0: no limit",
    )
    add(
        "--stall-check-warning-time-seconds",
        dest="stall_warning",
        metavar="S",
        help="like --stall-check-time, in seconds",
    )
    add("--log-level", dest="log_level", metavar="LEVEL", help="sets HOROVOD_LOG_LEVEL; no effect yet")


def translate(args: argparse.Namespace, environ: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """(variables for the ranks, notes for people). May set args.collective_timeout and
    args.stall_check_time, and take a variable out of environ.

    Raises HorovodsError."""
    variables: dict[str, str | None] = {
        "LOG_LEVEL": args.log_level,
        "LOG_HIDE_TIME": args.log_hide_time,
    }
    if args.log_level is not None:
        variables["LOG_LEVEL"] = args.log_level.upper()
        if variables["LOG_LEVEL"] not in LEVELS:
            raise HorovodsError(f"--log-level {args.log_level}: must be one of {', '.join(LEVELS)} [HVD704]")
    notes = []
    if args.log_level is not None or args.log_hide_time == "0":
        notes.append("--log-... (log levels come with a later version; --verbose prints the actions of the launcher)")
    warning = _seconds("--stall-check-warning-time-seconds", args.stall_warning)
    shutdown = _seconds("--stall-check-shutdown-time-seconds", args.stall_shutdown)
    if warning is not None:
        args.stall_check_time = args.stall_check_time or str(warning)
    if args.stall_check is not None:
        variables["STALL_CHECK_DISABLE"] = "0" if args.stall_check == "1" else "1"
        environ.pop("HVDLITE_STALL_CHECK_DISABLE", None)
    if args.collective_timeout is None and (shutdown == 0 or args.stall_check == "0"):
        args.collective_timeout = "0"
    elif args.collective_timeout is None and shutdown:
        args.collective_timeout = str(shutdown)
    return {f"HOROVOD_{name}": value for name, value in variables.items() if value is not None}, notes


def _seconds(flag: str, text: str | None) -> int | None:
    """Whole seconds, as Horovod takes them."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal()) or int(text[:9]) > 1_000_000 or len(text) > 9:
        raise HorovodsError(f"{flag} {text[:40]}: must be a whole number of seconds, 0 to 1000000 [HVD704]")
    return int(text)
