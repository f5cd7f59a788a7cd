"""What does the book of an elastic job say, to whom, and when? One case for each text and each rule with a number.

That its rules hold together, whatever happens, is the question of test_elastic_membership.py.
"""

import json

import pytest

from hvdlite.launcher.store.elastic_membership import Events, Membership, Terms
from hvdlite.launcher.store.epochs import LOST_CODE, Refusal
from hvdlite.security import framing

BUILD = "1.0", "1"


class Book:
    """A book whose members 0, 1, ... are on one host, and all that it has said."""

    def __init__(self, np, min_np=1, max_np=None, reset_limit=None, come=None):
        self.now, self.opened, self.failed, self.killed, self.news, self.waits, self.frames = (
            0.0,
            [],
            [],
            [],
            [],
            [],
            [],
        )
        events = Events(
            lambda number, members: self.opened.append(members),
            self.failed.append,
            lambda *killed: self.killed.append(killed),
            lambda: self.news.append(self.of.news()),
            self.waits.append,
        )
        terms = Terms(min_np, max_np, np, 600.0, reset_limit)
        self.of = Membership(terms, 1, lambda *frame: self.frames.append(frame), events, lambda: self.now)
        self.start(*range(np))
        self.join(*range(np if come is None else come))

    def start(self, *numbers):
        for number in numbers:
            self.of.started(number, "b", number)
            self.of.process(number, number)

    def join(self, *numbers, commit=-1):
        for number in numbers:
            self.of.check(number, 0, number, BUILD, False)
            self.of.join(number, number, BUILD, 30.0, "b", commit)

    def again(self, *numbers, commit=3):
        """These leave their epoch and join again."""
        for number in numbers:
            self.of.left(number)
            self.of.disconnected(number)
        self.join(*numbers, commit=commit)

    def at(self, now):
        assert self.of.deadline() <= now
        self.now = now
        self.of.tick(now)


def test_who_is_waited_for_is_said_once_and_killed_later():
    book = Book(4)
    book.again(0, 1, 3)
    assert book.of.deadline() == 5.0 and not book.waits
    book.at(5.0)
    assert book.waits == ["the other 3 ranks have waited 5 s to meet again: missing rank 2 (pid 2 on b)"]
    book.at(300.0)
    assert len(book.waits) == 1 and book.opened[1:] == [[0, 1, 3]]
    assert book.killed == [
        (2, "rank 2 (pid 2 on b) did not join within 300 s when the ranks met again (--rendezvous-timeout) [HVD113]")
    ]
    with pytest.raises(Refusal, match=r"did not join within 300 s .*\[HVD113\]$"):
        book.join(2)


def test_the_first_epoch_opens_without_who_does_not_call_init_in_time():
    book = Book(4, min_np=3, come=2)
    book.at(5.0)
    missing = "a new rank (pid 2 on b), a new rank (pid 3 on b)"
    assert book.waits == [f"the other 2 ranks have waited 5 s in init: missing {missing}"]
    book.at(30.0)
    assert book.of.deadline() == 600.0 and not book.opened  # too few
    book.join(2)
    limit = "within 30 s of the first that did (HVDLITE_START_TIMEOUT sets the limit): the others begin without it"
    assert book.killed == [(3, f"a new rank (pid 3 on b) did not call init {limit} [HVD113]")]
    assert book.opened == [[0, 1, 2]] and book.of.deadline() is None and len(book.waits) == 1
    book = Book(2, min_np=2, come=1)
    book.at(5.0), book.at(30.0), book.at(600.0)
    assert "1 rank has waited for 1 more" in book.failed[0]


def test_who_ends_well_before_the_first_epoch_fails_those_that_call_init():
    for come in 0, 1:
        book = Book(2, come=come)
        book.of.ended(1, f"{book.of.who(1)} exited with code 0", True)
        assert len(book.failed) == come
        book.start(2)  # had it called init, the launcher would have refused it
        if not come:
            book.join(0)
        assert book.failed == ["a new rank (pid 1 on b) exited with code 0 and did not call init [HVD401]"]


def test_min_np_need_not_hold_once_a_rank_has_ended_well_but_not_a_newcomer():
    for number, opens in (2, True), (3, False):
        book = Book(3, min_np=3)
        book.start(3)
        book.of.ended(number, "it exited with code 0", True)
        book.of.ended(1, "killed")
        book.again(*{0, 2} - {number})
        assert (len(book.opened) == 2) is opens


