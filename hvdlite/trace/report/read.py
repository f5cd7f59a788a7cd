"""Reader of rank-K.steps.jsonl, also while training still appends to it.

The first line of a file says whose steps they are, each further one is a step (hvdlite/metrics/step_log.py writes
them). A file is of another program and may be cut, mixed up or written on purpose, so nothing in it is
believed: a line that is none is counted and passed over, a file that begins wrongly is left out and named, and lines,
names and lists have bounds. A last line without its end is one that is being written: it is read the next time.

Kept are numbers, 80 bytes a step, and of the steps that tell of their buckets the last few hundred. A file that has
become shorter, or another one, is that of a job that was started again: it is read anew. Ranks that have begun again
are shown alone, until the others have, too (../attempts.py).
"""

from __future__ import annotations

import json
import os
import re
from array import array
from pathlib import Path
from typing import Any

from ...errors.codes import coded
from .. import attempts
from ..regular_file import no_folder, opened

FORMAT = "hvdlite-steps-1"
LINE_MAX = 1 << 20
_OF_JOB = ("cores", "local_size", "fusion_threshold", "epoch")  # numbers of the head, where it has them
SAMPLES_MAX = 200  # steps with buckets that are kept of a rank
BUCKETS_MAX = 512
NAME_MAX = 200
RANKS_MAX = 1024
NUMBER_MAX = 1 << 62
NONE = -1  # where a step does not know a number
COLUMNS = (
    "step", "t", "step_ns", "compute_ns", "exposed_ns", "negotiation_ns", "data_wait_ns", "optimizer_ns", "arrived_ns",
    "cpu_ns",
)  # fmt: skip
_NEEDED = ("step", "t", "step_ns")
_FILE = re.compile(r"rank-(\d{1,6})\.steps\.jsonl(\.\d{1,6})?")


class ReadError(ValueError):
    """A folder or file that is not what it should be; the text names it."""


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < NUMBER_MAX:
        raise ValueError(f"{value!r} is no number")
    return value


