"""Table of Horovod's modules and the modules of hvdlite that replace them; what is missing, and why.

A row gives the modules whose public names the alias shows, the first that has a name winning. Rows of SAME are our very
module under a second name, so that what a test or a script sets there (a registry, a patch) is seen by our code.

What is not in the table is either not yet or was never public; a new row is all that a new alias takes.
"""

from __future__ import annotations

_TORCH = "hvdlite.torch"
_TENSORFLOW = "hvdlite.tensorflow"
_KERAS = "hvdlite.keras"
_CALLBACKS = "hvdlite.keras.callbacks"
_KERAS_ELASTIC = "hvdlite.keras.elastic"
_REST = "hvdlite.as_horovod.small_functions"
_OF_TENSORFLOW = "hvdlite.as_horovod.tensorflow"
_OF_KERAS = "hvdlite.as_horovod.keras"
_OF_TORCH = "hvdlite.as_horovod.torch"
_LAUNCH = "hvdlite.as_horovod.launch"

MADE_OF: dict[str, tuple[str, ...]] = {
    "horovod": ("hvdlite.as_horovod.horovod",),
    "horovod.common": ("hvdlite.as_horovod.basics",),
    "horovod.common.basics": ("hvdlite.as_horovod.basics",),
    "horovod.common.exceptions": ("hvdlite.errors",),
    "horovod.common.process_sets": ("hvdlite.process_sets.process_set", "hvdlite.as_horovod.process_sets"),
    "horovod.common.util": (_REST,),
    "horovod._keras": (_KERAS, _OF_KERAS),
    "horovod._keras.callbacks": (_CALLBACKS,),
    "horovod.data": ("hvdlite.data",),
    "horovod.data.data_loader_base": ("hvdlite.data",),
    "horovod.keras": (_KERAS, _OF_KERAS),
    "horovod.keras.callbacks": (_CALLBACKS,),
    "horovod.keras.elastic": (_KERAS_ELASTIC,),
    "horovod.ray": ("hvdlite.ray",),
    "horovod.ray.runner": ("hvdlite.ray",),
    "horovod.runner": (_LAUNCH,),
    "horovod.runner.common": (),
    "horovod.runner.common.util": (),
    "horovod.runner.common.util.env": (_LAUNCH,),
    "horovod.runner.launch": (_LAUNCH,),
    "horovod.runner.mpi_run": (_LAUNCH,),
    "horovod.spark": ("hvdlite.spark",),
    "horovod.spark.common": (),
    "horovod.spark.common.store": ("hvdlite.spark.store",),
    "horovod.spark.keras": ("hvdlite.spark.keras",),
    "horovod.spark.torch": ("hvdlite.spark.torch",),
    "horovod.tensorflow": (_TENSORFLOW, _OF_TENSORFLOW, _REST),
    "horovod.tensorflow.compression": ("hvdlite.tensorflow.compression", _TENSORFLOW),
    "horovod.tensorflow.functions": (_TENSORFLOW,),
    "horovod.tensorflow.elastic": ("hvdlite.tensorflow.elastic",),
    "horovod.tensorflow.keras": (_KERAS, _OF_KERAS),
    "horovod.tensorflow.keras.callbacks": (_CALLBACKS,),
    "horovod.tensorflow.keras.elastic": (_KERAS_ELASTIC,),
    "horovod.tensorflow.mpi_ops": (_TENSORFLOW, "hvdlite.as_horovod.basics", _OF_TENSORFLOW, _REST),
    "horovod.tensorflow.sync_batch_norm": ("hvdlite.tensorflow.sync_batch_norm",),
    "horovod.tensorflow.util": (_OF_TENSORFLOW, _REST),
    "horovod.torch": (_TORCH, _OF_TORCH, _REST),
    "horovod.torch.compression": ("hvdlite.torch.compression", _TORCH),
    "horovod.torch.elastic": ("hvdlite.torch.elastic",),
    "horovod.torch.functions": (_TORCH,),
    "horovod.torch.mpi_ops": (_TORCH, "hvdlite.as_horovod.basics", _REST),
    "horovod.torch.optimizer": ("hvdlite.torch.optimizer", _TORCH, _REST),
    "horovod.torch.sync_batch_norm": ("hvdlite.torch.sync_batch_norm",),
}
SAME: dict[str, str] = {
    "horovod.common.elastic": "hvdlite.elastic",
    "horovod.torch.elastic.sampler": "hvdlite.torch.elastic.sampler",
    "horovod.torch.elastic.state": "hvdlite.torch.elastic.state",
}
# Imported only when asked for: these need a framework. All others come with their parent, as in Horovod.
ON_DEMAND = {
    "horovod.ray",
    "horovod.spark",
    "horovod.spark.keras",
    "horovod.spark.torch",
    "horovod.torch",
    "horovod.tensorflow",
    "horovod.tensorflow.keras",
    "horovod.keras",
    "horovod._keras",
}

# Modules of Horovod's launcher and elastic driver. They can be imported, for scripts that import more than they use;
# what is taken from them raises HvdNotYetError when it is called. Of one in MADE_OF this is so for other names only.
_HOLLOW = """
gloo_run js_run mpi_run run_task task_fn
driver driver.driver_service task task.task_service http http.http_client http.http_server
common.service common.service.driver_service common.service.task_service
common.util.codec common.util.config_parser common.util.host_hash common.util.hosts common.util.network
common.util.safe_shell_exec common.util.secret common.util.settings common.util.timeout common.util.tiny_shell_exec
elastic elastic.constants elastic.discovery elastic.driver elastic.registration elastic.rendezvous elastic.settings
elastic.worker
util util.cache util.lsf util.network util.remote util.streams util.threads
"""
HOLLOW = {f"horovod.runner.{name}" for name in _HOLLOW.split()}

_LATER = "comes with a later version of hvdlite"
NOT_YET: dict[str, str] = {
    "horovod.tensorflow.data": f"the data service {_LATER}",
    "horovod.spark.lightning": f"the estimator for Lightning {_LATER}",
    "horovod.ray.elastic": f"elastic training on Ray {_LATER}",
    "horovod.ray.elastic_v2": f"elastic training on Ray {_LATER}",
    "horovod.mxnet": "MXNet is retired, and hvdlite does not support it",
}


def why_not(name: str) -> str | None:
    """Why there is no such module of Horovod's; None if hvdlite has nothing to say about it."""
    for start, reason in NOT_YET.items():
        if name == start or name.startswith(start + "."):
            return reason
    return None
