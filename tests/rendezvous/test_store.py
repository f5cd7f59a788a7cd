"""The rendezvous store and its client: ranks meet, exchange, leave, come again, and hear who is gone and why."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from linking import SECRET
from ranks import everything
from storing import JOB, SECONDS, frame, joined, joining, served, stranger, together

from hvdlite.errors import HvdInitError, HvdPeerLostError
from hvdlite.rendezvous import store_client
from hvdlite.security import framing


@pytest.mark.parametrize("size", [1, 3, 16, *everything(2, 7)])
def test_everybody_gets_everybodys_bytes_in_rank_order(size):
    with served(size) as store:

        def rank(number):
            mine = store.connect(number, size)
            assert (mine.epoch, mine.job) == (0, JOB)
            rounds = [mine.allgather(bytes([number]) * (number * step)) for step in range(3)]
            mine.bye()
            return rounds

        expected = [[bytes([number]) * (number * step) for number in range(size)] for step in range(3)]
        assert together(size, rank) == [expected] * size
        assert store.aborts == []


def test_a_megabyte_of_each_rank_arrives():
    with served(3) as store:
        parts = [bytes([65 + rank]) * (1 << 20) for rank in range(3)]
        assert together(3, lambda rank: store.connect(rank, 3).allgather(parts[rank])) == [parts] * 3


def test_more_than_a_frame_holds_is_refused_and_says_whose_part_it_was():
    with served(2) as store:
        outcomes = together(2, lambda rank: store.connect(rank, 2).allgather(b"x" * (9 << 20)))
        assert all(isinstance(error, HvdInitError) and "exceeds 16 MiB" in str(error) for error in outcomes)


def test_ranks_that_leave_can_come_again():
    with served(2) as store:

        def rank(number):
            for epoch in range(5):
                mine = store.connect(number, 2)
                assert mine.epoch == epoch
                assert mine.allgather(b"%d" % number) == [b"0", b"1"]
                mine.bye()
                mine.bye()
            return "done"

        assert together(2, rank) == ["done", "done"]


def test_a_rank_in_the_next_epoch_waits_for_the_others():
    with served(2) as store:
        met = threading.Barrier(2)

        def rank(number):
            first = store.connect(number, 2)
            met.wait()
            if number == 1:
                time.sleep(0.3)
                assert first.fileno() >= 0
            first.bye()
            return store.connect(number, 2).epoch

        assert together(2, rank) == [1, 1]


def lost(outcome, *words):
    assert isinstance(outcome, HvdPeerLostError), outcome
    for word in words:
        assert word in str(outcome), outcome


def test_a_connection_that_ends_without_bye_is_a_loss_to_those_who_wait():
    with served(3) as store:

        def rank(number):
            mine = store.connect(number, 3)
            if number == 1:
                mine.close()
                return "closed"
            return mine.allgather(b"")

        outcomes = together(3, rank)
        for number in (0, 2):
            lost(outcomes[number], "rank 1 (pid ", "without a goodbye")
            assert outcomes[number].rank == 1


def test_the_launchers_word_on_how_a_rank_ended_is_what_the_others_hear():
    with served(2) as store:
        both = threading.Barrier(2)

        def rank(number):
            mine = store.connect(number, 2)
            both.wait()
            if number == 1:
                mine.close()
                store.rank_ended(1, "rank 1 (pid 77) killed by SIGKILL")
                return "dead"
            began = time.monotonic()
            try:
                return mine.allgather(b"")
            finally:
                assert time.monotonic() - began < SECONDS / 2

        lost(together(2, rank)[0], "rank 1 (pid 77) killed by SIGKILL")


def test_a_rank_that_ends_before_it_joins_fails_those_who_wait_for_it():
    with served(3) as store:
        timer = threading.Timer(0.2, store.rank_ended, (2, "rank 2 (pid 9) exited with code 0"))
        timer.start()
        outcomes = together(2, lambda rank: store.connect(rank, 3))
        for outcome in outcomes:
            lost(outcome, "rank 2 (pid 9) exited with code 0 and did not call init")


def test_a_rank_that_never_joins_tells_the_store_itself_how_it_has_ended():
    text = "rank 1 (pid 9 on b) returned from its function"
    with served(2) as store:
        for impossible in (-1, 2):
            store_client.ended(*store.address, SECRET, impossible, text, SECONDS)
        store_client.ended(*store.address, b"another secret" * 3, 1, text, SECONDS)
        timer = threading.Timer(0.2, store_client.ended, (*store.address, SECRET, 1, text, SECONDS))
        timer.start()
        lost(together(2, lambda rank: None if rank else store.connect(0, 2))[0], f"{text} and did not call init")
        timer.join()
    store_client.ended(*store.address, SECRET, 1, text, 0.2)  # nobody is there any more


def test_who_joins_after_a_rank_has_ended_hears_of_it_at_once():
    with served(2) as store:
        store.rank_ended(0, "rank 0 (pid 9) killed by SIGSEGV")
        time.sleep(0.1)
        lost(together(2, lambda rank: store.connect(1, 2) if rank else None)[1], "rank 0 (pid 9) killed by SIGSEGV")


def test_a_rank_that_ends_after_bye_is_no_loss_until_somebody_waits_for_it():
    with served(2) as store:

        def rank(number):
            mine = store.connect(number, 2)
            mine.allgather(b"")
            if number == 1:
                mine.bye()
                store.rank_ended(1, "rank 1 (pid 5) exited with code 0")
                return "left"
            time.sleep(0.3)
            mine.bye()  # had it been told of a loss, its next life would be no different: it fails, with this text
            return store.connect(0, 2)

        outcome = together(2, rank)[0]
        lost(outcome, "rank 1 (pid 5) exited with code 0 and did not call init again")


def test_a_member_that_left_is_not_reported_lost_in_its_epoch():
    with served(2) as store:
        one, other = joined(store)
        other.say(framing.BYE)
        assert frame(other) is None
        store.rank_ended(1, "rank 1 exited with code 0")
        one.settimeout(0.5)
        with pytest.raises(TimeoutError):
            one.recv(1)


def test_an_abort_record_reaches_the_launcher_and_all_others():
    with served(3) as store:

        def rank(number):
            mine = store.connect(number, 3)
            if number == 2:
                mine.abort(2, -5, "ValueError: boom (train.py:12)")
                return "told"
            return mine.allgather(b"")

        outcomes = together(3, rank)
        for number in (0, 1):
            lost(outcomes[number], "rank 2 ended the job: ValueError: boom (train.py:12)")
        assert store.aborts == [(2, 2, -5, "ValueError: boom (train.py:12)")]


def test_the_text_of_an_abort_record_is_cut_between_characters():
    body = framing.pack_end(3, -5, "x" + "é" * 2000)
    assert len(body) <= 8 + framing.TEXT_MAX
    culprit, code, text = framing.unpack_end(body)
    assert (culprit, code) == (3, -5) and text == "x" + "é" * ((framing.TEXT_MAX - 1) // 2)
    text = framing.unpack_end(framing.pack_end(3, -5, "x" + "é" * 2000 + " [HVD450]"))[2]
    assert len(text.encode()) <= framing.TEXT_MAX and text == "x" + "é" * ((framing.TEXT_MAX - 10) // 2) + " [HVD450]"
    for whole in ("x [HVD450]", "x" * (framing.TEXT_MAX - 9) + " [HVD450]"):
        assert framing.unpack_end(framing.pack_end(3, -5, whole))[2] == whole


def test_missing_ranks_are_named_at_the_time_limit():
    with served(4) as store:
        outcomes = together(2, lambda rank: store.connect(rank, 4, timeout=0.4))
        for outcome in outcomes:
            assert isinstance(outcome, HvdInitError) and "ranks 2, 3 did not call init within 0.4 s" in str(outcome)
            assert "HVDLITE_START_TIMEOUT" in str(outcome)
        ((waiting, missing, text),) = store.missed
        assert waiting in (0, 1) and missing == 2 and "ranks 2, 3 did not call init within 0.4 s" in text


def test_ranks_missing_from_an_allgather_are_named_at_the_time_limit():
    with served(2) as store:

        def rank(number):
            mine = store.connect(number, 2, timeout=0.4)
            if number:
                return time.sleep(1.0)
            try:
                return mine.allgather(b"")
            except HvdInitError as error:
                mine.abort(0, -6, str(error))  # init does that, and is not the cause
                raise

        outcome = together(2, rank)[0]
        assert isinstance(outcome, HvdInitError) and "rank 1 did not take part in allgather 1" in str(outcome)
        assert [(waiting, missing) for waiting, missing, _ in store.missed] == [(0, 1)] and not store.aborts


def test_a_second_process_of_a_rank_is_refused_and_both_are_named():
    with served(2) as store:
        first = stranger(store, True)
        first.say(*joining(1, pid=111))
        second = stranger(store, True)
        second.say(*joining(1, pid=222))
        kind, body = frame(second)
        assert kind == framing.REFUSED and b"111" in body and b"222" in body and b"rank 1" in body
        assert frame(second) is None
        mine = store.connect(0, 2)  # the first goes on
        assert frame(first)[0] == framing.JOINED
        mine.bye()


@pytest.mark.parametrize(
    "rank, size, says", [(0, 3, "says 3 ranks, but this job has 2"), (2, 2, "no rank 2"), (-1, 2, "no rank -1")]
)
def test_a_rank_that_cannot_be_is_refused(rank, size, says):
    with served(2) as store, pytest.raises(HvdInitError, match=says):
        store.connect(rank, size)


def test_versions_that_differ_are_refused_on_both_sides():
    with served(2) as store:

        def rank(number):
            if number == 1:
                time.sleep(0.2)
            return store.connect(number, 2, version=f"1.{number}", wire=number)

        for outcome in together(2, rank):
            assert isinstance(outcome, HvdInitError)
            assert "rank 1 runs hvdlite 1.1 (wire 1), rank 0 runs hvdlite 1.0 (wire 0)" in str(outcome)


def test_a_wrong_secret_is_told_at_once():
    with served(1) as store:
        began = time.monotonic()
        with pytest.raises(HvdInitError, match="refused this rank's secret"):
            store.connect(0, 1, secret=bytes(32))
        assert time.monotonic() - began < SECONDS / 2


def test_no_store_is_told_with_its_address():
    with served(1) as store:
        pass
    with pytest.raises(HvdInitError, match=f"no store answers at 127.0.0.1:{store.address[1]}"):
        store.connect(0, 1, timeout=0.3)


def test_a_store_that_ends_is_told():
    with ThreadPoolExecutor(1) as pool:
        with served(2) as store:
            waits = pool.submit(store.connect, 0, 2)
            deadline = time.monotonic() + 10
            while not store.store._members and time.monotonic() < deadline:
                time.sleep(0.01)
        with pytest.raises(HvdInitError, match="the store closed the connection"):
            waits.result(10)
