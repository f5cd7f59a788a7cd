"""Every way to a step of Keras 2, by public names and by those that Horovod's users know: an average, or a refusal."""

from importlib.util import find_spec

import pytest
from ranks import as_ranks, everything

if find_spec("tensorflow") is None or find_spec("tf_keras") is None:
    pytest.skip("TensorFlow or tf_keras is not installed", allow_module_level=True)

PATIENCE_S = 300.0  # TensorFlow takes a minute to import on a busy machine
FRESH_RANKS = True  # which Keras it is must be said before hvdlite.keras is imported


class Passes:
    """One pass each; the gradient of `w` is the rank plus 1."""

    def __init__(self, tf, hvd, optimizer, w):
        self.tf, self.hvd, self.optimizer, self.w = tf, hvd, optimizer, w

    def loss(self):
        return self.w * (self.hvd.rank() + 1.0)

    def taped(self, distributed=False, **terms):
        with self.tf.GradientTape() as tape:
            loss = self.loss()
        tape = self.hvd_tape(tape, **terms) if distributed else tape
        return [(tape.gradient(loss, self.w), self.w)]

    def hvd_tape(self, tape, **terms):
        from hvdlite.tensorflow import DistributedGradientTape

        return DistributedGradientTape(tape, **terms)

    def minimize(self):
        self.optimizer.minimize(self.loss, [self.w])

    def by_hand(self, **flag):
        self.optimizer.apply_gradients(self.taped(), **flag)

    def own_averages(self, **flag):
        pairs = [(self.hvd.allreduce(gradient), w) for gradient, w in self.taped()]
        self.optimizer.apply_gradients(pairs, **flag)

    def taped_averages(self, **flag):
        self.optimizer.apply_gradients(self.taped(distributed=True), **flag)

    def taken(self, **flag):
        self.optimizer.apply_gradients(self.optimizer._compute_gradients(self.loss, [self.w]), **flag)

    def taken_publicly(self, **flag):
        self.optimizer.apply_gradients(self.optimizer.compute_gradients(self.loss, [self.w]), **flag)

    def clipped(self, **flag):
        pairs = self.optimizer._compute_gradients(self.loss, [self.w])
        pairs = [(gradient if gradient is None else gradient * 1.0, w) for gradient, w in pairs]
        self.optimizer.apply_gradients(pairs, **flag)

    def aggregated(self, **flag):
        self.optimizer.apply_gradients(self.optimizer._aggregate_gradients(self.taped()), **flag)

    def allreduced(self, name, **flag):
        averages = getattr(self.optimizer, name)([self.taped()[0][0]], [self.w])
        self.optimizer.apply_gradients(zip(averages, [self.w]), **flag)

    def gotten(self, **flag):
        gradients = self.optimizer.get_gradients(self.loss(), [self.w])
        self.optimizer.apply_gradients(zip(gradients, [self.w]), **flag)


FALSE, SKIP = {"experimental_aggregate_gradients": False}, {"skip_gradients_aggregation": True}
DIFFER, TWICE = "HVD302", "apply modified gradients with experimental_aggregate_gradients=False.*HVD224"
# name, flags, and the refusal: of all; or by "new" or "legacy" optimizers, of "several" passes, if "eager" or "graph".
TABLE = [
    ("minimize", {}, {}),
    ("by_hand", {}, {}),
    ("by_hand", FALSE, {"": DIFFER}),
    ("by_hand", SKIP, {"legacy": "skip_gradients_aggregation", "": DIFFER}),
    ("own_averages", {}, {}),
    ("own_averages", FALSE, {}),
    ("taped_averages", {}, {}),
    ("taped_averages", FALSE, {}),
    ("taken", {}, {}),
    ("taken", FALSE, {}),
    ("taken", SKIP, {"legacy": "skip_gradients_aggregation"}),
    ("taken_publicly", {}, {"legacy": "compute_gradients"}),
    ("taken_publicly", SKIP, {"legacy": "compute_gradients"}),
    ("clipped", {}, {"several": TWICE}),
    ("clipped", FALSE, {}),
    ("aggregated", {}, {}),
    ("aggregated", FALSE, {}),
    ("allreduced", {"name": "_allreduce"}, {}),
    ("allreduced", {"name": "_allreduce", **FALSE}, {}),
    ("allreduced", {"name": "_allreduce_grads"}, {}),
    ("allreduced", {"name": "_allreduce_grads", **FALSE}, {}),
    ("gotten", {}, {"new": "get_gradients", "eager": "`None` for gradient"}),
    ("gotten", FALSE, {"new": "get_gradients", "eager": "`None` for gradient"}),
]


