"""What does a switch that adds gain over the ring, and what does a process on an ordinary host lose?"""

import functools

import pytest
from test_predict import told, write

from hvdlite import predict
from hvdlite.plan import Links, make, prove, time
from hvdlite.plan.units import link
from hvdlite.predict.network_model import BLOCKS, HEADERS, Cluster, of_plan

LINK = "25gbit,20us"
ALPHA, BETA = link(LINK)
MB = 1 << 20


@functools.lru_cache(None)
def switched(n):
    return of_plan("aggregator", Cluster(n, n, 2, "own"), link(LINK), 1 << 30)


@pytest.mark.parametrize("n, root, pieces", [(1, 0, 16), (2, 1, 1), (3, 0, 5), (9, 8, 16), (9, 4, 2), (65, 64, 3)])
def test_it_sums_in_the_order_of_ranks(n, root, pieces):
    table = make("aggregator", n, root=root, pieces=pieces)
    proof = prove(table)
    assert proof.in_rank_order and proof.moves == (n > 1) * (2 * (n - 1) + 1) * pieces


def test_each_port_of_a_switch_carries_the_tensor_once():
    once = 16 * MB * (1 + HEADERS) * BETA
    assert switched(8)(16 * MB) == pytest.approx(ALPHA + once * (1 + 1 / BLOCKS), rel=0.001)
    links = Links.switch(9, "20us", BETA * (1 + HEADERS))
    whole = time(make("aggregator", 9, root=8, pieces=BLOCKS), 16 * MB, links)
    assert switched(8)(16 * MB) == switched(1000)(16 * MB) == pytest.approx(whole)  # why three ranks are played
    assert switched(1)(MB) == 0.0


@pytest.mark.parametrize("n", [4, 16])
def test_it_gains_what_the_ring_sends_twice(n):
    ring = time(make("ring", n), 256 * MB, Links.uniform(n, "20us", "25gbit"))
    assert ring / switched(n)(256 * MB) * (1 + HEADERS) == pytest.approx(2 * (n - 1) / n, rel=0.01)
    few = time(make("halving", n), 4096, Links.uniform(n, "20us", "25gbit"))
    assert few / switched(n)(4096) == pytest.approx(2 * (n.bit_length() - 1), rel=0.1)  # latencies against one


def test_a_process_on_an_ordinary_host_has_one_port_for_all():
    links = Links.uniform(9, "20us", "25gbit")
    host, ring = (time(make(name, 9), 64 * MB, links) for name in ("aggregator", "ring"))
    assert host == pytest.approx(8 * 64 * MB * BETA * (1 + 1 / 16), rel=0.01) and host > 4 * ring
    through = Links.switch(9, "20us", "25gbit")  # ranks that are not the switch see uniform links
    assert through.of(0, 1) == links.of(0, 1) and through.of(0, 8) == (10e3, ((("out", 0), BETA),))


def test_predictions_have_it_and_refuse_what_cannot_be(tmp_path, capsys):
    job = predict.load(write(tmp_path / "r", sizes=(1 << 12, 64 << 20)))
    ring, aggregator = (job.step(8, link=LINK, plan=name) for name in ("ring", "aggregator"))
    assert ring.ms - aggregator.ms == pytest.approx((1.75 - 1 - HEADERS) * 64 * MB * BETA / 1e6, rel=0.05)
    code, out, _ = told(capsys, tmp_path / "r", "--ranks", "1,8", "--link", LINK, "--plan", "aggregator")
    assert code == 0 and "was simulated, not measured: it needs a switch that adds (8 ranks)" in out
    assert "no network is faster than" in out and "float16" not in out
    for more, why in ((("--medium", "bus"), "a bus has none"), (("--wire", "fp16"), "fp16 saves no bytes")):
        code, _, err = told(capsys, tmp_path / "r", "--link", LINK, "--plan", "aggregator", *more)
        assert code == 2 and why in err and "[HVD008]" in err
