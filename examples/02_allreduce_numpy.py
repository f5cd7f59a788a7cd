"""Collectives on NumPy arrays, each compared with the expected result.

hvdlite-run -np 2 python examples/02_allreduce_numpy.py
"""

import numpy as np

import hvdlite as hvd

hvd.init()
rank, size = hvd.rank(), hvd.size()
of_ranks = sum(range(size))

# Average (the default), sum, and the sum in place.
mine = np.full((3, 4), rank, dtype=np.float32)
assert np.all(hvd.allreduce(mine) == of_ranks / size)
assert np.all(hvd.allreduce(mine, op=hvd.Sum) == of_ranks)
hvd.allreduce_(mine, op=hvd.Max)
assert np.all(mine == size - 1)

# Asynchronous: many small arrays travel together. They have names, so ranks may call in any order.
arrays = {f"layer{i}": np.full(1000, i + rank, dtype=np.float64) for i in range(10)}
order = list(arrays) if rank % 2 == 0 else list(reversed(arrays))
handles = {name: hvd.allreduce_async(arrays[name], name=name, op=hvd.Sum) for name in order}
for i, name in enumerate(arrays):
    assert np.all(hvd.synchronize(handles[name]) == i * size + of_ranks)

# Allgather joins along the first dimension, which may differ between ranks: rank r gives r + 1 rows.
rows = hvd.allgather(np.full((rank + 1, 2), rank, dtype=np.int64))
assert rows.shape == (size * (size + 1) // 2, 2)
assert np.array_equal(rows[:, 0], np.repeat(np.arange(size), np.arange(1, size + 1)))

# Broadcast: every rank gets the array of the root.
seed = hvd.broadcast(np.array([42 if rank == 0 else 0]), root_rank=0)
assert seed[0] == 42

hvd.barrier()
if rank == 0:
    print(f"allreduce, allgather and broadcast are right on {size} rank{'s' if size > 1 else ''}")
hvd.shutdown()