def test_nobody_is_killed_because_of_a_rank_that_came_and_died():
    book = Book(3)
    book.again(1)
    book.of.ended(1, "rank 1 was killed")
    assert book.of.deadline() is None and not book.killed


def test_who_loses_its_connection_at_the_rendezvous_is_waited_for_again():
    book = Book(3, min_np=3)
    book.again(0, 1)
    book.of.ended(2, "killed")
    assert book.of.deadline() == 600.0
    book.of.disconnected(1)
    assert book.of.deadline() == 5.0
    book.of.disconnected(0)
    assert book.of.deadline() is None  # nobody waits
    book.join(0)
    book.start(2, 3)
    book.join(3)
    book.of.disconnected(3)
    assert book.news[-2:] == [{"come": 0, "go": 0}] * 2
    book.at(300.0)
    assert book.waits and [number for number, _ in book.killed] == [1] and len(book.opened) == 1


def cut(first, second, commits):
    """Two epochs with a report each, between which all but member 2 come with these commits."""
    book = Book(3)
    for (reporter, culprit), commit in zip((first, second), commits):
        ranks = book.opened[-1]
        assert book.of.named(reporter, ranks.index(culprit)) == culprit
        book.of.aborted(reporter, culprit, LOST_CODE, f"rank {ranks.index(culprit)} is lost")
        book.again(0, 1, commit=commit)
        book.again(2, commit=3)
    return book


@pytest.mark.parametrize(
    "first, second, loser, by", [((0, 2), (1, 2), 2, 1), ((0, 2), (2, 0), 2, 0), ((1, 0), (1, 0), 0, 1)]
)
def test_one_of_two_ranks_whose_link_is_cut_is_killed(first, second, loser, by):
    book = cut(first, second, (3, 3))
    text = (
        f"rank {loser} (pid {loser} on b) cannot be reached by rank {by} (pid {by} on b), the second epoch in a row, "
    )
    assert book.killed == [(loser, text + "though both are alive: the link between them is cut [HVD454]")]
    assert book.opened[-1] == [n for n in range(3) if n != loser]


def test_no_link_counts_as_cut_after_a_commit_or_for_a_rank_that_has_died():
    assert not cut((0, 2), (0, 2), (3, 4)).killed and not cut((0, 2), (1, 0), (3, 3)).killed
    for died in range(2):
        book = Book(4)
        for epoch in range(2):
            book.of.aborted(0, 1, LOST_CODE, "rank 1 is lost")
            if epoch == died:
                book.of.ended(3, "killed")  # the cause
            book.again(*range(3 if epoch >= died else 4))
        assert not book.killed and book.opened[-1] == [0, 1, 2]
    book = Book(3)
    book.of.aborted(0, 2, LOST_CODE, "rank 2 is lost")
    for _ in range(2):
        book.of.aborted(1, 0, LOST_CODE, "rank 0 is lost")  # in the first epoch because it has left then
        book.again(0, 1, 2)
    assert not book.killed and len(book.opened) == 3


@pytest.mark.parametrize("first, second, loser", [((0, 2), (0, 2), 0), ((0, 2), (2, 0), 0), ((0, 2), (1, 2), None)])
def test_the_rank_that_alone_has_state_is_not_killed(first, second, loser):
    book = cut(first, second, (-1, -1))
    assert [number for number, _ in book.killed] == ([] if loser is None else [loser])
    assert book.opened[-1] == [n for n in (2, 0, 1) if n != loser]


def test_a_newcomer_that_leaves_before_it_has_state_is_new():
    book = Book(2, max_np=3)
    book.start(2, 3)
    assert book.of.end_of(2).new and not book.of.end_of(1).new
    book.join(2)
    assert book.news == [{"come": 0, "go": 0}]  # 3 comes soon
    book.at(2.0)
    assert book.news[1:] == [{"come": 1, "go": 0}]
    book.join(3)
    assert book.news[2:] == [{"come": 1, "go": 0}]  # there is room for one
    book.again(0, 1)
    assert book.opened[-1] == [0, 1, 2] and not book.of.end_of(2).new
    book.of.left(2, True)
    assert book.of.end_of(2).new and not book.of.end_of(4).new
    book.of.left(1)
    assert not book.of.end_of(1).new
    book = Book(2)
    book.of.left(1)
    assert not book.of.end_of(1).new


