"""`hvdlite.run(function, args, num_proc=4)`: start a job from Python and return the results of its ranks.

From a script, an interpreter or a notebook, on this host or on others. The launcher runs as a process of its own
(launcher/parent_death.py), because it needs one thread and all signals; what it and the ranks print is passed on to
sys.stdout and sys.stderr, which a notebook shows under its cell. The call goes to the ranks, and results come back,
over a function server in this process (launcher/function_server.py). All options are those of hvdlite-run, read and
checked as it does it, so that a job which is started from here finds nothing different (Horovod turned its cache off
here, by a typing error).

Everything happens in the caller's thread. A Ctrl-C is passed on to the job, the second one kills it, and
KeyboardInterrupt is raised once nothing of it is left.
"""

from __future__ import annotations

import codecs
import os
import pickle
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import config
from ..errors import HvdRunError
from ..errors.codes import coded, uncoded
from ..errors.user_warning import warn

if TYPE_CHECKING:
    from ..launcher.function_server import Answer, FunctionServer

_WORDS_MAX = 4096  # of the launcher's output, for an error that no rank explains


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Sequence[str] | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Start a job of its own, call a function on every rank of it, and return the results.

    It blocks until the job has ended. The launcher runs in a process of its own with the options of ``hvdlite-run``.
    The function, its arguments and its results travel by cloudpickle; modules that they import must be importable on
    all hosts. Ctrl-C is passed on to the job. ``min_num_proc``, ``max_num_proc`` or ``host_discovery_script`` makes the
    job elastic: lost ranks are not an error, and ``func`` trains in ``hvd.elastic.run``.

    Args:
        func (callable): function to call on every rank.
        args (sequence): its positional arguments. Default: none.
        kwargs (mapping, optional): its keyword arguments. Default: none.
        num_proc (int): number of ranks. Default: 1.
        hosts (str, optional): hosts and slots, such as ``"a:4,b:4"``. Default: this host.
        hostfile (str, optional): file with a line ``host slots=N`` per host; not together with ``hosts``.
        start_timeout (int, optional): seconds in which all ranks must have called ``init``. Default: 30.
        output_filename (str, optional): folder for the output of each rank. Default: none.
        verbose (int or bool, optional): True prints what is started and how it ends.
        executable (str, optional): Python interpreter of the ranks. Default: this one.
        ssh_port (int, optional): port of the hosts' ssh servers.
        ssh_identity_file (str, optional): private key for ssh.
        network_interfaces (str or list of str, optional): interfaces or networks on which this host listens.
        min_num_proc (int, optional): elastic: go on with this many ranks or more.
        max_num_proc (int, optional): elastic: at most this many ranks.
        host_discovery_script (str, optional): elastic: command that prints the current hosts, ``host:slots`` per line.
        slots (int, optional): elastic: ranks per host for which the script prints no number. Default: 1.
        reset_limit (int, optional): elastic: end the job when its ranks have changed more often than this.
        cooldown_range ((int, int), optional): elastic: seconds without a new rank on a host after a failure, for the
            first failure and at most. Default: (5, 300).
        use_mpi (bool, optional): True starts the ranks by ``mpirun``.
        mpi_args (str, optional): more arguments for ``mpirun``; needs ``use_mpi=True``.
        use_gloo (bool, optional): Horovod's; not together with ``use_mpi``.
        disable_cache (bool, optional): Horovod's; not used.
        network_interface (str or list of str, optional): Horovod's old name of ``network_interfaces``.
        np, min_np, max_np (int, optional): Horovod's old names of ``num_proc``, ``min_num_proc`` and ``max_num_proc``.

    Returns:
        list: the results in the order of the ranks.

    Raises:
        HvdRunError: if a rank raises or dies, or the job does not start. The exception of the rank is its
            ``__cause__``.
        ValueError: for arguments that exclude each other or have invalid values.
        TypeError: if ``func`` is not callable, or cannot be pickled.
        KeyboardInterrupt: after Ctrl-C, when the job has ended.

    Example:
        >>> hvd.run(lambda x: 2 * x, args=(21,), num_proc=2)  # doctest: +SKIP
        [42, 42]
        >>> # skipped here, since it starts two processes
    """
    if not callable(func):
        raise TypeError(f"run() needs a function, not {type(func).__name__} [HVD244]")
    if np is not None:
        warn("np is deprecated, use num_proc", DeprecationWarning)
        num_proc = np
    if isinstance(num_proc, bool) or not isinstance(num_proc, int) or num_proc < 1:
        raise ValueError(f"num_proc={num_proc!r}: must be a whole number of ranks, at least 1 [HVD244]")
    least, most = min_num_proc or min_np, max_num_proc or max_np
    elastic = any(value is not None for value in (least, most, host_discovery_script))
    if elastic and num_proc == 1:  # the default
        num_proc = least or 1
    if hosts is not None and hostfile is not None:
        raise ValueError("hosts and hostfile exclude each other [HVD244]")
    if use_gloo and use_mpi:
        raise ValueError("use_gloo and use_mpi exclude each other [HVD244]")
    if mpi_args is not None and not use_mpi:
        raise ValueError("mpi_args is for mpirun: it needs use_mpi=True [HVD244]")
    flags = ["--num-proc", str(num_proc)]
    flags += _flag("--hosts", hosts) + _flag("--hostfile", hostfile) + _flag("--start-timeout", start_timeout)
    flags += _flag("--ssh-port", ssh_port) + _flag("--ssh-identity-file", ssh_identity_file)
    flags += _flag("--output-filename", output_filename) + _flag("--mpi-args", mpi_args)
    flags += _flag("--network-interfaces", _listed(network_interfaces or network_interface))
    flags += _flag("--min-np", least) + _flag("--max-np", most) + _flag("--slots-per-host", slots)
    flags += _flag("--host-discovery-script", host_discovery_script) + _flag("--reset-limit", reset_limit)
    flags += ["--blacklist-cooldown-range", *map(str, cooldown_range)] if cooldown_range is not None else []
    flags += ["--verbose"] * bool(verbose) + ["--gloo"] * bool(use_gloo) + ["--mpi"] * bool(use_mpi)
    flags += ["--as-horovod"] * ("hvdlite.as_horovod" in sys.modules)
    call = _Call(flags, None if elastic else num_proc, executable or sys.executable)
    return call.make(func, tuple(args), dict(kwargs or {}))


def _flag(name: str, value: object) -> list[str]:
    return [] if value is None else [f"{name}={os.fspath(value) if isinstance(value, os.PathLike) else value}"]


def _listed(names: str | Sequence[str] | None) -> str | None:
    return names if names is None or isinstance(names, str) else ",".join(names)


class _Call:
    """One job. `make` once. size: None: ranks come and go."""

    def __init__(self, flags: Sequence[str], size: int | None, executable: str) -> None:
        self._flags, self._size, self._executable = list(flags), size, executable
        self._selector = selectors.DefaultSelector()
        self._words = ""  # the end of the output on stderr

    def make(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        from ..launcher import cli, function_server
        from ..system import python_command

        call = packed(func, args, kwargs)
        environ = config.environ()
        host_address = function_server.address_for(cli.read_flags(self._flags), self._size, environ)
        key = os.urandom(32)
        with self._selector:
            counter = function_server.FunctionServer(key, host_address, self._size, call)
            try:
                address, port = counter.address
                far = [self._executable, *python_command.words("hvdlite.executors.worker")[1:], address, str(port)]
                near = [*python_command.words("hvdlite.launcher.parent_death"), str(os.getpid()), *self._flags, *far]
                code = self._attend(near, {**environ, function_server.KEY: key.hex()}, counter)
            finally:
                counter.close()
        return self._results(code, counter.answers)

    def _attend(self, words: Sequence[str], environ: Mapping[str, str], counter: FunctionServer) -> int:
        """Runs the launcher to its end; its exit code. Nothing of the job is left, whatever happens."""
        pipe = subprocess.PIPE
        job = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environ, start_new_session=True
        )
        assert job.stdout is not None and job.stderr is not None
        self._selector.register(counter, selectors.EVENT_READ)
        for stream, show in ((job.stdout, self._out), (job.stderr, self._err)):
            decode = codecs.getincrementaldecoder("utf-8")("replace").decode
            self._selector.register(stream.fileno(), selectors.EVENT_READ, (decode, show))
        interrupt: BaseException | None = None
        with job.stdout, job.stderr:
            while len(self._selector.get_map()) > 1 or job.poll() is None:
                try:
                    if not self._turn(counter) and job.poll() is not None:
                        break  # another process holds its streams open
                except BaseException as error:  # Ctrl-C; or the caller's sys.stdout cannot be written
                    interrupt = interrupt or error
                    job.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            while self._turn(counter, 0.0):
                pass  # last answers
        if interrupt is not None:
            raise interrupt
        return job.returncode

    def _turn(self, counter: FunctionServer, patience: float = 0.5) -> bool:
        """One round of the loop; whether there was anything to do."""
        ready = self._selector.select(patience)
        for key, _ in ready:
            if key.data is None:
                counter.turn()
                continue
            chunk = os.read(key.fd, 1 << 16)
            if not chunk:
                self._selector.unregister(key.fd)
            decode, show = key.data
            show(decode(chunk, not chunk))
        return bool(ready)

    def _out(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _err(self, text: str) -> None:
        self._words = (self._words + text)[-_WORDS_MAX:]
        sys.stderr.write(text)
        sys.stderr.flush()

    def _results(self, code: int, answers: Sequence[Answer]) -> list[Any]:
        """What the ranks have returned. Raises HvdRunError."""
        from ..launcher import function_server

        returned = [each.body for each in answers if each.kind == function_server.RETURNED]
        if code == 0 and (len(returned) == self._size or (returned and self._size is None)):
            results = sorted(map(pickle.loads, returned), key=lambda each: each[0])
            return [result for _, result in results]
        failed = [
            each
            for each in answers
            if each.kind != function_server.RETURNED and (self._size or each.kind == function_server.RAISED)
        ]
        first = next((each for each in failed if each.kind != function_server.SUFFERED), failed[0] if failed else None)
        if first is None:
            lines = [line for line in self._words.splitlines() if line.startswith("hvdlite-run: ")]
            why = f"the job ended with {_code(code)}" if code else "not all ranks have answered"
            raise HvdRunError(coded("HVD721", "\n".join([why, *lines])), None, code)
        if first.kind == 0:
            shown, why = f"rank {first.rank} {first.who}", f" ({uncoded(first.body.decode())})" if first.body else ""
            raise HvdRunError(
                coded("HVD721", f"{shown} ended without an answer{why}; the job ended with {_code(code)}"),
                first.rank,
                code,
            )
        raise error_of(first.body, first.who, code)


def packed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A call, for `worker.made`. Raises TypeError where it cannot be sent."""
    import cloudpickle

    try:
        inner = cloudpickle.dumps((func, args, kwargs))
    except Exception as error:
        name = getattr(func, "__name__", type(func).__name__)
        why = f"run({name}): it or its arguments cannot be sent to ranks: {error}"
        raise TypeError(coded("HVD245", why)) from error
    folders = [os.path.abspath(folder) for folder in sys.path]
    return bytes(cloudpickle.dumps((folders, "hvdlite.as_horovod" in sys.modules, inner)))


def error_of(body: bytes, who: str, code: int = 1) -> HvdRunError:
    """What a rank has raised, from `worker.described`; its __cause__ is the exception, if it can be had here."""
    rank, text, trace, itself = pickle.loads(body)
    try:
        cause = None if itself is None else pickle.loads(itself)
    except Exception:  # its class cannot be imported here
        cause = None
    error = HvdRunError(coded("HVD721", f"rank {rank} {who} raised {text}\n\n{trace.rstrip()}"), rank, code)
    error.__cause__ = cause
    return error


def _code(code: int) -> str:
    """A launcher's exit code in words."""
    from ..launcher.agent.process import signal_name

    number = -code if code < 0 else code - 128
    return f"code {code}, {signal_name(number)}" if 0 < number <= 64 else f"code {code}"
