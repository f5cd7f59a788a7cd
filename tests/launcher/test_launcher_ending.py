"""Who is to blame and what happens to the others, as a table of events with their times."""

import signal

import pytest

from hvdlite import config
from hvdlite.launcher.control.ending import INTERRUPT_S, KILL, KILLED, LEAVING_S, TERM_S, Abort, Ending, Graces, Send

TERM = Send(int(signal.SIGTERM))


def ending(size=3, grace=2.0):
    job = Ending(size, Graces(grace))
    job.pids = {rank: 100 + rank for rank in range(size)}
    return job


def test_the_first_failure_gives_the_others_grace_then_term_then_kill():
    job = ending()
    job.ended(10.0, 1, 3)
    assert job.due() == 12.0
    assert job.act(11.9) is None
    assert job.act(12.0) == TERM
    assert job.due() == 12.5
    assert job.act(12.5) == KILL
    assert job.due() is None
    job.ended(18.0, 0, -9)
    job.ended(18.0, 2, -9)
    assert job.exit_code() == 3
    assert job.headline() == "rank 1 (pid 101) exited with code 3 [HVD401]"


def test_nothing_is_sent_once_all_have_ended():
    job = ending(2)
    job.ended(0.0, 1, 3)
    job.ended(0.5, 0, 1)
    assert job.due() is None and job.act(9.0) is None
    assert job.exit_code() == 3


def test_the_first_abort_record_beats_the_first_exit():
    job = ending()
    job.ended(0.0, 0, 1)
    job.aborted(0.1, Abort(2, 1, "rank 1 is gone"))
    job.aborted(0.2, Abort(0, 0, "rank 0 is gone"))
    job.ended(0.3, 1, -9)
    job.ended(0.4, 2, 1)
    assert job.culprit() == 1 and job.exit_code() == 137
    assert job.headline() == f"rank 1 (pid 101) killed by SIGKILL{KILLED} [HVD402]" and "dmesg" in KILLED


def test_what_the_culprit_says_itself_counts_more_than_what_others_have_heard_of_it():
    """Its words come by another way, and may come later."""
    job = ending()
    job.aborted(1.0, Abort(2, 1, "rank 1 raised ValueError: boom"))
    job.aborted(1.1, Abort(1, 1, "rank 1 raised ValueError: boom (train.py:12)"))
    job.aborted(1.2, Abort(0, 0, "rank 0 failed later"))
    job.ended(1.3, 0, 1)
    job.ended(1.3, 1, 1)
    assert job.headline() == (
        "rank 1 (pid 101) exited with code 1: rank 1 raised ValueError: boom (train.py:12) [HVD401]"
    )


def test_an_abort_record_that_names_no_rank_is_of_who_says_it():
    job = ending()
    job.aborted(1.0, Abort(2, 7, "?"))
    assert job.culprit() == 2


def test_an_abort_record_starts_the_grace():
    job = ending()
    job.aborted(5.0, Abort(1, 1, "ValueError: boom (train.py:12)"))
    assert job.due() == 7.0
    job.ended(5.1, 1, 1)
    assert job.due() == 7.0
    assert job.headline() == "rank 1 (pid 101) exited with code 1: ValueError: boom (train.py:12) [HVD401]"


def test_a_culprit_that_has_said_why_and_ends_too_slowly_is_still_the_one_that_failed():
    """It is no rank killed by SIGTERM with code 143: on a busy machine a process takes longer to end than the grace."""
    job = ending(2)
    job.aborted(5.0, Abort(1, 1, "rank 1 raised ValueError: boom (train.py:12)"))
    assert job.act(7.0) == TERM._replace(spared=frozenset({1})) and job.act(7.5) == KILL._replace(spared=frozenset({1}))
    job.ended(7.6, 0, -9)
    assert job.due() == 5.0 + LEAVING_S and job.act(15.0) == TERM and job.due() == 15.5
    job.ended(15.1, 1, -15)
    assert job.exit_code() == 1
    assert job.headline() == (
        "rank 1 (pid 101) failed, and was stopped before it ended: rank 1 raised ValueError: boom (train.py:12) "
        "[HVD401]"
    )


