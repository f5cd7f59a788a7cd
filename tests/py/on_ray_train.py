"""A driver of real Ray Train, started by test_ray.py: digits on two workers, then one that raises."""

import json
import os
import sys

import engine_digits
import ray
from ray import train
from ray.train import ScalingConfig

from hvdlite.ray.train import HvdliteTrainer


def loop(config):
    found = engine_digits.train(**config)
    train.report({"accuracy": found["accuracy"]})
    print(json.dumps(found), flush=True)


def main():
    path = os.pathsep.join(sys.path)
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ray.init("local", num_cpus=2, include_dashboard=False, runtime_env={"env_vars": variables})
    for config in ({}, {"fails": 1}):
        trainer = HvdliteTrainer(loop, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2))
        try:
            trainer.fit()
        except Exception as error:
            print("error", json.dumps(str(error)), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
