"""How streams become text: whole lines stay whole, a progress bar stays one line, nothing is lost."""

import random

import pytest

from hvdlite.launcher.lines import LINE_MAX, UNFINISHED_S, Lines, Screen, Tail


class Terminal:
    """Two streams on one screen; what they wrote, and what a terminal would show."""

    def __init__(self):
        self.screen = Screen()
        self.streams = {"a": Lines(), "b": Lines()}
        self.bytes = b""

    def write(self, key, chunk, now=0.0):
        self._show(key, self.streams[key].feed(chunk, now))

    def flush(self, key):
        self._show(key, self.streams[key].flush())

    def finish(self, key):
        self._show(key, self.streams[key].finish())

    def _show(self, key, pieces):
        self.bytes += self.screen.render(key, key.encode() + b":", pieces)

    def rows(self):
        """What stands on the terminal, row by row."""
        shown = []
        for line in self.bytes.split(b"\n"):
            row = b""
            for part in line.split(b"\r"):
                row = part + row[len(part) :]
            shown.append(row.decode())
        return shown


def test_an_unfinished_line_is_due_and_goes_on_where_it_was():
    terminal = Terminal()
    terminal.write("a", b"name? ", now=5.0)
    assert terminal.streams["a"].due() == 5.0 + UNFINISHED_S
    terminal.flush("a")
    assert terminal.bytes == b"a:name? "
    assert terminal.streams["a"].due() is None
    terminal.write("a", b"Bob\n")
    assert terminal.bytes == b"a:name? Bob\n"


def test_more_of_an_unfinished_line_does_not_put_off_when_it_is_due():
    lines = Lines()
    lines.feed(b".", 1.0)
    lines.feed(b".", 1.1)
    assert lines.due() == 1.0 + UNFINISHED_S


def test_somebody_elses_line_never_lands_in_an_unfinished_one():
    terminal = Terminal()
    terminal.write("a", b"loading")
    terminal.flush("a")
    terminal.write("b", b"x\n")
    terminal.write("a", b"... done\n")
    assert terminal.rows() == ["a:loading", "b:x", "a:... done", ""]


def test_a_progress_bar_stays_one_line():
    terminal = Terminal()
    for percent in (b"10%", b"50%", b"100%"):
        terminal.write("a", b"\r" + percent)
        terminal.flush("a")
    terminal.write("a", b"\n")
    assert terminal.rows() == ["a:100%", ""]


def test_a_progress_bar_survives_a_line_of_another_rank():
    terminal = Terminal()
    terminal.write("a", b"\r10%")
    terminal.flush("a")
    terminal.write("b", b"hello\n")
    terminal.write("a", b"\r20%\r30%")
    terminal.flush("a")
    assert terminal.rows() == ["a:10%", "b:hello", "a:30%"]


def test_carriage_return_before_newline_is_a_line_end():
    terminal = Terminal()
    terminal.write("a", b"one\r\ntwo\r")
    terminal.write("a", b"\nthree\n")
    assert terminal.bytes == b"a:one\na:two\na:three\n"


def test_empty_lines_are_lines():
    terminal = Terminal()
    terminal.write("a", b"\n\n")
    terminal.write("a", b"\r\n")
    assert terminal.rows() == ["a:", "a:", "a:", ""]


def test_the_end_of_a_stream_ends_its_line():
    terminal = Terminal()
    terminal.write("a", b"last words")
    terminal.finish("a")
    terminal.finish("a")
    assert terminal.bytes == b"a:last words\n"
    terminal.write("b", b"\r99%")
    terminal.flush("b")
    terminal.finish("b")
    assert terminal.bytes == b"a:last words\nb:99%\n"


def test_a_line_without_end_is_bounded():
    terminal = Terminal()
    for _ in range(3 * LINE_MAX // 65536):
        terminal.write("a", b"x" * 65536)
    assert terminal.bytes.count(b"x") >= 2 * LINE_MAX
    terminal.finish("a")
    assert terminal.bytes == b"a:" + b"x" * (3 * LINE_MAX) + b"\n"


@pytest.mark.parametrize("seed", range(50))
def test_however_it_is_cut_the_text_of_each_stream_is_the_same(seed):
    chance = random.Random(seed)
    terminal = Terminal()
    wrote = {"a": b"", "b": b""}
    for _ in range(60):
        key = chance.choice("ab")
        chunk = bytes(chance.choice(key.upper().encode() + b"\n" + b".") for _ in range(chance.randrange(6)))
        wrote[key] += chunk
        terminal.write(key, chunk)
        if chance.random() < 0.2:
            terminal.flush(key)
    for key in "ab":
        terminal.finish(key)
    for key in "ab":
        shown = b"".join(row[2:].encode() for row in terminal.rows() if row.startswith(key + ":"))
        assert shown == wrote[key].replace(b"\n", b""), (seed, terminal.bytes)
    whole = [row for row in terminal.rows() if row]
    assert all(row[:2] in ("a:", "b:") and row[2:].strip("." + row[0].upper()) == "" for row in whole), terminal.bytes


def test_the_tail_is_the_last_lines_as_they_stand():
    tail = Tail()
    tail.feed(b"".join(b"line %d\n" % number for number in range(5000)))
    tail.feed(b"\r10%\r20%\nwindows\r\nunfinished")
    assert tail.lines(4) == [b"line 4999", b"20%", b"windows", b"unfinished"]
    assert len(tail.lines(20)) == 20
    assert all(line.startswith(b"line ") for line in tail.lines(10**6)[:-3])
    assert Tail().lines(20) == []
