"""How streams become text: whole lines stay whole, a progress bar stays one line, nothing is lost."""

import random

import pytest

from hvdlite.launcher.output.lines import LINE_MAX, REDRAWN_S, UNFINISHED_S, Lines, Screen, Tail


class Terminal:
    """Two streams on one screen; what they wrote, and what a terminal would show."""

    def __init__(self, redraws=True):
        self.screen = Screen()
        self.streams = {"a": Lines(redraws), "b": Lines(redraws)}
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


BARS = [
    ([b"\r10%", b"\r50%", b"\r100%\n", b"next\n"], b"a:100%\na:next\n"),  # tqdm
    ([b"10%\r", b"50%\r100%\r", b"\n"], b"a:100%\n"),
    ([b"10%", b"\r50%", b"\r100%"], b"a:100%\n"),
    ([b"\r10%\r", b"   \r", b"next\n"], b"a:next\n"),  # it clears itself
    ([b"\r10%\r", b"   \r"], b""),
    ([b"\r\n", b"one\r", b"\ntwo\r\n", b"\n"], b"a:\na:one\na:two\na:\n"),
    ([b"\r10%", b"\r5", b"0%"], b"a:50%\n"),
]


@pytest.mark.parametrize(("chunks", "written"), BARS)
def test_a_log_has_the_last_state_of_a_progress_bar(chunks, written):
    log = Terminal(redraws=False)
    for chunk in chunks:
        log.write("a", chunk)
    log.finish("a")
    log.finish("a")
    assert log.bytes == written


def test_a_log_shows_that_a_progress_bar_moves():
    log = Terminal(redraws=False)
    for second in range(4 * int(REDRAWN_S)):
        log.write("a", b"\r%d s" % second, now=float(second))
        due = log.streams["a"].due()
        if due is not None and due <= second:
            log.flush("a")
    assert log.bytes.count(b"\n") == 3 and b"\r" not in log.bytes
    log.flush("a")
    log.flush("a")  # it has stopped: the last state, once
    log.write("b", b"beside\n")
    log.write("a", b"\n")
    log.finish("a")
    assert log.bytes.endswith(b"a:38 s\na:39 s\nb:beside\n"), log.bytes


def test_an_unfinished_line_in_a_log_ends_where_it_is_written_over():
    log = Terminal(redraws=False)
    log.write("a", b"0%")
    log.flush("a")
    for chunk in (b"\r10%", b"\r20%", b"\r30%\n"):
        log.write("a", chunk)
    assert log.bytes == b"a:0%\na:30%\n"


def test_a_bar_without_end_is_bounded():
    log = Terminal(redraws=False)
    for _ in range(3 * LINE_MAX // 65536):
        log.write("a", b"\rx" + b"x" * 65535)
        log.write("a", b"y" * 65536)
    assert len(log.streams["a"]._held) + len(log.streams["a"]._state or b"") < LINE_MAX
    log.finish("a")
    assert log.bytes == b"a:x" + b"x" * 65535 + b"y" * 65536 + b"\n"


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
    terminal = Terminal(redraws=seed % 2 == 0)
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
