"""Horovod's second name for its Keras module: `import hvdlite.tensorflow.keras as hvd` is hvdlite.keras."""

from ...keras import *  # noqa: F403
from ...keras import __all__ as __all__
from ...keras import __getattr__ as __getattr__
from ...keras import callbacks as callbacks
from ...keras import elastic as elastic
