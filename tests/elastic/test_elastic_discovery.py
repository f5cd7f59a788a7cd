"""Which hosts an elastic job may use: the host discovery script, the capacity of hosts, and the flags."""

import os
import select
import shlex
import signal
import time

import pytest
from launching import answers

from hvdlite.launcher.agent import process
from hvdlite.launcher.elastic import capacity, discovery
from hvdlite.launcher.elastic.capacity import Capacity
from hvdlite.launcher.elastic.discovery import DiscoveryError, DiscoveryScript
from hvdlite.launcher.hosts.hosts import Host


@pytest.fixture
def two(monkeypatch):
    """Hosts a and b, neither of them this one; cooldown 5 to 30 s, three starts that fail."""
    monkeypatch.setattr(capacity, "is_here", lambda name: name.startswith("here"))
    return Capacity([Host("a", 2), Host("b", 1)], "nodeA", (5.0, 30.0), 3)


def test_all_names_of_this_machine_are_one_host(two):
    assert two.offer([Host("here1", 2), Host("a", 1), Host("here2", 3)]) == {"nodeA": 5, "a": 1}
    assert two.names() == ["a", "b", "nodeA"] and [two.slots(name) for name in two.names()] == [1, 0, 5]
    assert [two.can_start(name, 0.0) for name in two.names()] == [True, False, True]
    assert Capacity([Host("here", 1)], None, (5.0, 30.0), 3).names() == ["localhost"]


def test_the_cooldown_doubles_up_to_its_limit_and_is_forgotten_after_quiet(two):
    now, lasts = 100.0, []
    for _ in range(5):
        two.failed("a", now, new=False)
        two.failed("a", now + 0.9, new=False)  # the same failure
        ends = two.due(now)
        lasts.append(ends - now)
        assert not two.can_start("a", ends - 0.01) and two.can_start("a", ends) and two.can_start("b", now)
        now = ends + 1
    assert lasts == [5, 10, 20, 30, 30] and two.due(now) is None and two.remedy("a", now) == ""
    now += capacity.QUIET_S
    two.failed("a", now, new=False)
    assert two.remedy("a", now) == "; host a gets no new rank for 5 s"


def test_failures_are_known_when_a_host_comes_back(two):
    two.failed("b", 10.0, new=False)
    two.offer([Host("a", 2)])
    assert two.slots("b") == 0 and two.due(10.0) is None and not two.can_start("b", 1000.0)
    two.offer([Host("b", 4)])
    assert two.due(10.0) == 15.0 and not two.can_start("b", 14.0) and two.can_start("b", 15.0)


def test_a_host_on_which_no_process_becomes_a_rank_is_left_out_for_a_while(two):
    for at in (0.0, 0.1):
        two.failed("a", at, new=True)
    two.became_rank("a")
    for at in (50.0, 60.0, 70.0):
        assert not two.hopeless() and "left out" not in two.remedy("a", at)
        two.failed("a", at, new=True)
    told = "; host a is left out for 600 s: 3 processes in a row ended there before they were ranks"
    assert two.remedy("a", 70.0) == told and not two.can_start("a", 669.0) and two.due(70.0) == 670.0
    assert two.can_start("a", 670.0)
    two.failed("a", 671.0, new=True)  # one more try
    assert not two.can_start("a", 1270.0)
    for _ in range(3):
        two.failed("b", 500.0, True)
    assert two.hopeless()
    two.offer([Host("b", 1), Host("c", 1)])
    assert not two.hopeless() and two.slots("a") == 0
    two.offer([Host("a", 2)])  # it comes back
    two.failed("a", 1300.0, new=True)
    assert not two.hopeless() and two.can_start("a", 1330.0)


def test_ranks_that_cannot_take_the_state_were_none(two):
    for at in (0.0, 10.0, 20.0):
        assert two.can_start("a", 10000.0)
        two.became_rank("a")
        two.failed("a", at, new=True, unfit=True)
    assert "host a is left out for 600 s: 3 processes in a row" in two.remedy("a", 20.0)


def test_a_host_that_cannot_be_reached_is_never_left_out(monkeypatch):
    monkeypatch.setattr(capacity, "is_here", lambda name: False)
    eager = Capacity([Host("a", 2)], "nodeA", (0.0, 0.0), 3)
    for at in (0.0, 10.0, 20.0, 30.0):
        eager.unreached("a", at)
        assert eager.remedy("a", at) == "; host a gets no new rank for 1 s" and eager.due(at) == at + 1.0
    assert eager.can_start("a", 31.0) and not eager.hopeless()


@pytest.fixture
def script(tmp_path, monkeypatch):
    """script(body): a DiscoveryScript that runs this file; it is run again at once."""
    monkeypatch.setattr(discovery, "EVERY_S", 0.0)
    made = []

    def make(body, slots=4):
        (tmp_path / "hosts").write_text(body)
        made.append(DiscoveryScript(f"exec sh {tmp_path}/hosts", slots))
        return made[-1]

    yield make
    for each in made:
        each.close()


