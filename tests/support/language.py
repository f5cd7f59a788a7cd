"""Which sentences and words has a text that a user reads? For test_language, which holds them to the house's style.

`prose` takes Markdown or a docstring to its sentences: code blocks, directives, examples and the code of a sentence do
not count, a cell of a table and an item of a list are sentences of their own. `too_long` and `retired` name what breaks
the rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import docstrings

WORDS = 25  # of a sentence
# Words that have gone: what a reader of the field knows stands on the right.
RETIRED = {
    r"muster(s|ed)?": "rendezvous",
    r"shelf|shelves": "buffer",
    r"riders?|riding": "eager payload",
    r"lineups?": "device communicator",
    r"foresee[sn]?|foresaw": "speculate, expect",
    r"leashed": "guarded",
    r"whoever|whomever": "a rank that, a process that",
    r"by way of the CPU": "through host memory",
    r"cannot be had": "is not available",
    r"is not whole|are not whole": "is incomplete",
    r"(?<!there )is no (number|name|file|rank|folder|plan|dtype|tensor|text)": "is not a ...",
    r"(says|say|said|tells|told) so": "reports it, logs it",
    r"(is|are|was|were) told": "receives, is notified",
    r"tells? of": "reports",
    r"hears?": "receives",
    r"nobody|no ?one|somebody|someone": "no rank, a rank",
    r"what for": "the purpose",
    r"just|simply": "",
}
_RETIRED = {re.compile(rf"\b({words})\b", re.IGNORECASE): instead for words, instead in RETIRED.items()}


def prose(text: str) -> Iterator[str]:
    """The sentences of a Markdown text."""
    text = re.sub(r"^( *)(`{3,}).*?^\1\2 *$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|<[^>\n]+>", " ", text, flags=re.DOTALL)
    text = re.sub(r"^ *>>> (?:.+\n)+", "\n", text, flags=re.MULTILINE)  # an example and its output
    text = re.sub(r"^ *=+ +=.*^ *=+ +=[= ]*$", "\n", text, flags=re.MULTILINE | re.DOTALL)  # a table of reST
    text = re.sub(r"^ *[\w*, ]+(?: \(.*?\))?: ", "\n\n", text, flags=re.MULTILINE)  # an argument, an exception
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)  # a link counts by its words
    text = re.sub(r"``[^`]+``|(\{\w+\})?`[^`]+`", "CODE", text)
    text = re.sub(r"^ *(#+|[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)  # titles, items
    text = re.sub(r"^\|.*$", lambda row: "\n\n" + row.group().replace("|", "\n\n") + "\n\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        whole = " ".join(paragraph.split())
        yield from (each for each in re.split(r"(?<=[.!?:;])\s+(?=[A-Z\"'(*])|;\s+", whole) if each)


def too_long(text: str) -> list[str]:
    """The sentences of more than WORDS words."""
    return [each for each in prose(text) if len(re.findall(r"[\w'’/.-]*\w", each)) > WORDS]


def of_docstrings(module: str) -> list[str]:
    """What breaks the rules in the docstrings of a module's public names."""
    wrong = []
    for name, thing in docstrings.public(module):
        text = "\n\n".join(re.split(r"\n(?= {4}\S)", docstrings.cleandoc(thing)))
        wrong += [f"{name}: {each}" for each in too_long(text) + retired(text)]
    return wrong


def retired(text: str) -> list[str]:
    """Each use of a retired word, with what to say instead."""
    return [
        f"{found.group()!r} ({instead or 'leave it out'}) in: {sentence}"
        for sentence in prose(text)
        for pattern, instead in _RETIRED.items()
        for found in pattern.finditer(sentence)
    ]
