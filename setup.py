"""The package: metadata, and the one extension that hvdlite/_core/ffi_build.py describes.

`pip install .` needs gcc or clang, and nothing of torch, TensorFlow, MPI, NCCL or CUDA: those are found when a program
starts. The wheel is abi3: built by any Python from 3.9 on, it serves all of them. `.ci/wheel` builds the portable one
that a release carries. Settings of tools are in pyproject.toml.
"""

import os
import re
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
VERSION = re.search(r'^#define HVD_VERSION "(.+)"', (ROOT / "csrc/hvdlite.h").read_text(encoding="utf-8"), re.MULTILINE)
if VERSION is None:
    raise SystemExit("csrc/hvdlite.h does not say HVD_VERSION")

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def apart(name, folder):
    """TensorFlow's ops, JAX's handler: a library that Python never imports; linked to nothing of the framework's."""
    return Extension(
        name,
        sources=sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.c")),
        depends=["csrc/hvdlite.h", *(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).glob("*.h"))],
        extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-pthread", "-UNDEBUG"],
        extra_link_args=["-pthread", "-Wl,--strip-all"],
        libraries=["dl"],
        py_limited_api=not FREE_THREADED,
    )


class BuildExt(build_ext):
    """Compiles the files of an extension side by side: setuptools takes one after the other."""

    def build_extensions(self):
        """Called by setuptools once there is a compiler."""
        compile_all = self.compiler.compile

        def side_by_side(sources, *words, **more):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                each = pool.map(lambda source: compile_all([source], *words, **more), sources)
                return [name for names in each for name in names]

        self.compiler.compile = side_by_side
        super().build_extensions()


ZMQ = "pyzmq>=25"  # its wheels have libzmq with CURVE inside
TORCH = ["torch>=2.1"]
EXAMPLES = ["scikit-learn", "tqdm"]
DOCS = ["sphinx==9.0.4; python_version >= '3.11'", "furo", "myst-parser", "sphinx-copybutton"]
CHECKS = [
    "pytest",
    "pytest-xdist",  # several processes of tests
    "uv",  # installs what tests/support/overlays.py has
    "psutil",
    "expecttest",  # for torch's own tests of torch.distributed
    "pyyaml",
    "nbclient",  # hvdlite.run from a notebook
    "ipykernel",
    "setuptools>=64",
    "wheel",
    "clang-format==18.1.8",  # what formats and checks is pinned, or a fresh machine would find other faults
    "ruff==0.17.5",
    "mypy==2.4.1; python_version >= '3.10'",
]

setup(
    name="hvdlite",
    version=VERSION.group(1),
    description="Data-parallel training: a script for one process runs on many, with a four-line change",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.9",
    install_requires=["cffi>=1.16", "cloudpickle", "numpy"],
    extras_require={
        "torch": TORCH,
        "pytorch": TORCH,  # Horovod's name of it
        "tensorflow": ["tensorflow>=2.16"],
        "tensorflow-cpu": ["tensorflow-cpu>=2.16"],
        "keras": ["keras>=3"],
        "jax": ["jax>=0.4.38", "optax"],
        "yaml": ["pyyaml"],
        "examples": TORCH + EXAMPLES,
        "bench": [*TORCH, "matplotlib"],
        "report": ["plotly"],  # hvdlite-trace report, --dashboard
        "plan": ["scipy"],  # plan.network: how to split bandwidth
        "ps": [ZMQ],  # hvd.ps: tables on servers
        "rpc": [ZMQ],  # hvd.rpc: calls from rank to rank
        "ray": ["ray[train]>=2.51"],  # hvdlite.ray
        "dask": ["distributed>=2024"],  # hvdlite.dask
        "spark": ["pyspark>=3.4", "pyarrow", "pandas"],  # hvdlite.spark
        "trainers": [*TORCH, "lightning>=2", "accelerate", "transformers"],  # docs/guides/trainers.md
        "docs": [*TORCH, *DOCS],
        "test": [*CHECKS, *DOCS, *EXAMPLES, "matplotlib", "plotly", "scipy", ZMQ],
    },
    # The launcher lies beside the library because it stands on another floor; installed, it is a part of it.
    packages=find_packages(include=["hvdlite", "hvdlite.*"])
    + sorted(
        ".".join(["hvdlite", *path.relative_to(ROOT).parent.parts]) for path in (ROOT / "launcher").rglob("__init__.py")
    ),
    package_dir={"hvdlite.launcher": "launcher"},
    package_data={"hvdlite": ["py.typed", "ERRORS.md"], "hvdlite.as_horovod.front": ["*.dist-info/METADATA"]},
    cmdclass={"build_ext": BuildExt},
    cffi_modules=["hvdlite/_core/ffi_build.py:ffi"],
    ext_modules=[apart("hvdlite.tensorflow._kernels", "csrc/tensorflow"), apart("hvdlite.jax._handler", "csrc/jax")],
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp39"}},
    entry_points={
        "console_scripts": [
            "hvdlite-run = hvdlite.launcher.cli:main",
            "horovodrun = hvdlite.launcher.horovodrun:main",
            "hvdlite-trace = hvdlite.trace.cli:main",
            "hvdlite-plan = hvdlite.plan.cli:main",
            "hvdlite-aggregator = hvdlite.aggregation.aggregator_main:command",
        ],
        "torch.backends": ["hvdlite = hvdlite._torch_backend:register"],  # called by `import torch`, 2.5 and later
        "torch.distributed.backends": ["hvdlite = hvdlite._torch_backend:register"],  # asked for a name, 2.14
    },
    zip_safe=False,
)
