"""Where no rendezvous tells which address leads to others, those of IPv6 are told and listened at, too."""

import socket

import pytest
from linking import listener, still_links
from test_links import has_ipv6

from hvdlite.transport import address as places


def test_the_addresses_of_a_host_with_ipv6_are_told(monkeypatch, tmp_path):
    """Also where it has no other; not those of one link only, of loopback, or that are not usable."""
    rows = [
        "20010db8000000000000000000000007 02 40 00 80 eth7",
        "fd000000000000000000000000000009 02 40 00 80 eth7",
        "fe800000000000000000000000000001 02 40 20 80 eth7",
        "00000000000000000000000000000001 01 80 10 80 lo",
        "20010db8000000000000000000000008 02 40 00 c8 eth7",
    ]
    (tmp_path / "if_inet6").write_text("".join(f"{row}\n" for row in rows))
    monkeypatch.setattr(places, "_IPV6", tmp_path / "if_inet6")
    alone = [(number, name) for number, name in socket.if_nameindex() if name == "lo"]
    monkeypatch.setattr(socket, "if_nameindex", lambda: alone)
    assert places.everywhere() == ["2001:db8::7", "fd00::9"]
    monkeypatch.setattr(places, "_IPV6", tmp_path / "none")
    assert places.everywhere() == ["127.0.0.1"]


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_without_a_rendezvous_ranks_are_reached_by_ipv6_and_by_ipv4(monkeypatch):
    for told in (["::1"], ["127.0.0.1", "::1"], ["127.0.0.1"]):
        monkeypatch.setattr(places, "everywhere", lambda told=told: told)
        mine, other = listener(0, towards=None), listener(1, towards=None)
        try:
            ends = places.unpack(mine.address).ends
            assert [end.ip for end in ends] == told
            for end in ends:
                with socket.create_connection((end.ip, end.port), timeout=10) as sock:
                    assert sock.recv(1)  # the greeting
            assert still_links(mine, other)
        finally:
            mine.close()
            other.close()
