"""docs/guides/parameter-server.md and table-servers.md: one program for two ranks, and one for Keras.

Lines that rank 0 prints are compared, in the order of the pages. The program runs in a folder that its servers were not
started in.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import launch
from ranks import everything

pytest.importorskip("zmq")
pytest.importorskip("torch")
GUIDES = Path(__file__).resolve().parents[2] / "docs/guides"
PAGE = "".join((GUIDES / page).read_text(encoding="utf-8") for page in ("parameter-server.md", "table-servers.md"))
BLOCKS = re.findall(r"^```python[^\n]*\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def block(name):
    (found,) = [each for each in BLOCKS if each.startswith(f"# {name}\n")]
    return found


def test_the_program_of_the_page(tmp_path):
    rules, keras = block("rules.py"), block("Keras")
    (tmp_path / "rules.py").write_text(rules)
    program = "\n".join(each for each in BLOCKS if each not in (rules, keras))
    (tmp_path / "train.py").write_text(f"import os; os.chdir({str(tmp_path)!r})\n{program}")
    code, out, err = launch("-np", 2, "--servers", 2, sys.executable, tmp_path / "train.py")
    assert code == 0, out + err
    said = re.findall(r"^\[0\]<stdout>:(.*)", out, re.MULTILINE)
    assert said[:4] == ["[[4. 2.]]", "tensor([[4., 4.]]) [0. 0. 2. 2.]", "(2, 4)", "torch.Size([1])"]
    assert said[4:6] == [f"{server} True 520 [None, None]" for server in (0, 1)]
    assert all(name in said[6] for name in ("bytes_in", "waited_s", "cpu_s", "lead")), said
    assert {"index.json"} < {each.name for each in (tmp_path / "saved/users").iterdir()}


@pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed")
@pytest.mark.parametrize("backend", everything("torch", "tensorflow"))
def test_the_program_for_keras(backend):
    code, out, err = launch("-np", 2, sys.executable, "-c", block("Keras"), KERAS_BACKEND=backend)
    assert code == 0, out + err
