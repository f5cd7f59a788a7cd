"""Heartbeat of agents: a stopped process keeps its connections, because the kernel answers for it.

So the launcher sends a heartbeat to each agent every `INTERVAL_S`, as a control frame. An agent that has not answered
for `limit` seconds is lost. `hurry` shortens this limit to `HURRIED_S` once the job is to be killed: a silent agent
kills no rank.

Silence is counted in heartbeats of this loop, not by the clock: a launcher or a machine that was stopped must not blame
others for it. The count begins when the ranks of the agent have started, since a slow file system delays that. In the
other direction an agent waits for a stopped launcher. The kernel reports the end of its process or its host
(registration.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .agent_link import AgentLink

INTERVAL_S = 0.5
HURRIED_S = 1.0


class Heartbeat:
    """Of the agents behind `links`; limit: seconds without an answer after which an agent is lost."""

    def __init__(self, links: Sequence[AgentLink], limit: float) -> None:
        self._links = links
        self._limit = limit
        self._hurried = False
        self._next = time.monotonic() + INTERVAL_S
        self._missed = {id(each): 0 for each in links}

    def admit(self, link: AgentLink) -> None:
        """One more, which is in the list already."""
        self._missed[id(link)] = 0

    def due(self) -> float | None:
        """When `tick` has something to do; None: never."""
        return self._next if any(each.alive and not each.done for each in self._links) else None

    def hurry(self) -> None:
        """From now on, every agent has to answer soon."""
        if not self._hurried:
            self._hurried = True
            self._limit = min(self._limit, HURRIED_S)
            self._missed = dict.fromkeys(self._missed, 0)
            self._next = time.monotonic() + INTERVAL_S

    def tick(self, now: float) -> list[AgentLink]:
        """Asks the agents, if it is time to; those that have been silent for too long."""
        if now < self._next:
            return []
        self._next = now + INTERVAL_S
        silent = []
        for each in self._links:
            if not each.alive or each.done:
                continue
            if not each.pinged:
                each.pinged = True
                self._missed[id(each)] = 0
                each.order(do="ping")
            elif each.started or self._hurried:
                self._missed[id(each)] += 1
                if self._missed[id(each)] * INTERVAL_S >= self._limit:
                    silent.append(each)
        return silent
