"""What is installed is what was promised: one small abi3 wheel made from the source distribution, the launcher in it.

The wheel is built once, from the unpacked source distribution, so that a file missing there is missing here; the
portable wheel of a release is another matter (.ci/wheel.py).
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel made from the source distribution. ccache knows what the environment of tests has compiled."""
    folder = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "setup.py", "-q", "egg_info", "-e", folder, "sdist", "-d", folder], cwd=ROOT)
    (archive,) = folder.glob("hvdlite-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder / "source")
    (source,) = (folder / "source").iterdir()
    words = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    run(words, env={**os.environ, "CCACHE_BASEDIR": str(source)})
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_is_small_and_serves_every_python(wheel):
    assert re.fullmatch(r"hvdlite-[\d.]+-cp39-abi3-linux_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 1_900_000  # with docstrings and error texts, which users read


def test_the_wheel_holds_the_library_the_launcher_and_the_license(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("hvdlite/tensorflow/_kernels.abi3.so", "hvdlite/jax/_handler.abi3.so", "hvdlite/jax/__init__.py"):
        assert wanted in names
    for wanted in ("hvdlite/_cffi.abi3.so", "hvdlite/py.typed", "hvdlite/launcher/cli.py", "hvdlite/torch/__init__.py"):
        assert wanted in names
    for wanted in ("hvdlite/as_horovod/front/horovod.py", "hvdlite/torch/elastic/state.py", "hvdlite/data/shards.py"):
        assert wanted in names
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "launcher/", "examples/"))]


def test_an_installed_copy_runs_and_launches(wheel, tmp_path):
    site = tmp_path / "site"
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel])
    environment = {**os.environ, "PYTHONPATH": str(site)}
    program = "import hvdlite as h; h.init(); print(h.__file__, h.rank(), h.size(), flush=True)"
    output = run([sys.executable, "-c", program], cwd=tmp_path, env=environment)
    assert output.split() == [str(site / "hvdlite/__init__.py"), "0", "1"]
    launched = [sys.executable, "-m", "hvdlite.launcher", "-np", "1", "--as-horovod", sys.executable, "-c"]
    asked = run([*launched, "import horovod; print(horovod.__version__)"], cwd=tmp_path, env=environment)
    assert asked.split() == ["0.28.1"]
    launched = [sys.executable, "-m", "hvdlite.launcher", "-np", "2", sys.executable, "-c", program]
    output = run(launched, cwd=tmp_path, env=environment)
    assert sorted(line.split()[-2:] for line in output.splitlines() if str(site) in line) == [["0", "2"], ["1", "2"]]


def test_this_environment_knows_the_launcher(tmp_path):
    """Also where the project is installed in place, and from a folder that is not the project's."""
    output = run([sys.executable, "-c", "import hvdlite.launcher.cli as c; print(c.main.__module__)"], cwd=tmp_path)
    assert output.split() == ["hvdlite.launcher.cli"]


def test_a_clone_that_shadows_the_installed_package_says_so(tmp_path):
    shutil.copytree(ROOT / "hvdlite", tmp_path / "hvdlite", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "-S", "-c", "import hvdlite; hvdlite.init"]  # -S: a clone installed in place serves all
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: hvdlite in {tmp_path / 'hvdlite'} has no compiled extension")
    assert last.endswith(f"pip install -e {tmp_path} [HVD808]")


def test_the_build_depends_on_every_source_and_header_and_on_no_processor():
    build = runpy.run_path(str(ROOT / "hvdlite/_core/ffi_build.py"))
    _, preamble, _, options = build["ffi"]._assigned_source
    tree = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.[ch]")}
    apart = {path for path in tree if path.startswith(("csrc/jax/", "csrc/tensorflow/")) and path.endswith(".c")}
    assert tree - apart <= set(options["sources"]) | set(options["depends"]) and not apart & set(options["sources"])
    assert all(source in preamble for source in options["sources"]), "a source added or removed rebuilds"
    assert not [flag for flag in options["extra_compile_args"] if flag.startswith(("-march", "-mtune", "-mcpu"))]
    assert "-ffp-contract=off" in options["extra_compile_args"]
    (planes,) = (value for name, value in options["define_macros"] if name == "HVD_PLANE_LIST")
    assert "X(self)" in planes and "X(shm)" in planes and "X(table)" not in planes
