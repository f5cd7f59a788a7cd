"""What is known again when it is asked for again, up to a number: then the oldest goes for each new one.

Not all at once: a program that says new names for ever would let memory go and take it again in waves, each laid out
another way than the last, and the process would grow for a long time; and names that come in every step would be
looked at anew each time. By one for one, memory stays what it is as soon as the number is reached.

Invariant: several threads may remember in the same dict; it may then hold one or two more for a moment.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

KEPT = 8192  # as many as a job has tensors that are remembered by default, see the option cache_capacity

Key = TypeVar("Key")
What = TypeVar("What")


def remember(kept: OrderedDict[Key, What], key: Key, what: What) -> None:
    """Puts `what` there under `key`, in the oldest one's place if there are KEPT."""
    while len(kept) >= KEPT and key not in kept:
        try:
            kept.popitem(last=False)
        except KeyError:  # another thread has emptied it
            break
    kept[key] = what
