"""`horovod.common.process_sets`: what Horovod keeps there beside the sets themselves."""

from .rest import is_iterable

__all__ = ["is_iterable"]
