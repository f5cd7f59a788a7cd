"""Where Python meets the C core: the only package that imports hvdlite._cffi.

`library` is the compiled core as Python sees it: tables, errors, topology, process sets. `request` hands requests
over and waits for them, `flight` keeps tensor memory alive while the core works on it; `runs` is for hundreds at once;
`limits` waits for a time only; `device` waits for a device; `unnamed` says what stands for a name.

Not here: how a process becomes a rank and leaves (_life), what a tensor is (adapters), what a collective means (ops).
"""

from .device import raise_failure as raise_failure
from .flight import Flight as Flight
from .flight import abandon as abandon
from .flight import forget_all as forget_all
from .flight import take as take
from .kept import remember as remember
from .library import *  # noqa: F403
from .library import _CODE_NAMES as _CODE_NAMES
from .limits import count_again as count_again
from .limits import excuse as excuse
from .limits import missing as missing
from .limits import seconds_of as seconds_of
from .limits import too_late as too_late
from .limits import within as within
from .patience import WAIT_MS as WAIT_MS
from .patience import asked as asked
from .patience import bound as bound
from .patience import follow as follow
from .request import ASIDE as ASIDE
from .request import NOW as NOW
from .request import QUIET as QUIET
from .request import SOON as SOON
from .request import Gathered as Gathered
from .request import Pending as Pending
from .request import Request as Request
from .request import given as given
from .request import kick as kick
from .request import request as request
from .request import submit as submit
from .request import submit_group as submit_group
from .request import tell_of_devices as tell_of_devices
from .stack import source as stack_source  # noqa: F401
from .unnamed import begin_again as begin_again
from .unnamed import forget_unnamed as forget_unnamed
from .unnamed import group_number as group_number
from .unnamed import joins as joins
from .unnamed import unnamed as unnamed
