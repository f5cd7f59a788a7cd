"""TensorFlow's tensors on a GPU, reduced there: in graphs (csrc/tensorflow/device.c) and eagerly
(hvdlite/tensorflow/device.py). machine.py starts it on one rank, and on as many as there are GPUs. Without a GPU that
this TensorFlow sees, or with a driver that is too old, it says so, and nothing of the claim."""

import sys
import warnings

import tensorflow as tf
from verdict import tell

import hvdlite.tensorflow as hvd
from hvdlite.tensorflow.ops.kernels import library

ROWS = 2048


@tf.function
def step(x, rank):
    """Long kernels write what is reduced, and memory of TensorFlow's is used again at once."""
    slow = tf.ones([ROWS, ROWS])
    for _ in range(10):
        slow = tf.matmul(slow, slow) / ROWS
    mine = x * slow[0, 0] + tf.cast(rank, tf.float32)
    total = hvd.allreduce(mine, op=hvd.Sum, name="total")
    rows = hvd.allgather(tf.fill([rank + 1, 3], tf.cast(rank, tf.float32)) * slow[0, 0], name="rows")
    whole = hvd.allreduce(tf.fill([5], rank), op=hvd.Sum, name="whole")  # int32
    part = hvd.reducescatter(tf.tile(mine[:1], [2 * hvd.size()]), op=hvd.Sum, name="part")
    return total * 1.0, rows * 1.0, whole, part, hvd.broadcast(mine, hvd.size() - 1, name="same")


def holds(rank, size):
    """Of many steps, without a pause between them."""
    kept = [(i, step(tf.fill([100_000], float(i)), rank)) for i in range(50)]
    for i, (total, rows, whole, part, same) in kept:
        ranks = size * (size - 1) // 2
        assert "GPU" in total.device, total.device
        assert bool(tf.reduce_all(total == size * i + ranks)), (i, total)
        assert rows[:, 0].numpy().tolist() == [r for r in range(size) for _ in range(r + 1)], i
        assert whole.numpy().tolist() == [ranks] * 5, i
        assert part.numpy().tolist() == [size * i + ranks] * 2, i
        assert bool(tf.reduce_all(same == i + size - 1)), i


def holds_eagerly(rank, size):
    """The same without a graph; int32 and bool, and none."""
    slow = tf.ones([ROWS, ROWS])
    for i in range(20):
        for _ in range(5):
            slow = tf.matmul(slow, slow) / ROWS
        total = hvd.allreduce(tf.fill([100_000], float(i)) * slow[0, 0] + rank, op=hvd.Sum)
        assert "GPU" in total.backing_device, total.backing_device
        assert bool(tf.reduce_all(total * 1.0 == size * i + size * (size - 1) // 2)), (i, total)
        rows = hvd.allgather(tf.fill([rank, 3], tf.cast(rank, tf.float32)) * slow[0, 0])
        assert rows.numpy()[:, 0].tolist() == [r for r in range(size) for _ in range(r)], i
    assert hvd.allreduce(tf.fill([5], rank), op=hvd.Max).numpy().tolist() == [size - 1] * 5
    assert hvd.allreduce(tf.fill([3], rank == 0), op=hvd.Sum).numpy().tolist() == [True] * 3
    assert hvd.allreduce(tf.zeros([0, 2])).shape == (0, 2)
    with tf.GradientTape() as tape:
        x = tf.Variable([1.0, 2.0])
        loss = tf.reduce_sum(hvd.allreduce(x * (rank + 1.0), op=hvd.Sum))
    assert tape.gradient(loss, x).numpy().tolist() == [size * (rank + 1.0)] * 2


def main():
    """The program of each rank."""
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) < hvd.local_size():
        print(f"TensorFlow {tf.__version__} sees {len(gpus)} GPUs")
        return
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
    if not library().on_device:
        print(f"TensorFlow {tf.__version__} and this driver: by way of the CPU")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holds(hvd.rank(), hvd.size())
        holds_eagerly(hvd.rank(), hvd.size())
    with open("/proc/self/maps") as maps:
        by_nccl = "libnccl" in maps.read()
    if hvd.rank() == 0:
        tell("tensorflow", by_nccl, f"{hvd.size()} ranks, TensorFlow {tf.__version__}: 50 steps of five collectives")
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
