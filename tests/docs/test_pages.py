"""Every code block of every page is run, or says why not; pages.py says how a block is marked."""

import os
import re
import shlex
import subprocess
import sys
import tempfile

import pages
import pytest
from launching import launch
from ranks import as_ranks, environment

pytest.importorskip("torch")

import hvdlite as hvd

KNOWN = {"python", "diff", "console", "text", *pages.PARSED}
RUN = [page for page in pages.PAGES if pages.runs_here(page)]


@pytest.mark.parametrize("page", pages.PAGES)
def test_codes_exist_and_fences_are_seen(page):
    text = (pages.ROOT / page).read_text(encoding="utf-8")
    known = set(re.findall(r"^### (HVD\d{3})", (pages.ROOT / "hvdlite/ERRORS.md").read_text(), re.MULTILINE))
    assert not set(re.findall(r"\bHVD\d{3}\b", text)) - known
    assert "~~~" not in text, "fences are of backquotes: pages.py reads no other"


@pytest.mark.parametrize("page", pages.PAGES)
def test_every_block_says_what_it_is(page):
    for block in pages.blocks(page):
        where = f"{page}:{block.line}"
        assert block.language in KNOWN, f"{where}: a block of {block.language or 'no language'}"
        wide = block.language in ("python", "diff") and any(len(line) > 100 for line in block.text.splitlines())
        assert not wide, f"{where}: a line is too long to be seen"
        assert block.language != "sh" or block.said, f"{where}: sh is only parsed: say why it is not run"
        assert "skip" not in block.said or len(block.skipped) > 5, f"{where}: skip without a reason"
        if block.language == "python":
            compile(block.text, where, "exec")
        elif block.language == "diff":
            compile(block.side("+"), where, "exec")
        elif block.language == "console" and "dry:" in block.said:
            pages.read_flags(block)
        else:
            pages.parse(block)


@as_ranks(2)
@pytest.mark.parametrize("page", [p for p in RUN if pages.in_ranks(p) and not pages.frameworks(p)])
def test_python_runs_on_two_ranks(page):
    in_a_folder(page)


def in_a_folder(page):
    """In one folder for all ranks, which is the current one meanwhile."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as own:
        os.chdir(hvd.broadcast_object(own))
        try:
            pages.run_in_rank(page)
            hvd.barrier()
        finally:
            os.chdir(before)


@pytest.mark.parametrize("page", [page for page in RUN if pages.in_folder(page)])
def test_commands_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", pages.path_with_programs())
    for block in pages.in_folder(page):
        if block.word("from"):
            assert block.side("-") == (tmp_path / block.word("from")).read_text(), f"{page}:{block.line}: the old side"
        if block.word("file"):
            (tmp_path / block.word("file")).write_text(block.side("+") if block.language == "diff" else block.text)
            continue
        for command, expected in pages.commands(block):
            said = output(command)
            assert not pages.output_lacks(expected, said), f"{page}:{block.line}: $ {command}\n{said}"


def output(command):
    """Of a command that ends well. A job of the launcher starts warm."""
    words = shlex.split(command)
    if words[0] == "hvdlite-run" and not set(words) & {"|", ">", "&&", ";", "--check-build"}:
        code, out, err = launch(*[sys.executable if word == "python" else word for word in words[1:]])
        said = out + err
    else:
        done = subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=120)
        code, said = done.returncode, done.stdout + done.stderr
    assert code == 0, f"$ {command}\n{said}"
    return said