def until(script, wanted):
    """Turns until `wanted` of (changed, told) is true: both."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = script.turn(time.monotonic())
        if wanted(*found):
            return found
        time.sleep(0.002)
    raise AssertionError("nothing came")


def assert_silent(script, runs):
    """Nothing is another and nothing told in three runs, which leave a line each in this file."""
    end = time.monotonic() + 60
    while not runs.exists() or len(runs.read_text()) < 3:
        assert script.turn(time.monotonic()) == (False, "") and time.monotonic() < end
        time.sleep(0.002)


def test_hosts_with_and_without_slots(script):
    found = script("echo a:2; echo; echo ' b '; echo a:1; echo [::1]:3; echo gone:0").first()
    assert found == [Host("a", 3), Host("b", 4), Host("::1", 3)]


WRONG = [
    ("echo a:2; echo 'no such key' >&2; echo >&2; exit 3", "ended with code 3, and says: no such key"),
    ("/no/such/script", "ended with code 127, and says: "),
    ("kill -9 $$", "was killed by SIGKILL"),
    ("echo .a:2; echo b c", "line 1: '.a:2' is not a host"),
    ("true", "prints no host that has a slot"),
    ("echo a:0", "prints no host that has a slot"),
    ("yes", "has printed more than 1 MB"),
    ("yes >&2", "has printed more than 1 MB, and says: y"),
]


@pytest.mark.parametrize("body, says", WRONG)
def test_what_cannot_be_believed_is_an_error_at_first_and_is_told_once_later(script, tmp_path, body, says):
    with pytest.raises(DiscoveryError) as error:
        script(body).first()
    assert says in str(error.value) and str(error.value).endswith(" [HVD708]")
    later = script("echo a:2")
    later.first()
    (tmp_path / "hosts").write_text(body)
    changed, told = until(later, lambda changed, told: told)
    assert not changed and says in told and told.endswith("; the hosts stay as they were [HVD708]")
    assert later.latest == [Host("a", 2)]
    (tmp_path / "hosts").write_text(f"echo >> {tmp_path}/runs; {body}")
    assert_silent(later, tmp_path / "runs")
    (tmp_path / "hosts").write_text("echo b:1")
    assert until(later, lambda changed, told: changed) == (True, "") and later.latest == [Host("b", 1)]


def test_a_line_that_is_no_host_is_left_out_and_the_others_count(script, tmp_path):
    hosts = script(f"echo a:2; echo {'b' * 64}.c:1; echo d..e; printf 'a\\0b\\n'; echo f.:1")
    changed, told = until(hosts, lambda changed, told: changed)
    assert hosts.latest == [Host("a", 2), Host("f.", 1)]
    assert "line 2: 'bbb" in told and "write name, name:slots or [IPv6]:slots; this line is left out [HVD708]" in told
    (tmp_path / "hosts").write_text(f"echo >> {tmp_path}/runs; echo a:2; echo {'b' * 64}.c:1; echo f.:1")
    assert_silent(hosts, tmp_path / "runs")


def test_another_order_is_no_change(script, tmp_path):
    hosts = script("echo a:2; echo b:1")
    hosts.first()
    (tmp_path / "hosts").write_text(f"echo b:1; echo a:2; echo >> {tmp_path}/runs")
    assert_silent(hosts, tmp_path / "runs")
    assert hosts.latest == [Host("a", 2), Host("b", 1)]


def test_a_script_that_hangs_is_killed_with_its_group_and_nothing_is_left(script, tmp_path, monkeypatch):
    hosts = script("echo a:2")
    hosts.first()
    descriptors = len(os.listdir("/proc/self/fd"))
    (tmp_path / "hosts").write_text(f"sleep 600 & echo $! > {tmp_path}/pid; echo b:1; exec >&- 2>&-; sleep 600")
    monkeypatch.setattr(discovery, "LIMIT_S", 0.5)
    _, told = until(hosts, lambda changed, told: told)
    assert "has not ended within 0.5 s" in told and hosts.latest == [Host("a", 2)]
    (tmp_path / "hosts").write_text("echo b:1")
    until(hosts, lambda changed, told: changed)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    left = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 60
    while process.state_of(left)[0] not in ("", "Z", "X"):
        assert time.monotonic() < end


def test_nothing_is_due_until_there_is_something_to_read(script):
    hosts = script("read nothing; sleep 0.1; echo a; sleep 600")
    now = time.monotonic()
    hosts.turn(now)
    assert os.getsid(hosts.pid) == hosts.pid and hosts.due() == now + discovery.LIMIT_S
    assert select.select([hosts], [], [], 60)[0] and hosts.turn(now) == (False, "")
    assert not select.select([hosts], [], [], 0)[0] and hosts.due() == now + discovery.LIMIT_S
    hosts.close()
    assert os.waitid(os.P_PID, hosts.pid, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL


REFUSED = [
    ("--min-np 3 -np 2", "--min-np 3 is more than -np 2 [HVD703]"),
    ("--max-np 1 -np 2", "--max-np 1 is less than -np 2 [HVD703]"),
    ("--max-np 1 --min-np 2 -H a:4", "--max-np 1 is less than --min-np 2 [HVD703]"),
    ("--min-np 4 -H a:1,b:2", "--min-np 4 is more than the 3 slots of all hosts: write host:slots [HVD703]"),
    ("--min-np many -np 2", "--min-np many: must be a whole number of ranks [HVD704]"),
    ("--max-np 0 -np 2", "--max-np 0: there must be at least 1 rank [HVD704]"),
    ("-np 2 --reset-limit 3", "--reset-limit is for jobs whose ranks come and go"),
    ("-np 2 --blacklist-cooldown-range 1 2", "--blacklist-cooldown-range is for jobs whose ranks"),
    ("-np 2 --rendezvous-timeout 9", "--rendezvous-timeout is for jobs whose ranks"),
    ("-np 2 --min-np 1 --rendezvous-timeout 0", "--rendezvous-timeout='0': must be at least 1"),
    ("-np 2 --min-np 1 --elastic-timeout long", "--elastic-timeout='long': must be a number"),
    ("-np 2 --min-np 1 --reset-limit -1", "--reset-limit -1: there must be at least 0 changes [HVD704]"),
    ("-np 2 --min-np 1 --slots 2", "--slots-per-host needs --host-discovery-script, which names the hosts [HVD703]"),
    ("-np 2 --min-np 1 --blacklist-cooldown-range 9 3", "range 9 3: LOW is more than HIGH [HVD704]"),
    ("-np 2 --min-np 1 --blacklist-cooldown-range 1 x", "--blacklist-cooldown-range x: must be a whole"),
    ("-np 2 --min-np 1 --mpi", "not yet: --min-np with --mpi: name hosts by"),
    ("--max-np 2 --nnodes 2", "not yet: --max-np with --nnodes"),
    ("-np 2 --tolerate 3", "--tolerate is for jobs whose ranks come and go"),
    ("-np 2 --min-np 1 --tolerate exception,0", "--tolerate 0: must be exception or an exit code from 1 to 255"),
    ("-H a..b:1", "'a..b:1' is not a host: write name"),
    ("--host-discovery-script true -np 1 -H a", "--host-discovery-script and -H exclude each other"),
    ("--host-discovery-script true --nproc-per-node 2", "exclude each other: give --slots-per-host [HVD703]"),
    ("--host-discovery-script /no/such -np 1", "--host-discovery-script /no/such: ended with code 127, and says: "),
    ("--host-discovery-script /etc/passwd -np 1", "/etc/passwd: ended with code 126, and says: "),
    ("--host-discovery-script 'echo b:c' --elastic-timeout 1", "echo b:c: line 1: 'b:c' is not a host"),
    ("--host-discovery-script 'exit 3' --elastic-timeout 1", "slots (--min-np) for 1 s (--elastic-timeout): --host-d"),
    ("--host-discovery-script 'echo a:1' -np 2 --elastic-timeout 1", "fewer than 2 slots (--min-np) for 1 s"),
]


def test_what_cannot_be_is_refused_before_anything_starts(tmp_path):
    said = answers([[*shlex.split(words), "touch", tmp_path / "ran"] for words, _ in REFUSED], tmp_path)
    for (words, says), (code, out, err) in zip(REFUSED, said):
        assert (code, out) == (2, "") and says in err and "Traceback" not in err, (words, err)
    assert not (tmp_path / "ran").exists()


SHOWN = [
    (
        "--host-discovery-script ./hosts -np 4 --min-np 2",
        3,
        "at least 2, at most as many as the hosts have slots for; hosts of --host-discovery-script",
    ),
    ("--host-discovery-script ./hosts --max-np 2", 2, "at least 1, at most 2;"),
    ("--host-discovery-script ./hosts --min-np 9", 3, "at most as many as the hosts have slots for;"),
    ("--host-discovery-script ./hosts --min-np 9", 3, "localhost:3; the job waits for 9 slots"),
    ("-H localhost:3 --min-np 2", 3, "at least 2, at most as many as the hosts have slots for; hosts of the command"),
]


def test_a_dry_run_asks_the_script_once(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("#!/bin/sh\necho localhost:3\necho >> runs\n")
    (tmp_path / "hosts").chmod(0o755)
    (tmp_path / "said").mkdir()
    monkeypatch.chdir(tmp_path)
    jobs = [[*words.split(), "--dry-run", "--wdir", "/", "true"] for words, _, _ in SHOWN]
    for (words, size, says), (code, out, err) in zip(SHOWN, answers(jobs, tmp_path / "said")):
        assert code == 0 and says in out and out.count("\nrank ") == size, (words, out, err)
    assert (tmp_path / "runs").read_text() == 4 * "\n"
