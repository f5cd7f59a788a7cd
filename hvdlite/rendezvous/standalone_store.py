"""Store that rank 0 keeps for ranks that a scheduler has started without hvdlite-run.

Under a plain `srun python train.py` all ranks know the job's and the step's number and on which node rank 0 is; under
torchrun its MASTER_ADDR, MASTER_PORT and run id; where RANK and WORLD_SIZE are set by hand or by an operator of
Kubernetes, MASTER_ADDR and MASTER_PORT; where HVDLITE_RANK and HVDLITE_SIZE are, HVDLITE_STORE_ADDR. They get nothing
more (torch's store listens at MASTER_PORT, and authenticates no client). So rank 0 starts the store
(launcher/store/standalone.py, a process of its own, because it must outlive rank 0 to name it when it dies) on the
address by which the other nodes know its node, at the first free of a few ports; the others try these in turn. A port
that answers is the right one if it proves that it knows the job's secret, and that is never sent:

    HVDLITE_SECRET_KEY          if the job file sets it, else what HVDLITE_SECRET_FILE holds, else
    ~/.config/hvdlite/key       made once, readable by its user alone, in a home that the nodes share
    (security/job_secret.py)

The secret of the job is drawn from it and these numbers. The first port follows from the numbers, so that ranks with
different secrets connect there and report it. The others follow from the secret, so that no stranger can occupy them
all before the job starts. Ranks skip any other process that listens at one of these ports or relays its traffic, and
name it if they find no store.

From there on everything is as with the launcher's store. HVDLITE_STORE_ADDR names rank 0's node another way, where its
own name leads astray, and HVDLITE_STORE_PORT the port.

Some operators give rank 0 "localhost" as the name of its host, and the other ranks the real name. So the store listens
at all addresses where rank 0's name stays at home, unless all ranks are known to be on its host, or no other host can
have the secret. The number of ranks is no part of the port and the secret: the store compares it, and names the rank
that was given another.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .. import config
from ..errors import HvdInitError, let_out
from ..errors.codes import coded, uncoded
from ..security import handshake
from ..security import job_secret as _secrets
from ..system import python_command
from ..transport import address
from . import slurm, store_client
from .discovery import BY_HAND, Place, described

_PORTS = (10000, 20000)  # below those that the kernel gives away, and those of torch.distributed
_TRIED = 8
_PAUSE_S = 0.1
_ANSWER_S = 3.0
_HOME = "127.0.0.1"
_EVERYWHERE = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
_keepers: list[subprocess.Popen[bytes]] = []  # of this process, as rank 0
_known: dict[str, Any] = {}  # what `found` found, for later incarnations


def found(place: Place, environ: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """store_addr, store_port and secret_key of this job. Rank 0 opens the store, the others wait for it.

    Raises HvdInitError naming the rank, where it looked and the remedy.
    """
    if _known and _known["pid"] == os.getpid():
        return {name: value for name, value in _known.items() if name != "pid"}
    deadline = time.monotonic() + values["start_timeout"]
    find_step = {"torchrun": _torchrun, "Slurm": _step}.get(place.source, _by_hand)
    step, nodes = find_step(place, environ, values["store_addr"])
    node = values["store_addr"] or (nodes[0] if len(nodes) > 1 else _HOME)
    key, here = _key(values["secret_key"], environ, place.rank, node, len(nodes) < 2)
    secret = hmac.digest(key, step.encode(), "sha256")
    ports = [values["store_port"]] if values["store_port"] else _ports(step, secret)
    node = _HOME if here else node
    _check_name(node)
    if place.rank == 0:
        if find_step is _by_hand:
            _await_name(node, deadline)
        ip = _HOME if here else _own_address(node, nodes)
        if ip not in (_HOME, _EVERYWHERE):
            _refuse_second(node, ip, ports[0], secret)
        # Half of the time, so that its error does not come after a first rank 0 has given up.
        port = _keep_alone(place.size, ip, ports, secret, deadline - values["start_timeout"] / 2)
        where = (_HOME if ip == _EVERYWHERE else port["address"], port["port"])
    else:
        where = _seek(place.rank, node, ports, secret, values["start_timeout"], environ, described(place, environ))
    _known.update(store_addr=where[0], store_port=where[1], secret_key=secret, pid=os.getpid())
    return found(place, environ, values)


def _step(place: Place, environ: Mapping[str, str], store_addr: str | None) -> tuple[str, list[str]]:
    """What identifies this step of this allocation in the cluster, and its nodes."""
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID", "")
    step = f"{environ.get('SLURM_CLUSTER_NAME', '')} {job}.{environ.get('SLURM_STEP_ID', '')}"
    return step, slurm.nodes(environ.get("SLURM_STEP_NODELIST", ""), "SLURM_STEP_NODELIST")


def _torchrun(place: Place, environ: Mapping[str, str], store_addr: str | None) -> tuple[str, list[str]]:
    """The same under torchrun, which sets rank 0's node alone. Its name is not part of the identity, as below, nor is
    the count of restarts, since nodes need not have the same; an earlier attempt's store ends when its ranks do."""
    node, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if not node or not port:
        raise HvdInitError(
            f"rank {place.rank} of {place.size}: torchrun's MASTER_ADDR={node!r} and MASTER_PORT={port!r} do not "
            "lead to rank 0: does the script change them before init()? [HVD116]"
        )
    step = f"torchrun {environ['TORCHELASTIC_RUN_ID']} {port}"
    return step, [_HOME] if place.local_size == place.size else [node, node]


