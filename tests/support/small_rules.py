"""Rules of a user's for tables of hvd.ps, which servers import by name."""

import time

from hvdlite.ps import checkpoint_pieces


def halves(rows, state, grads):
    """row -= grad / 4, and keeps the last gradient; refuses large ones."""
    if abs(grads).max() > 500:
        state[:] = 99
        raise ArithmeticError("no gradient of a thousand")
    rows -= grads / 4
    state[:] = grads


halves.columns = 1


def prints(rows, state, grads):
    """Adds, and says much."""
    print("x" * 5000)
    rows += grads


def refuses(rows, state, grads):
    """Adds, and takes no large gradients."""
    if (grads > 100).any():
        raise KeyError("too large")
    rows += grads


def disk_stops(rows, state, grads):
    """What a server writes after a gradient of 100 does not reach the disk."""
    rows += grads
    if grads.max() >= 100:
        checkpoint_pieces.write_piece = lambda *_: time.sleep(60)
