"""Elastic training on TensorFlow 2 as Horovod's users write it: nothing here knows of hvdlite.

Run by test_elastic_frameworks.py, which kills a rank and makes the file that is named last once another has come.
"""

import json
import os
import sys

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

hvd.init()
lr = 0.0001
inputs = np.random.RandomState(1).randn(4, 16, 3).astype("float32")
targets = inputs.sum(2, keepdims=True)
model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
optimizer = tf.keras.optimizers.SGD(lr * hvd.size(), momentum=0.5)


@tf.function
def train_one_batch(data, target, allreduce=True):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(data, training=True) - target) ** 2)
    if allreduce:
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))


train_one_batch(tf.constant(inputs[0]), tf.zeros([16, 1]), allreduce=False)  # makes the variables, and changes none


@hvd.elastic.run
def train(state):
    shown = False
    while not hvd.broadcast_object(os.path.exists(sys.argv[1])):
        for state.batch in range(state.batch, 4):  # noqa: B020
            train_one_batch(tf.constant(inputs[state.batch]), tf.constant(targets[state.batch]))
            state.sizes = state.sizes + [(state.batch, hvd.size())]
            if not shown:
                print(f"trains: rank {hvd.rank()} of {hvd.size()}, pid {os.getpid()}.", flush=True)
                shown = True
            if state.batch % 2 == 0:
                state.batch += 1
                state.commit()
        state.batch, state.epoch = 0, state.epoch + 1


def on_state_reset():
    optimizer.learning_rate.assign(lr * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0, sizes=[])
state.register_reset_callbacks([on_state_reset])
train(state)
weights = model.trainable_variables[0].numpy().ravel().tolist()
with open(f"{sys.argv[1]}.{hvd.rank()}", "w") as file:
    json.dump({"weights": weights, "sizes": state.sizes, "epoch": state.epoch}, file)
