"""Adasum on TensorFlow over hosts with different numbers of ranks, where Horovod asks for the same number everywhere.

Horovod's check of that could never fail (it looked at the function, not at its answer), and what came out was wrong.
Here the tree of ranks knows nothing of hosts: any number of ranks on any host gives the same values.
"""

from importlib.util import find_spec

import pytest
from hosts import needs_hosts
from hosts_job import HERE, HostsJob

if find_spec("tensorflow") is None:
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

pytestmark = needs_hosts

PROGRAM = f"""
import faulthandler, sys
faulthandler.dump_traceback_later(280)  # before the test gives up: where it stands
sys.path.insert(0, {str(HERE)!r})
import ranks, numpy as np, tensorflow as tf, hvdlite.tensorflow as hvd
from test_adasum import given, tree
hvd.init()
rank, size = hvd.rank(), hvd.size()
assert size == 3 and not hvd.is_homogeneous(), hvd.local_size()

def right(got, count):
    np.testing.assert_allclose(got, tree([given(r, count, "float32") for r in range(size)]), rtol=1e-5, atol=1e-5)

for count in (1, 1000, 300001):
    x = tf.constant(given(rank, count, "float32"))
    right(hvd.allreduce(x, op=hvd.Adasum), count)
    right(tf.function(lambda x: hvd.allreduce(x, op=hvd.Adasum))(x), count)
    for each in tf.function(lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Adasum))(x)[:1]:
        right(each, count)

import keras
variable = keras.Variable(np.zeros(1000, "float32"))
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
optimizer.build([variable])
optimizer.apply([tf.constant(given(rank, 1000, "float32"))], [variable])
right(-variable.numpy(), 1000)

start = tf.Variable(np.zeros(1000, "float32"))
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(start * given(rank, 1000, "float32"))
right(hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, [start])[0], 1000)
faulthandler.cancel_dump_traceback_later()
print("adasum is right", flush=True)
"""


def test_adasum_is_right_on_hosts_of_different_numbers_of_ranks(hosts):
    with HostsJob(hosts, (2, 1), ["-c", PROGRAM], TF_CPP_MIN_LOG_LEVEL="2", HVDLITE_START_TIMEOUT="240") as job:
        assert set(job.wait(300).values()) == {0}, job.text()
        assert all("adasum is right" in job.said(rank) for rank in range(3)), job.text()
