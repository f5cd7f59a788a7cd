"""The catalogue of errors is whole: every text that is raised has a code, every code a row, and every row is used.

The sources are read, not run: each call of a class of error (and each warning) must give a text that ends with a code.
What may go without stands in EXEMPT, with its reason. What is made from the table is compared with what lies there.
"""

import ast
import builtins
import pickle
import re
import sys
from pathlib import Path

import pytest

import hvdlite
from hvdlite import config, errors
from hvdlite.errors import catalogue
from hvdlite.errors.codes import code_of, coded
from hvdlite.launcher import cli
from hvdlite.lifecycle import uncaught

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import catalogue as written  # noqa: E402

AT_END = re.compile(r"\[(HVD\d{3})\]$")
NO_TEXT = "a signal of control flow: whoever calls it catches it, and no user sees it"
QUOTED = "only a part: caught by its caller, who tells it within a text that has a code"
PYTHONS = "Python's own protocol asks for this class, and shows its own words"
OTHERS = "the text is another error's, which has its code"
NOTICE = "no trouble: what was done, or where something is"
ABSTRACT = "an abstract method: what Python programmers know"
_OF_FOLDERS = """require_seen _require_ours require_own written _opened found Manifest.__init__ Manifest._take
Manifest._check Manifest.require_same Manifest._copy Manifest.rest_path"""
EXEMPT = {  # (file, function or class.function): reason
    ("hvdlite/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/aggregation/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/jax/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/lifecycle/uncaught.py", "_to_user: print"): "the traceback of an error that has a code",
    ("hvdlite/torch/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/torch/distributed/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/tensorflow/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/torch/sharded_checkpoint.py", "_Job._read_rest"): QUOTED,
    ("hvdlite/torch/sharded_checkpoint.py", "_require_plain"): QUOTED,
    **{("hvdlite/training/checkpoint_folder.py", name): QUOTED for name in _OF_FOLDERS.split()},
    ("hvdlite/parallel/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/torch/elastic/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/parallel/structure.py", "taken_apart.form"): QUOTED,
    ("hvdlite/parallel/checkpoint_values.py", "exchanged"): OTHERS,
    ("hvdlite/plan/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/plan/links.py", "from_json"): QUOTED,
    ("hvdlite/plan/links.py", "_rank"): QUOTED,
    ("hvdlite/plan/links.py", "_number"): QUOTED,
    ("hvdlite/plan/tree_packing.py", "_arc"): "Lovász proves that it is never raised",
    ("hvdlite/plan/registry.py", "file"): OTHERS,
    ("hvdlite/plan/table.py", "from_json"): QUOTED,
    ("hvdlite/plan/table.py", "moves_of"): QUOTED,
    ("hvdlite/predict/cli.py", "run: print"): OTHERS,
    ("hvdlite/predict/replicas.py", "copies"): QUOTED,
    ("hvdlite/predict/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/plan/layers.py", "_layer"): QUOTED,
    ("hvdlite/plan/layers.py", "read"): QUOTED,
    ("hvdlite/plan/program.py", "Program.__post_init__"): QUOTED,
    ("hvdlite/plan/program.py", "Program._length"): QUOTED,
    ("hvdlite/plan/program.py", "_note"): QUOTED,
    ("hvdlite/plan/program.py", "groups"): QUOTED,
    ("hvdlite/plan/program.py", "from_json"): QUOTED,
    ("hvdlite/plan/program.py", "_line"): QUOTED,
    ("hvdlite/parallel/planned.py", "planned"): QUOTED,
    ("hvdlite/parallel/planned.py", "_checked"): QUOTED,
    ("hvdlite/ps/protocol.py", "Protocol.take"): QUOTED,
    ("hvdlite/ps/protocol.py", "Protocol._push"): QUOTED,
    ("hvdlite/ps/protocol.py", "Protocol._apply"): QUOTED,
    ("hvdlite/ps/shard.py", "_reserved"): QUOTED,
    ("hvdlite/ps/shard.py", "Shard.slots"): QUOTED,
    ("hvdlite/ps/shard.py", "Shard._make"): QUOTED,
    ("hvdlite/ps/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/ps/client.py", "Client.call"): OTHERS,
    ("hvdlite/ps/messages.py", "refusal"): OTHERS,
    ("hvdlite/ps/table.py", "Table._not_finite"): "the text is made a line above, with its code",
    ("hvdlite/ps/table.py", "Table.push_unique"): "the text is made a line above, with its code",
    ("hvdlite/ps/coordination.py", "Work._run"): QUOTED,
    ("hvdlite/ps/checkpoint_pieces.py", "_arrays_in"): QUOTED,
    ("hvdlite/ps/checkpoint_pieces.py", "_runs"): QUOTED,
    ("hvdlite/ps/checkpoint_pieces.py", "_check_rows"): QUOTED,
    ("hvdlite/ps/table.py", "Table.saved: print"): "the text is made a line above, with its code",
    ("hvdlite/_core/ffi_build.py", "declarations"): "while the package is built; it is not installed then",
    ("hvdlite/_core/request.py", "report_device_notice"): OTHERS,
    ("hvdlite/security/zmq_proxy.py", "Proxy._judge"): NO_TEXT,
    ("hvdlite/transport/http_server.py", "Port._receive"): NO_TEXT,
    ("hvdlite/data/rows.py", "_sliced"): NO_TEXT,
    ("hvdlite/keras/optimizer.py", "Distributed.__getattr__"): PYTHONS,
    ("hvdlite/lifecycle/uncaught.py", "_only_consequence: print"): "an error of another rank, which has its own",
    ("hvdlite/elastic/__init__.py", "_rejoin: print"): NOTICE,
    ("hvdlite/security/handshake.py", "Connector.answer"): QUOTED,
    ("hvdlite/security/handshake.py", "Connector.session"): QUOTED,
    ("hvdlite/security/handshake.py", "receive"): QUOTED,
    ("hvdlite/rendezvous/bootstrap.py", "records_of"): NO_TEXT,
    ("hvdlite/config/types.py", "finite_number"): QUOTED,
    ("hvdlite/config/types.py", "power_of_two"): QUOTED,
    ("hvdlite/config/types.py", "file_name"): QUOTED,
    ("hvdlite/config/types.py", "key"): QUOTED,
    ("hvdlite/config/types.py", "link_cost"): QUOTED,
    ("hvdlite/config/types.py", "signal_number"): QUOTED,
    ("hvdlite/config/types.py", "job"): QUOTED,
    ("hvdlite/config/types.py", "modules"): QUOTED,
    ("hvdlite/security/job_secret.py", "of_file"): QUOTED,
    ("hvdlite/security/job_secret.py", "of_user"): QUOTED,
    ("hvdlite/security/job_secret.py", "_folder_of_host"): QUOTED,
    ("hvdlite/elastic/checkpoint.py", "report: print"): NOTICE,
    ("hvdlite/rendezvous/store_client.py", "Store._expect"): "a rank that is removed: no failure",
    ("hvdlite/rendezvous/store_client.py", "authenticate"): QUOTED,
    ("hvdlite/security/framing.py", "Session.pack"): QUOTED,
    ("hvdlite/security/framing.py", "frame_length"): QUOTED,
    ("hvdlite/security/framing.py", "unpack_end"): QUOTED,
    ("hvdlite/security/framing.py", "unpack_round"): QUOTED,
    ("hvdlite/security/framing.py", "unpack_gathered"): QUOTED,
    ("hvdlite/as_horovod/finder.py", "_hollow_out.missing"): PYTHONS,
    ("hvdlite/config/__init__.py", "option_of"): "asked by hvdlite itself, with names of its own",
    ("hvdlite/data/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/data/loaders.py", "BaseDataLoader.__len__"): ABSTRACT,
    ("hvdlite/data/loaders.py", "BaseDataLoader._iterate"): ABSTRACT,
    ("hvdlite/elastic/__init__.py", "State.check_host_updates"): "no failure: its class says what has happened",
    ("hvdlite/elastic/__init__.py", "State.load_state_dict"): ABSTRACT,
    ("hvdlite/elastic/__init__.py", "State.save"): ABSTRACT,
    ("hvdlite/elastic/__init__.py", "State.restore"): ABSTRACT,
    ("hvdlite/elastic/__init__.py", "State.sync"): ABSTRACT,
    ("hvdlite/_core/nan_guard.py", "report"): OTHERS,
    ("hvdlite/keras/__init__.py", "__getattr__"): PYTHONS,
    ("hvdlite/transport/address.py", "unpack"): QUOTED,
    ("hvdlite/numpy.py", "__getattr__"): PYTHONS,
    ("hvdlite/ops/arguments.py", "Compressor.compress"): ABSTRACT,
    ("hvdlite/ops/arguments.py", "Compressor.decompress"): ABSTRACT,
    ("hvdlite/executors/run.py", "run"): "a DeprecationWarning, which says what to write instead",
    ("hvdlite/tensorflow/elastic.py", "_lost"): OTHERS,
    ("hvdlite/torch/elastic/state.py", "StateHandler.save"): ABSTRACT,
    ("hvdlite/torch/elastic/state.py", "StateHandler.restore"): ABSTRACT,
    ("hvdlite/torch/elastic/state.py", "StateHandler.sync"): ABSTRACT,
    ("hvdlite/torch/elastic/state.py", "StateHandler.take"): ABSTRACT,
    ("hvdlite/torch/optimizer/factory.py", "grouped"): "a DeprecationWarning, which says what to write instead",
    ("hvdlite/trace/events.py", "_whole"): QUOTED,
    ("hvdlite/trace/events.py", "_text"): QUOTED,
    ("hvdlite/trace/events.py", "_record"): QUOTED,
    ("hvdlite/trace/events.py", "read_record"): QUOTED,
    ("hvdlite/trace/report/read.py", "_whole"): QUOTED,
    ("hvdlite/trace/report/read.py", "RankFile._head"): QUOTED,
    ("hvdlite/trace/report/read.py", "RankFile._step"): QUOTED,
    ("hvdlite/lifecycle/init.py", "_init: print"): "notes of config, which have a code where they tell a trouble",
    ("hvdlite/autotune/tuner.py", "note: print"): NOTICE,
    ("hvdlite/ops/wire.py", "wire_compression: print"): NOTICE,
    ("hvdlite/keras/quantized_lists.py", "QuantizedLists.matters: print"): NOTICE,
    ("hvdlite/torch/compressed/carrier.py", "CompressedCarrier._begin: print"): NOTICE,
    ("hvdlite/ops/quantized_sum.py", "_readable"): OTHERS,
    ("hvdlite/metrics/aggregator.py", "_opened: print"): NOTICE,
    ("hvdlite/trace/analyze.py", "run: print"): OTHERS,
    ("hvdlite/plan/cli.py", "main: print"): OTHERS,
    ("hvdlite/trace/cli.py", "main: print"): OTHERS,
    ("hvdlite/trace/merge.py", "run: print"): OTHERS,
    ("hvdlite/trace/report/__init__.py", "wrong: print"): OTHERS,
    ("hvdlite/_core/nan_guard.py", "report: print"): OTHERS,
    ("launcher/restart_loop.py", "_pause"): NO_TEXT,
    ("launcher/restart_loop.py", "_announce: print"): OTHERS,
    ("launcher/starters/mpi_agent.py", "_serve: print"): OTHERS,
    ("launcher/cli.py", "main: print"): OTHERS,
    ("launcher/cli.py", "_run: print"): NOTICE,
    ("launcher/cli.py", "_start: print"): NOTICE,
    ("launcher/diagnostics/doctor.py", "run: print"): OTHERS,
    ("launcher/elastic/flags.py", "_announce: print"): NOTICE,
    ("launcher/starters/remote_agent.py", "_serve: print"): OTHERS,
    ("launcher/starters/rendezvous.py", "_serve: print"): OTHERS,
    ("launcher/starters/starter.py", "Start._report_refused: print"): OTHERS,
    ("launcher/placement/under_mpirun.py", "_gather: print"): NOTICE,
    ("launcher/restart_loop.py", "run"): "for the reader of the sources: it cannot be reached",
    ("launcher/command_line/config_file.py", "_read"): QUOTED,
    ("launcher/command_line/config_file.py", "_distinct"): QUOTED,
    ("launcher/command_line/config_file.py", "_words"): QUOTED,
    ("launcher/command_line/config_file.py", "_controller"): QUOTED,
    ("launcher/command_line/config_file.py", "_flag"): QUOTED,
    ("launcher/command_line/config_file.py", "_switched"): QUOTED,
    ("launcher/function_server.py", "FunctionServer._take_in"): NO_TEXT,
    ("launcher/diagnostics/doctor.py", "_There.receive"): QUOTED,
    ("launcher/probe/host_probe.py", "Examiner._connect"): QUOTED,
    ("launcher/control/registration.py", "Registration._read"): NO_TEXT,
    ("launcher/agent/process.py", "spawn"): "an OSError of the kernel's, told in a line that has a code",
    ("launcher/agent/process.py", "start"): "an OSError of the kernel's, told in a line that has a code",
    ("launcher/starters/starter.py", "Start.run"): "lines, each with a code of its own",
    ("launcher/store/server.py", "StoreServer.__init__"): QUOTED,
    ("hvdlite/trace/spans.py", "Spans.__init__"): QUOTED,
    ("hvdlite/trace/spans.py", "Spans.take"): QUOTED,
    ("hvdlite/torch/consistency.py", "_check"): QUOTED,
}


