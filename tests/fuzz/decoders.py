"""Targets in Python: what a listener, a connecting rank and the store read of others. Each plays one input, in bytes.

As in tests/c/fuzz.h an input is a short program: mostly true messages, damaged where it says so, in the pieces that it
says. Sockets, selectors, random numbers and time are made of the input, too (fakes.py), so that a failure is replayed
by its input, and nothing waits. What must hold beside "nothing is raised that is not foreseen": who has not proved the
secret gets nowhere, whoever has gets no further than a rank may, and what goes out can be read by the other end.

    python tests/fuzz/decoders.py --target=store [libFuzzer's options] FOLDER      with atheris, see run.py
"""

import json
import random
import sys
import time
from contextlib import nullcontext

import fakes
from fakes import Input, damaged, mutated


def has_atheris() -> bool:
    """Is there a coverage-guided fuzzer for Python here?"""
    try:
        import atheris  # noqa: F401
    except ImportError:
        return False
    return True


def _watched():
    """Where atheris drives, what is imported within is instrumented."""
    if __name__ == "__main__" and has_atheris():
        import atheris

        return atheris.instrument_imports(include=["hvdlite"])
    return nullcontext()


with _watched():
    from hvdlite.launcher.store import epochs, server
    from hvdlite.launcher.store.elastic_members import Events, Terms
    from hvdlite.launcher.store.elastic_membership import Membership
    from hvdlite.security import connection_limits as strangers
    from hvdlite.security import framing, handshake
    from hvdlite.transport import address as places
    from hvdlite.transport import connector, peer_claim
    from hvdlite.transport import listener as accepting

SECRET, FALSE_SECRET = bytes(range(32)), bytes(32)
JOB = 0xFEDCBA9876543210


def play_proof(given: Input) -> None:
    """The handshake of two ranks: who proves nothing learns nothing, and each side hears what the other has said."""
    handshake.os, who = fakes.Os(), given.below(8)
    secret, purpose = SECRET if who else FALSE_SECRET, handshake.STORE if who == 1 else handshake.LINK
    mine, ends = peer_claim.Claim(4, JOB, 0, -1, 1, ""), bytes(range(handshake.ENDS_BYTES))
    packed, seen = bytearray(peer_claim.pack(mine._replace(source=2, purpose="set 0"))), bytearray(ends)
    for each in (packed, seen):
        damaged(given, each)  # by somebody who knows the secret
    greeting, me = handshake.greeting(), handshake.Connector(secret, purpose, bytes(seen), bytes(packed))
    answer = me.answer(greeting)
    sent = bytearray(answer)
    damaged(given, sent)  # by somebody who does not
    told, session = handshake.judge(
        SECRET,
        handshake.LINK,
        ends,
        greeting,
        bytes(sent),
        lambda it: peer_claim.verdict_on(peer_claim.unpack(it), mine),
    )
    assert len(sent) == peer_claim.ANSWER_BYTES and len(told) == handshake.VERDICT_BYTES
    assert (told[0] != handshake.UNKNOWN) == (sent == answer and who > 1)
    assert (session is not None) == (told[0] == handshake.WELCOME)
    claim = peer_claim.unpack(bytes(packed))
    assert session is None or (claim.job == JOB and claim.source > 1 and len(claim.purpose) < 64 and seen == ends)
    assert _heard(me, told) == told[0] and peer_claim.reason(told[0])
    changed, greeted = bytearray(told), bytearray(greeting)
    assert not damaged(given, changed) or _heard(me, bytes(changed)) in (handshake.FALSE, handshake.UNKNOWN)
    damaged(given, greeted)
    try:
        assert me.answer(bytes(greeted)) and greeted[:8] == handshake.MAGIC
    except handshake.HandshakeError:
        assert greeted[:8] != handshake.MAGIC


def _heard(me: handshake.Connector, told: bytes) -> int:
    try:
        me.session(told)
    except handshake.HandshakeError as error:
        return error.verdict
    return handshake.WELCOME


