"""Where Python meets the C core: `library` is its tables, errors and topology, `flight` hands requests over and waits.

Not here: how a process becomes a rank and leaves (_life), what a tensor is (adapters), what a collective means (ops).
"""

from .flight import Gathered as Gathered
from .flight import Pending as Pending
from .flight import forget_all as forget_all
from .flight import group_number as group_number
from .flight import kick as kick
from .flight import submit as submit
from .library import *  # noqa: F403
from .library import _CODE_NAMES as _CODE_NAMES
