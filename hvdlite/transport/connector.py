"""Connector: make all streams of one purpose at once; this rank connects to smaller ranks and accepts from greater.

One loop in the caller's thread drives all connections that are being made, without blocking, and hears of those that
the listener's thread has accepted. A connection that fails is made again with growing pauses, at the peer's next
address if it published several, until the deadline: the peer may still be starting, or its table may be full for a
while. Two things end the attempts earlier: an answer that no repetition will change (another job, an earlier
incarnation), and an error of `check`, which reports ranks that died meanwhile. Only an authenticated peer gives such an
answer. Any process may answer that our secret is unknown, also one of another job on a port that a rank has left.

The error at the deadline names each missing rank with address, last failure and remedy. On any failure every stream of
this call is closed: nothing half-made is left.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Collection, Mapping
from functools import partial
from typing import Callable

from ..errors import HvdInitError, let_out
from ..errors.codes import coded, uncoded
from ..security import handshake
from . import address as addressing
from . import peer_claim
from .listener import Delivery, Key, Listener, Stream

ATTEMPT_S = 5.0  # one connection, from SYN to answer
AT_ONCE_MAX = 64  # connections being made by one call
CHECK_S = 0.1
SHOWN_MAX = 3  # ranks that an error describes in detail
RETRY_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_LASTING = {peer_claim.WIRE, peer_claim.JOB, peer_claim.EPOCH, peer_claim.PURPOSE, handshake.RELAYED}


class _Dial:
    """One peer to connect to; at most one socket at a time. `step` is called when that is ready or its time is up."""

    def __init__(self, listener: Listener, peer: int, address: addressing.Address, purpose: str) -> None:
        self.address, self.peer = address, peer
        self.failure = "it has not answered"
        self.hopeless: list[str] = []  # lasting failures, one per address of the peer
        self.sock: Stream | None = None
        self.done = False
        self.due = 0.0  # of the next attempt, or the end of the running one
        self._listener, self._purpose = listener, purpose
        self._attempts = 0
        self._reader: Callable[[], bool] = self._connected
        self._held = b""

    @property
    def end(self) -> addressing.End:
        """The address of the running or next attempt."""
        return self.address.ends[self._attempts % len(self.address.ends)]

    def start(self, now: float) -> None:
        """Begins an attempt: afterwards `sock` is to be watched, or None after a failure at once."""
        end, self.due = self.end, now + ATTEMPT_S
        self._reader, self._held = self._connected, b""
        is_6 = ":" in end.ip
        try:
            self.sock = Stream(socket.AF_INET6 if is_6 else socket.AF_INET, socket.SOCK_STREAM)
            self.sock.setblocking(False)
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            scope = self._listener.scope if end.ip.lower().startswith("fe80:") else 0
            code = self.sock.connect_ex((end.ip, end.port, 0, scope) if is_6 else (end.ip, end.port))
            if code not in (0, errno.EINPROGRESS):
                self.fail(os.strerror(code))
        except OSError as error:
            let_out(error)
            self.fail(str(error))

    def fail(self, text: str, lasting: bool = False) -> None:
        """Ends the attempt; the next one follows after a pause."""
        self.close()
        self.failure = f"{self.end}: {text}" if len(self.address.ends) > 1 else text
        if lasting and self.failure not in self.hopeless:
            self.hopeless.append(self.failure)
        self.due = time.monotonic() + RETRY_S[min(self._attempts // len(self.address.ends), len(RETRY_S) - 1)]
        self._attempts += 1

    def close(self) -> None:
        """Closes a connection in the making."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def events(self) -> int:
        """What to watch `sock` for."""
        return selectors.EVENT_WRITE if self._reader == self._connected else selectors.EVENT_READ

    def step(self) -> None:
        """Goes as far as it can without waiting. Then: done, or a `sock` to watch, or failed and to be started anew."""
        try:
            while self.sock is not None and not self.done and self._reader():
                pass
        except handshake.HandshakeError as error:
            self.fail(uncoded(str(error)) or peer_claim.reason(error.verdict), lasting=error.verdict in _LASTING)
        except OSError as error:
            let_out(error)
            self.fail(error.strerror or str(error))

    def _connected(self) -> bool:
        assert self.sock is not None
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.fail(os.strerror(code))
            return False
        if self.sock.getsockname() == self.sock.getpeername():  # TCP can connect a port to itself
            self.fail("nobody listens there")
            return False
        self._reader = self._greeted
        return True

    def _more(self, whole: int) -> bytes | None:
        """A message of `whole` bytes once it is complete."""
        assert self.sock is not None
        try:
            chunk = self.sock.recv(whole - len(self._held))
        except BlockingIOError:
            return None
        if not chunk:
            self.fail("the connection was closed before the handshake was done")
            return None
        self._held += chunk
        if len(self._held) < whole:
            return None
        message, self._held = self._held, b""
        return message

    def _greeted(self) -> bool:
        message = self._more(handshake.GREETING_BYTES)
        if message is None:
            return False
        assert self.sock is not None
        mine = self._listener.mine
        claim = mine._replace(source=mine.target, target=self.peer, purpose=self._purpose)
        ends = handshake.ends_of(self.sock, connects=True)
        me = handshake.Connector(self._listener.secret, handshake.LINK, ends, peer_claim.pack(claim))
        self._reader = partial(self._answered, me)
        return self._write(me.answer(message))

    def _answered(self, me: handshake.Connector) -> bool:
        message = self._more(handshake.VERDICT_BYTES)
        if message is not None:
            assert self.sock is not None
            self.sock.keys = me.session(message).keys
            self.done = self._write(peer_claim.CONFIRMED)
        return False

    def _write(self, message: bytes) -> bool:
        """A fresh connection has room for a message of ours."""
        assert self.sock is not None
        if self.sock.send(message) == len(message):
            return True
        self.fail("the connection takes no bytes")
        return False


