"""When is a gradient due? The book that counts backward passes, without any framework."""

import pytest

from hvdlite.training.gradient_tracker import GradientTracker


def book(parameters=2, passes=1):
    made = GradientTracker(passes)
    for number in range(parameters):
        assert made.add() == number
    return made


def reach(made, parameter, backward, nested=False):
    made.reached(parameter, backward)
    return made.due(parameter, nested)


def test_one_pass_makes_a_gradient_due():
    made = book()
    assert reach(made, 0, backward=1)
    made.sent(0)
    assert made.is_sent(0) and made.unsent() == [1]
    assert made.ended()


def test_due_after_as_many_passes_as_asked_for():
    made = book(passes=3)
    seen = []
    for backward in range(3):
        due = reach(made, 0, backward)
        seen.append((due, made.ended()))
    assert seen == [(False, False), (False, False), (True, True)]
    assert reach(made, 1, backward=3) is False


def test_a_round_begins_a_window_and_is_remembered_until_a_pass_begins():
    made = book(passes=2)
    reach(made, 0, backward=0)
    made.sent(0)
    assert made.in_flight() and not made.complete
    made.completed()
    assert made.complete and made.reduced and not made.in_flight()
    made.begun()
    assert made.reduced and not made.complete
    assert not reach(made, 0, backward=1)


def test_reset_begins_a_step():
    made = book(passes=2)
    reach(made, 0, backward=0)
    made.sent(1)
    made.ended()
    made.reset()
    assert made.unsent() == [0, 1] and not made.reduced
    assert not reach(made, 0, backward=1) and not made.ended()
    assert reach(made, 0, backward=2) and made.ended()


def test_a_parameter_reached_twice_by_one_backward_is_one_pass_and_travels_at_the_end_from_then_on():
    made = book(passes=2)
    assert not reach(made, 0, backward=0) and not reach(made, 0, backward=0)
    made.ended()
    assert not reach(made, 0, backward=1), "its second time in this pass may come yet"
    assert made.ended() and made.unsent() == [0, 1]


def test_what_a_nested_backward_reaches_is_held_back_as_another_rank_may_reach_it_again():
    made = book()
    for backward in range(3):
        assert not reach(made, 0, backward, nested=True)
        assert made.ended() and made.unsent() == [0, 1]
    assert not reach(made, 0, backward=3), "nor when it is reached outside: the nested one may follow"


def test_recall_sends_a_parameter_once_more_in_the_same_round():
    made = book()
    assert reach(made, 0, backward=0)
    made.sent(0)
    with pytest.raises(AssertionError):
        made.reached(0, 0)
    made.recall(0)
    assert not reach(made, 0, backward=0) and 0 in made.unsent()


def test_passes_that_only_accumulate_are_not_counted_and_the_next_one_closes_the_window():
    made = book(passes=3)
    made.accumulating = True
    assert not reach(made, 0, backward=0) and not made.ended()
    made.accumulating = False
    assert reach(made, 1, backward=1) and made.ended()
    made.completed()
    assert not reach(made, 0, backward=2) and not made.ended(), "the next window is whole again"


def test_other_passes_per_step_begin_the_window_anew():
    made = book(passes=2)
    reach(made, 0, backward=0)
    made.ended()
    made.passes_per_step = 2
    assert not reach(made, 0, backward=1) and not made.ended()


@pytest.mark.parametrize("passes", [0, -1, 1.5, "2", True, None])
def test_passes_per_step_must_be_a_positive_whole_number(passes):
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        GradientTracker(passes)