def _by_hand(place: Place, environ: Mapping[str, str], store_addr: str | None) -> tuple[str, list[str]]:
    """The same where variables give the host of rank 0 and a port, and no number of the job. The name of the host is
    not part of the identity, since rank 0 may have another for itself."""
    port = environ.get("MASTER_PORT") or environ.get("PET_MASTER_PORT") if place.source == BY_HAND else None
    node = store_addr or environ.get("MASTER_ADDR") or environ["PET_MASTER_ADDR"]
    local = environ.get("LOCAL_WORLD_SIZE") if place.source == BY_HAND else str(place.local_size)
    return f"by hand, {port}", [_HOME] if local == str(place.size) else [node, node]


def _check_name(node: str) -> None:
    """Raises HvdInitError for what cannot be looked up: an empty part of a name, or one of more than 63 letters."""
    try:
        node.encode("idna")
    except UnicodeError as error:
        raise HvdInitError(
            f"{node!r} is not the name of a host ({error}): set MASTER_ADDR (or HVDLITE_STORE_ADDR) to that of rank 0 "
            "[HVD116]"
        ) from None


def _await_name(node: str, deadline: float) -> None:
    """Waits until the name of rank 0's host resolves: DNS knows that of a pod only after the pod has started."""
    while time.monotonic() < deadline:
        try:
            socket.getaddrinfo(node, 0)
            return
        except OSError as error:
            let_out(error)
            time.sleep(_PAUSE_S)


def _ports(step: str, secret: bytes) -> list[int]:
    """The ports to try, in order: one that any process can compute, and some that only this job can."""
    low, high = _PORTS
    drawn = hashlib.sha256(step.encode()).digest()[:2] + hmac.digest(secret, b"hvdlite ports", "sha256")
    return [low + int.from_bytes(drawn[2 * i : 2 * i + 2], "big") % (high - low) for i in range(_TRIED)]


def _key(secret_key: bytes | None, environ: Mapping[str, str], rank: int, node: str, here: bool) -> tuple[bytes, bool]:
    """What the secret is drawn from, and whether it serves ranks of this host alone. here: all are known to be on it.
    Raises HvdInitError."""
    if secret_key is not None:
        return secret_key, here
    try:
        return _secret(environ, rank, here), here
    except HvdInitError:
        if here or not _stays_home(node):
            raise
    return _secret(environ, rank, True), True


def _stays_home(name: str) -> bool:
    """Whether a name or an address leads every host to itself."""
    return name in ("localhost", "0.0.0.0", "::") or address.End(name, 0).is_loopback


def _own_address(node: str, nodes: Sequence[str]) -> str:
    """The address at which the other nodes look for this one: that of its name; all, if the name stays at home."""
    try:
        (_, _, _, _, end), *_ = socket.getaddrinfo(node, 0, type=socket.SOCK_STREAM)
        if not _stays_home(str(end[0])):
            with socket.create_server((str(end[0]), 0), family=_family(str(end[0]))):
                return str(end[0])
    except OSError:
        pass  # a name that leads nowhere, or to no interface of this node
    mine = str(address.towards((nodes[-1], 9), 0)[1][0])
    return _EVERYWHERE if _stays_home(mine) else mine


def _refuse_second(node: str, ip: str, port: int, secret: bytes) -> None:
    """Raises where the name of rank 0's host leads to another host, and rank 0 has its store there already."""
    try:
        away = ip not in (end[0] for *_, end in socket.getaddrinfo(node, 0, type=socket.SOCK_STREAM))
    except OSError as error:
        let_out(error)
        return
    if away and _is_ours(node, port, secret):
        raise HvdInitError(
            f"rank 0 ({socket.gethostname()}): {node} is another host, where another rank 0 of this job waits: give "
            "every process a RANK (PET_NODE_RANK, HVDLITE_RANK) of its own [HVD118]"
        )


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _keep_alone(size: int, ip: str, ports: Sequence[int], secret: bytes, deadline: float) -> dict[str, Any]:
    """Starts the store where no other with this secret listens at an earlier port: ranks of both jobs would join it.
    Waits for the other to end, since it may be what is left of an attempt before."""
    near = _HOME if ip == _EVERYWHERE else ip
    while True:
        found = _keep(size, ip, ports, secret)
        other = next((port for port in ports[: ports.index(found["port"])] if _is_ours(near, port, secret)), None)
        if other is None:
            return found
        keeper = _keepers.pop()
        keeper.kill()
        keeper.wait()
        if time.monotonic() > deadline:
            raise HvdInitError(
                f"rank 0 of {size}: another rank 0 already uses {near}:{other}, with the same secret and the same "
                "MASTER_PORT or none. If it is of this job, give every process a RANK of its own. If it is of another "
                "job, set a different MASTER_PORT (or HVDLITE_STORE_PORT) for each job [HVD116]"
            )
        time.sleep(_PAUSE_S)


