"""The short help of hvdlite-run, and its completion in bash and, where there is one, zsh."""

import shutil
import subprocess

import pytest
from launching import launch

from hvdlite.launcher import cli
from hvdlite.launcher.command_line import help


@pytest.fixture(scope="module")
def script():
    return help.completion(cli._parser(), "bash")


def test_the_short_help_fits_two_screens_and_names_the_long_one():
    code, out, _ = launch("--help", COLUMNS="100")
    lines = out.splitlines()
    assert code == 0 and len(lines) <= 80 and max(map(len, lines)) <= 120
    assert "hvdlite-run doctor" in lines[1] and "--help-all" in lines[-1]
    assert "HVDLITE_START_TIMEOUT" in launch("--help-all")[1] and "HVDLITE_START_TIMEOUT" not in out
    assert {action.option_strings[0] for action in cli._parser()._actions} >= help.COMMON


def completed(script, *words):
    """What bash offers for the last word."""
    body = f'{script}\nCOMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _hvdlite_run; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", body, "bash", "hvdlite-run", *words], capture_output=True, text=True)
    assert done.stderr == "", done.stderr
    return done.stdout.split()


def test_bash_completes_flags_before_the_command_and_files_after_it(script):
    assert completed(script, "--dry") == ["--dry-run"]
    assert completed(script, "-np", "2", "-H", "a", ":", "2,b", ":", "2", "--verb") == ["--verbose"]
    assert completed(script, "--hosts", "=", "a", ":", "2", "-x", "A", "=", "b", "--verb") == ["--verbose"]
    assert completed(script, "--blacklist-cooldown-range", "5", "9", "--bind-to", "") == [
        "none",
        "core",
        "socket",
        "numa",
    ]
    assert completed(script, "--bind-to", "=", "so") == ["socket"]
    assert completed(script, "doc")[0] == "doctor" and "bash" in completed(script, "-np", "2", "ba")
    for words in (["python", "tr"], ["python", "train.py", "--"], ["--hostfile", ""], ["--", "--dry"], ["-np", ""]):
        assert completed(script, *words) == [], words  # then bash itself offers files


def test_the_script_is_loaded_as_documented():
    _, out, _ = launch("--completion", "bash")
    assert subprocess.run(["bash", "-c", f"{out}\ncomplete -p hvdlite-run"], capture_output=True).returncode == 0
    assert launch("--completion", "fish")[0] == 2


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_loads_the_script_and_completes_a_flag(tmp_path):
    script = help.completion(cli._parser(), "zsh")
    body = (
        f"autoload -U compinit && compinit -D -u\n{script}\n"
        "setopt ksharrays shwordsplit; COMP_WORDS=(hvdlite-run -np 2 --dry); COMP_CWORD=3; _hvdlite_run\n"
        'echo "$_comps[hvdlite-run] ${COMPREPLY[@]}"'
    )
    done = subprocess.run(["zsh", "-fc", body], capture_output=True, text=True, cwd=tmp_path)
    assert "--dry-run" in done.stdout, done.stdout + done.stderr
