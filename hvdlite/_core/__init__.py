"""Where Python meets the C core: the only package that imports hvdlite._cffi.

`library` is the compiled core as Python sees it: tables, errors, topology, process sets. `flight` hands requests
over, waits for them, and keeps tensor memory alive while the core works on it; `runs` does so for hundreds at once.

Not here: how a process becomes a rank and leaves (_life), what a tensor is (adapters), what a collective means (ops).
"""

from .flight import NOW as NOW
from .flight import QUIET as QUIET
from .flight import SOON as SOON
from .flight import Gathered as Gathered
from .flight import Pending as Pending
from .flight import Request as Request
from .flight import abandon as abandon
from .flight import done as done
from .flight import finish as finish
from .flight import forget_all as forget_all
from .flight import group_number as group_number
from .flight import kick as kick
from .flight import request as request
from .flight import submit as submit
from .library import *  # noqa: F403
from .library import _CODE_NAMES as _CODE_NAMES
from .patience import bound as bound
from .patience import follow as follow
