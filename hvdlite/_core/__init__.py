"""Bindings of the C core: the only package that imports hvdlite._cffi.

`library` is the compiled core as Python sees it: tables, errors, topology, process sets. `request` hands requests
over and waits for them, `inflight` keeps tensor memory alive while the core works on it; `request_batch` is for
hundreds at once; `deadline` waits for a time only; `device` waits for a device; `auto_names` says what stands for a
name.

Not here: how a process becomes a rank and leaves (lifecycle), what a tensor is (adapters), what a collective means
(ops).
"""

from ..system.bounded_cache import remember as remember
from .auto_names import begin_again as begin_again
from .auto_names import forget_unnamed as forget_unnamed
from .auto_names import group_number as group_number
from .auto_names import joins as joins
from .auto_names import unnamed as unnamed
from .deadline import count_again as count_again
from .deadline import excuse as excuse
from .deadline import missing as missing
from .deadline import seconds_of as seconds_of
from .deadline import too_late as too_late
from .deadline import within as within
from .device import raise_failure as raise_failure
from .inflight import Flight as Flight
from .inflight import abandon as abandon
from .inflight import abandoned as abandoned
from .inflight import dropped as dropped
from .inflight import forget_all as forget_all
from .inflight import idle as idle
from .inflight import in_flight as in_flight
from .inflight import take as take
from .library import *  # noqa: F403
from .library import _CODE_NAMES as _CODE_NAMES
from .request import ASIDE as ASIDE
from .request import NOW as NOW
from .request import QUIET as QUIET
from .request import SOON as SOON
from .request import Pending as Pending
from .request import RaggedResult as RaggedResult
from .request import Request as Request
from .request import kick as kick
from .request import report_device_notice as report_device_notice
from .request import request as request
from .request import submission as submission
from .request import submit as submit
from .request import submit_group as submit_group
from .stack_dump import source as stack_source  # noqa: F401
from .wait_limit import WAIT_MS as WAIT_MS
from .wait_limit import bound as bound
from .wait_limit import core_limit as core_limit
from .wait_limit import follow as follow
