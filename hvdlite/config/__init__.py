"""Options read from the environment and flags, and checked against the table in options.py.

This is the only file that reads os.environ. It uses the standard library alone and imports quickly, because the
launcher takes its flags from it. Values are checked when they are read (at init, never at import): a value that cannot
be is an HvdOptionError naming variable and value; an unknown HVDLITE_ variable is warned about with the nearest
name, not refused, since an environment may well be made for another version.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import HvdOptionError
from .ignored import QUIET_ALIASES, SUPERSEDED
from .options import ALIAS_PREFIX, OPTIONS, PREFIX, SECRET, WANTED, Option, finite_number


class Settings(NamedTuple):
    """What `read` found: a value for every option, where it came from (None: the default), and what to tell."""

    values: dict[str, Any]
    origin: dict[str, str | None]
    notes: list[str]

    def stall_limits(self) -> tuple[float, float]:
        """Seconds after which a collective that waits is reported, and ends the job; 0: never."""
        report, end = self.values["stall_check_time"], self.values["collective_timeout"]
        if self.values["stall_check_disable"]:
            return 0.0, end if self.origin["collective_timeout"] is not None else 0.0
        return report, end

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
    shown = "(not shown)" if option.name in SECRET else repr(text)
    try:
        value = option.type(text.strip())
    except ValueError:
        raise HvdOptionError(f"{source}={shown}: must be {WANTED[option.type]}. {option.help} [HVD801]") from None
    if option.low is not None and value < option.low:
        raise HvdOptionError(f"{source}={shown}: must be at least {option.low}. {option.help} [HVD802]")
    if option.high is not None and value > option.high:
        raise HvdOptionError(f"{source}={shown}: must be at most {option.high}. {option.help} [HVD802]")
    return value


def _nearest(name: str, names: list[str]) -> str:
    import difflib

    # Without the prefix, which is the same for all: with it any two short names look alike.
    by_rest = {each.partition("_")[2]: each for each in names}
    found = difflib.get_close_matches(name.partition("_")[2], by_rest, n=1, cutoff=0.75)
    return f" (did you mean {by_rest[found[0]]}?)" if found else ""


def put(variables: Mapping[str, str]) -> None:
    """What scripts and children read from now on."""
    os.environ.update(variables)


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
                " [HVD803]"
            )
    return Settings(values, origin, _notes(environ, honoured))


def _notes(environ: Mapping[str, str], honoured: list[str]) -> list[str]:
    """One line on unknown HVDLITE_ variables, one on what became of HOROVOD_ variables; none where all is known."""
    notes = []
    own = [option.variable for option in OPTIONS]
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in own)
    if unknown:
        listed = ", ".join(name + _nearest(name, own) for name in unknown)
        notes.append(f"unknown, without effect: {listed} [HVD804]")
    aliases = [option.alias_variable for option in OPTIONS if option.alias_variable is not None]
    ignored = []
    for name in sorted(environ):
        if not name.startswith(ALIAS_PREFIX) or name in aliases or name in QUIET_ALIASES:
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
    """A copy of this process's environment, for variables other than the options."""
    return dict(os.environ)


def write(name: str, value: str | None) -> None:
    """Sets a variable of this process and its children; None removes it."""
    os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)


def add_flags(parser: Any) -> None:
    """Give an argparse parser (or group) a flag for every option that has one. Unset flags parse to None.

    An option that is on or off has two flags, --x and --no-x.
    """
    for option in OPTIONS:
        if option.flag is None:
            continue
        if option.is_switch:
            add = {"dest": option.name, "action": "store_const"}
            text = option.help.removeprefix("1: ")
            on = f"{text[:1].upper()}{text[1:]} Default {option.default_text}; environment {option.variable}."
            parser.add_argument(option.flag, const="1", help=on, **add)
            parser.add_argument("--no-" + option.flag[2:], const="0", help=f"Not {option.flag}.", **add)
            continue
        default = f"{option.default / option.flag_unit:g}" if option.flag_unit != 1 else option.default_text
        where = f"Default {default}; environment" if default is not None else "Environment"
        parser.add_argument(
            option.flag,
            dest=option.name,
            metavar="MB" if option.flag_unit == 1 << 20 else option.name.upper(),
            help=f"{option.help} {where} {option.variable}.",
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
                number = finite_number(text)
            except ValueError:
                raise HvdOptionError(f"{option.flag} {text!r}: must be a number. {option.help} [HVD801]") from None
            text = str(int(number * option.flag_unit))
        parse(option, text, option.flag)
        result[option.variable] = text.strip()
    return result


def absolute(variables: Mapping[str, str]) -> dict[str, str]:
    """Those of these variables that name a file or folder by a relative path, as the current folder has it.

    The launcher hands them on so, because a script may go elsewhere before it calls init.
    """
    found = {}
    for option in OPTIONS:
        for name in (option.variable, option.alias_variable or option.variable):
            text = variables.get(name, "").strip()
            if text and option.is_path is not None and option.is_path(text):
                found[name] = os.path.abspath(text)
    return found


def documentation() -> str:
    """The table as Markdown, for docs and `--help` of tools; secrets and what the launcher sets for ranks included."""
    lines = ["| variable | Horovod's name | flag | default | what it does |", "| --- | --- | --- | --- | --- |"]
    for option in OPTIONS:
        default = option.default_text or ""
        agreed = " The same on all ranks." if option.agreed else ""
        cells = [option.variable, option.alias_variable or "", option.flag or "", default, option.help + agreed]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
