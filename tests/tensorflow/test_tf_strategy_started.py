"""Scripts of tf.distribute run unchanged, and what cannot train as it seems to is refused."""

import json
import os
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from ranks import Job, as_ranks

if find_spec("tensorflow") is None:  # importing it takes seconds, and only ranks need it
    pytest.skip("TensorFlow is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine

UNCHANGED = """
import importlib.util, os, sys
assert importlib.util.find_spec("tensorflow")
import keras  # which imports TensorFlow
import tensorflow.compat.v2 as tf

options = tf.distribute.experimental.CommunicationOptions()
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
old = tf.distribute.experimental.MultiWorkerMirroredStrategy(
    communication=tf.distribute.experimental.CommunicationImplementation.RING
)
with strategy.scope():
    weight = tf.Variable(float(strategy.cluster_resolver.task_id) + 5)
context = tf.distribute.get_replica_context
total = strategy.run(lambda: context().all_reduce("SUM", context().replica_id_in_sync_group + 1))
class Mine(tf.distribute.MultiWorkerMirroredStrategy): pass
try:
    Mine()
except RuntimeError as error:
    assert "derive it from hvd.Strategy" in str(error), error
else:
    sys.exit("it would train alone")
sizes = strategy.num_replicas_in_sync, old.num_replicas_in_sync
print("trained", *sizes, float(weight.numpy()), int(total), os.environ["MINE"])
"""


def test_a_script_runs_unchanged_beside_a_sitecustomize_of_the_user(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['MINE'] = 'seen'")
    (tmp_path / "train.py").write_text(UNCHANGED)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, str(tmp_path / "train.py")]
    with Job(2, command, "--tf-strategy", cold=True, PYTHONPATH=path) as job:
        assert job.wait(300) == 0, job.text()
        assert job.text().count("trained 2 2 5.0 3 seen") == 2, job.text()


@as_ranks(2)
def test_a_strategy_that_would_train_something_else_is_refused():
    import keras
    import tensorflow as tf

    import hvdlite.tensorflow as hvd
    from hvdlite.rendezvous import elastic_member
    from hvdlite.tensorflow import strategy as strategy_module

    def refused(text):
        return pytest.raises(hvd.HvdInitError, match=text + r".*HVD429")

    for config, text in (
        ({"cluster": {"worker": ["a:1"] * 3, "chief": ["b:1"]}, "task": {}}, "has 4 workers and the job has 2 ranks"),
        ([1], "no JSON of a cluster"),
    ):
        os.environ["TF_CONFIG"] = json.dumps(config)
        with refused(text):
            hvd.Strategy()
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}})
    strategy = hvd.Strategy()
    del os.environ["TF_CONFIG"]
    made_of = strategy_module._REPLACED
    strategy_module._REPLACED = (*made_of, "_moved_by_tensorflow")
    with refused(rf"TensorFlow {tf.__version__} has no _moved_by_tensorflow in .*: use hvd.DistributedOptimizer"):
        hvd.Strategy()
    strategy_module._REPLACED = made_of
    elastic_member._values["epoch"] = 1
    with refused("ranks of an elastic job change"):
        hvd.Strategy()
    elastic_member._values.clear()
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
    version, keras.__version__ = keras.__version__, "3.4.1"
    with strategy.scope():
        tf.Variable(1.0)  # is none of Keras
        with refused("Keras 3.4.1 does not sum gradients"):
            keras.layers.Dense(1).build((1, 1))
    keras.__version__ = version
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))

    def step():
        optimizer.apply_gradients([(tf.ones([2]), weight)])

    for call in (lambda: strategy.run(step), tf.function(lambda: strategy.run(step))):
        with pytest.raises(hvd.HvdArgumentError, match=r"Strategy sums gradients already.*HVD224"):
            call()
    hvd.shutdown()
    hvd.init()
    with pytest.raises(hvd.HvdStateError, match=r"a job that is over.*HVD429"):
        strategy.reduce("SUM", tf.constant(1.0), axis=None)
    again = hvd.Strategy()
    assert again.reduce("SUM", tf.constant(1.0), axis=None) == 2
    names = {name: getattr(again.extended, name) for name in ("_num_workers", "_id_in_cluster")}
    assert names == {"_num_workers": 2, "_id_in_cluster": hvd.rank()}


@as_ranks(2)
def test_ranks_that_do_different_things_get_an_error_at_once():
    import tensorflow as tf

    import hvdlite.tensorflow as hvd

    strategy, rank = hvd.Strategy(), hvd.rank()

    def reduced(values):
        context = tf.distribute.get_replica_context
        return strategy.run(lambda: context().all_reduce("SUM", [2 * value for value in values]))

    lists = [tf.ones([2]), tf.ones([3])][: 1 + rank] * 2
    for call in (reduced, tf.function(reduced)):
        with pytest.raises(tf.errors.FailedPreconditionError, match="ranks have different lists.*\n.*2 values.*\n.*4"):
            call(lists)
    differ = r"1 variable \(bias float64 \(2,\)\)\n.*1 variable \(bias float64 \(3,\)\)"
    with pytest.raises(hvd.HvdMismatchError, match=differ), strategy.scope():
        tf.Variable(np.zeros(2 + rank), name="bias")
    assert strategy.reduce("SUM", tf.constant(1.0), axis=None) == 2, "the strategy goes on"
