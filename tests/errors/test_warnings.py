"""A warning of hvdlite shows the line of the user's script, however deep hvdlite and a framework are in between."""

import contextlib
import threading
import warnings
from pathlib import Path

import pytest
from ranks import as_ranks

from hvdlite.errors import user_warning

ROOT = Path(__file__).resolve().parents[2]


def nested(names, warn=user_warning.warn):
    """A function that warns, called through a module of each name, the first outermost."""
    for name in reversed(names):
        scope = {"__name__": name, "inner": warn}
        exec("def outer(*words):\n    inner(*words)", scope)
        warn = scope["outer"]
    return warn


@pytest.mark.parametrize("names", [[], ["hvdlite.a"], ["torch.optim", "hvdlite.torch.b"], ["keras.x", "contextlib"]])
def test_the_line_is_the_nearest_one_outside(names):
    with pytest.warns(RuntimeWarning, match="^said$") as said:
        nested(names)("said", RuntimeWarning)
    assert (
        said[0].filename == __file__ and "nested(names)" in Path(__file__).read_text().split("\n")[said[0].lineno - 1]
    )


def test_a_thread_without_a_user_s_line_warns_and_a_filter_can_make_it_an_error():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        thread = threading.Thread(target=nested(["hvdlite.a", "hvdlite.b"]), args=("said",))
        thread.start()
        thread.join()
    assert [str(each.message) for each in said] == ["said"]
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="said"):
        warnings.simplefilter("error")
        nested(["hvdlite.a"])("said")


@as_ranks(1)
def test_warnings_of_public_calls_show_the_caller():
    torch = pytest.importorskip("torch")
    import hvdlite.torch as hvd

    weight = torch.nn.Parameter(torch.ones(1))
    with warnings.catch_warnings(record=True) as said, contextlib.ExitStack():
        warnings.simplefilter("always")
        hvd.data.shard([], uneven="keep")
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1), num_groups=1)
        list(hvd.data.watch(torch.utils.data.DataLoader([]), check=True))
    assert {each.filename for each in said} == {__file__}, [str(each) for each in said]


def test_every_warning_of_hvdlite_goes_through_warn():
    found = [path for path in (ROOT / "hvdlite").rglob("*.py") if "warnings.warn" in path.read_text(encoding="utf-8")]
    assert [path.name for path in found] == ["user_warning.py"]
