"""Ranks that were told wrong about their host say so on all ranks, and the job ends instead of hanging."""

import sys

import pytest
from launching import launch

PROGRAM = """
import os
rank = int(os.environ["HVDLITE_RANK"])
{change}
import hvdlite as hvd
try:
    hvd.init()
    print("met", hvd.local_rank(), hvd.local_size(), flush=True)
except hvd.HvdInitError as error:
    print(f"it says: {{error}}", flush=True)
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            'os.environ["HVDLITE_HOST_ID"] = f"host {rank // 2}"',
            "rank 0 was told that 3 of 3 ranks are on its host, but 2 are on",
        ),
        (
            'os.environ["HVDLITE_LOCAL_RANK"] = os.environ["HOROVOD_LOCAL_RANK"] = "0"',
            "ranks 0-2 on {host} were all told that they are local rank 0",
        ),
    ],
)
def test_what_is_wrong_about_hosts_is_said_by_every_rank(change, said):
    import socket

    code, out, err = launch("-np", 3, sys.executable, "-c", PROGRAM.format(change=change))
    assert code == 0, err
    assert (out + err).count("it says: " + said.format(host=socket.gethostname())) == 3, out + err
    assert "hvdlite-run" in out


def test_a_host_id_of_ones_own_joins_what_looks_like_one_host():
    change = 'os.environ["HVDLITE_HOST_ID"] = "the same"'
    code, out, err = launch("-np", 2, sys.executable, "-c", PROGRAM.format(change=change))
    assert code == 0 and out.count("met") == 2, out + err
