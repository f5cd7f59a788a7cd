"""When a gradient is due: the book that counts backward passes, without any framework."""

import pytest

from hvdlite.optimizer import GradientBook


def book(parameters=2, passes=1):
    made = GradientBook(passes)
    for number in range(parameters):
        assert made.add() == number
    return made


def test_one_pass_makes_a_gradient_due():
    made = book()
    assert made.passed(0)
    made.sent(0)
    assert made.is_sent(0) and made.unsent() == [1]


def test_due_after_as_many_passes_as_asked_for():
    made = book(passes=3)
    assert [made.passed(0) for _ in range(3)] == [False, False, True]
    assert made.passed(1) is False


def test_reset_begins_a_step():
    made = book(passes=2)
    made.passed(0)
    made.sent(1)
    made.reset()
    assert made.unsent() == [0, 1]
    assert [made.passed(0) for _ in range(2)] == [False, True]


def test_recall_begins_one_parameter_anew():
    made = book(passes=2)
    made.passed(0), made.passed(0)
    made.sent(0)
    with pytest.raises(AssertionError):
        made.passed(0)
    made.recall(0)
    assert made.passed(0) is False and 0 in made.unsent()


def test_a_step_is_whole_when_nothing_is_half_counted():
    made = book(passes=2)
    assert not made.whole()  # nothing has been sent
    made.passed(0), made.passed(0)
    made.sent(0)
    assert made.whole()
    made.passed(1)
    assert not made.whole()


@pytest.mark.parametrize("passes", [0, -1, 1.5, "2", True, None])
def test_passes_per_step_must_be_a_positive_whole_number(passes):
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        GradientBook(passes)
