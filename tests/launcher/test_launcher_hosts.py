"""Host lists, slots, the ranks' environment and the words of the command line: all pure."""

import pytest

from hvdlite import config
from hvdlite.launcher import cli
from hvdlite.launcher.agent import rank_environment
from hvdlite.launcher.command_line import flags
from hvdlite.launcher.hosts import hosts
from hvdlite.launcher.hosts.hosts import Host, HostError, Slot, assign, is_this_host, parse_hostfile, parse_hosts


def test_host_lists_may_leave_slots_out_and_name_ipv6():
    assert parse_hosts("a:4, b,[::1]:2,[fe80::1]") == [Host("a", 4), Host("b", 1), Host("::1", 2), Host("fe80::1", 1)]


def test_a_host_named_twice_has_both_slots():
    assert parse_hosts("a:2,b:1,a:3") == [Host("a", 5), Host("b", 1)]


@pytest.mark.parametrize("text", ["", "a:", "a:x", "a:0", "a,,b", "a b", ":3", "::1:4", "a:1:2", "[::1"])
def test_a_host_list_that_cannot_be_read_is_refused(text):
    with pytest.raises(HostError):
        parse_hosts(text)


def test_a_host_file_may_have_comments_blank_lines_and_both_spellings():
    text = "# cluster\n\nnode-1 slots=4\nnode-2:2  # fast\nnode-3\n[::1]   slots = 3\nnode-4 slots=2 max_slots=8\n"
    slots = {"node-1": 4, "node-2": 2, "node-3": 1, "::1": 3, "node-4": 2}
    assert parse_hostfile(text, "hosts") == [Host(name, count) for name, count in slots.items()]


@pytest.mark.parametrize("text, line", [("a\nb slots=x\n", 2), ("a slots=0", 1), ("\n\na b c", 3)])
def test_a_bad_line_of_a_host_file_is_named(text, line):
    with pytest.raises(HostError, match=f"myhosts, line {line}"):
        parse_hostfile(text, "myhosts")


def test_a_host_file_of_a_windows_editor_is_read(tmp_path):
    (tmp_path / "list").write_bytes(b"\xef\xbb\xbfa slots=2\r\nb\r\n")
    assert parse_hostfile(hosts.read(str(tmp_path / "list")), "list") == [Host("a", 2), Host("b", 1)]


def test_an_empty_host_file_is_refused():
    with pytest.raises(HostError, match="not a host|no host"):
        parse_hostfile("# nothing\n", "myhosts")


def test_ranks_fill_hosts_in_order():
    slots = assign([Host("a", 3), Host("b", 1), Host("c", 2)], 6)
    assert [(s.host, s.rank, s.local_rank, s.local_size, s.cross_rank, s.cross_size) for s in slots] == [
        ("a", 0, 0, 3, 0, 3),
        ("a", 1, 1, 3, 0, 2),
        ("a", 2, 2, 3, 0, 1),
        ("b", 3, 0, 1, 1, 3),
        ("c", 4, 0, 2, 2, 3),
        ("c", 5, 1, 2, 1, 2),
    ]


def test_fewer_ranks_than_slots_leave_the_last_hosts_empty():
    assert assign([Host("a", 2), Host("b", 2)], 2) == [Slot(0, "a", 0, 2, 0, 1), Slot(1, "a", 1, 2, 0, 1)]


def test_this_host_is_known_by_its_names():
    for name in ("localhost", "127.0.0.1", "127.1.2.3", "::1", "box", "BOX", "box.example.org"):
        assert is_this_host(name, "box.example.org"), name
    assert not is_this_host("other", "box.example.org")
    assert not is_this_host("box2", "box.example.org")


MEETING = rank_environment.StoreAccess("127.0.0.1", 4000, bytes(range(32)), 0xABC)


def test_a_rank_finds_its_place_in_three_spellings():
    slots = assign([Host("localhost", 3)], 3)
    shared = rank_environment.shared({"PATH": "/bin"}, {}, MEETING, slots)
    rank = rank_environment.of_rank(slots[2], 3)
    assert rank["HVDLITE_RANK"] == rank["HOROVOD_RANK"] == rank["RANK"] == "2"
    assert rank["HVDLITE_SIZE"] == rank["HOROVOD_SIZE"] == shared["WORLD_SIZE"] == "3"
    assert rank["HVDLITE_LOCAL_SIZE"] == rank["HOROVOD_LOCAL_SIZE"] == rank["LOCAL_WORLD_SIZE"] == "3"
    assert rank["HVDLITE_CROSS_RANK"] == rank["HOROVOD_CROSS_RANK"] == rank["GROUP_RANK"] == "0"
    assert rank["HOROVOD_HOSTNAME"] == "localhost"
    assert shared["MASTER_ADDR"] == "127.0.0.1" and 1024 < int(shared["MASTER_PORT"]) < 65536
    assert shared["PYTHONUNBUFFERED"] == "1" and shared["PATH"] == "/bin"
    settings = config.read({**shared, **rank})
    assert (settings.values["rank"], settings.values["size"], settings.values["cross_size"]) == (2, 3, 1)
    assert settings.values["secret_key"] == bytes(range(32)) and settings.values["job_id"] == 0xABC


def test_groups_are_hosts_however_uneven_they_are():
    """As torchrun counts them; a host without ranks is none."""
    slots = assign([Host("a", 1), Host("b", 2), Host("c", 1)], 3)
    found = [rank_environment.of_rank(slot, 3) for slot in slots]
    assert [(rank["GROUP_RANK"], rank["GROUP_WORLD_SIZE"]) for rank in found] == [("0", "2"), ("1", "2"), ("1", "2")]
    assert [rank["HOROVOD_CROSS_RANK"] for rank in found] == ["0", "1", "0"]


def test_the_alias_of_horovod_comes_before_what_pythonpath_has():
    for before, after in ((None, []), ("", []), ("/a:/b", ["/a", "/b"])):
        environ = {} if before is None else {"PYTHONPATH": before}
        rank_environment.put_in_front(environ, ["as_horovod"])
        assert environ["PYTHONPATH"].split(":") == [rank_environment.FRONTS["as_horovod"], *after]
    assert rank_environment.FRONTS["as_horovod"].endswith("/hvdlite/as_horovod/front")


@pytest.mark.parametrize(
    "words, own",
    [
        ("-np 2 python train.py -v", 2),
        ("-n2 python -np 3", 1),
        ("--num-proc=2 --verbose train --help", 2),
        ("-np 2 -- -odd-name x", 2),
        ("-np 2 VAR=x python", 2),
        ("-cb", 1),
        ("-np -1 true", 2),
    ],
)
def test_the_command_starts_at_the_first_word_that_is_no_option(words, own):
    argv = words.split()
    ours, command = flags.split(cli._parser(), argv)
    assert ours == argv[:own]
    assert command == [word for word in argv[own:] if word != "--"]


def test_no_flag_is_both_known_and_refused():
    known = {flag for action in cli._parser()._actions for flag in action.option_strings}
    assert not known & set(flags.NOT_YET) and not set(flags.OBSOLETE) & set(flags.NOT_YET)
    assert set(flags.OBSOLETE) <= known
