"""What makes a shell complete the flags? A script for bash, zsh or fish, made from the parser, so it lacks none.

Behind a flag that takes a file the shell completes files; behind others nothing; from the command on, everything. Flags
that are there for other launchers' sake only are not offered. A user puts it where the shell looks:
`eval "$(hvdlite-run --completion bash)"` in ~/.bashrc, the others' into a folder of completions.
"""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "DIR")

_BASH = """# eval "$(hvdlite-run --completion bash)"
_hvdlite_run() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} at=1
    COMPREPLY=()
    while [ $at -lt $COMP_CWORD ]; do
        case ${{COMP_WORDS[at]}} in
            {valued}) at=$((at + 2)) ;;
            -*) at=$((at + 1)) ;;
            *) _command_offset $at 2>/dev/null || COMPREPLY=($(compgen -f -- "$word")); return ;;
        esac
    done
    case $before in
        {files}) COMPREPLY=($(compgen -f -- "$word")); return ;;
        {valued}) [ $at -gt $COMP_CWORD ] && return ;;
    esac
    case $word in
        -*) COMPREPLY=($(compgen -W "{flags}" -- "$word")) ;;
        *) COMPREPLY=($(compgen -c -- "$word")) ;;
    esac
}}
complete -o default -F _hvdlite_run hvdlite-run
"""


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script. ValueError for a shell that is none of SHELLS."""
    actions = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    if shell == "bash":
        valued = [flag for action in actions if action.nargs != 0 for flag in action.option_strings]
        files = [flag for action in actions if action.metavar in _FILES for flag in action.option_strings]
        flags = [flag for action in actions for flag in action.option_strings]
        return _BASH.format(valued="|".join(valued), files="|".join(files), flags=" ".join(sorted(flags)))
    if shell == "zsh":
        lines = ["#compdef hvdlite-run", "_arguments -s \\"]
        for action in actions:
            value = "" if action.nargs == 0 else f":{action.dest}:" + ("_files" if action.metavar in _FILES else "")
            lines += [f"  '{flag}[{_plain(action)}]{value}' \\" for flag in action.option_strings]
        return "\n".join([*lines, "  '(-)1:command:_command_names -e' '*::arguments:_normal'"]) + "\n"
    if shell == "fish":
        return "".join(_fish(action) for action in actions)
    raise ValueError(f"--completion {shell}: there is one for {', '.join(SHELLS[:-1])} and {SHELLS[-1]} [HVD704]")


def _fish(action: argparse.Action) -> str:
    spelled = [f"-l {flag[2:]}" for flag in action.option_strings if flag.startswith("--")]
    spelled += [f"-s {flag[1:]}" for flag in action.option_strings if len(flag) == 2]
    spelled += [f"-o {flag[1:]}" for flag in action.option_strings if len(flag) > 2 and flag[1] != "-"]
    value = "" if action.nargs == 0 else " -r" if action.metavar in _FILES else " -x"
    return f"complete -c hvdlite-run {' '.join(spelled)}{value} -d '{_plain(action)}'\n"


def _plain(action: argparse.Action) -> str:
    """Its help, without what shells would read."""
    text = str(action.help or "").partition(" Environment ")[0].partition(" Default ")[0]
    return "".join(character for character in text if character not in "'\"[]:$`\\%")[:80]
