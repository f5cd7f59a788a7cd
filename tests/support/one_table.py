"""A table in one process, for tests of layers: a NumPy array that is pulled from, and a list of what was pushed.

It is strict where the real one trusts its caller: ids that pull_unique and push_unique get are sorted, different and
int64, gradients are contiguous float32.
"""

import contextlib

import numpy as np

from hvdlite.ps.arrays import added_up
from hvdlite.ps.table import Table


class OneTable:
    def __init__(self, rows=50, dim=4, name="users"):
        self.name, self.rows, self.dim, self.is_frozen, self.steps = name, rows, dim, False, 0
        self.weight = np.random.default_rng(3).standard_normal((rows, dim)).astype(np.float32)
        self.pulls, self.pushes = [], []

    checked_ids = Table.checked_ids

    def pull_unique(self, ids):
        assert ids.dtype == np.int64 and (np.diff(ids) > 0).all()
        self.pulls.append(ids)
        return self.weight[ids]

    def push_unique(self, ids, grads):
        assert ids.dtype == np.int64 and (np.diff(ids) > 0).all() and not self.is_frozen
        assert grads.dtype == np.float32 and grads.shape == (len(ids), self.dim) and grads.flags.c_contiguous
        self.pushes.append((ids, grads))

    def push_async(self, ids, grads):
        self.push_unique(*added_up(self.checked_ids(ids).ravel(), np.asarray(grads).reshape(-1, self.dim)))

    def _end_step(self, flag):
        assert not self.is_frozen
        self.steps += 1

    def _wait_turn(self):
        pass

    @contextlib.contextmanager
    def frozen(self):
        self.is_frozen = True
        yield
        self.is_frozen = False

    def pushed(self):
        """What was pushed, as the gradient of a dense weight; forgets it."""
        total = np.zeros_like(self.weight)
        for ids, grads in self.pushes:
            total[ids] += grads
        self.pushes.clear()
        return total
