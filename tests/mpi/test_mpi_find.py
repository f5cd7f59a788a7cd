"""Which MPI is found, when it is asked for at all, and what is said about one that hvdlite does not know."""

import shutil
import socket
import subprocess
import sys
import types
from pathlib import Path

import mpis
import pytest

from hvdlite import config, mpi
from hvdlite.mpi import communicator, diagnosis, libmpi
from hvdlite.rendezvous import bootstrap
from hvdlite.rendezvous.discovery import SINGLE, Place
from hvdlite.rendezvous.placement import HostLayout
from hvdlite.transport import mesh

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def names(environ=None, asked=None, module=None, maps="", prefixes=("/a",)):
    return libmpi.candidates(environ or {}, asked, module, maps, list(prefixes), "x86_64")


def test_what_is_asked_for_is_all_that_is_tried():
    assert names(asked="libmine.so", module="/m.so", maps="x /lib/libmpi.so.40\n") == ["libmine.so"]


def test_mpi4py_and_what_is_in_the_process_come_first():
    maps = "7f-8f r-xp 0 0:0 0 /x/lib/libmpi.so.12.5\n7f r /x/libmpi_cxx.so.40\n7f r /y/libmpi_abi.so.1 (deleted)\n"
    assert names(module="/m/MPI.abi3.so", maps=maps)[:3] == [
        "/m/MPI.abi3.so",
        "/x/lib/libmpi.so.12.5",
        "/y/libmpi_abi.so.1",
    ]


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "libmpi.so.40"),
        ({"PMIX_RANK": "0"}, "libmpi.so.40"),
        ({"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}, "libmpi.so.12"),
    ],
)
def test_the_launchers_own_kind_comes_first(environ, first):
    found = names(environ, prefixes=["/a", "/b"])
    assert found[:3] == [f"/a/lib/{first}", f"/a/lib64/{first}", f"/a/lib/x86_64-linux-gnu/{first}"]
    assert found.index(f"/b/lib/{first}") < found.index(first)
    assert found[-1] == "libmpi_abi.so" and len(set(found)) == len(found)


class Communicator:
    """What looks like mpi4py's."""

    def Get_rank(self):
        return 0

    def Get_size(self):
        return 1


def test_mpi_is_touched_only_when_it_was_asked_for():
    def place(source, size=2):
        return Place(0, size, 0, size, 0, 1, source)

    assert not mpi.wanted(None, SINGLE, {})
    assert not mpi.wanted(None, place("HVDLITE_ variables"), {"OMPI_COMM_WORLD_SIZE": "2"})
    assert not mpi.wanted(None, place("Open MPI", 1), {})
    assert not mpi.wanted([0], place("HVDLITE_ variables"), {})
    assert not mpi.wanted(None, place("Slurm"), {}) and not mpi.wanted(None, place("torchrun"), {"PMI_RANK": "0"})
    assert mpi.wanted(None, place("Open MPI"), {}) and mpi.wanted(None, place("MPICH or Intel MPI"), {})
    assert mpi.wanted(None, place("Slurm"), {"PMI_RANK": "0"}) and mpi.wanted(None, place("Slurm"), {"PMIX_RANK": "0"})
    assert mpi.wanted(None, place("HVDLITE_ variables"), {}, "mpi")
    assert mpi.wanted(Communicator(), None, {}) and mpi.wanted(Communicator(), SINGLE, {})


def test_what_is_said_when_ranks_do_not_come_names_the_networks():
    assert diagnosis.advice("MPICH", ["eth0"]) == "Do all of them call it, and with the same MPI?"
    said = diagnosis.advice("Open MPI", ["docker0", "ib0"])
    assert "has docker0, ib0" in said and "--mca btl_tcp_if_include ib0" in said
    assert "mpiexec -iface eth0" in diagnosis.advice("MPICH", ["eth0", "docker0"])
    assert "for eth1" in diagnosis.advice("MPI standard", ["eth1", "eth0"]) and "lo" not in diagnosis.networks()


@pytest.mark.parametrize("known", [True, False])
def test_a_host_whose_name_is_not_known_is_reached_by_any_route(monkeypatch, known):
    """Streams of a job over MPI: no store shows the way, only the other host's name."""

    def lookup(host, *_, **__):
        assert host == "far"
        if not known:
            raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(mesh, "find_links", lambda towards, *_: (towards, None))
    place, world = Place(0, 2, 0, 1, 0, 2, "MPI"), types.SimpleNamespace(job=7, secret=b"", epoch=0, allgather=None)
    found = bootstrap.link(place, config.read({}), world, HostLayout([0, 1], ["near", "far#1"]))
    assert found == (("far", 9) if known else None, None)


def test_sets_of_communicators_are_those_of_all_ranks():
    halves = [[5, [5, 7], None], [6, [6, 8], None], [7, [7, 5], None], [8, [6, 8], None]]
    assert communicator.sets(halves) == [[0, 2], [1, 3]] and [
        communicator.own([[0, 2], [1, 3]], r) for r in (0, 3)
    ] == [0, 1]
    some = [[0, [], None], [1, [2, 1], None], [2, [1, 2], None]]
    assert communicator.sets(some) == [[1, 2]] and communicator.own([[1, 2]], 0) == 0
    with pytest.raises(ValueError, match="rank 1: its communicator has rank 9 of MPI_COMM_WORLD, which is not a rank"):
        communicator.sets([[0, [0], None], [1, [1, 9], None]])
    with pytest.raises(ValueError, match="every rank passed MPI.COMM_NULL"):
        communicator.sets([[0, [], None]])
    with pytest.raises(ValueError, match="rank 0: a process set of an MPI communicator needs a job over MPI"):
        communicator.sets([communicator.word(Communicator())])