def last_name(node):
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Sources:
    """All of hvdlite/ and launcher/ as trees; their classes of error, and constants that end with a code."""

    def __init__(self):
        paths = sorted(path for folder in ("hvdlite", "launcher") for path in (ROOT / folder).rglob("*.py"))
        self.texts = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self.errors = {name for name, each in vars(builtins).items() if isinstance(each, type)}
        self.errors = {name for name in self.errors if issubclass(getattr(builtins, name), BaseException)}
        nodes = [node for tree in self.trees.values() for node in ast.walk(tree)]
        defined, known = [node for node in nodes if isinstance(node, ast.ClassDef)], 0
        while known != len(self.errors):
            known = len(self.errors)
            self.errors |= {c.name for c in defined if any(last_name(base) in self.errors for base in c.bases)}
        self.constants = set()
        given = [node for tree in self.trees.values() for node in tree.body if isinstance(node, ast.Assign)]
        self.constants = {last_name(node.targets[0]) for node in given if self.has_code(node.value)}

    def has_code(self, text):
        """Whether what this expression gives ends with a code, whatever its values are."""
        if isinstance(text, ast.BinOp):
            return self.has_code(text.right)
        if isinstance(text, ast.JoinedStr):
            return self.has_code(text.values[-1])
        if isinstance(text, ast.Constant):
            return isinstance(text.value, str) and AT_END.search(text.value) is not None
        if isinstance(text, ast.Name):
            return text.id in self.constants
        return isinstance(text, ast.Call) and last_name(text.func) == "coded"

    def without(self, node, path, inside=()):
        """(file, function, line) of what is raised or warned of without a code below this node."""
        for child in ast.iter_child_nodes(node):
            names = (*inside, child.name) if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else inside
            bare = isinstance(child, ast.Raise) and last_name(child.exc) in self.errors
            called = last_name(child.func) if isinstance(child, ast.Call) else ""
            told = called == "warn" or (called == "print" and any(each.arg == "file" for each in child.keywords))
            made = called in self.errors or told
            if bare or (made and not any(map(self.has_code, child.args))):
                yield path, ".".join(names) + ("" if called != "print" else ": print"), child.lineno
            yield from self.without(child, path, names)


