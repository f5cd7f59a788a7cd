"""Agents of schedulers that replace ssh: `agent host command`.

The MPI operator of Kubernetes names one to Open MPI (OMPI_MCA_plm_rsh_agent), LSF has blaunch and SGE qrsh, and where
they are, ssh is often not allowed. What they must do is what ssh does: run the command there, and pass stdin on. Some
scripts of the operator do not (kubectl exec without -i); mpirun needs no stdin there, so the advice is --mpi.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence

from ..hosts import address
from .starter import Session, far_command

_OF_SCHEDULERS = {"LSF": ["blaunch"], "SGE": ["qrsh", "-inherit"]}


class Rsh:
    """A Starter. `agent` are the words before the host's name."""

    def __init__(self, agent: Sequence[str]) -> None:
        self._agent = list(agent)

    def sessions(self, hosts: Sequence[tuple[int, str]]) -> list[Session]:
        """One for each host."""
        far = "exec " + " ".join(map(shlex.quote, far_command()))
        return [Session([*self._agent, name, far], [number]) for number, name in hosts]

    def resolve(self, name: str) -> list[str]:
        """The addresses of a host."""
        return address.resolve(name)

    def again(self, code: int, text: str) -> bool:
        """Nothing is known of its errors."""
        return False

    def remedy(self, host: str, code: int, text: str) -> str:
        """What the user can do, and the agent's last line."""
        name, last = self._agent[0], text.splitlines()[-1].strip() if text else "nothing"
        if code == 255 and not text:
            return f"{name} passes no stdin on, which hvdlite-run needs: use hvdlite-run --mpi"
        if "No module named 'hvdlite" in text:
            return f"the Python there has no hvdlite: install it on all hosts [{last}]"
        return f"{name} ended with code {code} [{last}]"


def agent_of(environ: Mapping[str, str], scheduler: str | None = None) -> Rsh | None:
    """The agent to use instead of ssh; None: ssh is right. scheduler: whose allocation this is."""
    named = shlex.split(environ.get("OMPI_MCA_plm_rsh_agent", "").partition(":")[0])
    if named:
        return None if os.path.basename(named[0]) == "ssh" else Rsh(named)
    words = _OF_SCHEDULERS.get(scheduler or "", [])
    found = shutil.which(words[0], path=environ.get("PATH", os.defpath)) if words else None
    return Rsh([found, *words[1:]]) if found is not None else None
