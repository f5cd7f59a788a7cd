"""Main of an agent on another host: it registers with the launcher and serves it.

Whatever starts it (ssh, srun) runs `BOOT` (starter.py), which reads one line of JSON from stdin: the job's secret, the
launcher's address, the command with its folder and environment. So nothing of it stands in an argument list or a file.
Stdin stays open; its end means that the launcher is gone, as does the end of the control stream.

What is wrong with this host (no such folder, no such command, another version) is in HELLO before any rank is started
anywhere, so that the launcher can report all hosts at once.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from hvdlite import __version__, config

from ..agent import process, rank_environment, torch_environment, watchdog
from ..agent.agent import Agent
from ..control import registration
from ..control.ending import LOST


def main(order: dict[str, Any]) -> int:
    """An agent that ssh or srun has started, from start to end. Returns its exit code."""
    hangup = os.dup(0)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    os.close(null)
    environ = config.environ()
    if order["host"] is None:  # started by srun with others
        order["host"] = order["hosts"][int(environ["SLURM_NODEID"])]
    order["environ"] = {**rank_environment.of_host(environ), **order["environ"]}
    code = watchdog.watched(partial(_serve, order), hangup)
    return code if code >= 0 else LOST


def _serve(order: Mapping[str, Any], hangup: int) -> int:
    try:
        return serve(order, hangup)[0]
    except registration.ReportError as error:
        print(error, file=sys.stderr)
        return LOST


def serve(
    order: Mapping[str, Any],
    hangup: int,
    stays: bool = False,
    slots: int = 0,
    secret_for_ranks: bool = True,
    kind: type[Agent] = Agent,
) -> tuple[int, bool]:
    """Reports and is the agent until the job is over; the exit code, and whether the job is to be tried again. Raises
    registration.ReportError.

    order: secret, address, timeout, silence, host, command, cwd and environ; without a command this host is only
    examined (diagnostics/doctor.py). hangup: that of agent/watchdog.py. stays: see Agent. slots: for ranks here, where
    the launcher does not know. kind: the agent to be.
    """
    secret = bytes.fromhex(order["secret"])
    examined = "command" not in order
    problem, code = (None, 0) if examined else _problem(order)
    hello = {
        "version": __version__,
        "host": order["host"],
        "name": socket.gethostname(),
        "problem": problem,
        "code": code,
        "slots": slots,
        "nodes": order.get("nodes"),
        "id": os.urandom(8).hex(),
        "silence": order["silence"],
        "machine": order.get("machine"),
        "torch_port": torch_environment.free_port(),
    }
    deadline = time.monotonic() + order["timeout"]
    streams, sessions = {}, {}
    for stream in (registration.CONTROL, registration.OUTPUT):
        streams[stream], sessions[stream] = registration.report(
            (order["address"][0], order["address"][1]),
            secret,
            {**hello, "stream": stream},
            deadline,
            given_up=lambda: _ended(hangup),
        )
        registration.keep_watch(streams[stream], stream == registration.CONTROL, order["silence"])
    watchdog.lend(hangup, streams[registration.CONTROL])
    process.rename(b"hvdlite-agent")
    if examined:
        from ..probe import host_probe  # late: jobs do without it

        host_probe.serve(streams[registration.CONTROL], sessions[registration.CONTROL], secret)
        return 0, False
    process.become_subreaper()
    started = {
        "command": order["command"],
        "cwd": order["cwd"],
        "environ": {**order["environ"], **(rank_environment.secret_of(secret) if secret_for_ranks else {})},
    }
    control, output = registration.CONTROL, registration.OUTPUT
    agent = kind(
        streams[control],
        streams[output],
        stdin=-1,
        common=started,
        hangup=hangup,
        stays=stays,
        sessions=(sessions[control], sessions[output]),
    )
    agent.run()
    watchdog.take_back(hangup, streams[control])
    for sock in streams.values():  # their end is what the launcher waits for
        sock.close()
    return agent.code if agent.code is not None else LOST if agent.orphan else 0, agent.again


def _problem(order: Mapping[str, Any]) -> tuple[str | None, int]:
    """What stands in the way of the ranks here, and the exit code that this gives."""
    if not os.path.isdir(order["cwd"]):
        return f"there is no folder {order['cwd']} (ranks start in the folder that the launcher is in)", 1
    command = order["command"][0]
    folder = order["cwd"] if os.sep in command and not os.path.isabs(command) else ""
    if shutil.which(os.path.join(folder, command), path=order["environ"].get("PATH", os.defpath)) is None:
        return f"{command}: command not found", process.NOT_FOUND
    return None, 0


def _ended(descriptor: int) -> bool:
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return bool(watch.poll(0))
