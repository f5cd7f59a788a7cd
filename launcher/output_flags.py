"""Flags of output: words of the command line in, a plan.Look out.

Whose output is shown, whether lines that ranks print alike are folded, JSON, and how large an output file may become:
all is checked before anything starts. Colours are for terminals that can show them, and not where NO_COLOR is set.
Files stay as they came.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from hvdlite.config.options import finite_number

from . import function_server
from .control.plan import Look
from .hosts.hosts import Slot


class LookError(ValueError):
    """Output cannot be shown so; the text names the flag."""


def of(args: argparse.Namespace, environ: Mapping[str, str]) -> Look:
    """Raises LookError."""
    size = None
    if args.file_mb is not None:
        try:
            size = int(finite_number(args.file_mb) * (1 << 20))
        except ValueError:
            raise LookError(f"--output-file-mb {args.file_mb}: must be a number [HVD704]") from None
        if size < 1:
            raise LookError(f"--output-file-mb {args.file_mb}: must be greater than 0 [HVD704]")
        if args.folder is None:
            raise LookError("--output-file-mb needs --output-filename DIR, whose files it limits [HVD703]")
    plain = "NO_COLOR" in environ or environ.get("TERM", "dumb") == "dumb"
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]
    redraws = [1, 2] if function_server.KEY in environ else terminals  # hvdlite.run shows it, perhaps in a notebook
    ranks = _ranks("--ranks-to-console", args.shown)
    local_ranks = _ranks("--local-ranks-filter", args.local_shown)
    return Look(args.timestamps, ranks, local_ranks, args.fold, args.as_json, [] if plain else terminals, redraws, size)


def placed(look: Look, slots: Sequence[Slot]) -> Look:
    """The same with `local_ranks` resolved to ranks, now that hosts are known."""
    if look.local_ranks is None:
        return look
    ranks = {slot.rank for slot in slots if slot.local_rank in look.local_ranks}
    return look._replace(ranks=ranks if look.ranks is None else ranks.intersection(look.ranks), local_ranks=None)


def missing(args: argparse.Namespace, look: Look, slots: Sequence[Slot]) -> str | None:
    """What is wrong with a look at these ranks: one that there is not."""
    last, most = len(slots) - 1, max(slot.local_size for slot in slots) - 1
    if look.ranks and max(look.ranks) > last:
        return f"--ranks-to-console {args.shown}: there is no rank {max(look.ranks)}, they end with {last}"
    if look.local_ranks and max(look.local_ranks) > most:
        return f"--local-ranks-filter {args.local_shown}: no host has so many ranks, they end with {most} there"
    return None


def _ranks(flag: str, text: str | None) -> set[int] | None:
    """`0,2-3` as {0, 2, 3}; all as None."""
    if text in (None, "all", "none"):
        return set() if text == "none" else None
    found: set[int] = set()
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) - int(first) > 1_000_000):
            raise LookError(f"{flag} {text}: must be all, none, or numbers as in 0,2-3 [HVD704]")
        found.update(range(int(first), int(last or first) + 1))
    return found