@pytest.fixture(scope="module")
def sources():
    return Sources()


def test_every_error_and_warning_has_a_code(sources):
    found = [site for path, tree in sources.trees.items() for site in sources.without(tree, path)]
    bare = [
        f"{path}:{line}: {function} gives a text without a code"
        for path, function, line in found
        if (path, function) not in EXEMPT
    ]
    assert not bare, "\n" + "\n".join(bare) + "\nend the text with one of hvdlite/ERRORS.md, or tell EXEMPT why not"
    idle = set(EXEMPT) - {(path, function) for path, function, _ in found}
    assert not idle, f"EXEMPT names what needs it no more: {sorted(idle)}"


def test_codes_in_the_sources_and_in_the_table_are_the_same(sources):
    core = {
        path: path.read_text(encoding="utf-8") for path in (ROOT / "csrc").rglob("*.[ch]") if path.name != "codes.h"
    }
    told = sources.texts
    used = {}
    for path, text in [*told.items(), *core.items()]:
        pattern = r"\bHVD(\d{3})\b|HVD_ENDS\((\d{3})\)" if path in core else r"\[HVD(\d{3})\]|\"HVD(\d{3})\""
        for match in re.finditer(pattern, text):
            used.setdefault("HVD" + next(filter(None, match.groups())), path)
    unknown = {code: path for code, path in used.items() if code not in catalogue.ROWS}
    assert not unknown, f"codes that hvdlite/ERRORS.md does not have: {unknown}"
    assert not (idle := set(catalogue.ROWS) - set(used)), f"rows that nothing uses: {sorted(idle)}"