def play_address(given: Input) -> None:
    """The address of a rank, as it comes through the bootstrap."""
    ends = [places.End("10.0.0.1", 5), places.End("fe80::1", 65535)][given.below(2) :]
    packed = bytearray(places.pack(places.Address("node-a", b"hostmark", tuple(ends))))
    if damaged(given, packed):
        del packed[given.below(len(packed) + 1) :]
    packed += b"\4\0\5\12\0\0\1" * (given.below(36) // 6)
    if given.below(2):
        packed += given.take(given.below(160))
    try:
        address = places.unpack(bytes(packed))
    except ValueError:
        return
    assert 1 <= len(address.ends) <= 4 and str(address) and len(packed) <= 128
    assert all(0 <= end.port < 65536 and isinstance(end.is_loopback, bool) for end in address.ends)
    assert len(places.pack(address)) <= places.ADDRESS_MAX


def play_frames(given: Input) -> None:
    """Frames of the store's connection, in pieces, and their bodies, as both ends read them: of frames that are signed
    nothing is read but what was sent, in order, and nothing is waited for but what is on its way."""
    stream, said, heads, signed = bytearray(), [], [], given.below(2) == 1
    sender, receiver = (framing.Session(SECRET, FALSE_SECRET), framing.Session(FALSE_SECRET, SECRET))
    if not signed:
        sender = receiver = framing.Session()
    for _ in range(given.below(5)):
        body = [
            framing.pack_end(given.below(9) - 2, -given.below(200), "rank 1 \u00e9 " * given.below(9)),
            framing.pack_round(given.below(4), given.take(given.below(40))),
            framing.pack_gathered(given.below(4), [given.take(given.below(20)) for _ in range(given.below(4))]),
            given.take(given.below(64)),
        ][given.below(4)]
        said.append((given.below(10), body))
        frame = sender.pack(*said[-1])
        heads.append(frame[: sender.head_bytes])
        stream += frame
    damaged(given, stream)
    reader, size = framing.FrameReader(receiver, 4096), 1 + given.below(3)
    try:
        while stream:
            piece = bytes(stream[: 1 + given.below(300)])
            del stream[: len(piece)]
            for kind, body in reader.feed(piece):
                assert 0 <= kind < 256 and len(body) < 4096
                assert not signed or (kind, body) == said.pop(0)
                for read in (
                    framing.unpack_end,
                    framing.unpack_round,
                    lambda body: framing.unpack_gathered(body, size),
                ):
                    try:
                        read(body)
                    except framing.WireError:
                        pass
            held = bytes(reader._held[: receiver.head_bytes])
            assert not signed or len(held) < len(heads[0]) or held == heads[len(heads) - len(said)]
        reader.end()
    except framing.WireError:
        pass
    assert len(reader._held) <= 4096 + 8 + 300


class _Client:
    """The other end of a connection to the store."""

    def __init__(self, given: Input, selector: fakes.Selector) -> None:
        self.given, self.sock, self.true, self.rank = given, fakes.Socket(selector), True, -1
        self.session = framing.Session()

    def shake_hands(self) -> None:
        """The answer to the greeting; not always the right one."""
        greeted = bytes(self.sock.sent[: handshake.GREETING_BYTES])
        ends = handshake.ends_of(self.sock, connects=True)
        me = handshake.Connector(SECRET if self.given.below(8) else FALSE_SECRET, handshake.STORE, ends)
        told = bytearray(me.answer(greeted))
        damaged(self.given, told)
        verdict, session = handshake.judge(SECRET, handshake.STORE, ends, greeted, bytes(told))
        self.true = session is not None
        if self.true:
            self.session = me.session(verdict)
        self.sock.comes(bytes(told))

    def say(self, size: int, elastic: bool) -> None:
        """A frame, mostly one that may come."""
        given, kind = self.given, self.given.below(framing.NEWS + 2 if elastic else 10) or framing.SERVE
        if kind == 9 and not elastic:
            kind = framing.ENDED
        if kind == framing.JOIN:
            self.rank = given.below(size + 1)
            says = {"rank": self.rank, "size": size, "pid": 9, "host": "a", "version": "1", "wire": 4, "timeout": 9}
            says.update({"commit": given.below(4) - 1} if elastic else {})
            body = bytearray(json.dumps(says).encode())
        elif kind == framing.ALLGATHER:
            body = bytearray(framing.pack_round(1 + given.below(3), given.take(given.below(30))))
        elif kind in (framing.ABORT, framing.ENDED):
            body = bytearray(framing.pack_end(given.below(5) - 1, -5, "it fell"))
        elif kind == framing.SERVE:
            body = bytearray(b'{"server":%d,"address":"tcp://127.0.0.1:4000"}' % (given.below(4) - 1))
        else:
            body = bytearray(given.take(given.below(12)))
        damaged(given, body)
        frame = bytearray(self.session.pack(kind, bytes(body)))
        damaged(given, frame)
        self.sock.comes(bytes(frame))

    def check(self) -> None:
        """What it was told can be read; a stranger was told nothing but the nonce and that it is one."""
        told = bytes(self.sock.sent)[handshake.GREETING_BYTES :]
        if not self.true:
            assert bytes((handshake.UNKNOWN,)).ljust(handshake.VERDICT_BYTES, b"\0").startswith(told)
            return
        for kind, body in framing.FrameReader(self.session).feed(told[handshake.VERDICT_BYTES :]):
            assert kind not in (framing.JOIN, framing.ALLGATHER, framing.ABORT, framing.WATCH, framing.SERVE)
            if kind in (framing.LOST, framing.GONE):
                framing.unpack_end(body)


def play_members(given: Input) -> None:
    """The store of an elastic job: members say anything, too, and some only watch."""
    play_store(given, elastic=True)


def _book(store: server.StoreServer, size: int, clock: fakes.Clock) -> Membership:
    events = Events(*(lambda *said: None for _ in Events._fields))
    book = Membership(Terms(1, None, size, 9.0, None), JOB, store._send_frame, events, clock.monotonic)
    for number in range(size):
        book.started(number, "a", number)
    return book


def play_store(given: Input, elastic: bool = False) -> None:
    """The store, with ranks that say anything, and others that are none."""
    clock, size, servers, aborts = fakes.Clock(), 1 + given.below(3), 0 if elastic else given.below(3), []
    server.time = epochs.time = strangers.time = clock
    handshake.os = fakes.Os()
    selector, listening = fakes.Selector(), fakes.Listening()
    store = server.StoreServer.__new__(server.StoreServer)
    store._secret, store._on_abort = SECRET, lambda *record: aborts.append(record)
    store._listener, store._selector = listening, selector
    store._strangers, store._guests, store._members, store._watchers, store.left = [], [], {}, [], set()
    book = None if elastic else epochs.Epochs(size, JOB, store._send_frame, None, servers)
    store._epochs, store.servers = book or _book(store, size, clock), server.Serving(book, store._send)
    selector.register(listening, 1, None)
    clients: list[_Client] = []
    for _ in range(40):
        what = given.below(16)
        if not given.left:
            break
        if what < 4 and len(clients) < 6:
            clients.append(_Client(given, selector))
            listening.waiting.append(clients[-1].sock)
            store.turn(0)
            clients[-1].shake_hands()
        elif what < 12 and clients:
            clients[given.below(len(clients))].say(size, elastic)
        elif what == 12 and clients:
            clients[given.below(len(clients))].sock.over = True
        elif what == 13 and clients:
            clients[given.below(len(clients))].sock.room = given.below(200)
        elif what == 14 and servers and given.below(2):
            store.servers.ended(given.below(servers), "it was killed [HVD402]")
        elif what == 14:
            store.rank_ended(given.below(size), "it was killed")
        else:
            clock.now += given.below(100) / 10
        if what % 2:
            store.turn(0)
    store.turn(0)
    for client in clients:
        client.check()
    proved = [client.sock for client in clients if client.true]
    assert all(0 <= rank < size and member.sock in proved for rank, member in store._members.items())
    assert all(0 <= reporter < size and 0 <= culprit < size for reporter, culprit, _, _ in aborts)
    store.close()
    assert not selector.keys.keys() - {listening}


def play_listener(given: Input) -> None:
    """A listener with peers and strangers: who is kept has proved everything that its key says."""
    handshake.os, accepting.time, accepting.Stream = fakes.Os(), fakes.Clock(), fakes.Stream
    strangers.time = accepting.time
    made = accepting.Listener.__new__(accepting.Listener)
    made.secret, made.mine = SECRET, peer_claim.Claim(4, JOB, 0, -1, 1, "")
    made._sock, made._selector = fakes.Listening(), fakes.Selector()
    made._awaited, made._kept, made._strangers, made._paused = {}, {}, [], None
    made._lock = nullcontext()
    made._selector.register(made._sock, 1, None)
    peers: list[tuple[fakes.Socket, tuple[int, str] | None]] = []
    for _ in range(given.below(7)):
        sock = fakes.Socket(made._selector)
        made._sock.waiting.append(sock)
        made._accept()
        claim = made.mine._replace(source=given.below(4), purpose="set 0"[: given.below(6)])
        secret, ends = SECRET if given.below(8) else FALSE_SECRET, bytes(handshake.ENDS_BYTES)
        me = handshake.Connector(secret, handshake.LINK, ends, peer_claim.pack(claim))
        message = bytearray(me.answer(bytes(sock.sent)))
        true = not damaged(given, message) and secret == SECRET
        ended = bytearray(peer_claim.CONFIRMED + given.take(given.below(3)))
        damaged(given, ended)
        sock.comes(bytes(message + ended))
        sock.piece, sock.over = 1 + given.below(200), given.below(8) == 0
        peers.append((sock, (claim.source, claim.purpose) if true else None))
        for _ in range(given.below(64)):
            stranger = next((each for each in made._strangers if each.sock is sock), None)
            if stranger is not None:
                made._receive(stranger)
    for key, stream in made._kept.items():
        assert [key] == [told for sock, told in peers if sock is stream.sock] and key[0] > made.rank
        assert stream.sock.unread_after(peer_claim.ANSWER_BYTES + 1)  # what follows is the core's
    assert len(made._strangers) + len(made._kept) <= len(peers)


def play_dial(given: Input) -> None:
    """The connecting side: whoever is no rank of this job is seen through, whatever it says."""
    handshake.os, connector.time = fakes.Os(), fakes.Clock()
    listening = accepting.Listener.__new__(accepting.Listener)
    listening.secret, listening.mine = SECRET, peer_claim.Claim(4, JOB, 0, -1, 3, "")
    address = places.Address("a", b"hostmark", (places.End("10.0.0.1", 5),))
    call = connector._Dial(listening, 1, address, "set 0")
    sock = call.sock = fakes.Socket(fakes.Selector())
    sock.piece = 1 + given.below(100)
    greeting = bytearray(handshake.MAGIC + given.take(32).ljust(32, b"\0"))
    damaged(given, greeting)
    sock.comes(bytes(greeting))
    sock.room = 1 << 20 if given.below(16) else given.below(200)
    call._reader = call._greeted
    for _ in range(50):
        call.step()
    if greeting[:8] != handshake.MAGIC or call.sock is None:
        assert not call.done
        return
    answer, verdict = bytes(sock.sent), 1 + given.below(9)
    secret, ends = SECRET if given.below(8) else FALSE_SECRET, bytes(handshake.ENDS_BYTES)
    told, session = handshake.judge(secret, handshake.LINK, ends, bytes(greeting), answer, lambda claim: verdict)
    said = bytearray(told)
    true = not damaged(given, said) and session is not None
    sock.comes(bytes(said))
    sock.over = given.below(4) == 0
    for _ in range(50):
        call.step()
    assert call.done <= true
    assert call.done or call.sock is None or call.sock.unread < handshake.VERDICT_BYTES


PLAYED = (play_proof, play_address, play_frames, play_store, play_members, play_listener, play_dial)
TARGETS = {play.__name__.partition("_")[2]: play for play in PLAYED}


def play_mutations(target: str, kept: "list[bytes]", seed: int, inputs: int, seconds: float = 0) -> int:
    """Plays what is kept, then mutations of it; how many. A failure tells its input."""
    chance, kept = random.Random(seed), kept or [b""]
    began, played = time.monotonic(), 0
    while played < inputs + len(kept) if not seconds else time.monotonic() - began < seconds:
        made = kept[played] if played < len(kept) else mutated(kept, chance)
        try:
            TARGETS[target](Input(made))
        except Exception as error:
            raise AssertionError(f"target {target} fails on the input {made.hex()}") from error
        played += 1
    print(f"{target}: {played} inputs in {time.monotonic() - began:.0f} s", flush=True)
    return played


if __name__ == "__main__":
    import atheris

    chosen = next(each for each in sys.argv if each.startswith("--target="))  # libFuzzer passes it by
    play = TARGETS[chosen.partition("=")[2]]
    atheris.Setup(sys.argv, lambda given: play(Input(given)))
    atheris.Fuzz()