def _is_ours(ip: str, port: int, secret: bytes) -> bool:
    try:
        _prove(ip, port, secret, time.monotonic() + _ANSWER_S)
    except (handshake.HandshakeError, OSError, EOFError) as error:
        if isinstance(error, OSError):
            let_out(error)
        return False
    return True


def _keep(size: int, ip: str, ports: Sequence[int], secret: bytes) -> dict[str, Any]:
    """Starts the store; where it listens. It ends after this process, once it has no connection any more."""
    path = os.pathsep.join(dict.fromkeys(each or os.curdir for each in sys.path))
    keeper = subprocess.Popen(
        python_command.words("hvdlite.launcher.store.standalone", "main()"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**config.environ(), "PYTHONPATH": path},  # as the script finds hvdlite, so does the keeper
        start_new_session=True,
    )
    assert keeper.stdin is not None and keeper.stdout is not None
    _keepers.append(keeper)
    os.register_at_fork(after_in_child=keeper.stdin.close)  # a child must not keep it alive
    order = {"size": size, "address": ip, "ports": list(ports), "secret": secret.hex()}
    try:
        keeper.stdin.write(json.dumps(order).encode() + b"\n")
        keeper.stdin.flush()
        report = json.loads(keeper.stdout.readline() or b"{}")
    except OSError as error:
        let_out(error)
        report = {}
    keeper.stdout.close()
    if "port" not in report:
        reason = report.get("failed", f"hvdlite.launcher.store.standalone does not start by {sys.executable}")
        raise HvdInitError(
            coded(
                "HVD116",
                f"rank 0 cannot open a store for the {size} ranks of this job: {reason}. Set HVDLITE_STORE_ADDR to an "
                "address of the first node, or start the job with hvdlite-run.",
            )
        )
    return report


def _seek(
    rank: int,
    node: str,
    ports: Sequence[int],
    secret: bytes,
    timeout: float,
    environ: Mapping[str, str],
    assignment: str,
) -> tuple[str, int]:
    """Where rank 0's store listens, asked for until it answers. A port of another process is skipped, also one that
    relays to the store. assignment: the source of this rank's assignment, for the text."""
    deadline, attempt = time.monotonic() + timeout, 0
    reasons: dict[int, str] = {}
    while time.monotonic() < deadline:
        port = ports[attempt % len(ports)]
        attempt += 1
        try:
            return _prove(node, port, secret, deadline), port
        except handshake.HandshakeError as error:
            reasons[port] = uncoded(store_client.stranger(error, "that port"))
        except (OSError, EOFError) as error:
            if isinstance(error, OSError):
                let_out(error)
            reasons.setdefault(port, str(error))
        if attempt % len(ports) == 0:
            time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))
    shared = {reason: [str(port) for port in ports if reasons.get(port) == reason] for reason in reasons.values()}
    refusals = "; ".join(f"{', '.join(those)}: {reason}" for reason, those in shared.items())
    raise HvdInitError(
        f"rank {rank} ({socket.gethostname()}) found no store of rank 0 at {node} within {timeout:g} s (ports "
        f"{refusals}). This rank has {assignment}: rank 0 must have the same, but for the rank. "
        f"Check that rank 0 calls init(), and that {node} leads to its node (or set HVDLITE_STORE_ADDR). "
        f"Check that the nodes share the home directory, or set a secret: {_secrets.giving(environ)} [HVD116]"
    )


def _prove(node: str, port: int, secret: bytes, deadline: float) -> str:
    """The address of a store of ours, the first that proves it of all that the name leads to. Raises HandshakeError
    where another listens there, OSError, EOFError."""
    failure: Exception | None = None
    for family, _, _, _, end in socket.getaddrinfo(node, port, type=socket.SOCK_STREAM):
        limit = min(deadline, time.monotonic() + _ANSWER_S)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(max(0.01, limit - time.monotonic()))
                sock.connect(end)
                handshake.shake_hands(sock, secret, handshake.STORE, limit)
                return str(end[0])
        except (handshake.HandshakeError, OSError, EOFError) as error:
            if isinstance(error, OSError):
                let_out(error)
            if failure is None or isinstance(error, handshake.HandshakeError):
                failure = error
    assert failure is not None  # a name leads somewhere, or getaddrinfo raises
    raise failure


def _secret(environ: Mapping[str, str], rank: int, one_host: bool) -> bytes:
    """This user's key. Raises HvdInitError."""
    try:
        return _secrets.of_user(environ, one_host)
    except _secrets.SecretError as error:
        raise HvdInitError(
            f"rank {rank}: this job has no secret that keeps other users out: {error}. Set a secret: "
            f"{_secrets.giving(environ)}. Or set HVDLITE_SECRET_FILE to a file of mode 0600 that all nodes have "
            "[HVD117]"
        ) from None
