"""Where a timeline may lie: in a folder that is made for it, as the recorder makes its own. What cannot be, is told."""

import json
import os
import stat
import sys
import tempfile
from pathlib import Path

import as_program
import numpy as np
import pytest
from launching import Launch
from ranks import as_ranks

import hvdlite as hvd

PROGRAM = [sys.executable, as_program.__file__, __file__]
UMASK = ("sh", "-c", 'umask 027; exec "$@"', "sh")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_of_a_timeline_is_made_as_the_one_of_records_is(tmp_path):
    """It may be the very same: timelines are begun before anything else is written there."""
    both, records = tmp_path / "new" / "both", tmp_path / "old" / "records"
    words = ["-np", 3, "--trace-dir", both, "--timeline-filename", both / "line.json", *PROGRAM]
    with Launch(*words, under=UMASK) as job:
        assert job.wait() == 0 and "HVD725" not in job.err, job.err
    names = {f"line.json{end}" for end in ("", ".rank-1.json", ".rank-2.json")}
    assert {path.name for path in both.iterdir()} == names | {f"rank-{rank}.flight.json" for rank in range(3)}
    assert all(json.loads((both / name).read_text())[0]["name"] == "hvdlite_timeline" for name in names)
    with Launch("-np", 1, "--trace-dir", records, *PROGRAM, under=UMASK) as job:
        assert job.wait() == 0, job.err
    assert [mode(both), mode(both.parent)] == [mode(records), mode(records.parent)] == [0o750, 0o750]


@as_ranks(2)
def test_what_cannot_be_made_or_written_is_told(tmp_path):
    mine = Path(tempfile.mkdtemp(dir=tmp_path))
    (mine / "file").touch()
    for path, said in {
        mine / "file" / "line": r"/file/line\S*' cannot be written: Not a directory",
        mine / "file" / "in" / "line": r"written: its folder '\S+/file/in' cannot be made: Not a directory",
        Path("/proc/none/line"): r"written: its folder '/proc/none' cannot be made: No such file or directory",
    }.items():
        with pytest.raises(OSError, match=rf"^the timeline '.+{said} \[HVD725\]$"):
            hvd.start_timeline(path)
    pipe = mine / "pipe"
    os.mkfifo(pipe if hvd.rank() == 0 else f"{pipe}.rank-{hvd.rank()}.json")
    with pytest.raises(OSError, match=r"/pipe\S*' cannot be written: No such device or address \[HVD725\]$"):
        hvd.start_timeline(pipe)


@as_ranks(2)
def test_a_folder_of_a_relative_name_is_made(tmp_path):
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        hvd.start_timeline("in/here/line.json")
        hvd.stop_timeline()
        hvd.start_timeline("line.json")
        hvd.stop_timeline()
    finally:
        os.chdir(here)
    end = "" if hvd.rank() == 0 else f".rank-{hvd.rank()}.json"
    assert all(json.loads((tmp_path / name).read_text()) for name in (f"in/here/line.json{end}", f"line.json{end}"))


def main():
    hvd.init()
    hvd.allreduce(np.ones(3), name="one")


if __name__ == "__main__":
    main()
