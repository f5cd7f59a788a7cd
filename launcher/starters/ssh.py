"""ssh: its command line, and its errors explained.

One ssh per host, never a question (BatchMode), host keys as the user's ssh has them (an unknown one is accepted once
and kept, a changed one is refused). Only errors of the connection are tried again: a host whose sshd drops logins
because too many come at once will take the next, a wrong key stays wrong.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ..hosts import address
from .starter import Session, far_command

CONNECT_S = 10
_LOST = re.compile(
    r"Connection (refused|reset|closed)|kex_exchange_identification|Temporary failure in name resolution",
    re.IGNORECASE,
)
_REMEDIES = (
    (
        r"Permission denied",
        "ssh does not let you in: does `ssh {host} true` ask nothing? (--ssh-identity-file)",
    ),
    (r"Host key verification failed|IDENTIFICATION HAS CHANGED", "its ssh host key is not the known one"),
    (r"Could not resolve hostname", "there is no host of this name"),
    (r"Connection refused", "ssh was refused: is sshd running there, at this port? (--ssh-port)"),
    (r"timed out|No route to host|unreachable", "ssh does not reach it: is it up, and is the network?"),
    (
        r"No module named '?hvdlite|cannot import name \S+ from 'hvdlite",
        "the Python there has no hvdlite: install it on all hosts",
    ),
)


class Ssh:
    """A Starter. `options` go to ssh as they are, and override those given here."""

    def __init__(self, port: int | None = None, identity: str | None = None, options: Sequence[str] = ()) -> None:
        self._words = ["ssh", "-T", *(word for option in options for word in shlex.split(option))]
        self._words += ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]  # ssh takes the first value
        self._words += ["-o", "StrictHostKeyChecking=accept-new", "-o", "ControlMaster=no"]
        self._words += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=2", "-o", "LogLevel=ERROR"]
        self._words += ["-p", str(port)] if port is not None else []
        self._words += ["-i", identity] if identity is not None else []

    def sessions(self, hosts: Sequence[tuple[int, str]]) -> list[Session]:
        """One for each host."""
        far = "exec " + " ".join(map(shlex.quote, far_command()))
        return [Session([*self._words, "--", name, far], [number]) for number, name in hosts]

    def resolve(self, name: str) -> list[str]:
        """The addresses of a host, which only ssh may know by this name. Raises address.AddressError."""
        try:
            return address.resolve(name)
        except address.AddressError:
            import subprocess  # late: slow to import

            answer = subprocess.run([*self._words, "-G", "--", name], capture_output=True, text=True, check=False)
            real = re.search(r"^hostname (\S+)$", answer.stdout, re.MULTILINE)
            if real is None or real[1] == name:
                raise
            return address.resolve(real[1])

    def again(self, code: int, text: str) -> bool:
        """Is it an error of the connection?"""
        return code == 255 and _LOST.search(text) is not None

    def remedy(self, host: str, code: int, text: str) -> str:
        """What the user can do, and ssh's last line."""
        last = text.splitlines()[-1].strip() if text else ""
        for pattern, advice in _REMEDIES:
            if re.search(pattern, text, re.IGNORECASE):
                return f"{advice.format(host=host)} [{last}]"
        python = far_command()[0]
        if code in (126, 127):
            return f"there is no Python {python}: it must be at the same path on all hosts [{last}]"
        return f"ssh ended with code {code} [{last}]" if last else f"ssh ended with code {code} and said nothing"
