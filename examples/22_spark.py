"""Trains a small network on handwritten digits on Spark: by a function on all ranks, and by an estimator.

    python examples/22_spark.py           # Spark on this machine, two tasks at a time
    spark-submit examples/22_spark.py     # on your cluster

Both learn the 1797 digits of scikit-learn (8 x 8 pixels) and reach more than 97 % test accuracy. `run` calls a function
that hvdlite-run could also start. TorchEstimator takes a DataFrame and returns a model. The model adds a column of
predictions to a DataFrame.
"""

import tempfile

import hvdlite.spark


def parts():
    """Pixels and labels to train on, and to test on."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x, xt, y, yt = train_test_split(x / 16, y, test_size=0.2, stratify=y, random_state=1)
    return x.astype("float32"), y, xt.astype("float32"), yt


def network():
    """The same first weights wherever it is called."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    return model, torch.optim.Adam(model.parameters(), lr=0.003)


def train(epochs):
    """On each rank: the accuracy on the test set, and the sum of all weights."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    x, y, xt, yt = map(torch.as_tensor, parts())
    model, optimizer = network()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))[hvd.rank() :: hvd.size()]
        for batch in order[: len(x) // hvd.size()].split(32):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    accuracy = (model(xt).argmax(1) == yt).float().mean().item()
    return accuracy, sum(each.double().sum().item() for each in model.parameters())


def frame(spark, pixels, digits):
    """A DataFrame with a column of arrays and one of numbers."""
    rows = [(row, digit) for row, digit in zip(pixels.tolist(), digits.tolist())]
    return spark.createDataFrame(rows, "pixels array<float>, digit long")


def estimate(spark, folder):
    """The accuracy on the test set of a model that an estimator has trained."""
    import torch

    from hvdlite.spark.store import Store
    from hvdlite.spark.torch import TorchEstimator

    x, y, xt, yt = parts()
    model, optimizer = network()
    estimator = TorchEstimator(
        model=model,
        optimizer=optimizer,
        loss=torch.nn.functional.cross_entropy,
        feature_cols=["pixels"],
        label_cols=["digit"],
        store=Store.create(folder),
        epochs=25,
        verbose=0,
    )
    found = estimator.fit(frame(spark, x, y)).transform(frame(spark, xt, yt)).collect()
    return sum(max(range(10), key=row.digit__output.__getitem__) == row.digit for row in found) / len(found)


def main():
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.getOrCreate()
    accuracy, _ = hvdlite.spark.run(train, [25], num_proc=2)[0]
    print(f"run: {accuracy:.2%} of the test set")
    with tempfile.TemporaryDirectory() as folder:  # on a cluster: a shared folder
        print(f"TorchEstimator: {estimate(spark, folder):.2%} of the test set")
    spark.stop()


if __name__ == "__main__":
    main()
