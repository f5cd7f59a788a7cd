"""A signal handler raises while `backward` or `step` waits for the other ranks' gradients. As test_interrupted."""

import os

import pytest
from ranks import as_ranks
from test_interrupted import COUNT, ERRORS, EVERY, after_ms, interrupted

torch = pytest.importorskip("torch")

import hvdlite.torch as hvd  # noqa: E402


def trained(later):
    """One step of a model of one parameter, whose gradient is the given value. later: `step` waits, not `backward`."""

    def step(value, name):
        weight = torch.nn.Parameter(torch.zeros(COUNT))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], 1.0), named_parameters=[(name, weight)], op=hvd.Sum
        )
        optimizer.wait_in_backward = not later
        (weight * value).sum().backward()
        optimizer.step()
        return -weight.detach()

    return step


@pytest.mark.parametrize("later", [False, True])
@as_ranks(2, deadline=600)
def test_a_signal_in_any_millisecond_of_a_step_leaves_no_gradient_without_an_owner(later):
    hvd.shutdown()
    os.environ["HVDLITE_CHECK_START"] = "off"  # it submits more in some steps, and a trial counts
    hvd.init()
    trained(later)(1.0, "warm")  # the first optimizer of a process imports for seconds
    for number in range(0, 58, min(2 * EVERY - 1, 14)):
        error = ERRORS[number % len(ERRORS)]("mine")
        # the gradient, and the digest of what is sent
        assert interrupted(trained(later), 101, 2, f"step.{later}", after_ms(number, 2), error)
