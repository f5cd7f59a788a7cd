"""The manifests of examples/batch: their fields are real, what they and their operators set makes one job, and the
Dockerfile's steps run as they stand.

Two processes are the pods: their variables are read from the manifest, as far as it sets them, and names of pods lead
to this host. What the operators set is written here from their sources; there is no Kubernetes in these tests.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import overlays
import pytest
from launching import launch
from ranks import everything
from test_env_start import ends, start

import hvdlite
from hvdlite.rendezvous import discovery
from hvdlite.security import job_secret

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
BATCH = ROOT / "examples/batch"
PAGE = ROOT / "docs/guides/kubernetes.md"
KINDS = ["pytorchjob", "trainjob", "jobset", "job"]  # a rank for each pod
TRAIN = """
import numpy as np, hvdlite as hvd
hvd.init()
weights = hvd.broadcast(np.full(5, hvd.rank() + 1.0), root_rank=0)
data = np.random.default_rng(hvd.rank()).normal(size=(20, 5))
for row in data:
    weights -= 0.1 * hvd.allreduce((row @ weights - 1) * row)
print("rank", hvd.rank(), "of", hvd.size(), weights.tobytes().hex())
"""


def manifest(kind):
    return list(yaml.safe_load_all((BATCH / f"kubernetes_{kind}.yaml").read_text()))


def of_container(container, index, secret):
    """The variables that a manifest sets in the pod of this number."""
    environ = dict(secret) if {"secretRef": {"name": "hvdlite"}} in container.get("envFrom", []) else {}
    for each in container["env"]:
        origin = each.get("valueFrom", {})
        if "fieldRef" in origin:
            assert "job-completion-index" in origin["fieldRef"]["fieldPath"]
            environ[each["name"]] = str(index)
        elif "secretKeyRef" in origin:
            assert origin["secretKeyRef"] == {"name": "hvdlite", "key": "HVDLITE_SECRET_KEY"}
            environ.update(secret)
        else:
            environ[each["name"]] = each["value"]
    assert environ.keys() >= secret.keys()  # from the Secret of this name
    assert environ["HVDLITE_START_TIMEOUT"] == "600" and container["command"] == ["python", "train.py"]
    return environ


def pods(kind, secret):
    """The environments of all pods, and the name by which the first is known."""
    document = manifest(kind)[-1]
    name, spec = document["metadata"]["name"], document["spec"]
    sets, numbers = {job_secret.POD: "10.0.0.1"}, ["JOB_COMPLETION_INDEX"]
    if kind == "pytorchjob":
        roles = [spec["pytorchReplicaSpecs"][role] for role in ("Master", "Worker")]
        first, size = f"{name}-master-0", str(sum(role["replicas"] for role in roles))
        containers = [role["template"]["spec"]["containers"][0] for role in roles for _ in range(role["replicas"])]
        assert {each["name"] for each in containers} == {"pytorch"}
        sets.update(MASTER_ADDR=first, MASTER_PORT="23456", WORLD_SIZE=size, PET_NPROC_PER_NODE="auto")
        sets.update(PET_MASTER_ADDR=first, PET_MASTER_PORT="23456", PET_NNODES=size)
        numbers = ["RANK", "PET_NODE_RANK"]
    elif kind == "trainjob":
        trainer, first = spec["trainer"], f"{name}-node-0-0.{name}"
        containers = [trainer] * trainer["numNodes"]
        sets.update(PET_NNODES=str(trainer["numNodes"]), PET_NPROC_PER_NODE=str(trainer["numProcPerNode"]))
        sets.update(PET_MASTER_ADDR=first, PET_MASTER_PORT="29500")
        numbers += ["PET_NODE_RANK"]
    else:
        (ranks,) = spec["replicatedJobs"] if kind == "jobset" else [{"template": document}]
        job = ranks["template"]["spec"]
        pod = job["template"]["spec"]
        jobset = f"-{ranks['name']}-0-0.{spec['network']['subdomain']}" if kind == "jobset" else None
        first = name + (jobset or f"-0.{pod['subdomain']}")
        assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
        services = [(each["metadata"]["name"], each["spec"]["clusterIP"]) for each in manifest(kind)[:-1]]
        assert services == ([(pod["subdomain"], "None")] if kind == "job" else [])
        containers = pod["containers"] * job["completions"]
    environs = [of_container(each, n, secret) | dict.fromkeys(numbers, str(n)) for n, each in enumerate(containers)]
    return [each | sets for each in environs], first


def played(tmp_path, environs, first):
    """Exit codes and outputs of train.py in these pods. first: its name leads here, if given."""
    (tmp_path / "train.py").write_text(TRAIN)
    here = [{k: "127.0.0.1" if v == first else v for k, v in each.items()} for each in environs]
    here = [{**each, "HVDLITE_START_TIMEOUT": "60", "HVDLITE_HOST_ID": f"pod {n}"} for n, each in enumerate(here)]
    return ends(start(tmp_path, *here, program=[sys.executable, str(tmp_path / "train.py")]))


@pytest.mark.parametrize("kind", KINDS[:1] + [*everything(*KINDS[1:])])
def test_pods_form_one_job_with_the_same_weights(kind, tmp_path):
    environs, first = pods(kind, {"HVDLITE_SECRET_KEY": os.urandom(32).hex()})
    codes, said = played(tmp_path, environs, first)
    assert codes == [0, 0], said
    lines = [re.fullmatch(r"rank (\d) of 2 (\w+)\s*", text).groups() for text in said]
    assert [rank for rank, _ in lines] == ["0", "1"] and lines[0][1] == lines[1][1]


@pytest.mark.parametrize("kind", KINDS[:1] + [*everything(*KINDS[1:])])
def test_without_the_secret_every_rank_says_at_once_how_to_give_one(kind, tmp_path):
    environs, _ = pods(kind, {})
    began = time.monotonic()
    codes, said = played(tmp_path, environs, None)  # the name of the first pod leads nowhere, and is not asked for
    assert codes == [1, 1] and time.monotonic() - began < 30 and not (tmp_path / "hvdlite").exists(), said
    for rank, text in enumerate(said):
        assert re.search(rf"rank {rank}: .*a Secret of Kubernetes: kubectl create secret .*\[HVD117\]", text), text


@pytest.mark.parametrize(
    ("kind", "change", "way"),
    [
        ("trainjob", {"PET_NPROC_PER_NODE": "2"}, r"start the script with torchrun, or with hvdlite-run .*\[HVD105\]"),
        ("jobset", {"WORLD_SIZE": ""}, r"without WORLD_SIZE: .* Set RANK, WORLD_SIZE, .*on all ranks.*\[HVD105\]"),
    ],
)
def test_half_a_place_is_an_error_that_names_the_way(kind, change, way, tmp_path):
    environs, first = pods(kind, {})
    codes, said = played(tmp_path, [{**each, **change} for each in environs], first)
    assert codes == [1, 1] and all(re.search(way, text) for text in said), said


def test_the_launcher_of_the_mpi_operator_has_a_rank_for_each_slot(tmp_path):
    (job,) = manifest("mpijob")
    roles, slots = job["spec"]["mpiReplicaSpecs"], job["spec"]["slotsPerWorker"]
    workers = [f"{job['metadata']['name']}-worker-{n}.train.default.svc" for n in range(roles["Worker"]["replicas"])]
    (tmp_path / "hostfile").write_text("".join(f"{worker} slots={slots}\n" for worker in workers))
    (container,) = roles["Launcher"]["template"]["spec"]["containers"]
    program, *command = container["command"]
    code, out, err = launch("--dry-run", *command, OMPI_MCA_orte_default_hostfile=str(tmp_path / "hostfile"))
    assert program == "hvdlite-run" and code == 0, out + err
    assert re.findall(r"^rank (\d+) on (\S+):", out, re.MULTILINE) == [
        (str(n), workers[n // slots]) for n in range(slots * len(workers))
    ]


def test_every_field_of_the_manifests_is_one_of_its_kind(tmp_path):
    home = overlays.library("kubernetes")
    for kind, name in (("job", "completions"), ("jobset", "envFrom"), ("trainjob", "numNodes"), ("mpijob", "replicas")):
        wrong = (BATCH / f"kubernetes_{kind}.yaml").read_text().replace(f"{name}:", f"{name}x:", 1)
        (tmp_path / f"{kind}.yaml").write_text(wrong)
    (tmp_path / "zz.yaml").write_text((BATCH / "kubernetes_pytorchjob.yaml").read_text().replace("runP", "runp"))
    files = [*sorted(BATCH.glob("kubernetes_*.yaml")), *sorted(tmp_path.glob("*.yaml"))]
    program = [sys.executable, ROOT / "tests/support/kubernetes_schemas.py", *files]
    done = subprocess.run(program, env=overlays.with_path(home), capture_output=True, text=True, timeout=120)
    kinds = ["Service", "Job", "JobSet", "MPIJob", "PyTorchJob", "TrainJob"]
    wrong = ["Service fine", "Job wrong", "JobSet wrong", "MPIJob wrong", "TrainJob wrong", "PyTorchJob wrong"]
    said = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert said == [f"{kind} fine" for kind in kinds] + wrong, done.stdout + done.stderr


def wheel(folder):
    """The wheel of this tree, packed and not compiled anew (test_install.py makes one from the sources)."""
    about = importlib.metadata.distribution("hvdlite")
    path, inside = folder / f"hvdlite-{about.version}-py3-none-any.whl", f"hvdlite-{about.version}.dist-info"
    package = Path(hvdlite.__file__).parent
    with zipfile.ZipFile(path, "w") as packed:
        for base, top in ((package, "hvdlite"), (ROOT / "launcher", "hvdlite/launcher")):
            for each in (each for each in base.rglob("*") if each.suffix in (".py", ".so", ".md")):
                packed.write(each, f"{top}/{each.relative_to(base)}")
        packed.writestr(f"{inside}/METADATA", about.read_text("METADATA") or about.read_text("PKG-INFO"))
        packed.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr(f"{inside}/RECORD", "")


def test_the_steps_of_the_dockerfile_run_as_they_stand(tmp_path):
    """In a fresh environment for FROM's image, which is not played; what pip would fetch (torch, NumPy) lies there."""
    pytest.importorskip("torch")
    given, image = tmp_path / "given", tmp_path / "image"
    given.mkdir()
    wheel(given)
    (given / "train.py").write_text(TRAIN)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", image], check=True, timeout=120)
    (image / "bin/pip").write_text(f'#!/bin/sh\nexec {image}/bin/python -m pip "$@"\n')
    (image / "bin/pip").chmod(0o755)
    beside = tmp_path / "beside"
    beside.mkdir()
    for folder in (Path(each) for each in sys.path if each.endswith("-packages")):
        for each in folder.iterdir():
            if not re.match(r"_*(editable_*)?hvdlite", each.name) and not (beside / each.name).is_symlink():
                (beside / each.name).symlink_to(each)
    (site,) = image.glob("lib/python*/site-packages")
    (site / "beside.pth").write_text(f"{beside}\n")
    environ = {"PATH": f"{image / 'bin'}:{os.environ['PATH']}", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    steps = re.findall(r"^([A-Z]+) (.+)$", (BATCH / "Dockerfile").read_text(), re.MULTILINE)
    assert steps[0][0] == "FROM" and steps[-1][0] == "CMD"
    for step, words in steps[1:]:
        if step == "WORKDIR":
            folder = image / words.lstrip("/")
            folder.mkdir()
        elif step == "COPY":
            (path,) = given.glob(words.split()[0])
            shutil.copy(path, folder / words.split()[1])
        else:
            command = ["sh", "-c", words] if step == "RUN" else json.loads(words)
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("rank 0 of 1 ") and (site / "hvdlite/launcher/cli.py").exists()


def test_the_page_reads_the_environment_in_the_order_of_discovery():
    head = discovery.__doc__.split("in this order:")[1].split("Why MPI")[0]
    rows = [" ".join(row.split()) for row in re.split(r"^ {4}(?=\S)", head, flags=re.MULTILINE)[1:]]
    table = re.findall(r"^\| \d \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert [f"{told} {by}".replace("`", "") for told, by in table] == rows
