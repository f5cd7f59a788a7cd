"""A pipeline that follows the number of ranks of an elastic job: `hvd.elastic.PipelineState`.

When ranks leave or come, the ranks that are there choose stages and copies anew, layers travel in memory to the ranks
that need them, and training goes on from the last commit. The idea is Varuna's (Athlur et al., EuroSys 2022), which
restarts all processes from a checkpoint in storage.

    state.py      the state: what a commit keeps, and how a new pipeline is made of it
    recipe.py     how a stage is made of functions and layers, and parted into layers
    holdings.py   which rank holds which layers, which keeps copies, what travels; pure
    exchange.py   layers from rank to rank, in one alltoall
    folder.py     commits in a folder, one file for each layer
"""

from .state import PipelineState

__all__ = ["PipelineState"]
