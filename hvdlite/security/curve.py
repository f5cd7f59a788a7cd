"""CURVE keys for ZeroMQ: only the processes of one job exchange messages of hvd.ps and hvd.rpc.

All keys are drawn from a secret that the job's processes share, so nothing is handed out and no process in between can
put himself there: each side knows the other's public key before the first byte. A server (of tables, or a rank that
takes calls) has a key of its own; the clients share one, and a server lets in no other (ZAP, RFC 27 of ZeroMQ).

CURVE (libsodium: Curve25519, XSalsa20-Poly1305) encrypts what is sent, and refuses what is repeated or changed. pyzmq
is an extra: it is imported when the first socket is made.
"""

from __future__ import annotations

import hmac
from typing import Any

from ..errors import HvdInitError
from . import connection_limits, zmq_proxy

MESSAGE_MAX = 64 << 20  # bytes of a frame; the sender of a larger one is cut off
_HANDSHAKE_MS = int(1000 * connection_limits.HANDSHAKE_S)
_CONNECT_MS = 2000  # after which it is tried anew: the kernel itself asks more and more rarely while a network is cut


def zmq_for(what: str) -> Any:
    """The module zmq. HvdInitError where pyzmq is missing or cannot encrypt; `what` needs it: "hvd.ps"."""
    extra = what.partition(".")[2]
    try:
        import zmq
        import zmq.utils.z85
    except ImportError as error:
        raise HvdInitError(f'{what} needs pyzmq: pip install "hvdlite[{extra}]" ({error}) [HVD023]') from error
    if not zmq.has("curve"):
        raise HvdInitError(
            f"{what} needs a pyzmq with encryption; this one (libzmq {zmq.zmq_version()}) was built without CURVE: "
            'pip install --force-reinstall --no-build-isolation "pyzmq>=25" [HVD023]'
        )
    return zmq


class Keys:
    """The keys of a job's processes for one purpose. secret: at least 16 random bytes, the same in all of them.

    keys = Keys(secret, "rpc", zmq_for("hvd.rpc"))
    keys.serve(router, number=3)  # before it listens
    proxy = keys.listen(router, "10.0.0.3")
    keys.connect_to(dealer, number=3)
    keys.connect(dealer, proxy.address)
    """

    def __init__(self, secret: bytes, purpose: str, zmq: Any) -> None:
        self._secret, self._purpose, self._zmq = secret, purpose, zmq

    def _pair(self, side: str) -> tuple[bytes, bytes]:
        """(public, secret), as ZeroMQ's options take them (Z85)."""
        drawn = hmac.digest(self._secret, f"hvdlite {self._purpose}, {side}".encode(), "sha256")
        hidden = self._zmq.utils.z85.encode(drawn)
        return self._zmq.curve_public(hidden), hidden

    def serve(self, socket: Any, number: int) -> None:
        """Server `number` will bind this socket."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self._pair(f"server {number}")
        socket.handshake_ivl = _HANDSHAKE_MS

    def listen(self, socket: Any, host: str) -> zmq_proxy.Proxy:
        """Binds this socket behind a port at `host`. Close what is returned after the socket. OSError: no port."""
        return zmq_proxy.listen(socket, host, self._name)

    def connect_to(self, socket: Any, number: int) -> None:
        """A client will connect this socket to server `number`."""
        socket.curve_publickey, socket.curve_secretkey = self._pair("client")
        socket.curve_serverkey = self._pair(f"server {number}")[0]
        socket.handshake_ivl = _HANDSHAKE_MS

    def connect(self, socket: Any, address: str) -> None:
        """A client connects this socket to the server that listens at `address`."""
        socket.ipv6 = "[" in address
        socket.connect(zmq_proxy.local_address(address, self._name(address)))

    def _name(self, address: str) -> str:
        """Of the unix socket behind this address: no other process can take it before."""
        label = f"hvdlite {self._purpose}, behind {address}".encode()
        return "hvdlite-" + hmac.digest(self._secret, label, "sha256")[:16].hex()

    def is_client(self, credentials: bytes) -> bool:
        """Whether a raw public key is the clients'."""
        return hmac.compare_digest(credentials, self._zmq.utils.z85.decode(self._pair("client")[0]))


class Door:
    """Lets in clients of the job alone. Make it before a socket of this context binds; poll `socket`, and call `turn`
    when something has come. `refused` counts those that were not let in."""

    def __init__(self, context: Any, keys: Keys, zmq: Any) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")
        self._keys = keys
        self.refused = 0

    def turn(self) -> None:
        """Answers one connection that asks to be let in."""
        version, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        is_ours = mechanism == b"CURVE" and len(credentials) == 1 and self._keys.is_client(credentials[0])
        self.refused += not is_ours
        status = (b"200", b"OK") if is_ours else (b"400", b"not of this job")
        self.socket.send_multipart([version, request, *status, b"", b""])


def bounded(socket: Any, silence_ms: int) -> None:
    """What every socket here has: no own limit on queued messages (senders count theirs), a largest message, and
    heartbeats: a connection that is silent for `silence_ms` is made anew."""
    socket.set_hwm(0)
    socket.maxmsgsize = MESSAGE_MAX
    socket.connect_timeout = _CONNECT_MS
    socket.heartbeat_ivl, socket.heartbeat_timeout, socket.heartbeat_ttl = silence_ms // 3, silence_ms, silence_ms
