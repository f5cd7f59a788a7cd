"""A plane or an algorithm asked for by name, as a user sees it: HVDLITE_PLANE and HVDLITE_ALGO, the same on all ranks.

What planes do is tested in C (test_plane*.c) and by whatever runs a job; what the core says of names, in test_choice.c.
"""

import re
import sys

from ranks import Job

PROGRAM = """
import os, sys
rank = os.environ["HVDLITE_RANK"]
if rank in sys.argv[1:]:
    os.environ["HVDLITE_PLANE"] = "shm"
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
print("sum", hvd.allreduce(np.array([1.0, 2.0]), op=hvd.Sum))
"""


def say(*names, size=2, **variables):
    """What a job of these variables says, and its exit code. Ranks in `names` ask for shm instead."""
    with Job(size, [sys.executable, "-c", PROGRAM, *names], **variables) as job:
        return job.wait(60), job.text()


def test_a_plane_that_works_is_taken():
    code, text = say(HVDLITE_PLANE="shm")
    assert code == 0 and text.count("sum [2. 4.]") == 2, text


def test_an_unknown_plane_is_refused_with_the_list_of_those_there_are():
    code, text = say(HVDLITE_PLANE="infiniband")
    assert code != 0 and "there is no plane 'infiniband' (HVDLITE_PLANE): this build has " in text, text
    assert "p2p" in text and "shm" in text, text


def test_an_unknown_algorithm_is_refused_with_the_list_of_those_there_are():
    code, text = say(HVDLITE_ALGO="bubble")
    assert code != 0 and "there is no algorithm 'bubble' (HVDLITE_ALGO): this build has " in text, text
    assert "ring" in text, text


def test_all_ranks_hear_the_cause_of_a_name_that_there_is_not():
    """None of them only hears that another one ended."""
    program = "import hvdlite.numpy as hvd\ntry:\n    hvd.init()\nexcept Exception as error:\n"
    program += "    print(f'{type(error).__name__}: {error}.', flush=True)"
    expected = r"there is no algorithm 'bubble' \(HVDLITE_ALGO\): this build has [a-z, ]*whole \[HVD850\]\."
    with Job(3, [sys.executable, "-c", program], HVDLITE_PLANE="p2p", HVDLITE_ALGO="bubble") as job:
        job.wait(60)
        assert len(re.findall(expected, job.text())) == 3, job.text()


def test_ranks_that_ask_for_different_planes_are_named():
    code, text = say("1")
    assert code != 0 and "the option plane (HVDLITE_PLANE) differs: rank 0 has None, rank 1 has 'shm'" in text, text


def test_what_crosses_each_stream_is_counted_and_told():
    """A ring: two thirds of the buffer go twice to the next rank, in four messages, and nothing to the one before."""
    program = "import numpy as np, hvdlite.numpy as hvd\nhvd.init()\nme, before = hvd.rank(), hvd.link_stats()\n"
    program += "hvd.allreduce(np.ones(30000, np.float32))\nafter = hvd.link_stats()\n"
    program += "moved = {r: {k: after[r][k] - before[r][k] for k in after[r]} for r in after}\n"
    program += "there, back = moved[(me + 1) % 3], moved[(me - 1) % 3]\n"
    program += "assert len(moved) == 2 and there['messages_out'] == back['messages_in'] == 4, moved\n"
    program += "assert 160000 <= there['bytes_out'] == back['bytes_in'] < 160200, moved\n"
    program += "assert there['bytes_in'] == back['bytes_out'] == 0, moved\n"
    program += "some = hvd.add_process_set([0, 2])\n"
    program += "assert me == 1 or hvd.link_stats(some) == {2 - me: dict.fromkeys(there, 0)}, hvd.link_stats(some)\n"
    program += "hvd.shutdown()\nprint('told', flush=True)"
    with Job(3, [sys.executable, "-c", program], HVDLITE_PLANE="p2p", HVDLITE_ALGO="ring") as job:
        assert job.wait(60) == 0 and job.text().count("told") == 3, job.text()


def test_p2p_serves_on_one_host_over_streams_of_its_own():
    code, text = say(size=3, HVDLITE_PLANE="p2p")
    assert code == 0 and text.count("sum [3. 6.]") == 3, text
