"""What Horovod's Keras modules show beyond ours: the class of a distributed optimizer says that it is from
`horovod._keras`.

Scripts tell by this whether an optimizer, loaded from a file say, is distributed. Saved models do not know of it, since
what Keras writes is the `__class__` of the optimizer, which is the plain one. Importing this module is all that is to
be done: it is named in the table for Horovod's Keras modules (names.py), and has no names of its own.
"""

from __future__ import annotations

from ..keras import optimizer

__all__: list[str] = []

optimizer.made_in = "horovod._keras"
