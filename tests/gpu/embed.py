"""Compiles the kernels (csrc/cuda/pack.cu) into a text (pack_ptx.c), with nvcc:

    python tests/gpu/embed.py       after a change of one of them, or of its header

What nvcc writes is for drivers as new as itself; nothing in these kernels needs one, so the text is marked as of PTX
6.0 for compute capability 6.0 (CUDA 9, Pascal), and ptxas says whether that holds. The file notes the hash of its
sources, which a test compares: it cannot be forgotten.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

CUDA = Path(__file__).resolve().parent.parent.parent / "csrc" / "cuda"
TARGET, VERSION, WIDTH = "sm_60", "6.0", 110
NAMES = ("pack",)
ESSAY = """/* {name}_ptx.c - {name}.cu, compiled: what a driver loads as a module. Written by tests/gpu/embed.py.
 *
 * PTX is the assembler that CUDA's drivers translate for whatever device they find, so this text serves all of them
 * and a build needs neither nvcc nor CUDA. Lines are joined: PTX is free in that.
 *
 * sources: {sources}
 */
"""


def sources(name: str) -> str:
    """The hash of what the text was made of."""
    return hashlib.sha256(b"".join((CUDA / f"{name}{end}").read_bytes() for end in (".cu", ".h"))).hexdigest()


def compiled(name: str, folder: Path) -> str:
    """PTX for old drivers."""
    path = folder / "kernels.ptx"
    flags = ["-O3", "-ptx", "-arch=compute_75", "--fmad=false"]
    subprocess.run(["nvcc", *flags, "-o", str(path), str(CUDA / f"{name}.cu")], check=True)
    text = re.sub(r"//.*|\.pragma.*", "", path.read_text())
    text = re.sub(r"\.version \S+", f".version {VERSION}", text)
    text = re.sub(r"\.target \S+", f".target {TARGET}", text)
    path.write_text(text)
    for architecture in sys.argv[1:] or ["sm_75", "sm_90", "sm_100"]:
        subprocess.run(["ptxas", f"-arch={architecture}", "-o", str(folder / "cubin"), str(path)], check=True)
    return text


def embed(name: str) -> None:
    """Writes the file."""
    with tempfile.TemporaryDirectory() as folder:
        text = compiled(name, Path(folder))
    out, line = [], ""
    for part in (" ".join(one.split()) for one in text.splitlines()):
        alone = part.startswith(".") and part.split()[0] in (".version", ".target", ".address_size")
        if line and (alone or len(line) + len(part) > WIDTH):
            out.append(line)
            line = ""
        line = f"{line} {part}".strip()
        if alone:
            out.append(line)
            line = ""
    out.append(line)
    lines = "\n".join(f'    "{one}\\n"' for one in out if one)
    body = (
        f'#include "{name}.h"\n\n/* clang-format off */\nconst char hvd_{name}_ptx[] =\n{lines};\n'
        "/* clang-format on */\n"
    )
    (CUDA / f"{name}_ptx.c").write_text(ESSAY.format(name=name, sources=sources(name)) + body)


if __name__ == "__main__":
    for each in NAMES:
        embed(each)
