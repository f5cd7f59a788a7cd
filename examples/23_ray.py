"""Trains digits on workers of Ray: RayExecutor or a trainer of Ray Train calls the training function.

    pip install "hvdlite[ray,torch]" scikit-learn
    python examples/23_ray.py                 # starts a cluster of Ray on this machine
    python examples/23_ray.py --train         # Ray Train
    ray job submit --address ... -- python examples/23_ray.py --address auto --workers 8 --gpu

Ray decides on which machines the workers run. Each worker calls `train`, which is the same function as under
hvdlite-run.
"""

import argparse


def train(epochs=25):
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits

    import hvdlite.torch as hvd

    hvd.init()
    torch.manual_seed(1)
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    data = load_digits()
    x, y = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    test, learn = order[:360], order[360:]
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    mine = hvd.data.shard(torch.utils.data.TensorDataset(x[learn], y[learn]))
    for _ in range(epochs):
        for inputs, targets in torch.utils.data.DataLoader(mine, 32, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs.to(device)), targets.to(device)).backward()
            optimizer.step()
    return float((model(x[test].to(device)).argmax(1).cpu() == y[test]).float().mean())


def reported(config):
    from ray import train as ray_train

    ray_train.report({"accuracy": train(**config)})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="local", help="of a cluster; auto: the one that this machine is in")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="one for each worker")
    parser.add_argument("--train", action="store_true", help="by Ray Train")
    flags = parser.parse_args()
    import ray

    ray.init(flags.address)
    if flags.train:
        from ray.train import ScalingConfig

        from hvdlite.ray.train import HvdliteTrainer

        scaling = ScalingConfig(num_workers=flags.workers, use_gpu=flags.gpu)
        HvdliteTrainer(reported, train_loop_config={"epochs": 25}, scaling_config=scaling).fit()
    else:
        from hvdlite.ray import RayExecutor

        executor = RayExecutor(num_workers=flags.workers, use_gpu=flags.gpu)
        executor.start()
        print("accuracy by rank:", executor.run(train))
        executor.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
