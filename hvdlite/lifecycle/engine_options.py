"""Options of the core at its start: `struct hvd_options`, from settings, rank assignment and streams.

Python checks nothing here that the core checks; it translates. The core borrows texts and rows of numbers for the call
of hvd_init alone. They must stay alive as long, so they are returned beside the struct. The core owns the descriptors:
it closes them, also if the call fails.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

from .. import _core, config
from .._core import ffi
from ..rendezvous import discovery
from ..trace import directory

if TYPE_CHECKING:
    from ..rendezvous import store_client
    from ..rendezvous.placement import HostLayout
    from ..transport.mesh import Rows


def of_job(
    settings: config.Settings, store: store_client.Rendezvous | None, incarnation: int
) -> tuple[bytes, int, int]:
    """The secret, number and epoch of this incarnation of this job."""
    secret, job = settings.values["secret_key"], settings.values["job_id"]
    if store is None:
        return secret or bytes(32), job or os.getpid(), incarnation
    return secret or store.secret, job or store.job, store.epoch


def options(
    place: discovery.Place,
    settings: config.Settings,
    store: store_client.Rendezvous | None,
    layout: HostLayout | None,
    rows: Rows | None,
    incarnation: int,
) -> tuple[Any, list[Any]]:
    """`struct hvd_options *`, and what must stay alive until hvd_init returns. rows: streams to other ranks, the core's
    from then on. incarnation: how often this process has been a rank before."""
    values, borrowed = settings.values, list[Any]()
    options = ffi.new("struct hvd_options *")
    options.rank, options.size = place.rank, place.size
    options.local_rank, options.local_size = place.local_rank, place.local_size
    options.cross_rank, options.cross_size = place.cross_rank, place.cross_size
    options.secret, options.job, options.epoch = of_job(settings, store, incarnation)
    options.store_fd = store.fileno() if store is not None else -1
    session = store.session() if store is not None else None
    if session is not None:  # its counts stay valid as long as the store, which outlives the engine
        borrowed = [_core.keys_or_null(session.keys), ffi.from_buffer("uint64_t[]", session.counts)]
        options.store_keys, options.store_counters = borrowed
    options.shared_memory = values["shared_memory"]
    options.fusion_bytes = values["fusion_threshold"]
    options.slots_max = values["cache_capacity"]
    options.deterministic = values["deterministic"]
    options.nan_guard = values["nan_guard"]
    options.shares_gpus = config.environ().get("NCCL_MULTI_RANK_GPU_ENABLE", "") not in ("", "0")
    options.nccl_blocks = config.environ().get("NCCL_COMM_BLOCKING", "") not in ("", "0")
    options.start_timeout_ms = int(values["start_timeout"] * 1000)
    options.leave_timeout_ms = int(values["leave_timeout"] * 1000)
    options.spin_us = values["spin_us"]
    # a timeline is read from the ring by a thread that may have to wait for its turn
    options.trace_events = max(values["trace_events"], 1 << 16) if values["timeline"] else values["trace_events"]
    options.trace_signal = values["trace_signal"] or 0
    options.peer_timeout_ms = int(values["peer_timeout"] * 1000)
    warn, end = settings.stall_limits()
    options.stall_warn_ms, options.collective_timeout_ms = math.ceil(warn * 1000), math.ceil(end * 1000)
    options.report_fd = 2
    options.stack_signal, options.stack_fd = _core.stack_source() if place.size > 1 else (0, -1)
    borrowed += [_core.bytes_or_null(values[name]) for name in ("plane", "algo")]
    options.plane, options.algo = borrowed[-2:]
    options.link_alpha_ns, options.link_beta_ps = values["link_cost"] or (0, 0)
    if store is not None and (values["plane"] == "mpi" or (layout is not None and layout.hosts > 1)):
        options.mpi_comm = store.lend()
    records = directory.place_of(values["trace_dir"], options.job, config.environ())
    borrowed.append(_core.bytes_or_null(records.folder))
    options.trace_dir, options.trace_guarded = borrowed[-1], not records.by_user
    if store is not None and layout is not None and layout.hosts > 1:
        from ..trace import clock

        options.clock_offset_ns, options.clock_error_ns = clock.offset(place.rank, layout.host_of, store.allgather)
    if rows is not None:
        borrowed += [_core.row_or_null(rows.tensors), _core.row_or_null(rows.votes)]
        options.tensor_fd, options.vote_fd = borrowed[-2:]
        borrowed += [_core.keys_or_null(rows.tensor_keys), _core.keys_or_null(rows.vote_keys)]
        options.tensor_keys, options.vote_keys = borrowed[-2:]
    if layout is not None and layout.hosts > 1:
        names = [_core.bytes_or_null(name) for name in layout.host_name]
        borrowed += [*names, ffi.new("char *[]", names), _core.row_or_null(layout.host_of)]
        options.host_name, options.host_of = borrowed[-2:]
    return options, borrowed
