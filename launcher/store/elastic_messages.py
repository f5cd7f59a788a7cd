"""Messages of the membership of an elastic job; elastic_membership.py decides when, and to which process.

The first epoch has no ranks before it opens, so a member is called "a new rank" until then (Member.who). What ends the
job or kills a member has a code of the catalogue; what merely reports a wait has none. Each text is one sentence that
stands by itself in the launcher's output, and as the error of a rank that receives it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from .elastic_members import Member, Terms

STATE_LOST = (
    "all ranks that had the training state are gone, and the state is lost with them: start the job again. If the "
    "script uses State.save_to, the job goes on from that file [HVD420]"
)
KEPT = "the ranks have committed and ended: start the job again, and it goes on from the file of State.save_to [HVD424]"
UNKEPT = (
    "the ranks have ended at a commit, but no file contains it: call State.save_to with a path that rank 0 can write "
    "[HVD424]"
)


def opened(number: int, members: Sequence[int], pids: Mapping[int, int]) -> str:
    """An epoch: the rank of each member."""
    ranks = ", ".join(f"{rank}: [{member}] pid {pids.get(member, '?')}" for rank, member in enumerate(members))
    return f"epoch {number}: {len(members)} rank{'s' * (len(members) > 1)} ({ranks})"


def over(name: str) -> str:
    """The others go on without one that has ended well."""
    return f"{name} has ended with code 0: training counts as over, and lost ranks are not replaced"


def late(ended: str) -> str:
    """A loss for which no rank can go on."""
    return f"{ended} after training: what it had left to do is missing, so the job fails"


def offers(slots: Mapping[str, int]) -> str:
    """The hosts have changed."""
    return f"the discovery script offers {', '.join(f'{name}:{count}' for name, count in slots.items())}"


def removed(host: str, slots: int) -> str:
    """Why a rank is to go. slots: that its host is offered with."""
    few = f"offered with {slots} slot{'s' * (slots > 1)} only" if slots else "offered no more"
    return f"this rank is removed: host {host} is {few}"


def kept(members: Collection[Member], terms: Terms) -> str:
    """Ranks stay although they are to go."""
    return (
        f"{_listed(members)} {'stay' if len(members) > 1 else 'stays'} until new ranks have the training state, at "
        f"most {terms.timeout:g} s (--elastic-timeout): fewer than --min-np {terms.min_np} would be left"
    )


def _listed(members: Collection[Member]) -> str:
    """No more than a line of them."""
    shown = ", ".join(m.who() for m in list(members)[:4])
    return shown + (f" and {len(members) - 4} more" if len(members) > 4 else "")


def waited_for(awaited: Collection[Member], there: int, seconds: float, first: bool) -> str:
    """A text: so many others wait for these, first: in init. It names no more than a line of them."""
    others = "rank has" if there == 1 else f"{there} ranks have"
    where = "in init" if first else "to meet again"
    return f"the other {others} waited {seconds:.0f} s {where}: missing {_listed(awaited)}"


def short(there: int, terms: Terms, over: bool) -> str:
    """A text: so few wait for more, or have waited."""
    verb = ("has" if there == 1 else "have") + " waited" if over else "waits" if there == 1 else "wait"
    text = f"{there} rank{'s' * (there != 1)} {verb} for {terms.min_np - there} more (--min-np {terms.min_np})"
    return f"{text}, {'for' if over else 'at most'} {terms.timeout:g} s (--elastic-timeout)"


def there_already(member: Member, pid: int) -> str:
    """A text: why this process cannot join as the member."""
    return (
        f"{member.who()} is in the job already; process {pid} has inherited its environment and cannot be the same "
        "rank: only one process of a rank may call init"
    )


def of_another_version(member: Member, build: tuple[str, str], of_job: tuple[str, str]) -> str:
    """A text: why it cannot join. Builds are (version, wire version)."""
    return (
        f"{member.who()} runs hvdlite {build[0]} (wire {build[1]}), the job {of_job[0]} (wire {of_job[1]}): install "
        "the same version on all hosts [HVD121]"
    )


def not_come(member: Member, seconds: float) -> str:
    """A text: the time for the rendezvous is over."""
    return f"{member.who()} did not join within {seconds:g} s when the ranks met again (--rendezvous-timeout) [HVD113]"


def not_begun(member: Member, seconds: float) -> str:
    """A text: the first epoch opens without it."""
    limit = f"within {seconds:g} s of the first that did (HVDLITE_START_TIMEOUT sets the limit)"
    return f"{member.who()} did not call init {limit}: the others begin without it [HVD113]"
