"""HVD3xx: Ranks disagree, and numbers that are none.

Each block is a code: its title, what raises it, cause and remedy (row.py says how a page is read). What Python tells
comes first, then what the core tells. Tests find the texts with these codes, and fail if a code is not here or a row
is not used.
"""

from .row import family

_PYTHON = """
HVD301 Ranks gave different lists of tensors
raises: HvdMismatchError
cause: Ranks compared what they have, and the names, numbers, shapes or dtypes of their tensors differ: the model was
not built in the same way everywhere.
remedy: The text names the first entry that differs and the ranks. Build the same model on every rank: look for random
choices before the seed is set, for `if hvd.rank() == 0`, and for data that decides the shape of a layer.

HVD302 Values that should be the same differ between ranks
raises: HvdMismatchError
cause: `hvd.check_consistency` found a parameter, buffer or state whose bits are not the same on all ranks: an update
was skipped or made twice somewhere, or the first values were never broadcast.
remedy: Call `hvd.broadcast_parameters` (or `broadcast_state`) after the model is made or loaded. If they differ later,
look for code that only some ranks run, and for an optimizer that is not a `DistributedOptimizer`.

HVD303 Ranks add or remove different process sets
raises: HvdMismatchError
cause: All ranks, members or not, must add and remove the same process sets in the same order; here two ranks did
something else.
remedy: Call `hvd.add_process_set` and `hvd.remove_process_set` outside of conditions on the rank.

HVD304 Ranks have other windows of backward passes
raises: HvdMismatchError
cause: `backward_passes_per_step` differs between ranks, or a rank loaded weights in the middle of a window while others
did not.
remedy: Give all ranks the same `backward_passes_per_step`; load weights on all ranks, before the first pass or when a
window has ended. With `hvd.join()`, take a first step on every rank before it.

HVD305 Ranks have gradients for different variables
raises: HvdMismatchError
cause: A step of the optimizer was called with another list of variables on some rank: other layers are trainable, or a
branch of the model was not run.
remedy: The text says who has what. Freeze the same layers everywhere, and give all ranks the same list of variables;
variables without a gradient must be without one on all ranks.

HVD306 A call failed because it failed on another rank
raises: ValueError, RuntimeError, HvdMismatchError
cause: Something that all ranks do together, such as adding a process set, was refused on the rank that is named, with
the reason that follows.
remedy: Correct what that rank gave; here nothing was wrong.

HVD307 Not all ranks have the same metrics
raises: a warning
cause: Metrics are averaged over ranks by name, and some exist on a part of the ranks only, for example because only
rank 0 has validation data.
remedy: Compile the same metrics everywhere, and give validation data to all ranks or to none.

HVD308 A rank skipped a backward pass
raises: HvdMismatchError, HvdError
cause: The backward pass of the rank that is named ended with an exception (out of memory, an error in a hook) that the
script caught, after gradients had been sent. The step has no averages on any rank.
remedy: Catch this error where the exception is caught: call `optimizer.zero_grad()` and take the next batch on all
ranks. Until `zero_grad()` all ranks refuse `step()`, and directly after it `step()` does nothing on any rank. An
exception in forward is not told: there call `zero_grad()` and `step()`, which gives zeros.

HVD309 A rank has missed a step that others took
raises: HvdError, HvdMismatchError
cause: A signal handler (Ctrl-C, an alarm) or another exception has left `backward()` or `step()` of this rank when its
gradients had been sent, or came between the two, and the script caught it. The other ranks have their averages and step
with them; without that step the weights of this rank are others. What came between `backward()` and `step()` is told on
all ranks, in the next round of gradients, and again until the ranks are equal; not with a comm hook, which sends what
it likes. Where all ranks leave a step out, or something has written to the parameters since, nothing is told.
remedy: The text says which. While it waited: go on to `optimizer.step()` before `zero_grad()`. Within `step()`, or if
the gradients are lost, or the step was missed: load a checkpoint on all ranks (with `optimizer.load_state_dict`), or
call `hvd.broadcast_parameters` and `hvd.broadcast_optimizer_state` on all. Where an exception between `backward()` and
`step()` is caught, call `step()` there.

HVD320 A rank gave NaN or infinities
raises: HvdNotFiniteError, a warning
cause: `HVDLITE_NAN_GUARD` is on, and a tensor to be reduced held values that are no numbers. The text says which
tensor, which rank had them first, and how many.
remedy: Look at that rank's batch and loss: a learning rate that is too high, a division by zero, a logarithm of zero,
bad data, or float16 without a `GradScaler`. `hvd.check_consistency` tells whether ranks had parted before.
"""

# From 350 on, what the core tells.
_CORE = """
HVD350 The ranks disagree about one tensor
raises: HvdMismatchError
cause: Ranks called the collective of this name with different shapes, dtypes, operations, roots, scales or groups, or
even different collectives. Nothing was moved; the engine goes on working.
remedy: The text says who said what. Look for code that depends on the rank or on the data: a last batch that is smaller
on one rank, a layer that only some ranks have, names that are given in another order. A tensor that lies on a GPU here
and in the CPU's memory there is moved with `.cuda()` or `.cpu()`.
example: tensor 'grad': ranks disagree on the shape: rank 0 said [2, 3], rank 1 said [2, 4]. Submit the same shape on
all ranks.

HVD351 A collective that is not possible after a join
raises: HvdArgumentError
cause: Another rank has called `hvd.join()`, which gives zeros to sums; other collectives have nothing to take from it.
remedy: Only allreduce, reduce and barrier may follow a join. Gather, broadcast and the like before any rank joins, or
give all ranks the same number of steps.

HVD352 Two collectives of one name in no order
raises: an error of tf.errors
cause: A graph starts two collectives of the same name, and nothing says which comes first: on another rank it may be
the other one.
remedy: Give each call a `name` of its own, or make one wait for the other (`tf.control_dependencies`; in a session run
them one after the other).
"""

FAMILY = family(3, "Ranks disagree, and numbers that are none", _PYTHON + _CORE)
