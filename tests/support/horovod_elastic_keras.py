"""Elastic training on Keras as Horovod's users write it: nothing here knows of hvdlite.

Run by test_elastic_frameworks.py, which kills a rank and makes the file that is named last once another has come.
"""

import json
import os
import sys

import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd
import numpy as np
from tensorflow import keras

hvd.init()
lr = 0.0001
inputs = np.random.RandomState(1).randn(64, 3).astype("float32")
targets = inputs.sum(1, keepdims=True)
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(lr * hvd.size(), momentum=0.5)))
state = hvd.elastic.KerasState(model, batch=0, epoch=0, sizes=[])


class Shows(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.shown = False

    def on_batch_end(self, batch, logs=None):
        state.sizes = state.sizes + [(batch, hvd.size())]
        if not self.shown:
            print(f"trains: rank {hvd.rank()} of {hvd.size()}, pid {os.getpid()}.", flush=True)
            self.shown = True


def on_state_reset():
    model.optimizer.learning_rate.assign(lr * hvd.size())


state.register_reset_callbacks([on_state_reset])
callbacks = [
    Shows(),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=3),
]


@hvd.elastic.run
def train(state):
    while not hvd_tf.broadcast_object(os.path.exists(sys.argv[1])):
        model.fit(inputs, targets, batch_size=4, shuffle=False, epochs=10, callbacks=callbacks, verbose=0)


train(state)
weights = model.get_weights()[0].ravel().tolist()
with open(f"{sys.argv[1]}.{hvd.rank()}", "w") as file:
    json.dump({"weights": weights, "sizes": state.sizes, "epoch": state.epoch}, file)
