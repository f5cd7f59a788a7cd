"""Rules of a user's for tables of hvd.ps, which servers import by name."""


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
