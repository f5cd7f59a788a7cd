"""What is written beside a job when there is no more room: said once, what is there stays readable, nothing ends."""

import json
import sys

from launching import launch

TIMELINE = """
import errno, os, resource, signal, sys
import numpy as np
import hvdlite as hvd

hvd.init()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
path = sys.argv[1] + ("/t.json.rank-1.json" if hvd.rank() else "/t.json")
for life in range(2):
    hvd.start_timeline(sys.argv[1] + "/t.json")
    for number in range(400):
        hvd.allreduce(np.ones(8, np.float32), name=f"tensor.{number}")
    try:
        hvd.stop_timeline()
    except OSError as error:
        print("stopped:", error, error.errno == errno.EFBIG)
open_now = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")
            and os.readlink(f"/proc/self/fd/{name}") == path]
print("open:", open_now, "sum:", hvd.allreduce(np.ones(1), op=hvd.Sum, name="last"))
"""


def test_a_timeline_ends_where_the_disk_does_and_stays_a_timeline(tmp_path):
    code, out, err = launch("-np", 2, sys.executable, "-c", TIMELINE, tmp_path)
    assert code == 0 and out.count("open: [] sum: [2.]") == 2, out + err
    for rank, name in enumerate(("t.json", "t.json.rank-1.json")):
        rows = json.loads((tmp_path / name).read_text())
        assert len(rows) >= 3 and rows[0]["name"] == "hvdlite_timeline"
        stopped = f"stopped: the timeline '{tmp_path / name}' cannot be written: File too large [HVD725] True"
        said = err.count(f"hvdlite: rank {rank}: cannot write the timeline") + out.count(f"[{rank}]<stdout>:{stopped}")
        assert said == 2, out + err