def test_a_culprit_that_has_said_why_gets_the_time_to_exit_with_its_own_code():
    """sys.exit(5), and handlers of atexit that take some seconds."""
    job = ending(2)
    job.aborted(5.0, Abort(0, 1, "rank 1 called sys.exit(5) (train.py:12)"))
    job.aborted(5.1, Abort(1, 1, "rank 1 called sys.exit(5) (train.py:12)"))
    assert job.act(7.0) == TERM._replace(spared=frozenset({1}))
    job.ended(7.1, 0, -15)
    job.ended(8.0, 1, 5)
    assert job.due() is None and job.exit_code() == 5
    assert job.headline() == "rank 1 (pid 101) exited with code 5: rank 1 called sys.exit(5) (train.py:12) [HVD401]"


def test_a_signal_to_the_launcher_spares_no_culprit():
    job = ending(2)
    job.aborted(5.0, Abort(1, 1, "rank 1 raised ValueError"))
    assert job.act(7.0) == TERM._replace(spared=frozenset({1}))
    assert job.signalled(7.1, signal.SIGTERM) == TERM and job.act(9.7) == KILL


@pytest.mark.parametrize("first", ["end", "record"])
def test_a_rank_that_exits_with_0_and_without_a_word_ends_nobody(first):
    job = ending()
    news = [lambda: job.ended(5.0, 0, 0), lambda: job.aborted(5.0, Abort(2, 0, "rank 0 is lost"))]
    for tell in news if first == "end" else reversed(news):
        tell()
    assert job.due() is None and job.culprit() is None and job.headline() is None
    job.ended(60.0, 1, 0)
    if first == "end":
        job.ended(70.0, 2, 0)
        assert job.exit_code() == 0 and job.headline() is None
        return
    job.ended(70.0, 2, 1)  # it needed it
    assert job.exit_code() == 1 and job.culprit() == 2
    said = "rank 2 (pid 102) exited with code 1: rank 0 (pid 100) exited with code 0 without hvd.shutdown() [HVD401]"
    assert job.headline() == said


def test_who_fails_of_something_else_than_a_rank_that_has_left_is_to_blame_itself():
    lost = "HvdPeerLostError: rank 0 is lost"
    left = "rank 0 left the job [HVD451]"
    for words, code, of in (("ValueError: boom", 1, ""), (lost, 1, left), (lost, 3, left), ("", 1, left), ("", 3, "")):
        job = ending(2)
        job.ended(5.0, 0, 0)
        job.aborted(5.0, Abort(1, 0, left))
        job.ended(70.0, 1, code, words)
        assert job.culprit() == 1 and job.exit_code() == code
        assert job.headline() == f"rank 1 (pid 101) exited with code {code}" + (f": {of}" if of else " [HVD401]")


def test_a_culprit_that_exits_with_0_hands_the_code_on():
    job = ending(2)
    job.ended(0.0, 1, 0)
    job.aborted(0.1, Abort(0, 1, "rank 1 left without hvdlite.shutdown()"))
    job.ended(0.2, 0, 4, "HvdPeerLostError: rank 1 left")
    assert job.exit_code() == 4
    said = "rank 0 (pid 100) exited with code 4: rank 1 (pid 101) exited with code 0 without hvd.shutdown() [HVD401]"
    assert job.headline() == said


WELL = [  # what rank 0, which runs exit handlers or has ended, is heard of before rank 1 fails at 5.0; is it spared?
    (lambda job: job.left.add(0), True),
    (lambda job: (job.left.add(0), job.aborted(4.0, Abort(1, 0, "rank 0 left the job [HVD451]"))), True),
    (lambda job: (job.ended(4.0, 0, 0), job.aborted(4.1, Abort(2, 0, "rank 0 left the job [HVD451]"))), False),
    (lambda job: (job.ended(4.0, 0, 0), job.missed(2, 0, "rank 0 did not call init again")), False),
]


