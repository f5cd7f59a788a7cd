"""tf.distribute.MultiWorkerMirroredStrategy becomes hvd.Strategy as soon as a script imports TensorFlow.

How does `hvdlite-run --tf-strategy` change a script that imports nothing of hvdlite? Python imports the module
`sitecustomize` when it starts, and finds this one. It imports neither TensorFlow nor hvdlite: it waits until the script
imports TensorFlow. The sitecustomize that this one hides is run as well.
"""

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTensorflow:
    """A finder that finds `tensorflow` as the others do, and replaces the class once the module has run."""

    def find_spec(self, name, path=None, target=None):
        """None for all but the first import of TensorFlow."""
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_replace(module):
            run(module)
            import hvdlite.tensorflow

            module.distribute.MultiWorkerMirroredStrategy = hvdlite.tensorflow.Strategy
            module.distribute.experimental.MultiWorkerMirroredStrategy = hvdlite.tensorflow.Strategy

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _run_the_hidden_one():
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _HERE]
    this = sys.modules.pop("sitecustomize")
    if importlib.util.find_spec("sitecustomize") is not None:
        import sitecustomize  # noqa: F401
    else:
        sys.modules["sitecustomize"] = this  # Python's import expects the module that it runs


sys.meta_path.insert(0, _AfterTensorflow())
_run_the_hidden_one()