def test_a_removed_member_goes_at_the_next_meeting_and_is_killed_if_it_does_not():
    book = Book(3)
    book.of.remove(0, "its host goes")
    book.of.remove(0, "its host goes")
    assert book.news == [{"come": 0, "go": 1}] and book.of.is_removed(0)
    book.again(0, 1, 2)
    assert book.opened[-1] == [1, 2] and (0, framing.REMOVED, b"its host goes") in book.frames
    assert book.of.news() == {"come": 0, "go": 0} and book.of.living() == [0, 1, 2] and book.of.free_slot("b") == 3
    book.at(30.0)
    assert book.killed == [(0, "rank 0 (pid 0 on b) was removed, and has not ended within 30 s [HVD501]")]
    book.of.ended(0, "killed")
    assert book.of.free_slot("b") == 0 and book.of.who(0) == "member 0"


def test_newcomers_need_not_come_when_training_is_over():
    book = Book(2)
    book.start(2, 3)
    book.join(2)
    book.of.left(1)
    assert book.of.remove_new("training is over") == [2, 3]
    book.join(3)
    assert book.frames[-2:] == [(number, framing.REMOVED, b"training is over") for number in (2, 3)]
    book.of.over("the job ends [HVD401]")
    with pytest.raises(Refusal, match="the job ends"):
        book.join(1)


def test_losses_name_the_rank_of_their_epoch():
    book = Book(3)
    book.again(1, 2)
    book.of.ended(0, "rank 0 (pid 0 on b) was killed [HVD402]")
    assert [json.loads(body)["rank"] for _, kind, body in book.frames[-2:] if kind == framing.JOINED] == [0, 1]
    book.of.disconnected(2)  # first, and its end tells more
    book.of.ended(2, f"{book.of.who(2)} was killed [HVD402]")
    assert book.frames[-1][:2] == (1, framing.LOST)
    assert framing.unpack_end(book.frames[-1][2]) == (1, LOST_CODE, "rank 1 (pid 2 on b) was killed [HVD402]")
    book = Book(2)
    book.of.disconnected(1)
    book.at(0.2)
    text = "the connection of rank 1 (pid 1 on b) ended without a goodbye [HVD401]"
    assert framing.unpack_end(book.frames[-1][2]) == (1, LOST_CODE, text)


def test_the_ends_of_a_job():
    book = Book(3, min_np=2)
    for number in range(3):
        book.of.ended(number, "killed")
    assert (
        "the state is lost with them: start the job again. If the script uses State.save_to, " in book.failed[0]
        and not book.of.deadline()
    )
    book = Book(3, min_np=3)
    book.of.ended(0, "killed")
    book.again(1, 2)
    book.at(600.0)
    assert book.waits == ["2 ranks wait for 1 more (--min-np 3), at most 600 s (--elastic-timeout)"]
    assert book.failed == ["2 ranks have waited for 1 more (--min-np 3), for 600 s (--elastic-timeout) [HVD421]"]
    assert book.frames[-1][:2] == (2, framing.REFUSED)
    book = Book(2, reset_limit=1)
    book.again(0, 1)
    book.again(0, 1)
    assert book.failed == ["the ranks have changed more often than --reset-limit 1 allows [HVD422]"]


def test_what_cannot_be_is_refused():
    book = Book(2)
    book.start(2)
    for number, pid, build, living, says in (
        (7, 7, BUILD, False, r"did not start member 7.*\[HVD119\]"),
        (1, 9, BUILD, True, r"rank 1 \(pid 1 on b\) is in the job already; process 9 .*\[HVD118\]"),
        (2, 5, ("0.9", "1"), False, r"a new rank \(pid 5 on b\) runs hvdlite 0.9 .*1.0 .*\[HVD121\]"),
    ):
        with pytest.raises(Refusal, match=says):
            book.of.check(number, 0, pid, build, living)
    assert [number for number, _ in book.killed] == [2]
    with pytest.raises(Refusal, match=r"member 2 takes part .*\[HVD112\]"):
        book.of.contribute(2, 1, b"")
    with pytest.raises(Refusal, match=r"rank 1 \(pid 1 on b\) sent its part of allgather 2, but 0.*\[HVD112\]"):
        book.of.contribute(1, 2, b"")
    book.of.contribute(1, 1, b"")
    book.at(30.0)
    assert "rank 0 (pid 0 on b) did not take part in allgather 1 within 30 s" in book.killed[-1][1]


def test_a_member_that_was_forgotten_may_still_speak():
    """Its wrapper has ended before it."""
    book = Book(3)
    book.of.ended(1, "killed")
    book.again(0, 2)
    book.of.aborted(1, 1, -5, "it fails")
    book.of.left(1)
    book.of.disconnected(1)
    assert book.of.news() == {"come": 0, "go": 0} and book.of.living() == [0, 2]
