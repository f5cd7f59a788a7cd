"""What does becoming a job cost on Ray, Dask and Spark, beside the same number of plain workers of that engine?

    python examples/benchmarks/engines.py [--ranks 2] [--times 5] [ray] [dask] [spark]

Each row is the median of some rounds, plain and ours in turn in the same cluster: from the first call in the driver to
the last worker that has done its part. Plain workers import hvdlite and NumPy, too; ours call hvd.init() besides. A
cluster is started once for each engine, and that is not counted.
"""

import argparse
import statistics
import time


def plain():
    import hvdlite.numpy  # noqa: F401


def joined():
    import hvdlite as hvd

    hvd.init()


def on_ray(ranks, times):
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from hvdlite.ray import RayExecutor

    @ray.remote
    class Plain:
        def call(self, function):
            return function()

    def own():
        group = placement_group([{"CPU": 1}] * ranks)
        ray.get(group.ready())
        strategy = PlacementGroupSchedulingStrategy(group)
        actors = [Plain.options(num_cpus=1, scheduling_strategy=strategy).remote() for _ in range(ranks)]
        ray.get([actor.call.remote(plain) for actor in actors])
        return lambda: ([ray.kill(actor) for actor in actors], remove_placement_group(group))

    def ours():
        executor = RayExecutor(num_workers=ranks)
        executor.start()
        executor.run(joined)
        return executor.shutdown

    ray.init("local", num_cpus=ranks, include_dashboard=False, logging_level="error")
    yield from rounds(own, ours, times)
    ray.shutdown()


def on_dask(ranks, times):
    from distributed import Client, LocalCluster

    from hvdlite.dask import run

    def own():
        futures = [client.submit(plain, workers=[place], pure=False) for place in client.nthreads()]
        client.gather(futures)
        return lambda: None

    def ours():
        run(client, joined)
        return lambda: None

    with (
        LocalCluster(n_workers=ranks, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        own()  # the first import is not the engine's
        yield from rounds(own, ours, times)


def on_spark(ranks, times):
    from pyspark.sql import SparkSession

    from hvdlite.spark import run

    def task(_):
        plain()
        yield 0

    def own():
        session.sparkContext.parallelize(range(ranks), ranks).barrier().mapPartitions(task).collect()
        return lambda: None

    def ours():
        run(joined, num_proc=ranks)
        return lambda: None

    session = SparkSession.builder.master(f"local[{ranks}]").config("spark.ui.enabled", "false").getOrCreate()
    own()
    yield from rounds(own, ours, times)
    session.stop()


def rounds(own, ours, times):
    """(seconds of plain workers, of ours), in turn."""
    for _ in range(times):
        pair = []
        for call in (own, ours):
            began = time.perf_counter()
            end = call()
            pair.append(time.perf_counter() - began)
            end()
            time.sleep(0.5)  # workers that were told to end do so
        yield pair


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", default=["ray", "dask", "spark"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=5)
    flags = parser.parse_args()
    print("engine   plain workers, s   ranks that have met, s   more, s")
    for engine in flags.engines:
        pairs = list({"ray": on_ray, "dask": on_dask, "spark": on_spark}[engine](flags.ranks, flags.times))
        own, ours = (statistics.median(each) for each in zip(*pairs))
        print(f"{engine:8} {own:16.3f} {ours:24.3f} {statistics.median(b - a for a, b in pairs):9.3f}", flush=True)


if __name__ == "__main__":
    main()
