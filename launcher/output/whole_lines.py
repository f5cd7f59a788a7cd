"""Output of whole lines, for `--fold-output` and `--output-json`. Pure: times are given.

A line of one rank is a line, or a JSON object. Folded, lines that several ranks print alike become one, under the
numbers of all of them: `[0-3]<stdout>:epoch 1`. A line waits for the others to print it too, at most `FOLD_S`, and
lines come out in the order in which they were first printed; the lines of a rank keep their order. An unfinished line
is shown when it is finished, of one that was written over (a progress bar) only what stood there at the end.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from ...errors.rank_ranges import as_runs
from .lines import LINE_MAX

FOLD_S = 0.25


class _Row:
    """A line that some ranks have printed."""

    def __init__(self, number: int, stream: int, text: bytes, since: float, server: str | None) -> None:
        self.number, self.stream, self.text, self.since, self.server = number, stream, text, since, server
        self.alike = stream, text, server
        self.ranks: list[int] = []


class WholeLines:
    """The output of these ranks; hosts: where they run, if that is to be shown. servers: names of parameter
    servers and aggregators by number; their lines are never folded. Results are (stream, bytes) to write."""

    def __init__(
        self,
        ranks: Collection[int],
        fold: bool,
        as_json: bool,
        streams: dict[int, bytes],
        hosts: Sequence[str] = (),
        servers: Mapping[int, str] = {},
    ) -> None:
        self._fold, self._json, self._streams, self._hosts = fold, as_json, streams, list(hosts)
        self._servers = servers
        self._held: dict[tuple[int, int], bytes] = {}
        self._living = set(ranks)
        self._rows: list[_Row] = []  # in the order of `number`
        self._open: dict[tuple[int, bytes, str | None], list[_Row]] = {}  # the same, by what they say
        self._joined: dict[int, int] = {}  # number of the row that a rank has printed last
        self._next = 0

    def admit(self, rank: int, host: str) -> None:
        """One more, with the next number; host: as at the start."""
        self._living.add(rank)
        if self._hosts:
            self._hosts.append(host)

    def feed(self, rank: int, stream: int, chunk: bytes, now: float) -> list[tuple[int, bytes]]:
        """What can be written now that a rank has written `chunk`."""
        *whole, rest = (self._held.get((rank, stream), b"") + chunk).split(b"\n")
        while len(rest) > LINE_MAX:
            whole.append(rest[:LINE_MAX])
            rest = rest[LINE_MAX:]
        self._held[rank, stream] = rest
        for line in whole:
            self._add_line(rank, stream, line.rstrip(b"\r").rpartition(b"\r")[2], now)
        return self.tick(now)

    def finish(self, rank: int, now: float) -> list[tuple[int, bytes]]:
        """A rank has ended: no line waits for it any more."""
        for stream in self._streams:
            rest = self._held.pop((rank, stream), b"")
            if rest:
                self._add_line(rank, stream, rest.rstrip(b"\r").rpartition(b"\r")[2], now)
        self._living.discard(rank)
        return self.tick(now)

    def due(self) -> float | None:
        """When `tick` has something to do."""
        return self._rows[0].since + FOLD_S if self._rows else None

    def tick(self, now: float) -> list[tuple[int, bytes]]:
        """What has waited long enough, or needs not wait."""
        done = 0
        for row in self._rows:
            if self._waits(row) and now < row.since + FOLD_S:
                break
            done += 1
        ready, self._rows = self._rows[:done], self._rows[done:]
        for row in ready:
            alike = self._open[row.alike]
            alike.remove(row)
            if not alike:
                del self._open[row.alike]
        return [(row.stream, self._shown(row)) for row in ready]

    def _waits(self, row: _Row) -> bool:
        """Whether others may say it, too."""
        return self._fold and row.server is None and not self._living.issubset(row.ranks)

    def _add_line(self, rank: int, stream: int, text: bytes, now: float) -> None:
        last = self._joined.get(rank, -1)
        server = self._servers.get(rank)
        alike = self._open.setdefault((stream, text, server), [])
        row = next((each for each in alike if each.number > last), None) if self._fold else None
        if row is None:
            row = _Row(self._next, stream, text, now, server)
            self._next += 1
            self._rows.append(row)
            alike.append(row)
        row.ranks.append(rank)
        self._joined[rank] = row.number

    def _shown(self, row: _Row) -> bytes:
        ranks = sorted(row.ranks)
        if not self._json:
            source = as_runs(ranks, ",") if row.server is None else row.server
            return b"[%s]<%s>:%s\n" % (source.encode(), self._streams[row.stream], row.text)
        record: dict[str, object] = {"time": round(row.since, 3)}
        if row.server is not None:
            kind, number = row.server.split()
            record[kind] = int(number)
        else:
            record.update({"ranks": ranks} if self._fold else {"rank": ranks[0]})
        if self._hosts and not self._fold:
            record["host"] = self._hosts[ranks[0]]
        record["stream"] = self._streams[row.stream].decode()
        record["text"] = row.text.decode("utf-8", "replace")
        return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def words(text: str, now: float, last: Sequence[bytes] = (), rank: int | None = None) -> bytes:
    """The launcher's own words as a JSON line, with the last words of a rank."""
    record: dict[str, object] = {"time": round(now, 3), "launcher": text}
    if rank is not None:
        record.update(rank=rank, last=[line.decode("utf-8", "replace") for line in last])
    return json.dumps(record).encode() + b"\n"