def connect(
    listener: Listener,
    addresses: Mapping[int, bytes],
    purpose: str,
    deadline: float,
    check: Callable[[], None] | None = None,
) -> dict[int, Stream]:
    """A connected, authenticated, non-blocking stream to each rank of `addresses`, for this purpose, with its keys.

    addresses: by rank in the job, as the ranks' listeners have published them. Each of them calls `connect` with this
    rank and the same purpose (at most 63 bytes). deadline: a time.monotonic(). check: called about every 0.1 s; what it
    raises ends the call. Raises HvdInitError naming ranks, addresses and the remedy; no stream of this call is left
    then.
    """
    me = listener.rank
    if me in addresses:
        raise ValueError(f"rank {me} needs no stream to itself [HVD901]")
    peer_claim.pack(listener.mine._replace(source=me, purpose=purpose))  # a purpose too long: ValueError
    known = {peer: _address(listener, peer, packed) for peer, packed in addresses.items()}
    nearest_first = sorted((peer for peer in known if peer < me), reverse=True)  # or else all would call rank 0 at once
    dials = [_Dial(listener, peer, known[peer], purpose) for peer in nearest_first]
    awaited: set[Key] = {(peer, purpose) for peer in known if peer > me}
    streams: dict[int, Stream] = {}
    with selectors.DefaultSelector() as selector:
        delivery = Delivery()
        try:
            listener.claim_streams(awaited, delivery)
            selector.register(delivery, selectors.EVENT_READ)
            while len(streams) < len(known):
                now = time.monotonic()
                if now >= deadline:
                    raise _late(listener, known, dials, streams, purpose)
                _advance(listener, selector, dials, now)
                for key, _ in selector.select(_patience(dials, min(deadline, now + CHECK_S))):
                    if key.fileobj is not delivery:
                        _step(selector, key.data, streams)
                for (peer, _), stream in delivery.take().items():
                    streams[peer] = stream
                if check is not None:
                    check()
            return streams
        except BaseException:
            for stream in streams.values():
                stream.close()
            for dial in dials:
                dial.close()
            raise
        finally:
            listener.give_up(awaited)
            delivery.close()


