"""`TorchEstimator(model=..., optimizer=..., loss=..., ...).fit(df)`: train a model of PyTorch on a DataFrame.

    from hvdlite.spark.store import Store
    from hvdlite.spark.torch import TorchEstimator

    estimator = TorchEstimator(model=net, optimizer=Adam(net.parameters()), loss=F.cross_entropy, epochs=5, num_proc=4,
                               feature_cols=["pixels"], label_cols=["digit"], store=Store.create("/shared/runs"))
    predictions = estimator.fit(df).transform(df)

The model is called with a tensor for each feature column, and returns a tensor for each label column. `loss` and
`metrics` are functions of output and label, one or (loss) one for each label. A label with as many numbers as its
output comes in the output's shape: the loss of outputs (N, 1) and labels (N,) would else be that of N x N pairs.
Numbers of history are of all ranks.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from . import estimator
from .rows import Rows


class TorchModel(estimator.Model):
    """The model that ``TorchEstimator.fit`` returns. ``getModel()`` is the PyTorch model."""

    @staticmethod
    def opened(args: Mapping[str, Any], checkpoint: bytes) -> Any:
        """A copy of the model, with the weights of rank 0."""
        state = torch.load(io.BytesIO(checkpoint), map_location="cpu", weights_only=True)
        model = _copied(args["model"])
        model.load_state_dict(state["model"])
        return model

    @staticmethod
    def predicted(model: Any, inputs: Sequence[np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        """Its outputs."""
        model.eval()
        with torch.no_grad():
            return [each.cpu().numpy() for each in estimator.listed(model(*map(torch.as_tensor, inputs)))]


class TorchEstimator(estimator.Estimator):
    """Train a PyTorch model on a DataFrame. The arguments are those of ``Estimator``.

    ``loss`` and ``metrics`` are functions of output and label::

        estimator = TorchEstimator(model=net, optimizer=Adam(net.parameters()), loss=F.cross_entropy, epochs=5,
                                   feature_cols=["pixels"], label_cols=["digit"], store=Store.create("/shared/runs"))
        predictions = estimator.fit(df).transform(df)
    """

    model_class = TorchModel

    @staticmethod
    def train(args: dict[str, Any], rows: Rows, validation: Rows | None, save: Callable[..., None]) -> Any:
        """On a rank. Model and optimizer came in one pickle, so they have the same parameters, as all ranks have."""
        import hvdlite.torch as hvd

        torch.manual_seed(args["random_seed"] + hvd.rank())  # of dropout: not the same on all ranks
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", hvd.local_rank() % gpus) if gpus else torch.device("cpu")
        model = args["model"].to(device)
        compression = args["gradient_compression"] or hvd.Compression.none
        optimizer = hvd.DistributedOptimizer(args["optimizer"], model.named_parameters(), compression=compression)
        judged, history = _Judged(args, model, device), []
        for epoch in range(args["epochs"]):
            model.train()
            means = _Means()
            for batch in rows.batches(args["batch_size"], args["random_seed"] + epoch if args["shuffle"] else None):
                optimizer.zero_grad()
                loss = judged(batch, means)
                loss.backward()
                optimizer.step()
            found = means.of_all_ranks()
            if validation is not None:
                model.eval()
                means = _Means()
                with torch.no_grad():
                    for batch in validation.batches(args["val_batch_size"] or args["batch_size"]):
                        judged(batch, means)
                found.update({f"val_{name}": value for name, value in means.of_all_ranks().items()})
            history.append({"epoch": epoch, **found})
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            save(partial(_saved, state))
            if args["verbose"] and hvd.rank() == 0:
                print(" ".join(f"{name} {value:.5g}" for name, value in history[-1].items()), flush=True)
        return history, estimator.row_shapes(judged.outputs)


class _Judged:
    """The loss of a batch."""

    def __init__(self, args: Mapping[str, Any], model: Any, device: Any) -> None:
        self._args, self._model, self._device, self.outputs = args, model, device, list[Any]()
        self._losses, labels = estimator.listed(args["loss"]), len(args["label_cols"])
        self._losses = self._losses * labels if len(self._losses) == 1 else self._losses
        self._weights = args["loss_weights"] or [1.0] * labels
        metrics = estimator.listed(args["metrics"])
        self._metrics = {getattr(each, "__name__", type(each).__name__): each for each in metrics}
        if len(self._metrics) < len(metrics) or "loss" in self._metrics:
            raise ValueError(f"metrics: {len(metrics)} functions must have as many names, and none be loss [HVD240]")

    def __call__(self, batch: Sequence[np.ndarray[Any, Any]], means: _Means) -> Any:
        features = len(self._args["feature_cols"])
        inputs = estimator.shaped(batch[:features], self._args["input_shapes"])
        tensors = [torch.as_tensor(each).to(self._device) for each in [*inputs, *batch[features:]]]
        self.outputs = estimator.outputs_of(self._model(*tensors[:features]), self._args["label_cols"])
        labels = [_like(output, label) for output, label in zip(self.outputs, tensors[features:])]
        pairs = zip(self._losses, self._weights, self.outputs, labels)
        loss = sum(weight * judge(output, label) for judge, weight, output, label in pairs)
        means.add("loss", loss, len(batch[0]))
        for key, metric in self._metrics.items():
            for name, output, label in zip(self._args["label_cols"], self.outputs, labels):
                means.add(f"{key}_{name}" if len(labels) > 1 else key, metric(output, label), len(batch[0]))
        return loss


def _like(output: Any, label: Any) -> Any:
    """The label in the output's shape; that of a class has fewer numbers, and stays."""
    return label.reshape(output.shape) if label.numel() == output.numel() else label


class _Means:
    """Of an epoch, over rows."""

    def __init__(self) -> None:
        self._sums, self._rows = dict[str, Any](), 0

    def add(self, name: str, value: Any, rows: int) -> None:
        value = torch.as_tensor(value).detach().double() * rows
        self._sums[name] = self._sums.get(name, 0.0) + value
        self._rows += rows if name == "loss" else 0

    def of_all_ranks(self) -> dict[str, float]:
        """Ranks have the same number of rows."""
        import hvdlite.torch as hvd

        means = torch.stack([value.cpu() for value in self._sums.values()]) / self._rows
        return dict(zip(self._sums, hvd.allreduce(means, name="means of the epoch").tolist()))


def _saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def _copied(model: Any) -> Any:
    """Also of a model that copy.deepcopy refuses, since ranks were sent it."""
    import cloudpickle

    return cloudpickle.loads(cloudpickle.dumps(model))
