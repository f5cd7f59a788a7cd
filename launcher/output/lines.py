"""Lines of many ranks as one readable text. Pure: bytes and times in, bytes out.

`Lines` cuts one stream into pieces: whole lines, parts that a carriage return ends (a progress bar), and an unfinished
line that has waited `UNFINISHED_S` (a prompt) or is longer than `LINE_MAX`. `Screen` puts the pieces of all streams
onto one terminal or file: each line under its prefix, never two lines mixed. An unfinished line belongs to its stream
until another one writes; then it is ended by a newline and goes on, under its prefix, on a line of its own. A piece
that starts over (after a carriage return) rewrites the line as long as the stream still owns it, so a bar stays one
line while the others are silent. `Tail` keeps the last lines of a stream for the report at the end.

In a file or pipe every redrawn state would stay. There (`Lines(False)`) a line that is redrawn is written once, with
its last state, when it ends. While it goes on, a state is written as a line every `REDRAWN_S`: a log shows that the
rank runs.

Cost: whole lines without carriage returns, the usual case, pass in blocks at the cost of one bytes.replace.
"""

from __future__ import annotations

import re
from collections import deque
from typing import NamedTuple

UNFINISHED_S = 0.2
REDRAWN_S = 10.0
LINE_MAX = 1 << 20
TAIL_BYTES = 16384
RECENT_LINES = 20  # of a screen: what stands there is not repeated

_ENDS = re.compile(rb"[\r\n]")


class Piece(NamedTuple):
    """A block of whole lines (`block`), or a part of one line."""

    text: bytes
    block: bool = False
    continues: bool = False  # a part of this line has been shown before
    over: bool = False  # starts over at the left margin
    ends: bool = False  # the line is finished


class Lines:
    """One stream of one rank. redraws: a line that is written over is shown each time, as on a terminal."""

    def __init__(self, redraws: bool = True) -> None:
        self._redraws = redraws
        self._state: bytes | None = None  # what stood in a line that is written over and not shown; None: it is not
        self._state_shown = False  # its last state has been shown as a line
        self._held = bytearray()  # of the current line, not shown yet
        self._shown = False  # a part of the current line has been shown
        self._over = False  # a carriage return came after what was shown
        self._since: float | None = None

    def feed(self, chunk: bytes, now: float) -> list[Piece]:
        """What can be shown now that `chunk` has come."""
        if not _ENDS.search(chunk):
            self._held += chunk
            pieces = [self._part()] if len(self._held) > LINE_MAX else []
        elif self._shown or self._over or self._state is not None or b"\r" in chunk:
            pieces = self._cut(bytes(self._held) + chunk)
        else:
            self._held += chunk
            end = self._held.rindex(b"\n") + 1
            pieces = [Piece(bytes(self._held[:end]), block=True)]
            del self._held[:end]
        if not self._held and not self._state:
            self._since = None
        elif self._since is None or pieces:
            self._since = now
        return pieces

    def due(self) -> float | None:
        """When the unfinished line is to be shown; None: there is none."""
        patience = UNFINISHED_S if self._state is None else REDRAWN_S
        return None if self._since is None else self._since + patience

    def flush(self) -> list[Piece]:
        """The unfinished line as far as it came; of one that is redrawn the last whole state, as a line."""
        if self._state is not None:
            text, self._state, self._state_shown = self._state or bytes(self._held), b"", True
            if text == self._held:
                self._held.clear()
            self._since = self._since + REDRAWN_S if self._since is not None and self._held else None
            return [Piece(text, ends=True)] if text.strip() else []
        self._since = None
        return [self._part()] if self._held else []

    def finish(self) -> list[Piece]:
        """The end of the stream: what is unfinished gets its newline."""
        if self._state is not None:
            self._since, self._state_shown = None, True
            return self._last()
        if not self._held and not self._shown:
            return []
        piece = self._part()._replace(ends=True)
        self._shown = self._over = False
        self._since = None
        return [piece]

    def _part(self) -> Piece:
        piece = Piece(bytes(self._held), continues=self._shown, over=self._over and bool(self._held))
        if self._held:
            self._over, self._state = False, None
        self._shown = True
        self._held.clear()
        return piece

    def _last(self) -> list[Piece]:
        """The last state of a line that was redrawn, unless it has been shown or is blank and has no newline."""
        text, shown = bytes(self._held) or self._state or b"", self._state_shown
        self._held.clear()
        self._state, self._state_shown = None, False
        return [] if shown and not text.strip() else [Piece(text, ends=True)]

    def _over_again(self) -> list[Piece]:
        """A carriage return where redrawn lines are not shown each time."""
        pieces = []
        if self._shown:  # as an unfinished line, which ends here
            pieces = [self._part()._replace(ends=True)]
            self._shown, self._state_shown = False, True
        elif self._held:
            self._state, self._state_shown = bytes(self._held), False
            self._held.clear()
        self._state = self._state or b""
        return pieces

    def _cut(self, text: bytes) -> list[Piece]:
        """The slow way: line by line, with carriage returns."""
        pieces = []
        start = 0
        self._held.clear()
        for match in _ENDS.finditer(text):
            self._held += text[start : match.start()]
            start = match.end()
            if match.group() == b"\n" and self._state is not None:
                pieces += self._last()
            elif match.group() == b"\r" and not self._redraws:
                pieces += self._over_again()
            elif match.group() == b"\n":
                pieces.append(self._part()._replace(ends=True))
                self._shown = self._over = False
            else:
                if self._held:
                    pieces.append(self._part())
                self._over = self._shown
        self._held += text[start:]
        return pieces


class Screen:
    """One terminal, pipe or file that several streams share."""

    def __init__(self) -> None:
        self._owner: object = None  # whose unfinished line is at the cursor
        self.written = 0  # lines
        self.recent: deque[object] = deque(maxlen=RECENT_LINES)  # the writers of the last of them

    def render(self, key: object, prefix: bytes, pieces: list[Piece]) -> bytes:
        """The bytes to write for the pieces of the stream `key`."""
        out = []
        for piece in pieces:
            if piece.block:
                out.append(self._cleared() + prefix + piece.text[:-1].replace(b"\n", b"\n" + prefix) + b"\n")
                self._count(key, piece.text.count(b"\n"))
                continue
            owned = piece.continues and self._owner == key
            if owned:
                out.append(b"\r" + prefix if piece.over else b"")
            elif piece.continues and not piece.text:
                continue  # the line of another stream has ended this one already
            else:
                out.append(self._cleared() + prefix)
                self._count(key, 1)
            out.append(piece.text + (b"\n" if piece.ends else b""))
            self._owner = None if piece.ends else key
        return b"".join(out)

    def _count(self, key: object, lines: int) -> None:
        self.written += lines
        self.recent.extend([key] * min(lines, RECENT_LINES))

    def _cleared(self) -> bytes:
        """Ends an unfinished line."""
        if self._owner is None:
            return b""
        self._owner = None
        return b"\n"


class Tail:
    """The last lines of one stream."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._cut = False

    def feed(self, chunk: bytes) -> None:
        """Remembers at most TAIL_BYTES."""
        self._held += chunk[-TAIL_BYTES:]
        if len(self._held) > TAIL_BYTES:
            self._cut = True
            del self._held[:-TAIL_BYTES]

    def lines(self, count: int) -> list[bytes]:
        """The last `count` lines; of a line that was written over, what stands there now."""
        lines = bytes(self._held).replace(b"\r\n", b"\n").split(b"\n")
        if not lines[-1]:
            lines.pop()
        if self._cut and len(lines) > 1:
            del lines[0]
        return [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines[-count:]]