def _address(listener: Listener, peer: int, packed: bytes) -> addressing.Address:
    """The peer's address, if it can be reached from here at all."""
    try:
        address = addressing.unpack(packed)
    except ValueError as error:
        raise HvdInitError(
            coded("HVD104", f"rank {listener.rank}: rank {peer} gave {error}; is its hvdlite the same version?")
        ) from None
    if address.mark != listener.known.mark and all(end.is_loopback for end in address.ends):
        raise HvdInitError(
            f"rank {listener.rank} on host {listener.known.host}: rank {peer} listens at {address}, which no other "
            "host reaches. It found the rendezvous at a loopback address: set HVDLITE_STORE_ADDR on that rank to an "
            "address that all hosts reach [HVD114]"
        )
    return address


def _advance(listener: Listener, selector: selectors.BaseSelector, dials: list[_Dial], now: float) -> None:
    """Ends attempts whose time is up, begins those that are due; raises for a peer that will never be reached."""
    running = 0
    for dial in dials:
        if dial.sock is not None and not dial.done and dial.due <= now:
            selector.unregister(dial.sock)
            dial.fail(f"no answer within {ATTEMPT_S:g} s")
        if len(dial.hopeless) == len(dial.address.ends):
            raise _refused(dial, listener)
        running += dial.sock is not None and not dial.done
    for dial in dials:
        if dial.sock is None and dial.due <= now and running < AT_ONCE_MAX:
            dial.start(now)
            if dial.sock is not None:
                selector.register(dial.sock, dial.events(), dial)
                running += 1


def _step(selector: selectors.BaseSelector, dial: _Dial, streams: dict[int, Stream]) -> None:
    sock = dial.sock
    if sock is None:
        return
    dial.step()
    if dial.done or dial.sock is None:
        selector.unregister(sock)
    else:
        selector.modify(sock, dial.events(), dial)
    if dial.done:
        streams[dial.peer] = sock


def _patience(dials: list[_Dial], until: float) -> float:
    """Seconds until something is due, at most until `until`."""
    due = [dial.due for dial in dials if not dial.done and (dial.sock is not None or len(dials) <= AT_ONCE_MAX)]
    return max(0.0, min([*due, until]) - time.monotonic())


def _refused(dial: _Dial, listener: Listener) -> HvdInitError:
    error = HvdInitError(
        f"rank {listener.rank} on host {listener.known.host}: rank {dial.peer} at {dial.address} refuses the "
        f"connection: {'; '.join(dial.hopeless)} [HVD115]"
    )
    error.rank = dial.peer
    return error


def _late(
    listener: Listener, known: Mapping[int, addressing.Address], dials: list[_Dial], made: Collection[int], purpose: str
) -> HvdInitError:
    """The error text when the time is up: the ranks that are missing, three of them in detail."""
    missing = sorted(peer for peer in known if peer not in made)
    reasons = {dial.peer: f"could not be reached: {dial.failure}" for dial in dials}
    shown = [
        f"rank {peer} at {known[peer]} {reasons.get(peer, 'has not connected to us')}" for peer in missing[:SHOWN_MAX]
    ]
    more = f"; and {len(missing) - SHOWN_MAX} more" if len(missing) > SHOWN_MAX else ""
    error = HvdInitError(
        f"rank {listener.rank} at {listener.known} has no connection for {purpose!r} with {len(missing)} of "
        f"{len(known)} ranks in time (HVDLITE_START_TIMEOUT sets the limit): {'; '.join(shown)}{more}. Check that "
        "these hosts reach each other: a firewall blocks these addresses, or an interface is down. [HVD115]"
    )
    error.rank = missing[0]
    return error
