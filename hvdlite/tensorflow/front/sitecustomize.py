"""tf.distribute.MultiWorkerMirroredStrategy becomes hvd.Strategy as soon as a script imports TensorFlow.

How does `hvdlite-run --tf-strategy` change a script that imports nothing of hvdlite? Python imports the module
`sitecustomize` when it starts, and finds this one. It imports neither TensorFlow nor hvdlite: it waits until the script
imports TensorFlow, and then puts a class in the place of TensorFlow's, whose call makes an hvd.Strategy. That imports
hvdlite, when all other imports are over. The sitecustomize that this one hides is run as well.
"""

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_NAME = "MultiWorkerMirroredStrategy"


class _AfterTensorflow:
    """A finder that finds `tensorflow` as the others do, and replaces the class once the module has run."""

    def find_spec(self, name, path=None, target=None):
        """None for all but TensorFlow."""
        if name != "tensorflow":
            return None
        finders = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec = next(filter(None, (each.find_spec(name, path, target) for each in finders)), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_replace(module):
            run(module)
            _replace(module.distribute.MultiWorkerMirroredStrategy)

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


def _replace(own):
    """In every module that shows TensorFlow's API to a user: those of compat.v1 and compat.v2, too."""

    class Calls(type(own)):  # type: ignore[misc]
        def __call__(cls, *args, **kwargs):
            import hvdlite.tensorflow as hvd

            if cls is replaced:
                return hvd.Strategy(*args, **kwargs)
            if not issubclass(cls, hvd.Strategy):  # which would train alone
                raise hvd.HvdInitError(
                    f"{cls.__name__} is a subclass of tf.distribute.{_NAME}: derive it from hvd.Strategy [HVD429]"
                )
            return super().__call__(*args, **kwargs)

        def __instancecheck__(cls, instance):
            return isinstance(instance, own) if cls is replaced else super().__instancecheck__(instance)

    replaced = Calls(_NAME, (own,), {"__doc__": own.__doc__, "__module__": own.__module__})
    for name, module in list(sys.modules.items()):
        if name.startswith("tensorflow._api.") and _NAME in vars(module):
            setattr(module, _NAME, replaced)


def _run_the_hidden_one():
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _HERE]
    this = sys.modules.pop("sitecustomize")
    if importlib.util.find_spec("sitecustomize") is not None:
        import sitecustomize  # noqa: F401
    else:
        sys.modules["sitecustomize"] = this  # Python's import expects the module that it runs


sys.meta_path.insert(0, _AfterTensorflow())
_run_the_hidden_one()
