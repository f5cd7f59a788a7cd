"""`--explain` and the box above the list of errors find a code, a pasted message, and one that has lost its code."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hvdlite.errors import catalogue, message_index
from hvdlite.launcher import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("code", ["HVD402", "hvd402", "402", "[HVD402]", " HVD402 "])
def test_explain_shows_cause_and_remedy(code, capsys):
    assert cli.main(["--explain", code]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("HVD402: A rank was killed by a signal\n") and not err
    assert "\nCause: SIGKILL mostly" in out and "\nRemedy: " in out and max(map(len, out.split("\n"))) <= 100


@pytest.mark.parametrize(
    "code, says",
    [
        ("HVD403x", "'HVD403x' is not a code"),
        ("", "'' is not a code"),
        ("HVD", "'HVD' is not a code"),
        ("HVD399", "no code HVD399; the nearest is HVD"),
        ("9" * 400, "no code HVD9999"),
        ("\u00b2", "is not a code"),
        ("x" * 4000, "'xxxx"),
    ],
)
def test_explain_refuses_what_is_no_code(code, says, capsys):
    assert cli.main(["--explain", code]) == cli.USAGE_ERROR
    out, err = capsys.readouterr()
    assert not out and says in err and "[HVD704]\nTry hvdlite-run --help." in err and len(err) < 300


PASTED = [  # what is pasted, and what it means
    ("[1]<stderr>:hvdlite.errors.HvdTimeoutError: allreduce of 'x' waits for rank 3 [HVD550]", ["HVD550"]),
    (
        "[0]<stderr>:a [HVD301]\n[1]<stderr>:b [HVD301]\nhvdlite-run: rank 1 exited with 1 [HVD401]",
        ["HVD301", "HVD401"],
    ),
    ("what is hvd402?", ["HVD402"]),
    (
        "Traceback (most recent call last):\n  x\nhvdlite-run: --nnodes needs the address of node 0: --rdzv-end",
        ["HVD713"],
    ),
    ("--start-timeout='soon': must be a number. Seconds within", ["HVD801"]),
    ("[3]<stderr>: rank 3: the launcher's environment variables differ:\nthis rank has NCCL 2.1 and", []),
    ("rank 1 has NCCL 2.20 and rank 0 has NCCL 2.14: install the same framework on\nall hosts", ["HVD658"]),
    ("numbers from elsewhere about nothing at all", []),
]


@pytest.mark.parametrize("text, codes", PASTED, ids=[str(number) for number in range(len(PASTED))])
def test_explain_finds_a_pasted_message(text, codes, capsys):
    assert cli.main(["--explain", text]) == (0 if codes else cli.USAGE_ERROR)
    out, err = capsys.readouterr()
    assert re.findall(r"^(HVD\d+): ", out, re.MULTILINE) == codes and (codes or "no message is like it" in err)


def test_words_that_many_codes_have_are_answered_by_titles(capsys):
    assert cli.main(["--explain", "secret"]) == cli.USAGE_ERROR
    assert "\n  HVD111: The secret belongs to another job\n" in capsys.readouterr().err


def test_every_message_that_lost_its_end_is_found_by_its_words():
    known = message_index.messages()
    assert len({code for code, _ in known}) > len(catalogue.ROWS) * 0.95
    asked = known[::25]
    missed = [
        pair
        for pair in asked
        if message_index.nearest(f"[1]<stderr>:E: {pair[1][: -len(pair[1]) // 8]}", known) != pair[0]
    ]
    assert len(missed) <= len(asked) // 10, missed


def test_the_box_of_the_site_finds_the_same(tmp_path):
    if shutil.which("node") is None:
        pytest.skip("needs node")
    sections = [(row.code, " ".join(row).lower()) for row in catalogue.ROWS.values()]
    given = json.dumps([[text for text, _ in PASTED], sections, message_index.messages()])
    (tmp_path / "given.json").write_text(given)
    script = str(ROOT / "docs/_static/errors.js")
    shown = f"const shown = require({script!r}), [texts, all, known] = require('./given.json');"
    code = (
        shown
        + "for (const t of texts) console.log(all.filter((_, i) => shown(t, all, known)[i]).map(s => s[0]).join())"
    )
    done = subprocess.run(["node", "-e", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [",".join(codes) for _, codes in PASTED], done.stderr


def test_explain_needs_a_code(capsys):
    assert cli.main(["--explain"]) == cli.USAGE_ERROR and "--explain needs a value [HVD701]" in capsys.readouterr().err
