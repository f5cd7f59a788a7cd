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
    expected = r"HvdInitError: there is no algorithm 'bubble' \(HVDLITE_ALGO\): this build has binomial, [a-z, ]*whole\."
    with Job(3, [sys.executable, "-c", program], HVDLITE_PLANE="p2p", HVDLITE_ALGO="bubble") as job:
        job.wait(60)
        assert len(re.findall(expected, job.text())) == 3, job.text()


def test_ranks_that_ask_for_different_planes_are_named():
    code, text = say("1")
    assert code != 0 and "the option plane (HVDLITE_PLANE) differs: rank 0 has None, rank 1 has 'shm'" in text, text


def test_p2p_serves_on_one_host_over_streams_of_its_own():
    code, text = say(size=3, HVDLITE_PLANE="p2p")
    assert code == 0 and text.count("sum [3. 6.]") == 3, text
