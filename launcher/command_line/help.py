"""Texts of `hvdlite-run --help`, `--help-all` and `--completion`, made from the parser of cli.py.

The short help names the flags of COMMON: what most jobs need, on two screens. The long one names all.

Completion is one function of bash, which zsh runs through its bashcompinit: flags before the command, files after it.
bash splits words at = and :, zsh does not; the function reads both.
"""

from __future__ import annotations

import argparse
from typing import Any

USAGE = """hvdlite-run -np N [options] command [arguments]
       hvdlite-run doctor [-H HOSTS] [--measure]   check whether a job will run, and print remedies
       hvdlite-run --explain CODE                  print cause and remedy of an error
       hvdlite-run --check-build                   print the frameworks and libraries found
       hvdlite-trace, hvdlite-plan                 traces and predictions of jobs; plans of parallel training"""
MORE = "hvdlite-run --help-all lists all flags, those of Horovod, mpirun and torchrun included."
_COMMON = (
    "-np -H -hostfile -m --verbose --dry-run --max-restarts --bind-to --record --output-filename --ranks-to-console "
    "--fold-output -prefix-timestamp --dashboard -p -x --nnodes --node-rank --nproc-per-node --rdzv-endpoint --min-np "
    "--max-np --host-discovery-script --mpi --start-timeout --collective-timeout --deterministic --autotune "
    "--fusion-threshold-mb --trace-dir --timeline-filename --nan-guard -h --help-all"
)
COMMON = frozenset(_COMMON.split())
_SCRIPT = """_hvdlite_run() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} i
    COMPREPLY=()
    [[ $cur == = ]] && cur=  # bash splits at = and :
    [[ $prev == = ]] && prev=${{COMP_WORDS[COMP_CWORD-2]}}
    for ((i = 1; i < COMP_CWORD; i++)); do
        [[ ${{COMP_WORDS[i+1]}} == = ]] && ((i++))
        case ${{COMP_WORDS[i]}} in
            [:=@]*|{one}) ((i += 1)) ;;
            {two}) ((i += 2)) ;;
            --|[!-]*) return ;;  # files follow
        esac
    done
    case $prev in
        {choices}
        {one}) return ;;
    esac
    if [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "{flags}" -- "$cur"))
    elif [[ $i -eq $COMP_CWORD && ${{COMP_WORDS[i]}} != [:=@]* ]]; then
        COMPREPLY=($(compgen -W doctor -- "$cur") ${{cur:+$(compgen -c -- "$cur")}})
    fi
}}
complete -o default -F _hvdlite_run hvdlite-run
"""


class Formatter(argparse.HelpFormatter):
    """A flag's value stands once, behind its last name."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **settings})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else f"{names} {self._format_args(action, action.dest.upper())}"


class Show(argparse.Action):
    """-h and --help-all."""

    def __call__(self, parser: argparse.ArgumentParser, args: Any, values: Any, option_string: Any = None) -> None:
        if option_string != "--help-all":
            parser.epilog = MORE
            for action in parser._actions:
                text = (action.help or "").partition(" Default ")[0].partition(" Environment ")[0]
                action.help = text if action.option_strings[0] in COMMON else argparse.SUPPRESS
        parser.print_help()
        parser.exit()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of this file."""
    parser.add_argument("-h", "--help", nargs=0, action=Show, help="print the most common flags")
    parser.add_argument("--help-all", nargs=0, action=Show, help="print all flags")
    shells = ("bash", "zsh")
    text = "print a script that completes this command: source <(hvdlite-run --completion bash)"
    parser.add_argument("--completion", choices=shells, help=text)


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """The script for this shell."""
    taking: dict[int, list[str]] = {1: [], 2: []}
    for action in parser._actions:
        if action.nargs != 0:
            taking[2 if action.nargs == 2 else 1] += action.option_strings
    text = _SCRIPT.format(
        one="|".join(taking[1]),
        two="|".join(taking[2]),
        flags=" ".join(f for a in parser._actions if a.help != argparse.SUPPRESS for f in a.option_strings),
        choices="\n        ".join(
            f'{"|".join(a.option_strings)}) COMPREPLY=($(compgen -W "{" ".join(a.choices)}" -- "$cur")); return ;;'
            for a in parser._actions
            if a.choices
        ),
    )
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text
