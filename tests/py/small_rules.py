"""Rules of a user's for tables of hvd.ps, which servers import by name."""


def halves(rows, state, grads):
    """row -= grad / 4, and keeps the last gradient; refuses large ones."""
    if abs(grads).max() > 500:
        state[:] = 99
        raise ArithmeticError("no gradient of a thousand")
    rows -= grads / 4
    state[:] = grads


halves.columns = 1
