"""What trainers of other libraries need of hvdlite, for Lightning and transformers: docs/trainers.md is the guide.

from hvdlite.trainers.lightning import StepLoggerCallback
from hvdlite.trainers.transformers import StepLoggerCallback
"""
