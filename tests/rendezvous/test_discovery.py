"""Which rank a process is, from the environments that launchers were seen to leave; all of it pure."""

import itertools
import re

import pytest

from hvdlite.errors import HvdInitError
from hvdlite.rendezvous.discovery import BY_HAND, SINGLE, Place, discover
from hvdlite.rendezvous.slurm import nodes, tasks_per_node


def own(rank, size, local_rank, local_size, cross_rank, cross_size, prefix="HVDLITE_"):
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    return {prefix + n: str(v) for n, v in zip(names, (rank, size, local_rank, local_size, cross_rank, cross_size))}


def variables(text):
    return dict(word.split("=") for word in text.split())


TORCHRUN = variables(
    "TORCHELASTIC_RUN_ID=none RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2"
)
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 "
    "OMPI_COMM_WORLD_NODE_RANK=0 PMIX_RANK=2"
)
LIGHTNING = variables("NODE_RANK=0 LOCAL_RANK=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=23456")
HAND = variables("RANK=1 WORLD_SIZE=2 MASTER_ADDR=train-0 MASTER_PORT=23456")
PODS = variables(
    "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=train-0.train PET_MASTER_PORT=29500"
)
HYDRA = variables("PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}'
PLACE_NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
MVAPICH = dict(zip(["MV2_COMM_WORLD_" + name for name in PLACE_NAMES], ["1", "4", "1", "2"]))
JSRUN = dict(zip(["JSM_NAMESPACE_" + name for name in PLACE_NAMES], ["1", "4", "1", "2"]))
SRUN = variables(
    "SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=3 SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=0 SLURM_NODEID=1 "
    "SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2,1"
)


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def test_nothing_is_a_single_process():
    assert discover({}) == SINGLE == Place(0, 1, 0, 1, 0, 1, "single process")
    for few in (
        {"RANK": "0"},
        {"LOCAL_RANK": "0"},
        {"LOCAL_RANK": "-1"},
        {"HVDLITE_MEMBER": "0", "HVDLITE_STORE_ADDR": "a"},
        {"TF_CONFIG": '{"cluster": {"chief": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 1}}'},
        {"WORLD_SIZE": "1", "RANK": "0"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"RANK": ""},
    ):
        assert discover({**few, "PATH": "/bin"}) == SINGLE
    assert discover({"JOB_COMPLETION_INDEX": "3"}) == discover({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}) == SINGLE


@pytest.mark.parametrize("prefix", ["HVDLITE_", "HOROVOD_"])
def test_own_variables_and_their_aliases(prefix):
    assert discover(own(3, 4, 1, 2, 1, 2, prefix))[:6] == (3, 4, 1, 2, 1, 2)


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        (TORCHRUN, Place(3, 4, 1, 2, 1, 2, "torchrun")),
        (HAND, Place(1, 2, None, None, None, None, BY_HAND)),
        (PODS, Place(1, 2, None, None, None, None, BY_HAND)),
        ({**PODS, "PET_NPROC_PER_NODE": "auto"}, Place(1, 2, None, None, None, None, BY_HAND)),
        ({**PODS, **HAND, "PET_NNODES": "1:4"}, Place(1, 2, None, None, None, None, BY_HAND)),
        (
            {"HVDLITE_SIZE": "4", "JOB_COMPLETION_INDEX": "3"},
            Place(3, 4, None, None, None, None, "HVDLITE_ variables"),
        ),
        (OPEN_MPI, Place(2, 4, 0, 2, None, None, "Open MPI")),
        (HYDRA, Place(1, 4, 1, 2, None, None, "MPICH or Intel MPI")),
        (MVAPICH, Place(1, 4, 1, 2, None, None, "MVAPICH")),
        (JSRUN, Place(1, 4, 1, 2, None, None, "jsrun")),
        (SRUN, Place(2, 3, 0, 1, 1, 2, "Slurm")),
        (without(SRUN, "SLURM_STEP_TASKS_PER_NODE"), Place(2, 3, 0, None, 1, 2, "Slurm")),
        # srun --mpi=pmi2: PMI_RANK without MPI_LOCALRANKID
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3", "PMI_JOBID": "7"}, Place(2, 3, 0, 1, 1, 2, "Slurm")),
        # srun --mpi=pmix
        ({**SRUN, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.1"}, Place(2, 3, 0, 1, 1, 2, "Slurm")),
        # an interactive step of one task in an allocation of four
        (
            {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0",
             "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
            Place(0, 1, 0, 1, 0, 1, "Slurm"),
        ),
    ],
)  # fmt: skip
def test_other_launchers(environ, place):
    assert discover(environ) == place


def test_an_sbatch_script_itself_is_a_single_process():
    step = [name for name in SRUN if name.startswith("SLURM_STEP_")]
    assert discover({**without(SRUN, *step), "SLURM_PROCID": "0"}) == SINGLE


@pytest.mark.parametrize("mpi", [OPEN_MPI, HYDRA])
def test_mpi_inside_an_allocation_wins_over_slurm(mpi):
    """Every rank of mpirun has SLURM_PROCID=0; under hydra it is the number of the node."""
    lying = {**SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}
    assert discover({**lying, **mpi}).source != "Slurm"


def test_the_first_source_wins():
    environs = [own(0, 2, 0, 2, 0, 1), TORCHRUN, OPEN_MPI, HYDRA, SRUN, HAND]
    names = ["HVDLITE_ variables", "torchrun", "Open MPI", "MPICH or Intel MPI", "Slurm", BY_HAND]
    for first, name in enumerate(names):
        assert discover({key: value for each in environs[first:] for key, value in each.items()}).source == name


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"HVDLITE_RANK": "1"}, "HVDLITE_SIZE"),
        ({"HOROVOD_RANK": "1"}, "HVDLITE_SIZE"),
        ({"HVDLITE_SIZE": "2"}, "HVDLITE_RANK"),
        ({"HVDLITE_LOCAL_RANK": "0"}, "HVDLITE_RANK"),
        (without(own(0, 2, 0, 2, 0, 1), "HVDLITE_LOCAL_SIZE"), "HVDLITE_LOCAL_SIZE"),
        (without(own(0, 2, 0, 2, 0, 1), "HVDLITE_CROSS_RANK"), "HVDLITE_CROSS_RANK"),
        (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE"),
        (without(TORCHRUN, "RANK"), "RANK"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE"),
        (without(HYDRA, "PMI_SIZE"), "PMI_SIZE"),
        (without(SRUN, "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"), "SLURM_NTASKS"),
        (without(HAND, "MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR, MASTER_PORT"),
        (without(HAND, "WORLD_SIZE"), "WORLD_SIZE"),
        (without(HAND, "RANK"), "RANK"),
        (LIGHTNING, "RANK, WORLD_SIZE: .* DDPStrategy"),  # which has taken WORLD_SIZE away at its end
        ({**LIGHTNING, "WORLD_SIZE": "2"}, "RANK: .* DDPStrategy"),
        ({**HAND, "MASTER_ADDR": ""}, "MASTER_ADDR"),
        (without(PODS, "PET_NODE_RANK", "PET_MASTER_ADDR"), "PET_NODE_RANK, PET_MASTER_ADDR"),
        ({"RANK": "1"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_WORLD_SIZE": "2"}, "RANK, WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "RANK, WORLD_SIZE"),
        ({"TF_CONFIG": TF_CONFIG}, "RANK, WORLD_SIZE"),
        ({"TF_CONFIG": '{"cluster": {"worker": {"1": "b:1"}}, "task": {"type": "worker", "index": 1}}'}, "RANK"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "RANK"),
        ({"MPI_LOCALRANKID": "0"}, "PMI_RANK"),
        (without(SRUN, "SLURM_STEP_ID"), "RANK, WORLD_SIZE"),  # lost: an sbatch script is rank 0
        (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID"),
        ({"JOB_COMPLETION_INDEX": "0", "MASTER_ADDR": "train-0"}, "RANK, WORLD_SIZE"),
        ({"JOB_COMPLETION_INDEX": "1", "HVDLITE_STORE_ADDR": "train-0"}, "HVDLITE_RANK, HVDLITE_SIZE"),
        ({"HVDLITE_STORE_ADDR": "train-0"}, "HVDLITE_RANK, HVDLITE_SIZE"),
    ],
)
def test_half_a_place_is_an_error_naming_the_other_half(environ, missing):
    with pytest.raises(HvdInitError, match=f"without {missing}"):
        discover(environ)


@pytest.mark.parametrize(
    "environ",
    [
        own(2, 2, 0, 2, 0, 1),
        own(0, 2, 2, 2, 0, 1),
        own(0, 2, 0, 3, 0, 1),
        own(0, 2, 0, 2, 1, 1),
        {**TORCHRUN, "RANK": "4"},
        {**TORCHRUN, "RANK": "-1"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "two"},
        {**HYDRA, "PMI_RANK": ""},
        {**SRUN, "SLURM_PROCID": "3"},
        {**HAND, "RANK": "2"},
        {**HAND, "MASTER_PORT": "x"},
        {**PODS, "PET_NODE_RANK": "2"},
        {**PODS, "PET_NNODES": "1:4"},
        {**HAND, **PODS, "WORLD_SIZE": "4", "PET_NPROC_PER_NODE": "2"},
        {**PODS, "PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"},
        {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x"},
        {"TF_CONFIG": "worker"},
        {"TF_CONFIG": '{"cluster": [1]}'},
    ],
)
def test_numbers_that_cannot_be_are_an_error(environ):
    with pytest.raises(HvdInitError):
        discover(environ)


def test_an_unknown_mpi_is_no_job_of_ones():
    with pytest.raises(HvdInitError, match="hvdlite-run"):
        discover({"PMI_RANK": "0", "PMI_SIZE": "4"})
    assert discover({"PMI_RANK": "0", "PMI_SIZE": "1"}) == SINGLE


@pytest.mark.parametrize("variable", ["PMIX_RANK", "PMI_RANK"])
def test_a_rank_of_nobody_knows_how_many_is_no_job_of_ones(variable):
    with pytest.raises(HvdInitError, match=f"{variable}=1 .* HVDLITE_SIZE"):
        discover({variable: "1", "PMIX_NAMESPACE": "prterun-1"})
    assert discover({variable: "1", "HVDLITE_RANK": "1", "HVDLITE_SIZE": "2"})[:2] == (1, 2)


def test_what_follows_from_the_rest_need_not_be_set():
    assert discover({"HVDLITE_RANK": "0", "HVDLITE_SIZE": "1"})[:6] == (0, 1, 0, 1, 0, 1)
    one_host = {"HVDLITE_RANK": "1", "HVDLITE_SIZE": "2", "HVDLITE_LOCAL_RANK": "1", "HVDLITE_LOCAL_SIZE": "2"}
    assert discover(one_host)[:6] == (1, 2, 1, 2, 0, 1)
    assert discover({"HVDLITE_RANK": "1", "HVDLITE_SIZE": "2"})[:6] == (1, 2, None, None, None, None)


@pytest.mark.parametrize(
    ("text", "counts"), [("", []), ("4", [4]), ("2(x3)", [2, 2, 2]), ("2(x2),1", [2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_slurms_counts(text, counts):
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["x", "2(x", "2(3)", "-1", "2,,1", "1(x99999999)"])
def test_slurms_counts_that_are_none(text):
    with pytest.raises(HvdInitError, match="SLURM_STEP_TASKS_PER_NODE"):
        tasks_per_node(text)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("n[01-03,7],login", ["n01", "n02", "n03", "n7", "login"]),
        ("r[1-2]c[09-10]-ib", ["r1c09-ib", "r1c10-ib", "r2c09-ib", "r2c10-ib"]),
        ("a,b[5],c.example.org", ["a", "b5", "c.example.org"]),
    ],
)
def test_slurms_nodes(text, names):
    assert nodes(text) == names


@pytest.mark.parametrize("text", ["n[1-", "n[]", "n[3-1]", "n[a-b]", "n]1[", "n[1-2]]", "a,,b", "n[1-9999999]"])
def test_slurms_nodes_that_are_none(text):
    with pytest.raises(HvdInitError, match="SLURM_JOB_NODELIST"):
        nodes(text)


# What each launcher sets for rank {r}: nothing, the whole place of one of two, a job of one, and parts of a place.
TOLD = {
    "own": "|HVDLITE_RANK={r} HVDLITE_SIZE=2 HVDLITE_STORE_ADDR=a|HVDLITE_RANK=0 HVDLITE_SIZE=1|HVDLITE_SIZE=2|"
    "HVDLITE_STORE_ADDR=a",
    "torchrun": "|TORCHELASTIC_RUN_ID=x RANK={r} WORLD_SIZE=2 LOCAL_RANK={r} MASTER_ADDR=a MASTER_PORT=1|"
    "TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=1 LOCAL_RANK=0|TORCHELASTIC_RUN_ID=x LOCAL_RANK={r}",
    "mpi": "|OMPI_COMM_WORLD_RANK={r} OMPI_COMM_WORLD_SIZE=2 PMIX_RANK={r}|OMPI_COMM_WORLD_RANK=0 "
    "OMPI_COMM_WORLD_SIZE=1|OMPI_COMM_WORLD_SIZE=2|PMIX_RANK={r}",
    "hydra": "|PMI_RANK={r} PMI_SIZE=2 MPI_LOCALRANKID={r}|PMI_RANK=0 PMI_SIZE=1 MPI_LOCALRANKID=0|PMI_RANK={r}",
    "srun": "|SLURM_STEP_ID=0 SLURM_PROCID={r} SLURM_NTASKS=2|SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 "
    "SLURM_NTASKS=1|SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2|SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=4",
    "pods": "|RANK={r} WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1|RANK=0 WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=1|"
    "PET_NNODES=2 PET_NODE_RANK={r} PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=a PET_MASTER_PORT=1|RANK=0 WORLD_SIZE=1 "
    "MASTER_ADDR=a MASTER_PORT=1 PET_NNODES=2 PET_NODE_RANK={r}|RANK={r}|WORLD_SIZE=2 MASTER_ADDR=a|RANK=0 "
    "WORLD_SIZE=1 TF_CONFIG={two}|TF_CONFIG={two}|JOB_COMPLETION_INDEX={i} MASTER_ADDR=a|JOB_COMPLETION_INDEX={i}|"
    "LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1",
}


def outcome(environ):
    try:
        return discover(environ)
    except HvdInitError as error:
        assert environ.keys() & set(re.findall(r"\w+", str(error))), (environ, error)
        return None


def test_no_combination_of_launchers_is_a_job_of_ones_without_a_word():
    two, count = TF_CONFIG.replace(" ", ""), 0
    for own_, torchrun, mpi, hydra, srun, pods in itertools.product(*(each.split("|") for each in TOLD.values())):
        given = variables(f"{pods} {srun} {hydra} {mpi} {torchrun} {own_}")  # torchrun sets RANK anew
        said = " ".join(map("=".join, given.items()))
        environs = [variables(said.replace("{r}", r).replace("{i}", r).replace("{two}", two)) for r in "01"]
        places, count = [outcome(environ) for environ in environs], count + 1
        if None in places or [(place.rank, place.size) for place in places] == [(0, 2), (1, 2)]:
            continue
        assert [place[:2] for place in places] == [(0, 1)] * 2, environs
        of_daemons = r"\b(SLURM|PMI|PMIX)_\S+" if "_SIZE=1" in mpi + hydra else "$"
        told = re.sub(of_daemons, "", said)
        half = places[0] == SINGLE and ("STORE" in own_ or "INDEX={i} MASTER" in pods)
        assert "SIZE=1" in own_ or not half and not re.search("{r}|=2|two", told), environs
    assert count > 5000