def legacy():
    import os

    os.environ.update(TF_USE_LEGACY_KERAS="1", HVDLITE_CHECK_START="raise")
    import tensorflow as tf

    import hvdlite.tensorflow.keras as hvd

    return tf, hvd


HALF = [("new", 1, "graph"), ("new", 2, "eager"), ("legacy", 1, "eager"), ("legacy", 2, "graph")]
OTHERS = [("new", 1, "eager"), ("new", 2, "graph"), ("legacy", 1, "graph"), ("legacy", 2, "eager")]


@pytest.mark.parametrize(("kind", "passes", "runs"), [*HALF, *everything(*OTHERS)])
@as_ranks(2, deadline=300)
def test_a_way_averages_or_is_refused(kind, passes, runs):
    tf, hvd = legacy()
    words = ("", kind, "several" if passes > 1 else "", runs)
    for name, flags, refusals in TABLE:
        plain = (tf.keras.optimizers if kind == "new" else tf.keras.optimizers.legacy).SGD(1.0)
        optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=passes)
        way = Passes(tf, hvd, optimizer, tf.Variable(0.0))
        refusal = [text for word, text in refusals.items() if word in words]

        def one_pass(way=way, name=name, flags=flags):
            getattr(way, name)(**flags)

        if runs == "graph":
            one_pass = tf.function(one_pass)
        where = f"{name} {flags}"
        try:
            for i in range(2 * passes):
                one_pass()
                if not refusal:
                    step = (i + 1) // passes
                    assert float(way.w) == -1.5 * passes * step, (where, i, float(way.w))
                    if passes > 1:
                        assert int(optimizer._agg_helper.counter) == (i + 1) % passes, where
            assert not refusal, f"{where} was not refused"
        except Exception as error:
            import re

            assert refusal and re.search(refusal[0], str(error), re.DOTALL), f"{where}: {error!r}"


@as_ranks(2, deadline=300)
def test_what_is_taken_by_one_function_and_applied_by_another():
    tf, hvd = legacy()
    for passes in (1, 2):
        for taking, applying in ((False, True), (True, False), (True, True)):
            w = tf.Variable(0.0)
            optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), backward_passes_per_step=passes)
            way = Passes(tf, hvd, optimizer, w)

            def take(way=way, w=w):
                return [gradient for gradient, _ in way.optimizer._compute_gradients(way.loss, [w])]

            def apply(gradients, way=way, w=w):
                way.optimizer.apply_gradients(zip(gradients, [w]), experimental_aggregate_gradients=False)

            take, apply = tf.function(take) if taking else take, tf.function(apply) if applying else apply
            for _ in range(2 * passes):
                apply(take())
            assert float(w) == -3.0 * passes, (passes, taking, applying, float(w))
            way.minimize(), way.minimize()
            assert float(w) == -3.0 * passes - 3, (passes, taking, applying, float(w))


@as_ranks(2, deadline=300)
def test_sums_are_not_summed_again():
    tf, hvd = legacy()
    for passes in (1, 2):
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=passes)
        way = Passes(tf, hvd, optimizer, tf.Variable(0.0))
        pairs = way.taped(distributed=True, op=hvd.Sum)
        for apply in (optimizer.apply_gradients, tf.function(lambda: optimizer.apply_gradients(pairs))):  # noqa: B023
            with pytest.raises(Exception, match="(?s)sums over the ranks already.*HVD224"):
                apply(pairs) if apply == optimizer.apply_gradients else apply()
        for _ in range(passes):
            optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
        assert float(way.w) == -3.0 * passes
    with pytest.raises(AttributeError, match="HVD224"):
        optimizer._agg_helper.compute_gradients()
