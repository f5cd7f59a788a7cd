"""What Horovod's torch modules show beyond ours: the class of a distributed optimizer says that it is from
`horovod.torch.optimizer`. Libraries tell by `"horovod" in str(type(optimizer))` whether an optimizer is distributed.
"""

from __future__ import annotations

from ..torch.optimizer import wrap

__all__: list[str] = []

wrap.made_in = "horovod.torch.optimizer"
