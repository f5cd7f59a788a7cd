"""The page of a job while it trains: its steps as they are written, in any browser.

A process of its own, so that drawing costs the training nothing. It listens on this machine only unless it is given
otherwise, answers two addresses, and knows no way to write anything. transport/http_server.py serves it, as it serves
the metrics, and bounds what strangers may cost.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from typing import Any

from ...transport.http_server import FRESH_S, Page, Port
from .page import content, page
from .read import Folder, ReadError
from .table import JobTable

ENDING_S = 5.0  # for ranks whose launcher has ended


class Board:
    """What there is to be seen now."""

    def __init__(self, folder: str) -> None:
        self._folder = Folder(folder)
        self._until = 0.0
        self._content: dict[str, Any] | None = None

    def content(self) -> dict[str, Any]:
        """As `content` has it. A folder that is not there yet has no ranks."""
        if self._content is None or time.monotonic() >= self._until:
            try:
                came = self._folder.look()
                problems = self._folder.problems
            except ReadError as error:
                came, problems = True, [str(error)]
            if came or self._content is None:
                self._content = content(JobTable(self._folder.ranks), problems)
            self._until = time.monotonic() + FRESH_S
        return self._content

    def page(self) -> tuple[bool, list[bytes]]:
        """/."""
        return True, page(self.content(), live=True)

    def numbers(self) -> tuple[bool, list[bytes]]:
        """/numbers.json."""
        return True, [json.dumps(self.content(), separators=(",", ":")).encode()]


def serve(folder: str, host: str, port: int) -> Port:
    """Serves until it is closed. Raises OSError, MissingLibraryError."""
    board = Board(folder)
    board.page()  # what draws is read before the first client comes
    shown = Page(board.page, "text/html; charset=utf-8")
    return Port(
        host, port, {"/": shown, "/index.html": shown, "/numbers.json": Page(board.numbers, "application/json")}
    )


def end_with(parent: int, own: str | None = None) -> None:
    """Ends this process as soon as its parent is another one: its starter is gone.

    own: a folder that only this process removes then. Ranks that are still ending may write there for a while,
    and make it anew.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        until = time.monotonic() + ENDING_S
        while own is not None and time.monotonic() < until:
            shutil.rmtree(own, ignore_errors=True)
            time.sleep(0.2)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
