"""Builds the package into a folder with nothing but cffi and a C compiler: python tests/gpu/build.py FOLDER

setup.py would need setuptools; here cffi writes the C source of the extension and the compiler does the rest. Files are
compiled side by side. TensorFlow's library is linked with nothing, so it is built whether TensorFlow is there or not.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def described():
    """hvdlite/_core/ffi_build.py by itself: the package has no extension yet."""
    spec = importlib.util.spec_from_file_location("_build", ROOT / "hvdlite" / "_core" / "ffi_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(out):
    """Fills `out` with the package, its launcher and its extension."""
    shutil.rmtree(out, ignore_errors=True)
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "hvdlite", out / "hvdlite", ignore=ignored)
    shutil.copytree(ROOT / "launcher", out / "hvdlite" / "launcher", ignore=ignored)
    source, build = out / "_cffi.c", described()
    build.ffi.emit_c_code(str(source))
    planes, algos = build.plug_ins("plane"), build.plug_ins("algo")
    compiler = os.environ.get("CC", "cc").split()
    flags = [*compiler, *build.FLAGS, "-fPIC", "-w", *(f"-D{name}={value}" for name, value in build.ABI3)]
    flags += [f"-I{ROOT / 'csrc'}"]
    flags += [f"-I{sysconfig.get_path('include')}", f"-DHVD_PLANE_LIST={planes}", f"-DHVD_ALGO_LIST={algos}", "-c"]
    sources = [source, *(path for path in (ROOT / "csrc").rglob("*.c") if path.parent.name != "tensorflow")]
    objects = [str(out / f"{i}.o") for i in range(len(sources))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pairs = list(zip(sources, objects))
        list(pool.map(lambda one: subprocess.run([*flags, str(one[0]), "-o", one[1]], check=True), pairs))
    suffix = sysconfig.get_config_var("EXT_SUFFIX") if build.FREE_THREADED else ".abi3.so"
    target = str(out / "hvdlite" / f"_cffi{suffix}")
    subprocess.run([*compiler, "-shared", "-pthread", *objects, "-o", target, "-ldl", "-lm"], check=True)
    for path in objects:
        os.unlink(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