@pytest.mark.parametrize(("well", "spared"), WELL)
@pytest.mark.parametrize("code", [1, 3, -9, -11])
def test_a_rank_that_has_left_gets_the_time_of_a_culprit_and_is_never_blamed(well, spared, code):
    job = ending()
    well(job)
    assert job.due() is None and job.culprit() is None
    job.ended(5.0, 1, code, "HvdPeerLostError: rank 0 left the job" if code == 1 else "")
    for sent in (TERM, KILL):
        assert job.act(job.due()) == sent._replace(spared=frozenset({0} if spared else {}))
    job.ended(8.0, 2, -9)
    assert job.due() == (5.0 + LEAVING_S if spared else None)
    if spared:
        assert job.act(15.0) == TERM
        job.ended(15.1, 0, -15)
    assert job.culprit() == 1 and job.exit_code() == (code if code > 0 else 128 - code)
    assert job.headline().startswith("rank 1 (pid 101) ") and "rank 0 (pid" not in job.headline()


def test_an_abort_that_everybody_survives_is_no_failure():
    job = ending(2)
    job.aborted(0.0, Abort(0, 1, "?"))
    job.ended(1.0, 0, 0)
    job.ended(1.0, 1, 0)
    assert job.exit_code() == 0 and job.headline() is None


def test_a_culprit_that_cannot_be_killed_is_a_failure():
    """In the driver of a broken device not even SIGKILL ends it; the launcher leaves it behind, but not with code 0."""
    job = ending(1)
    job.aborted(0.0, Abort(0, 0, "CUDA error"))
    job.act(2.0), job.act(2.5)  # there are no others
    assert job.act(LEAVING_S) == TERM and job.act(LEAVING_S + 0.5) == KILL
    assert job.exit_code() == 1 and job.headline() == "rank 0 (pid 100) is still running: CUDA error [HVD401]"
    job = ending(2)
    job.aborted(0.0, Abort(0, 1, "rank 1 is silent"))
    job.ended(0.1, 0, 0)
    assert job.act(2.0) == TERM and job.act(2.5) == KILL
    assert job.exit_code() == 1
    assert job.headline() == "rank 1 (pid 101) is still running; rank 0 says: rank 1 is silent [HVD401]"


def test_our_own_signal_is_not_what_a_culprit_failed_of():
    """It does not know that it has failed: it closed its descriptors, or became another program."""
    job = ending()
    job.aborted(0.0, Abort(0, 1, "the connection of rank 1 ended without a goodbye"))
    job.ended(0.1, 0, 1)
    assert job.act(2.0) == TERM
    job.ended(2.1, 1, -15)
    job.ended(2.2, 2, -15)
    assert job.exit_code() == 1
    assert job.headline() == (
        "rank 1 (pid 101) did not end by itself and was stopped; "
        "rank 0 says: the connection of rank 1 ended without a goodbye [HVD401]"
    )


def test_what_a_culprit_said_stands_beside_the_signal_that_ended_it():
    job = ending()
    job.aborted(0.0, Abort(1, 1, "rank 1 raised KeyboardInterrupt (train.py:3)"))
    job.ended(0.1, 1, -2)
    expected = "rank 1 (pid 101) killed by SIGINT: rank 1 raised KeyboardInterrupt (train.py:3) [HVD402]"
    assert job.headline() == expected and job.exit_code() == 130


def test_a_rank_that_ends_by_our_signal_is_not_to_blame():
    job = ending(2)
    assert job.signalled(0.0, signal.SIGTERM) == TERM
    job.ended(0.1, 0, -15)
    job.aborted(0.2, Abort(1, 0, "rank 0 is gone"))
    job.ended(0.3, 1, 1)
    assert job.exit_code() == 143 and job.headline() is None


def test_an_interrupt_is_passed_on_and_the_second_kills():
    job = ending()
    assert job.signalled(0.0, signal.SIGINT) == Send(int(signal.SIGINT))
    assert job.due() == INTERRUPT_S
    assert job.signalled(1.0, signal.SIGINT) == KILL
    for rank in range(3):
        job.ended(1.0, rank, -9)
    assert job.exit_code() == 130


