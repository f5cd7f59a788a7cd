"""Does the book of an elastic job keep its rules, whatever happens? Drawn histories, and what its texts say.

The members of a History are models: one trains until it hears of a loss or an interrupt, leaves its epoch and joins
again. Deaths come at any time (within a meeting, a sync, a commit), ends and connections in any order; some members are
late, some cannot reach each other, some are removed, and newcomers come. Time is drawn, too. The rules are looked at
when an epoch opens, when a member is told or killed, and after each event.
"""

import json
import random
import re

import pytest
from ranks import EVERYTHING

from hvdlite.launcher.store.elastic_membership import Events, Membership, Terms
from hvdlite.launcher.store.epochs import LOST_CODE, Refusal
from hvdlite.security import framing

BUILD = "1.0", "1"
AWAITED = {"in", "failed", "away"}  # in an epoch; in one that has ended for it; on its way to the rendezvous
RENDEZVOUS_S, TIMEOUT_S = 20.0, 50.0
SEEDS = 100_000 if EVERYTHING else 2_500


class History:
    """A job of up to 64 members; `play` raises AssertionError where a rule is broken."""

    def __init__(self, seed):
        self.r = r = random.Random(seed)
        np = int(65 ** r.random())
        most = r.choice((None, np, np + r.randint(0, 4)))
        self.terms = Terms(r.randint(1, np), most, np, TIMEOUT_S, r.choice((None, None, 3)), RENDEZVOUS_S)
        self.now, self.over, self.next, self.finished, self.epochs = 1000.0, "", 0, 0, 0
        self.at, self.commit, self.rank, self.host, self.slot = {}, {}, {}, {}, {}  # of the living
        self.last, self.base, self.state = [], -1, False  # the last epoch: by rank; the commit that it began with
        self.joined, self.lost, self.heard, self.going = {}, set(), [], {}
        self.killed, self.doomed, self.removed, self.rounds, self.later = set(), [], set(), {}, set()
        self.reports, self.before = set(), set()
        events = Events(self.opened, self.failed, self.kill, lambda: None, self.waits)
        self.book = Membership(self.terms, 7, self.tell, events, lambda: self.now)
        for _ in range(np):
            self.start()

    def start(self):
        number, self.next = self.next, self.next + 1
        self.host[number] = host = f"h{self.r.randrange(4)}"
        self.slot[number] = slot = self.book.free_slot(host)
        if self.epochs or sum(n not in self.later for n in self.at) >= self.terms.np:
            self.later.add(number)
        self.book.started(number, host, slot, number in self.later)
        self.book.process(number, number)
        self.at[number], self.commit[number], self.rank[number] = "away", -1, -1

    # What the book says.

    def tell(self, number, kind, body):
        self.heard.append((number, kind))
        if kind == framing.JOINED:
            self.joined[number] = json.loads(body)
        elif kind == framing.LOST:
            culprit, _, text = framing.unpack_end(body)
            assert number not in self.lost and number in self.last, "told twice, or of another epoch"
            assert 0 <= culprit < len(self.last) and f"rank {culprit} " in text, text
            self.lost.add(number)
        elif kind == framing.REMOVED:
            assert number in self.removed or self.finished and "is over" in body.decode(), "nobody removed it"
            assert self.at[number] == "waiting", "removed in the middle of a step"
            self.going[number] = self.now
        elif kind == framing.GATHERED:
            assert framing.unpack_gathered(body, len(self.last))[1] == [b"%d" % each for each in self.last]

    def opened(self, number, members):
        assert number == self.epochs and members and len(set(members)) == len(members)
        assert self.terms.reset_limit is None or number <= self.terms.reset_limit
        assert not self.awaited(), f"epoch {number} opened without {self.awaited()}"
        assert all(self.at[n] == "waiting" and n not in self.killed for n in members)
        stay = [n for n in members if n not in self.removed]
        heirs = [n for n in stay if (self.commit if self.state else self.rank)[n] >= 0]
        assert stay == members or not heirs or len(stay) < self.terms.min_np, "nobody needed the removed"
        assert len(stay) <= (self.terms.max_np or 999)
        rest = [n for n, at in self.at.items() if at == "waiting" and n not in members and n not in self.going]
        rest = [n for n in rest if n not in self.killed]
        assert all(self.rank[n] < 0 for n in rest), "a survivor was left out"
        assert (1 if self.finished else self.terms.min_np) <= len(members + rest)
        first = [n for n in members if n not in self.later]
        if not self.epochs and first:
            assert first == members, "a newcomer began with the first"
            rest = [n for n in rest if n not in self.later]
        assert not rest or len(members) == self.terms.max_np and max(members) < min(rest) or self.epochs
        having = [n for n in members if self.commit[n] >= 0]
        assert having or not self.state, "state was lost, and nobody said so"
        if self.epochs:
            having = having or [n for n in members if self.rank[n] >= 0]
            assert members[0] == min(having, key=lambda n: (self.commit[n], self.rank[n])), "who leads"
        by_host = {}
        for rank, n in enumerate(members):
            by_host.setdefault(self.host[n], []).append((self.slot[n], n))
            told = self.joined.pop(n)
            assert (told["epoch"], told["rank"], told["size"]) == (number, rank, len(members))
            told["host"] = self.host[n]
            slots = sorted(self.slot[m] for m in members if self.host[m] == told["host"]) if rank < 4 else None
            assert slots is None or told["local_rank"] == slots.index(self.slot[n]) and told["local_size"] == len(slots)
        assert not self.joined
        assert [n for here in by_host.values() for _, n in here] == members, "hosts are torn"
        for here in by_host.values():
            rest = here[1:] if here[0][1] == members[0] else here
            assert rest == sorted(rest) and len({slot for slot, _ in here}) == len(here), "slots"
        self.last, self.base, self.epochs = members, max(0, self.commit[members[0]]), number + 1
        self.rank.update((n, rank) for rank, n in enumerate(members))
        self.rounds, self.lost = dict.fromkeys(members, 0), set()
        self.before, self.reports = self.reports, set()

    def failed(self, text):
        assert not self.over and not self.awaited()
        self.over, there = text, [n for n in self.at if self.at[n] == "waiting" and n not in self.killed]
        if "HVD420" in text:
            had = [n for n in there if self.rank[n] >= 0 and (self.commit[n] >= 0 or not self.state)]
            assert not set(had) - self.going.keys(), "state was there"
        elif "HVD421" in text:
            assert len(set(there) - self.going.keys()) < self.terms.min_np
        else:
            assert "HVD422" in text and self.epochs > self.terms.reset_limit

    def kill(self, number, text):
        assert number not in self.killed and f"pid {number} on h" in text
        at = self.at[number]
        if "join within" in text:
            assert at in AWAITED and any(self.rank[n] >= 0 for n, at in self.at.items() if at == "waiting")
        elif "call init" in text:
            assert at == "away" and not self.epochs and number not in self.later
            assert self.terms.min_np <= list(self.at.values()).count("waiting")
        elif "was removed" in text:
            assert self.now >= self.going[number] + 30
        elif "take part" in text:
            assert at in ("in", "failed") and "in" in self.at.values()
        else:
            assert "is cut [HVD454]" in text and at == "waiting"
            assert all(any(number in pair for pair in each) for each in (self.reports, self.before)), "no second report"
            others = [n for n in self.at if self.at[n] == "waiting" and n != number and n not in self.going]
            assert self.commit[number] < 0 or any(self.commit[n] >= 0 for n in others), "it alone had state"
        self.killed.add(number)
        self.doomed.append(number)

    def waits(self, text):
        awaits = re.search(r" waited .*: missing .*rank \d+ \(pid \d+ on h\d\)", text)
        first = re.search(r" waited .* in init: missing .*new rank \(pid \d+ on h\d\)", text)
        named = self.awaited() if awaits else not self.epochs and "away" in self.at.values() and first
        kept = re.search(r"^rank .* stays? until new ranks have", text) and self.removed
        assert named or kept or re.search(r"waits? for \d+ more \(--min-np", text), text

    # What members do.

    def awaited(self):
        return [n for n in self.last if n in self.at and self.at[n] in AWAITED and n not in self.killed]

    def end(self, number, how, finished=False):
        """The process ends; its connection before, after, or with a BYE."""
        connected = self.at[number] not in ("away", "ended")
        bye = connected and (finished or how < 0.2)
        if bye:
            self.book.left(number)
        if connected and how < 0.6:
            self.book.disconnected(number)
        text = f"{self.book.who(number)} was killed"
        del self.at[number]
        self.book.ended(number, text, finished)
        if connected and how >= 0.6:
            self.book.disconnected(number)
        assert number not in self.book.living()

    def settle(self):
        """Members act on what they were told, and die where they were killed."""
        while self.heard or self.doomed:
            heard, self.heard = self.heard, []
            for number, kind in heard:
                at = self.at.get(number)
                if kind == framing.JOINED and at == "waiting":
                    self.at[number] = "in"
                elif kind == framing.LOST and at == "in":
                    self.at[number] = "failed"
                elif kind in (framing.REMOVED, framing.REFUSED) and at == "waiting":
                    self.at[number] = "leaving"
            if self.doomed and self.r.random() < 0.7:
                number = self.doomed.pop()
                if number in self.at:
                    self.end(number, self.r.random())
            elif not self.heard:
                return

    def come(self, number):
        if self.at[number] == "failed":
            self.at[number] = "away"
            if self.r.random() < 0.8:
                self.book.left(number)
            self.book.disconnected(number)
            return
        try:
            self.book.check(number, 0, number, BUILD, False)
        except Refusal:
            self.at[number] = "ended"  # no connection
            return
        self.at[number] = "waiting"
        self.state |= self.commit[number] >= 0
        self.book.join(number, number, BUILD, 10.0, "x", self.commit[number])

    def train(self):
        """A round, a sync, a commit, an interrupt or the end of training, of all that are in an epoch."""
        what, inside = self.r.random(), [n for n, at in self.at.items() if at == "in"]
        whole = inside and not self.lost and len(inside) == len(self.last) and len(set(self.rounds.values())) == 1
        if what < 0.3 and inside:
            for n in self.r.sample(inside, self.r.choice((len(inside), self.r.randint(1, len(inside))))):
                if n not in self.killed and self.rounds[n] == min(self.rounds.values()):
                    self.rounds[n] += 1
                    self.book.contribute(n, self.rounds[n], b"%d" % n)
        elif what < 0.5:  # maybe not all come to the end of it
            for n in inside:
                if self.commit[n] != self.base and (whole or self.r.random() < 0.5):
                    self.commit[n] = self.base
        elif what < 0.8 and whole and all(self.commit[n] == self.base for n in inside):
            self.base += 1
            died = self.r.random() < 0.15  # within the commit
            for n in inside:
                self.commit[n] += not died or self.r.random() < 0.5
            if died:
                self.end(self.r.choice(inside), self.r.random())
        elif what < 0.98 and whole:
            for n in inside:
                self.at[n] = "failed"  # by the interrupt
        elif whole:
            self.finished += 1
            number = self.r.choice(inside)
            self.finished -= number in self.going
            self.end(number, 0.0, finished=True)

    def event(self):
        r, what = self.r, self.r.random()
        if what < 0.4:
            coming = [n for n, at in self.at.items() if at in ("away", "failed") and n not in self.killed]
            for n in r.sample(coming, r.choice((len(coming), min(1, len(coming))))):
                if n in self.at:
                    self.come(n)
                    self.settle()
        elif what < 0.65:
            self.train()
        elif what < 0.72 and self.at:
            self.end(r.choice(list(self.at)), r.random())
        elif what < 0.78 and len(self.at) < 64:
            self.start()
        elif what < 0.80 and self.at:
            number = r.choice(list(self.at))
            if r.random() < 0.7:
                self.removed.add(number)
                self.book.remove(number, "its host goes")
            elif number not in self.going:
                self.removed.discard(number)
                self.book.remove(number, "")
        elif what < 0.86 and self.epochs:
            pair = self.last[0], self.last[-1]  # the link that is cut, if one is
            reporter, culprit = pair if r.random() < 0.5 else pair[::-1]
            if self.at.get(reporter) == "in" and reporter != culprit and not self.lost:
                self.reports.add((reporter, culprit))
                self.lost.add(reporter)
                self.at[reporter] = "failed"
                self.book.aborted(reporter, culprit, LOST_CODE, f"rank {self.rank[culprit]} is lost")
        elif what < 0.87:  # a connection ends at the rendezvous
            for n in [n for n, at in self.at.items() if at == "waiting"][:1]:
                self.at[n] = "away"
                self.book.disconnected(n)
        elif what < 0.92:
            for n in [n for n, at in self.at.items() if at in ("leaving", "ended")]:
                self.end(n, r.random())
        else:
            self.pass_time(r.choice((0.05, 0.2, 3.0, 6.0, 11.0, 31.0)))

    def pass_time(self, seconds):
        self.now += seconds
        due = self.book.deadline()
        if due is not None and due <= self.now:
            self.book.tick(self.now)
            self.settle()
            again = self.book.deadline()
            assert again is None or again > self.now, "a deadline that is never met"

    def look(self):
        """Nothing that is due was left undone, and who is gone is forgotten."""
        past = self.r.randrange(self.next)
        assert past in self.at or past in self.last or self.book.who(past) == f"member {past}"
        waiting = [n for n, at in self.at.items() if at == "waiting" and n not in self.killed]
        if self.over or not waiting or self.awaited():
            return
        preparing = [
            n for n, at in self.at.items() if at == "away" and n not in self.removed | self.killed | self.later
        ]
        begun = self.epochs or sum(n not in self.later for n in waiting) >= self.terms.np or not preparing
        enough = len(waiting) >= (1 if self.finished else self.terms.min_np)
        assert not (begun and enough), "enough are there, and no epoch is open"
        assert self.book.deadline() is not None, "they wait for ever"

    def play(self):
        for _ in range(self.r.randint(3, 70)):
            if self.over:
                break
            self.event()
            self.settle()
            self.look()
        for _ in range(60):  # no more deaths: an epoch opens, or time ends the job
            busy = [n for n, at in self.at.items() if at in ("away", "failed", "leaving", "ended")]
            for n in busy:
                if n in self.at:
                    self.end(n, 0.1) if self.at[n] in ("leaving", "ended") or n in self.killed else self.come(n)
            self.settle()
            self.look()
            assert sorted(self.at) == sorted(self.book.living())
            if self.over or set(self.at.values()) <= {"in"}:
                return
            if "in" in self.at.values() and not busy and "failed" not in self.at.values():
                return  # newcomers wait for a commit
            self.pass_time(max(0.0, (self.book.deadline() or self.now) - self.now))
        raise AssertionError(f"no end: {self.at}")


@pytest.mark.parametrize("part", range(10))
def test_no_drawn_history_breaks_a_rule(part):
    for seed in range(part * SEEDS // 10, (part + 1) * SEEDS // 10):
        try:
            History(seed).play()
        except Exception as error:
            raise AssertionError(f"history {seed}: {error}") from error
