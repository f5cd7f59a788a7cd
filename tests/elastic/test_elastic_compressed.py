"""An elastic job with compressed gradients loses a rank and gets another: residuals begin anew, weights stay equal."""

from pathlib import Path

import pytest
from launching import Launch

PROGRAM = Path(__file__).parents[1] / "support" / "elastic_compressed.py"


@pytest.mark.parametrize(("compression", "least"), [("int8", "1"), ("accordion", "3")])
def test_a_lost_rank_and_a_newcomer(tmp_path, compression, least):
    words = ("-np", "3", "--min-np", least, "--blacklist-cooldown-range", "0", "0", "python", str(PROGRAM))
    with Launch(*words, str(tmp_path), COMPRESSION=compression) as job:
        assert job.wait(60) == 0, job.out + job.err
        assert "killed by SIGKILL" in job.err and job.out.count("ended well") >= 2, job.out + job.err
