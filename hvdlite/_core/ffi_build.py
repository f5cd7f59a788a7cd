"""How csrc/ becomes hvdlite._cffi: which files are compiled, with which flags, and what Python sees of them.

setup.py hands this file to cffi (API mode), which runs it and compiles the result; nothing imports it at run time.
Three ideas:

* Headers are written once. cffi reads csrc/*.h between the marks `cffi: begin` and `cffi: end`; the one thing that
  Python itself implements, the bootstrap's allgather, is declared here because `extern "Python"` is not C.
* The file name is the registration. Every csrc/**/*.c is compiled (those of csrc/jax and csrc/tensorflow
  into libraries of their own, which setup.py describes); every csrc/plane/x.c (the table itself aside) becomes an X(x)
  in HVD_PLANE_LIST, which csrc/plane/registry.c expands; so does csrc/algo. tests/Makefile makes the same lists.
* Dependencies are honest. All headers are dependencies, and the list of sources stands in the generated file, so that
  a file that was changed, added or removed rebuilds the extension.

There is no -march=native: the kernels choose their SIMD at run time. Asserts stay on, against Python's own -DNDEBUG.
"""

import re
import sysconfig
from pathlib import Path

import cffi

ROOT = Path(__file__).resolve().parent.parent.parent
CSRC = ROOT / "csrc"
APART = ("jax", "tensorflow")
HEADERS = ("hvdlite.h", "quantized.h", "rows.h")  # of the C API

FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-pthread", "-UNDEBUG"]
CALLBACK = """
extern "Python" int hvd_py_allgather(void *self, const void *mine, size_t bytes, void *all,
                                     char *text, size_t text_bytes);
"""
# abi3 does not exist for free-threaded Pythons: there an extension serves one version only.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
ABI3 = [] if FREE_THREADED else [("Py_LIMITED_API", "0x03090000")]


def _relative(paths):
    """Paths as setuptools wants them: with `/`, relative to the project's root, in a fixed order."""
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def declarations() -> str:
    """What cffi parses: the marked parts of the public headers and the callback that Python implements."""
    parts = []
    for name in HEADERS:
        header = (CSRC / name).read_text(encoding="utf-8")
        found = re.search(r"/\* cffi: begin \*/(.*?)/\* cffi: end \*/", header, re.DOTALL)
        if found is None:
            raise RuntimeError(f"csrc/{name} has lost its marks `cffi: begin` and `cffi: end`")
        parts.append(found.group(1))
    return "".join(parts) + CALLBACK


def plug_ins(folder: str) -> str:
    """X(name) for each plug-in of csrc/folder, in the order of the alphabet."""
    return " ".join(f"X({path.stem})" for path in sorted((CSRC / folder).glob("*.c")) if path.stem != "registry")


def builder() -> cffi.FFI:
    """The cffi builder of hvdlite._cffi."""
    sources = _relative(path for path in CSRC.rglob("*.c") if path.parent.name not in APART)
    headers = _relative(CSRC.rglob("*.h"))
    result = cffi.FFI()
    result.cdef(declarations())
    result.set_source(
        "hvdlite._cffi",
        "/* compiled with:\n" + "".join(f" * {source}\n" for source in sources) + ' */\n#include "hvdlite.h"\n',
        sources=sources,
        depends=[*headers, "hvdlite/_core/ffi_build.py"],
        include_dirs=["csrc"],
        define_macros=[("HVD_PLANE_LIST", plug_ins("plane")), ("HVD_ALGO_LIST", plug_ins("algo")), *ABI3],
        py_limited_api=not FREE_THREADED,
        extra_compile_args=FLAGS,
        extra_link_args=["-pthread", "-Wl,--strip-all"],  # Python may ask for -g: most of the wheel would be that
        libraries=["dl", "m"],
    )
    return result


ffi = builder()
