"""`horovod.common.process_sets`: what Horovod keeps there beside the sets themselves."""

from .small_functions import is_iterable

__all__ = ["is_iterable"]
