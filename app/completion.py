"""`coatcheck completion bash|zsh|fish`: what makes a shell complete the command's words, made of the parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

SHELLS = ("bash", "zsh", "fish")
WordsOf = Callable[[str], list[str]]

_BASH = """_coatcheck() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _coatcheck coatcheck
"""
_ZSH = """autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""


def add_arguments(parser: argparse.ArgumentParser, commands: Mapping[str, str], words_of: WordsOf) -> None:
    """`commands`: each with what it does; `words_of` gives the actions and flags of one."""
    parser.add_argument(
        "shell",
        choices=SHELLS,
        metavar="SHELL",
        help=f'{", ".join(SHELLS)}; for its start-up file: eval "$(coatcheck completion bash)"',
    )

    def run(args: argparse.Namespace) -> int:
        print(script(args.shell, commands, {name: words_of(name) for name in commands}), end="")
        return 0

    parser.set_defaults(run=run)


def script(shell: str, commands: Mapping[str, str], words: Mapping[str, list[str]]) -> str:
    """`words`: of each command."""
    if shell == "fish":
        lines = ["complete -c coatcheck -n __fish_use_subcommand -f"]
        for name, summary in commands.items():
            said = summary.replace("\\", "\\\\").replace("'", "\\'")
            lines.append(f"complete -c coatcheck -n __fish_use_subcommand -f -a {name} -d '{said}'")
            lines.append(f"complete -c coatcheck -n '__fish_seen_subcommand_from {name}' -a '{' '.join(words[name])}'")
        return "\n".join([*lines, ""])
    cases = "\n".join(f'        {name}) words="{" ".join(each)}" ;;' for name, each in words.items())
    bash = _BASH.format(cases=cases, commands=" ".join(commands))
    return bash if shell == "bash" else f"{_ZSH}{bash}"