def test_the_page_is_whole_and_in_order():
    page = (ROOT / "hvdlite/ERRORS.md").read_text(encoding="utf-8")
    listed = list(catalogue.ROWS.values())
    assert [row.code for row in listed] == re.findall(r"^### (\w+)$", page, re.MULTILINE) == sorted(catalogue.ROWS)
    assert list(catalogue.FAMILIES) == list("0123456789") and len({row.title for row in listed}) == len(listed)
    for row in listed:
        assert min(map(len, (row.raises, row.cause, row.remedy))) > 3, row
        assert row.cause.endswith((".", "?", ":")) and row.remedy.endswith((".", "?")), row
        for name in re.findall(r"\b[A-Z]\w*(?:Error|Interrupt)\b", row.raises):
            assert hasattr(errors, name) or hasattr(builtins, name), f"{row.code}: there is no {name}"


def test_the_macros_of_the_core_are_those_of_the_page():
    assert written.HEADER.read_text(encoding="utf-8") == written.header(), "make -C tests codes"


def test_a_text_has_one_code():
    assert coded("HVD301", "a") == "a [HVD301]" == coded("HVD402", "a [HVD301]")
    assert coded("HVD301", "see [HVD402]: b") == "see [HVD402]: b [HVD301]"
    assert code_of("a [HVD301]\n") == "HVD301"
    for text in ("", "HVD301", "[HVD301] a", "a [HVD30]", "a [HVD3011]", "a [HVDabc]", "a [XYZ301]"):
        assert code_of(text) is None