class RankFile:
    """The steps of one rank, in the order of the file."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        self._forget()

    def _forget(self) -> None:
        self.size, self.host, self.job = 0, "", ""
        self.about: dict[str, int] = {}  # _OF_JOB
        self.offset_ns: int | None = None  # to be added for rank 0's clock; None: not known
        self.columns = {name: array("q") for name in COLUMNS}
        self.bytes: dict[str, int] = {}  # by plane, of all steps
        self.samples: dict[int, dict[str, Any]] = {}  # by step: buckets, memory
        self.bad = 0
        self._identity: tuple[int, int] | None = None
        self._offset, self._begun = 0, False

    def more(self) -> bool:
        """Reads what has come since; whether something has. Raises ReadError for a file that is none of ours."""
        try:
            with opened(self.path) as file:
                found = os.fstat(file.fileno())
                identity = (found.st_dev, found.st_ino)
                if self._identity != identity or found.st_size < self._offset:
                    self._forget()
                    self._identity = identity
                file.seek(self._offset)
                return self._read(file)
        except OSError as error:  # without strerror: `opened` has named the cause
            problem = f"{self.path} cannot be read: {error.strerror}" if error.strerror else str(error)
            raise ReadError(coded("HVD723", problem)) from None

    def _read(self, file: Any) -> bool:
        came = False
        while True:
            line = file.readline(LINE_MAX)
            if not line.endswith(b"\n"):
                if len(line) >= LINE_MAX:
                    raise ReadError(
                        f"{self.path} has a line of more than {LINE_MAX} bytes: it is not a file of hvdlite [HVD723]"
                    )
                return came
            self._offset += len(line)
            came = True
            if self._begun:
                self._step(line)
            else:
                self._head(line)

    def _head(self, line: bytes) -> None:
        try:
            head = json.loads(line)
            if head["format"] != FORMAT:
                raise ValueError(f"its format is {str(head['format'])[:40]!r}, this version reads {FORMAT!r}")
            if _whole(head["rank"]) != self.rank:
                raise ValueError(f"it says that it is of rank {head['rank']}")
            self.size, self.host = _whole(head["size"]), str(head.get("host", ""))[:NAME_MAX]
            self.job = str(head.get("job", ""))[:NAME_MAX]
            self.about = {name: _whole(head[name]) for name in _OF_JOB if head.get(name) is not None}
            if not self.rank < self.size <= RANKS_MAX:
                raise ValueError(f"a job of {self.size} ranks")
            clock = head.get("clock")
            offset = clock["offset_ns"] if clock else None
            if offset is not None and (not isinstance(offset, int) or abs(offset) >= NUMBER_MAX):
                raise ValueError(f"a clock that is {offset!r} off")
            self.offset_ns = offset
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ReadError(f"{self.path} is not a file of steps: {problem[:200]} [HVD723]") from None
        self._begun = True

    def _step(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            row = [NONE if entry.get(name) is None and name not in _NEEDED else _whole(entry[name]) for name in COLUMNS]
            steps = self.columns["step"]
            if steps and row[0] <= steps[-1]:
                raise ValueError("steps go backwards")
            moved = {str(plane)[:NAME_MAX]: _whole(number) for plane, number in (entry.get("bytes") or {}).items()}
            sample = self._sample(entry) if "buckets" in entry else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.bad += 1
            return
        for column, value in zip(self.columns.values(), row):
            column.append(value)
        for plane, number in moved.items():
            self.bytes[plane] = self.bytes.get(plane, 0) + number
        if sample is not None:
            self.samples[row[0]] = sample
            if len(self.samples) > SAMPLES_MAX:
                del self.samples[next(iter(self.samples))]

    def _sample(self, line: dict[str, Any]) -> dict[str, Any]:
        buckets: list[dict[str, Any]] = [
            {
                "tensors": _whole(each["tensors"]), "bytes": _whole(each["bytes"]), "start": _whole(each["start"]),
                "end": _whole(each["end"]), "plane": str(each["plane"])[:NAME_MAX],
                "names": [str(name)[:NAME_MAX] for name in each.get("names", [])[:3]],
            }
            for each in line["buckets"][:BUCKETS_MAX]
        ]  # fmt: skip
        memory = {str(device)[:NAME_MAX]: _whole(number) for device, number in (line.get("memory") or {}).items()}
        return {"buckets": [each for each in buckets if each["end"] >= each["start"] > 0], "memory": memory}

    def __len__(self) -> int:
        return len(self.columns["step"])


class Folder:
    """All files of steps in a folder; `look` reads what has come since, as often as one likes.

    before: so many attempts before the newest.
    """

    def __init__(self, path: str | os.PathLike[str], before: int = 0) -> None:
        self.path, self._before = Path(path), before
        self._files: dict[int, RankFile] = {}
        self.problems: list[str] = []

    def look(self) -> bool:
        """Whether anything has come. Raises ReadError where there is no such folder or attempt."""
        try:
            names = sorted(name for name in os.listdir(self.path) if _FILE.fullmatch(name))
        except OSError as error:
            problem = no_folder(self.path) or f"{self.path} cannot be read: {error.strerror or error}"
            raise ReadError(coded("HVD723", problem)) from None
        try:
            chosen = attempts.choose((self.path / name for name in names), self._before)
        except attempts.NoAttemptError as error:
            raise ReadError(coded("HVD723", f"{self.path}: {error}")) from None
        by_rank = attempts.of_rank(chosen.paths, _FILE)
        left = [rank for rank, file in self._files.items() if by_rank.get(rank) != file.path]
        for rank in left:
            del self._files[rank]
        came, self.problems = bool(left), []
        for rank, path in by_rank.items():
            if rank >= RANKS_MAX:
                self.problems.append(f"{path.name}: no job has so many ranks")
                continue
            file = self._files.setdefault(rank, RankFile(path, rank))
            try:
                came = file.more() or came
            except ReadError as error:
                self.problems.append(str(error))
                self._files[rank] = RankFile(path, rank)
        self._report_holes()
        older = attempts.note(chosen, f"hvdlite-trace report {self.path}")
        self.problems += [older] if older else []
        return came

    def _report_holes(self) -> None:
        bad = sum(file.bad for file in self._files.values())
        if bad:
            self.problems.append(
                f"{bad} line{'s' * (bad > 1)} could not be read and {'are' if bad > 1 else 'is'} left out"
            )
        sizes = {file.size for file in self.ranks}
        if len(sizes) > 1:
            self.problems.append(f"the files are of jobs of {sorted(sizes)} ranks: one folder is for one job")
        missing = sorted(set(range(max(sizes, default=0))) - {file.rank for file in self.ranks})
        if missing:
            shown = ", ".join(map(str, missing[:8])) + (" and others" if len(missing) > 8 else "")
            here = ", ".join(sorted({file.host for file in self.ranks if file.host})) or "this host"
            one = len(missing) == 1
            self.problems.append(
                f"no steps of rank{'' if one else 's'} {shown}: {'its file is' if one else 'their files are'} not in "
                f"{self.path}, which has those of {here}. A rank of another host writes into the folder of that name "
                "on its own: name one that all hosts see with --trace-dir, or copy its rank-K.steps.jsonl from there"
            )

    @property
    def ranks(self) -> list[RankFile]:
        """Those that have a step, in the order of ranks."""
        return [self._files[rank] for rank in sorted(self._files) if len(self._files[rank])]
