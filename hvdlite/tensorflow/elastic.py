"""Elastic training with TensorFlow: `@hvd.elastic.run`, and states of variables and of Keras's models.

    @hvd.elastic.run
    def train(state):
        ...
        state.commit()

    train(hvd.elastic.TensorFlowState(variables, step=0))

A lost rank that is noticed inside a graph is a tf.errors.UnknownError like others; `run` distinguishes it by asking
the core, so that whichever collective it was becomes the loop's business, and every other error stays what it is.
States of graphs ask likewise while they are synchronized.

Ranks come and go in jobs that hvdlite-run --min-np has started (see hvdlite.elastic).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from .. import _core
from ..elastic import ObjectState, State, reset, run_fn
from ..errors import HorovodInternalError
from ..errors.user_warning import warn
from ..keras.elastic import KerasState
from ..ops.objects import broadcast_object
from ..training.gradient_tracker import windows
from .functions import broadcast_variables


def _lost(error: tf.errors.UnknownError) -> HorovodInternalError | None:
    """The lost rank behind an error of TensorFlow's; None if it is about something else."""
    failure = _core.failure_of_job()
    if failure is not None:
        found = _core.error_for(failure[1], failure[2])
        return found if isinstance(found, HorovodInternalError) else None
    ours = any(op in error.message for op in ("HvdFinish", "HvdStart", "HvdGate"))
    return HorovodInternalError(error.message) if ours else None


@contextlib.contextmanager
def _losses_raised() -> Iterator[None]:
    """A lost rank is a HorovodInternalError, however TensorFlow has reported it."""
    try:
        yield
    except tf.errors.UnknownError as error:
        lost = None if isinstance(error, HorovodInternalError) else _lost(error)
        if lost is None:
            raise
        raise lost from error


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function so that it survives lost ranks and uses new ones. See ``hvdlite.elastic.run``.

    A lost rank inside a ``tf.function`` is a ``tf.errors.UnknownError``, like other errors of TensorFlow. This form
    tells them apart and retries only lost ranks.

    Args:
        func (callable): the training function, ``func(state, *args, **kwargs)``. All ranks must call it.

    Returns:
        callable: a function with the arguments and the result of ``func``.

    Raises:
        HvdMismatchError: when called, the states of the ranks have different attributes or parts.
        HvdNotYetError: when called, a rank was lost in a job that is not elastic. The other errors are those of
            ``hvdlite.elastic.run``.

    Example:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.step < 3:
        ...         weight.assign_add([1.0])
        ...         state.step += 1
        ...         state.commit()
        >>> weight = tf.Variable([float(hvd.rank())])
        >>> train(hvd.elastic.TensorFlowState([weight], step=0))
        >>> weight.numpy().tolist()
        [3.0]
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _losses_raised():
            return func(*args, **kwargs)

    return run_fn(wrapper, reset)


class TensorFlowKerasState(KerasState):
    """State of a Keras model and its optimizer: ``hvdlite.keras.elastic.KerasState`` by Horovod's other name.

    Args:
        model: the model, built.
        optimizer (optional): its optimizer. Default: the one that the model was compiled with.
        backend: accepted for Horovod, without effect.
        kwargs: more objects, by the name of the attribute.

    Raises:
        ValueError: the model is not built.

    Example:
        >>> model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        >>> state = hvd.elastic.TensorFlowKerasState(model, epoch=0)
        >>> state.epoch = 4
        >>> state.restore()
        >>> state.epoch
        0
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class TensorFlowState(ObjectState):
    """State of a list of variables and of any other objects, which are kept as attributes.

    Args:
        variables (list, optional): ``tf.Variable`` or Keras variables, in the same order on all ranks. Default: all
            global variables of the TensorFlow 1 graph.
        session (optional): the session of the variables of a graph. Default: TensorFlow's default session.
        kwargs: more objects, by the name of the attribute.

    Raises:
        ValueError: the variables are those of a graph, and there is no session.

    Example:
        >>> weight = tf.Variable([1.0])
        >>> state = hvd.elastic.TensorFlowState([weight], epoch=0)
        >>> _ = weight.assign([5.0])
        >>> state.restore()
        >>> weight.numpy().tolist()
        [1.0]
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session or tf.compat.v1.get_default_session()
        self._in_graph = not tf.executing_eagerly()
        if self._in_graph:
            known, every = {each.name for each in self.variables}, tf.compat.v1.global_variables()
            names = [each.op.name.rpartition("/")[2] for each in every]
            its = [each for each, name in zip(every, names) if name.startswith("hvd_")]
            self.variables += [each for each in its if each.name not in known]  # sums and counters of optimizers
            if self.session is None:
                raise ValueError("variables of a graph need a session: give session=, or make one the default [HVD247]")
            self._sent = broadcast_variables(self.variables, root_rank=0)
        self._values, self._within = self._copies(), self._passes()
        super().__init__(bcast_object=broadcast_object, get_rank=_core.rank, **kwargs)

    def save(self) -> None:
        """Keep a copy of everything in memory."""
        values, within = self._copies(), self._passes()
        super().save()
        self._values, self._within = values, within

    def restore(self) -> None:
        """Go back to the copy that was saved last. Windows of ``backward_passes_per_step`` begin anew."""
        self._begin_windows(self._within)
        for variable, value in zip(self.variables, self._values):
            if self._in_graph:
                variable.load(value, self.session)
            else:
                variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0. All ranks must call it.

        Raises:
            HvdMismatchError: the ranks have different variables.
            HvdPeerLostError: a rank has left or died. The copies stay as they were.
        """
        if self._in_graph:
            with _losses_raised():
                self.session.run(self._sent)
        else:
            broadcast_variables(self.variables, root_rank=0)
        self._begin_windows(self._passes())
        values = self._copies()
        super().sync()
        self._values, self._within = values, 0  # now that all has arrived: until then there is a way back

    def _form(self) -> dict[str, str]:
        return {**super()._form(), "variables": str(len(self.variables))}

    def state_dict(self) -> dict[str, Any]:
        """Return what was saved last.

        Returns:
            dict: ``{"objects": {name: value}, "variables": [array]}``.
        """
        return {**super().state_dict(), "variables": [np.array(value) for value in self._values]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a state that ``state_dict`` has returned.

        Args:
            state_dict (dict): the value of ``state_dict``, from this job or another one.

        Raises:
            HvdStateError: the names of the attributes differ.
            ValueError: the variables have other shapes.
        """
        values = state_dict["variables"]
        shapes = [tuple(value.shape) for value in values]
        if [tuple(variable.shape) for variable in self.variables] != shapes:
            raise ValueError(f"the shapes of its variables differ from those of the job: {shapes} [HVD425]")
        self._values = values if self._in_graph else [tf.convert_to_tensor(value) for value in values]
        super().load_state_dict(state_dict)
        self.restore()

    def _passes(self) -> int:
        """How many passes of an unfinished window of an optimizer are done; 0 in a graph, whose variables hold it."""
        return 0 if self._in_graph else max((each.position() for each in windows), default=0)

    def _begin_windows(self, passes: int) -> None:
        for each in () if self._in_graph else windows:
            each.clear()
        if passes:
            warn(
                f"rank {_core.rank()}: a window of backward_passes_per_step restarts. It was committed after {passes} "
                "of its passes, and TensorFlowState does not keep their sums: commit at the end of a window, or use "
                "KerasState [HVD243]"
            )

    def _copies(self) -> list[Any]:
        if self._in_graph:
            return list(self.session.run(self.variables))
        return [tf.identity(variable) for variable in self.variables]


__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run", "run_fn"]