def test_exceptions_have_their_code():
    for name in errors.CLASS_OF_CODE:
        error = errors.error_of(name, "rank 1: x [HVD450]", 1)
        assert error.code == "HVD450", name
    assert errors.error_of("HVD_EPEER", "x").code is None and errors.HvdError().code is None
    again = pickle.loads(pickle.dumps(errors.HvdMismatchError("a [HVD301]")))
    assert again.code == "HVD301"
    assert errors.HvdNotInitializedError(errors.NOT_INITIALIZED).code == "HVD101"
    with pytest.raises(hvdlite.HvdArgumentError) as caught:
        raise errors.HvdArgumentError("x [HVD209]")
    assert caught.value.code == "HVD209"


def test_what_a_rank_says_of_an_exception_ends_with_its_code():
    try:
        raise errors.HvdMismatchError("a" * 2000 + " [HVD301]")
    except errors.HvdMismatchError as error:
        said = uncaught.describe(type(error), error, error.__traceback__)
    assert re.search(r"aaa \(test_catalogue.py:\d+\) \[HVD301\]$", said) and len(said) < 1100


def raises_on_one(how):
    hvdlite.init()
    if hvdlite.rank() == 1 and how == "coded":
        hvdlite.allreduce(__import__("numpy").ones(1), op=77)
    if hvdlite.rank() == 1:
        raise KeyError("absent")
    hvdlite.barrier()


@pytest.mark.parametrize("how, code", [("coded", "HVD206"), ("plain", "HVD721")])
def test_the_code_of_another_rank_s_error_comes_through_run_and_the_launcher(how, code, capsys):
    with pytest.raises(hvdlite.HvdRunError) as caught:
        hvdlite.run(raises_on_one, (how,), num_proc=2)
    assert (caught.value.rank, caught.value.exit_code, caught.value.code) == (1, 1, code), str(caught.value)
    closing = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hvdlite-run: rank 1 ")]
    assert closing and code_of(closing[-1]) == ("HVD206" if how == "coded" else "HVD401"), closing


def test_remedies_name_flags_variables_and_functions_that_exist():
    torch = pytest.importorskip("hvdlite.torch")
    foreign = {"--shm-size", "--ulimit", "--network", "--gpus", "--ipc", "--force-reinstall"}  # of docker, pip
    known = {flag for action in cli._parser()._actions for flag in action.option_strings} | foreign
    variables = {option.variable for option in config.OPTIONS}
    for row in catalogue.ROWS.values():
        text = f"{row.cause} {row.remedy}"
        assert (found := set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))) <= known, (row.code, found - known)
        assert (found := set(re.findall(r"\bHVDLITE_\w*[A-Z]\b", text))) <= variables, (row.code, found - variables)
        for name in re.findall(r"`hvd\.([a-z_]+)", text):
            assert any(hasattr(place, name) for place in (hvdlite, torch)), f"{row.code}: no hvd.{name}"
