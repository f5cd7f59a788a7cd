"""What Horovod's torch modules show beyond ours: the class of a distributed optimizer says that it is from
`horovod.torch.optimizer`. Libraries tell by `"horovod" in str(type(optimizer))` whether an optimizer is distributed.
And broadcast_optimizer_state leaves zeros as gradients of an optimizer that has no state yet: scripts read them.
"""

from __future__ import annotations

from ..torch import state_broadcast
from ..torch.optimizer import factory

__all__: list[str] = []

state_broadcast.zero_gradients = True
factory.made_in = "horovod.torch.optimizer"
