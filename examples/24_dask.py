"""Trains a model on data that a Dask cluster has prepared: each worker trains on the partitions that it holds.

    pip install "hvdlite[dask]" scikit-learn
    python examples/24_dask.py                               # starts a cluster of two processes on this machine
    python examples/24_dask.py --scheduler tcp://head:8786   # an existing cluster

The model is softmax regression of the digits in NumPy. Dask scales the images, and `run` makes each worker process a
rank.
"""

import argparse


def train(parts, epochs=200):
    """parts: of rank 0, rank 1, ...: (images, digits)."""
    import numpy as np

    import hvdlite as hvd

    hvd.init()
    x, digits = parts[hvd.rank()]
    weights, bias = np.zeros((64, 10)), np.zeros(10)
    for _ in range(epochs):
        out = np.exp(x @ weights + bias)
        error = (out / out.sum(1, keepdims=True) - np.eye(10)[digits]) / len(x)
        weights -= 5.0 * hvd.allreduce(x.T @ error, name="weights")
        bias -= 5.0 * hvd.allreduce(error.sum(0), name="bias")
    right = ((x @ weights + bias).argmax(1) == digits).mean()
    return float(hvd.allreduce(np.array([right]), name="right")[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheduler", help="its address")
    flags = parser.parse_args()
    from distributed import Client, LocalCluster
    from sklearn.datasets import load_digits

    from hvdlite.dask import run

    with Client(flags.scheduler or LocalCluster(n_workers=2, threads_per_worker=1)) as client:
        ranks, data = len(client.nthreads()), load_digits()
        scaled = client.map(lambda x: x / 16, [data.data[n::ranks] for n in range(ranks)])
        parts = list(zip(client.gather(scaled), [data.target[n::ranks] for n in range(ranks)]))
        print("accuracy by rank:", run(client, train, args=(parts,)))


if __name__ == "__main__":
    main()
