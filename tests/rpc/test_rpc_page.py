"""docs/guides/rpc.md keeps its word: its blocks are one program, which three ranks run as it stands.

Each line that it prints is compared, in the order of the page. The names of the page's table are those of `hvd.rpc`.
"""

import re
import sys
from pathlib import Path

from launching import launch

import hvdlite as hvd

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/rpc.md").read_text(encoding="utf-8")


def test_the_program_of_the_page(tmp_path):
    program = "\n".join(re.findall(r"^```python[^\n]*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    (tmp_path / "calls.py").write_text(program)
    code, out, err = launch("-np", "3", sys.executable, str(tmp_path / "calls.py"))
    assert code == 0, out + err
    assert [line.partition("<stdout>:")[2] for line in out.splitlines()] == [
        "hello on rank 1",
        str([f"{n} on rank {n % 3}" for n in range(6)]),
        *["True", "15", "15", "15", "True"],
        "rank 1 did not answer time:sleep within 0.1 s; the function may still run there [HVD043]",
    ]


def test_the_table_of_the_page_is_whole():
    assert set(re.findall(r"`hvd\.rpc\.(\w+)\(", PAGE)) == {*hvd.rpc.__all__} - {"Future", "Ref"}