def test_one_interrupt_kills_after_a_while():
    job = ending()
    job.signalled(0.0, signal.SIGINT)
    assert job.act(INTERRUPT_S) == KILL


def test_a_signal_to_a_job_that_is_failing_leaves_the_culprit_to_blame():
    job = ending()
    job.ended(0.0, 1, 7)
    job.signalled(0.5, signal.SIGINT)
    for rank in (0, 2):
        job.ended(0.6, rank, -2)
    assert job.exit_code() == 7 and job.headline() == "rank 1 (pid 101) exited with code 7 [HVD401]"


def test_term_twice_does_not_kill_at_once():
    job = ending()
    job.signalled(0.0, signal.SIGTERM)
    assert job.signalled(1.0, signal.SIGTERM) == TERM
    assert job.due() == TERM_S
    assert job.signalled(2.0, signal.SIGINT) == KILL


def test_the_times_are_those_of_the_contract():
    """A second and a half after the first failure nobody is left; but who is told to end by a scheduler may save."""
    graces = Graces()
    assert graces.fail + graces.term == 1.5
    told = config.read({}).values
    assert graces == Graces(told["failure_grace"], told["term_grace"], told["signal_grace"])
    assert graces.after(signal.SIGINT) == 5 and graces.after(signal.SIGTERM) == 30
    assert [Graces(signal=8.0).after(number) for number in (signal.SIGTERM, signal.SIGINT)] == [8.0, 8.0]


def test_a_signal_to_a_job_that_is_failing_does_not_prolong_it():
    job = ending()
    job.ended(0.0, 1, 7)
    job.signalled(0.5, signal.SIGTERM)
    assert job.due() == 0.5 + 2.0 + 0.5


@pytest.mark.parametrize("first", ["signal", "end"])
def test_ranks_that_a_scheduler_has_told_to_end_are_not_hurried_by_the_first(first):
    """Slurm signals whole steps: ranks get SIGTERM without the launcher, and each saves as long as it takes."""
    job = ending()
    news = [lambda: job.warned(signal.SIGTERM), lambda: job.ended(10.0, 1, 143)]
    for tell in news if first == "signal" else reversed(news):  # an agent may be slower than the rank that ends at once
        tell()
    assert job.due() == 10.0 + TERM_S and job.act(39.0) is None
    job.warned(signal.SIGTERM)  # of another host
    assert job.due() == 10.0 + TERM_S


def test_news_of_such_a_signal_puts_off_sigkill_too():
    job = ending()
    job.ended(10.0, 1, 143)
    assert job.act(12.0) == TERM
    job.warned(signal.SIGTERM)
    assert job.act(13.0) is None and job.due() > TERM_S
    job.ended(20.0, 0, 143)
    job.ended(30.0, 2, 143)
    assert job.exit_code() == 143


def test_who_was_missing_at_the_time_limit_is_the_culprit_once_somebody_fails_of_it():
    job = ending()
    job.missed(0, 2, "rank 2 did not call init within 3 s")
    assert job.due() is None and job.culprit() is None and job.headline() is None  # the others may go on without
    job.ended(1.0, 0, 1)
    assert job.culprit() == 2 and job.due() == 3.0
    job.act(3.0), job.act(9.0)
    job.ended(9.0, 1, -15)
    job.ended(9.0, 2, -9)
    assert job.exit_code() == 1
    assert job.headline() == (
        "rank 2 (pid 102) did not end by itself and was stopped; "
        "rank 0 says: rank 2 did not call init within 3 s [HVD401]"
    )


def test_ranks_that_fail_before_one_is_missed_stay_the_cause():
    job = ending()
    job.ended(1.0, 1, 4)
    job.missed(0, 2, "rank 2 did not call init within 3 s")
    job.ended(1.1, 0, 1)
    assert job.culprit() == 1
