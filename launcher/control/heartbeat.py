"""Heartbeat of agents: a stopped process keeps its connections, because the kernel answers for it.

So the launcher asks each agent every `BEAT_S`, in a control frame, and one that has not answered for `limit` seconds is
given up. Once the job is to be killed, `hurry`: an agent that is silent for `HURRIED_S` will not kill anybody.

Silence is counted in beats of this loop, not by the clock: a launcher (or a whole machine) that was stopped itself must
not blame others for it. It counts only when the ranks there have been started: that may take long, from a
slow file system. The other way round an agent waits for a launcher that is stopped, as a
user may do it, and hears from the kernel when its process or its host is gone (registration.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .agent_link import AgentLink

BEAT_S = 0.5
HURRIED_S = 1.0


class Heartbeat:
    """Of the agents of `branches`; limit: seconds without an answer that are too many."""

    def __init__(self, links: Sequence[AgentLink], limit: float) -> None:
        self._links = links
        self._limit = limit
        self._hurried = False
        self._next = time.monotonic() + BEAT_S
        self._missed = {id(each): 0 for each in links}

    def admit(self, link: AgentLink) -> None:
        """One more, which is in the list already."""
        self._missed[id(link)] = 0

    def due(self) -> float | None:
        """When `beat` has something to do; None: never."""
        return self._next if any(each.alive and not each.done for each in self._links) else None

    def hurry(self) -> None:
        """From now on, every agent has to answer soon."""
        if not self._hurried:
            self._hurried = True
            self._limit = min(self._limit, HURRIED_S)
            self._missed = dict.fromkeys(self._missed, 0)
            self._next = time.monotonic() + BEAT_S

    def beat(self, now: float) -> list[AgentLink]:
        """Asks the agents, if it is time to; those that have been silent for too long."""
        if now < self._next:
            return []
        self._next = now + BEAT_S
        silent = []
        for each in self._links:
            if not each.alive or each.done:
                continue
            if not each.asked:
                each.asked = True
                self._missed[id(each)] = 0
                each.order(do="ping")
            elif each.started or self._hurried:
                self._missed[id(each)] += 1
                if self._missed[id(each)] * BEAT_S >= self._limit:
                    silent.append(each)
        return silent
