"""--dashboard: the page is there while the job runs, shows what comes, asks nobody's trust, and goes with the job."""

import http.client
import json
import os
import re
import signal
import sys

import pytest
import stepping
from launching import Launch, launch

pytest.importorskip("plotly", reason="the page is drawn by plotly: pip install hvdlite[report]")
WAITS = """
import os, sys
print("folder", os.environ["HVDLITE_TRACE_DIR"], os.environ["HVDLITE_TRACE_STEPS"], flush=True)
sys.stdin.readline() if os.environ["HVDLITE_RANK"] == "0" else None
"""


def asked(address, path="/numbers.json", host=None, method="GET"):
    """(status, body) of the page at this host:port."""
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_follows_the_job_and_ends_with_it_its_folder_too():
    read, write = os.pipe()
    with Launch("-np", 2, "--stdin", "0", "--dashboard", sys.executable, "-c", WAITS, stdin=read) as job:
        job.until("folder", count=2)
        address = re.search(r"dashboard: http://(127\.0\.0\.1:\d+)/", job.err).group(1)
        folder = re.search(r"folder (\S+) 1", job.out).group(1)
        status, page = asked(address, "/")
        assert status == 200 and "const LIVE = true" in page and "connect-src 'self'" in page
        assert json.loads(asked(address)[1])["advice"] == ["No step has been written yet."]
        stepping.write(folder, 2, 40, late=1)
        said = {}
        while not said.get("figures"):  # it looks once a second at most
            said = json.loads(asked(address)[1])
        assert said["advice"][0].startswith("Rank 1 is late") and said["title"] == "2 ranks on 2 hosts"
        assert asked(address, "/etc/passwd")[0] == 404 and asked(address, "/../rank-0.steps.jsonl")[0] == 404
        assert asked(address, host="evil.example:80")[0] == 403 and asked(address, host="localhost:1")[0] == 200
        assert asked(address, method="POST")[0] == 405
        os.write(write, b"\n")
        assert job.wait() == 0, job.err
        assert not job.left() and not os.path.exists(folder)
        with pytest.raises(OSError):
            asked(address)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("own", [False, True])
def test_a_launcher_that_is_killed_leaves_no_page_behind_nor_a_folder_of_its_own(own, tmp_path):
    read, write = os.pipe()
    place = [] if own else ["--trace-dir", tmp_path]
    with Launch(
        "-np", 1, "--stdin", "0", "--dashboard-port", "0", *place, sys.executable, "-c", WAITS, stdin=read
    ) as job:
        job.until("folder")
        folder = re.search(r"folder (\S+) 1", job.out).group(1)
        stepping.write(folder, 1, 3)
        assert any("serve" in command for command in job.left().values())
        job.send(signal.SIGKILL)
        job.until_gone()
        assert os.path.exists(folder) != own and (own or folder == str(tmp_path))
    os.close(read)
    os.close(write)


def test_a_port_that_cannot_be_is_told_before_anything_starts():
    for port, wanted in (("70000", "0 to 65535"), ("x", "0 to 65535"), ("1" if os.geteuid() else "0x1", "--dashboard")):
        code, out, err = launch("-np", 1, "--dashboard-port", port, sys.executable, "-c", "print('started')")
        assert code == 2 and wanted in err and "started" not in out and "Traceback" not in err, err