def test_a_process_that_did_not_ask_has_no_mpi():
    program = "import hvdlite as hvd; hvd.init(); hvd.shutdown(); print('libmpi' in open('/proc/self/maps').read())"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout == "False\n"
    )


def compiled(tmp_path, source, *flags):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("a C compiler is needed")
    file, out = tmp_path / "it.c", tmp_path / "it"
    file.write_text(source)
    done = subprocess.run([compiler, "-o", str(out), str(file), *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return out


FAKE = """
#include <string.h>
int MPI_Get_library_version(char *text, int *length) { strcpy(text, "Foreign MPI 7.1\\nmore"); *length = 20; return 0; }
"""
PLAIN = ("Init_thread", "Initialized", "Finalized", "Finalize", "Query_thread", "Error_string", "Comm_create_keyval")


def said_of(path):
    program = """
import sys
from hvdlite._core import ffi, lib, text_of
text = ffi.new("char[]", 2048)
code = lib.hvd_mpi_open(sys.argv[1].encode(), text, 2048)
print(code, text_of(text))
"""
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_mpi_of_an_unknown_kind_is_refused_with_its_version(tmp_path):
    calls = "".join(f"int MPI_{name}(void) {{ return 0; }}\n" for name in PLAIN)
    said = said_of(compiled(tmp_path, FAKE + calls, "-shared", "-fPIC"))
    assert "unknown binary interface" in said and '"Foreign MPI 7.1"' in said and "HVDLITE_MPI_LIBRARY" in said
    said = said_of(compiled(tmp_path, FAKE + calls.replace("int MPI_Finalized", "int X"), "-shared", "-fPIC"))
    assert "not an MPI library that hvdlite can use: it has no MPI_Finalized" in said
    old = calls + "int ompi_mpi_comm_world;\n"
    said = said_of(compiled(tmp_path, FAKE + old, "-shared", "-fPIC"))
    assert "has no ompi_mpi_comm_null" in said and "MPI 3.1" in said


def test_a_file_that_is_no_library_is_refused(tmp_path):
    (tmp_path / "it").write_text("no library")
    assert "it" in said_of(tmp_path / "it") and said_of("/nowhere/libmpi.so").startswith("-6 ")


NUMBERS = """
#include <stdio.h>
#include <stdint.h>
#include HEADER
#define world MPI_COMM_WORLD
#define self MPI_COMM_SELF
#define comm_null MPI_COMM_NULL
#define request_null MPI_REQUEST_NULL
#define errors_return MPI_ERRORS_RETURN
#define byte MPI_BYTE
#define int8 MPI_INT8_T
#define uint8 MPI_UINT8_T
#define int16 MPI_INT16_T
#define uint16 MPI_UINT16_T
#define int32 MPI_INT32_T
#define int64 MPI_INT64_T
#define float32 MPI_FLOAT
#define float64 MPI_DOUBLE
#define sum MPI_SUM
#define min MPI_MIN
#define max MPI_MAX
#define product MPI_PROD
#include "constants.h"
#define VALUE(standard, mpich) COLUMN(standard, mpich)
int main(void)
{
    int wrong = 0;
#define X(name, symbol, mpich, standard) \\
    if ((uintptr_t)(intptr_t)name != (uintptr_t)VALUE(standard, mpich)) wrong = 1, printf("%s\\n", #mpich);
    HVD_MPI_CONSTANTS(X)
    if ((intptr_t)MPI_IN_PLACE != VALUE(1, -1) || (intptr_t)MPI_STATUS_IGNORE != VALUE(0, 1)) wrong = 2;
    if (MPI_THREAD_MULTIPLE != VALUE(4096, 3)) wrong = 3;
    printf("%d\\n", wrong);
    return wrong;
}
"""


@pytest.mark.parametrize(("header", "column"), [("mpi.h", "mpich"), ("mpi_abi.h", "standard")])
def test_numbers_are_those_of_the_headers(tmp_path, header, column):
    """Of MPICH's ABI and of the standard ABI; Open MPI's handles are addresses, looked up by name."""
    include = mpis.mpirun("mpich").parent.parent / "include"
    text = (CSRC / "mpi" / "mpi.h").read_text()
    begin = text.index("#define HVD_MPI_CONSTANTS")
    (tmp_path / "constants.h").write_text(text[begin : text.index("\n\n", begin)] + "\n")
    flags = [f'-DHEADER="{header}"', f"-DCOLUMN(standard, mpich)={column}", f"-I{include}", f"-I{tmp_path}", "-w"]
    out = compiled(tmp_path, NUMBERS, *flags, *(["-DMPI_ABI"] if column == "standard" else []))
    done = subprocess.run([str(out)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n")
