"""A pipeline follows the number of ranks: whatever happens, a replay of its layouts in one process has the same bits.

The program is tests/support/elastic_pipeline_job.py. Ranks are killed after a commit, within calls of the state and at
any time, come again, are spare, lose both holders of a layer, and go on from a folder.
"""

import json
from pathlib import Path

import pytest
from elastic_jobs import ElasticJob
from elastic_pipeline_job import Plan, differing
from ranks import everything

PROGRAM = str(Path(__file__).parents[1] / "support" / "elastic_pipeline_job.py")
NEVER = ("--blacklist-cooldown-range", "100", "100")  # no replacement comes


class PipelineJob(ElasticJob):
    def __init__(self, folder, *flags, **plan):
        self.pipeline = Plan(**plan)
        super().__init__(folder, *flags, program=PROGRAM, OMP_NUM_THREADS="1", PIPELINE=json.dumps(plan))

    def equal(self):
        """Waits for the end; the layouts, once the replay has the same bits."""
        assert self.wait(100) == 0, self.out
        self.until_gone()
        wrong, log = differing(self.folder, self.pipeline)
        assert not wrong, f"{wrong} differ\n{log}\n{self.out}"
        return [(step, layout.pp, layout.dp) for step, layout in log]


@pytest.mark.parametrize(
    "ranks, plan, layouts",
    [
        (4, {"shapes": {4: [2, 2], 3: [3, 1]}, "kills": {6: [1]}, "frozen": True}, [(0, 2, 2), (6, 3, 1)]),
        (3, {"shapes": {3: [3, 1]}, "kills": {4: [0], 8: [1]}, "tied": True}, [(0, 3, 1), (4, 1, 2), (8, 1, 1)]),
        (2, {"shapes": {2: [1, 1]}, "kills": {5: [0]}}, [(0, 1, 1)]),
        *everything((8, {"shapes": {8: [2, 4], 6: [3, 2]}, "kills": {6: [1, 6]}}, [(0, 2, 4), (6, 3, 2)])),
    ],
)  # fmt: skip
def test_ranks_are_killed_and_the_pipeline_changes(tmp_path, ranks, plan, layouts):
    plan = {**plan, "steps": 12}
    with PipelineJob(tmp_path, "-np", str(ranks), "--min-np", "1", *NEVER, **plan) as job:
        assert job.equal() == layouts
