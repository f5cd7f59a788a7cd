"""The kernels that were compiled ahead (csrc/cuda/*_ptx.c) are what sources and launchers say, as far as a machine
without nvcc can tell: entries, arguments, and for which drivers. (test_house.py compares the hash of their sources.)"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CUDA = ROOT / "csrc" / "cuda"
sys.path.append(str(ROOT / "tests" / "gpu"))


def ptx(name):
    """The text that a driver loads."""
    body = (CUDA / f"{name}_ptx.c").read_text(encoding="utf-8")
    assert f"const char hvd_{name}_ptx[] =" in body
    return "".join(re.findall(r'^    "(.*)\\n"', body, re.MULTILINE))


def sizeof(name, tmp_path):
    """Bytes of the table that travels as the launch's only argument."""
    source = f'#include "{name}.h"\n#include <stdio.h>\nint main(void) {{ '
    source += f'printf("%zu %zu", sizeof(struct hvd_{name}_table), _Alignof(struct hvd_{name}_table)); }}'
    program = tmp_path / name
    subprocess.run(["cc", "-I", str(CUDA), "-x", "c", "-", "-o", str(program)], input=source, text=True, check=True)
    return [int(word) for word in subprocess.check_output([str(program)], text=True).split()]


@pytest.mark.parametrize("name", ["pack"])
def test_the_compiled_kernels_have_the_entries_and_arguments_that_are_launched(name, tmp_path):
    import embed

    text, header = ptx(name), (CUDA / f"{name}.h").read_text(encoding="utf-8")
    entries = re.findall(r"\.visible \.entry (\w+)\((.*?)\)", text)
    source = (CUDA / f"{name}.cu").read_text(encoding="utf-8")
    written = re.findall(r"^KERNEL void (\w+)\(([^)]*)\)", source, re.MULTILINE)
    launched = re.findall(r'#define HVD_\w+\s+"(hvd_\w+)"', header)
    assert sorted(entry for entry, _ in entries) == sorted(kernel for kernel, _ in written) == sorted(launched)
    assert all(arguments == f"const struct hvd_{name}_table table" for _, arguments in written)
    size, align = sizeof(name, tmp_path)
    for entry, arguments in entries:
        assert arguments.strip() == f".param .align {align} .b8 {entry}_param_0[{size}]", arguments
    assert size <= 4096, "a launch has room for no more"
    assert f".version {embed.VERSION}" in text and f".target {embed.TARGET}" in text and ".address_size 64" in text
    assert name in embed.NAMES and embed.sources(name) in (CUDA / f"{name}_ptx.c").read_text(encoding="utf-8")
    assert ".maxntid" not in text and ".extern" not in text and "call" not in re.findall(r"\b\w+\b", text)
