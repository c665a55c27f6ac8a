"""The `coatcheck` command: finds who does what is asked, and tells in one line each what keeps them from it.

A command's own modules are imported only when it is asked for, and what does the work only when it is done: `--version`
and `--help` need none of them, and the help of `serve` not the router.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from app import Trouble, version

_COMMANDS = {
    "serve": "run the router",
    "mock": "run simulated workers",
    "up": "run simulated workers and replicas of the router on this machine, ready to be tried",
    "demo": "show in two minutes what becomes of caches when workers and replicas die, by three ways to a fleet",
    "sessions": "list, show and close sessions of a running router",
    "workers": "list the workers of a running router, add and remove, cordon and drain them",
    "replicas": "list the replicas that share a running router's claims, and in what they differ",
    "simulate": "try policies on a simulated fleet, with a trace or made-up agents",
    "top": "show a running fleet in the terminal: workers, replicas, turns, events",
    "register": "keep a worker's record alive where routers find it",
    "key": "make an API key of a tenant, and its line for the file of keys",
    "completion": "print what makes a shell complete this command's words",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; answers the exit code: 0 done, 1 could not go on, 2 wrongly asked."""
    words = sys.argv[1:] if argv is None else argv
    parser = command = _Parser(
        prog="coatcheck",
        description="An OpenAI-compatible router for LLM workers. A session stays on the worker that has its cache, "
        "whichever replica of the router its turns reach.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show program's version number and exit")
    # One that is missing prints the help, which says more than an error would.
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    asked = next((word for word in words if not word.startswith("-")), "")
    for name, summary in _COMMANDS.items():
        each = subparsers.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30),
        )
        if name == asked:
            command = each
            _add_arguments(each, name)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        command.unknown(unknown[0].partition("=")[0])
    if args.version:
        print(f"coatcheck {version()}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of `| head`; what is left would be tried again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Trouble as trouble:
        for line in trouble.lines:
            print(f"coatcheck: {line}", file=sys.stderr)
        return trouble.code
    except KeyboardInterrupt:
        return 130


def _add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Gives a command's parser its arguments, and as `run` what the command does with them."""
    match name:
        case "serve":
            from app import options

            options.add_arguments(parser)
            parser.set_defaults(run=_serve)
        case "mock":
            import mocker.cli
            from app import registering

            mocker.cli.add_arguments(parser)
            registering.add_mock_arguments(parser)
            parser.set_defaults(run=_mock)
        case "up":
            from app import up

            up.add_arguments(parser)
        case "demo":
            from app.demo import command

            command.add_arguments(parser)
        case "sessions" | "workers" | "replicas":
            from app import remote

            remote.add_arguments(parser, name)
        case "top":
            from app import top

            top.add_arguments(parser)
        case "register":
            from app import registering

            registering.add_arguments(parser)
            parser.set_defaults(run=_register)
        case "simulate":
            from app import simulate

            simulate.add_arguments(parser)
        case "completion":
            from app import completion

            completion.add_arguments(parser, _COMMANDS, _words_of)
        case "key":
            parser.add_argument("tenant", metavar="TENANT", help="letters, digits, dots, dashes and underscores")
            parser.set_defaults(run=_make_key)


def _serve(args: argparse.Namespace) -> int:
    from app import checking

    return checking.run(args)


def _mock(args: argparse.Namespace) -> int:
    import mocker.cli

    if args.register is None:
        return mocker.cli.run(args)
    from app import register

    return mocker.cli.run(args, beside=register.beside_mocks(args))


def _register(args: argparse.Namespace) -> int:
    from app import register

    return register.run(args)


def _words_of(name: str) -> list[str]:
    """What may stand behind a command: its actions, then its flags."""
    parser = _Parser(prog=f"coatcheck {name}", allow_abbrev=False)
    _add_arguments(parser, name)
    return [*parser.choices, *dict.fromkeys(re.findall(r"(?<![\w-])--[\w-]+\w", parser.format_help()))]


def _make_key(args: argparse.Namespace) -> int:
    from app.sessions.tenants import new_key

    try:
        key, line = new_key(args.tenant)
    except ValueError as error:
        raise Trouble(str(error), code=2) from None
    print(f"the key, for the client (it is not kept): {key}", file=sys.stderr)
    print(line)
    return 0


class _Parser(argparse.ArgumentParser):
    """One clear line instead of a page of usage."""

    def __init__(self, *args: Any, **how: Any) -> None:
        self.choices: list[str] = []
        """Words that may stand for its positional arguments."""
        super().__init__(*args, **how)

    def add_argument(self, *names: Any, **how: Any) -> argparse.Action:
        if names and not names[0].startswith("-"):
            self.choices += how.get("choices") or ()
        return super().add_argument(*names, **how)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n(try `{self.prog} --help`)\n")

    def unknown(self, word: str) -> NoReturn:
        close = difflib.get_close_matches(word, re.findall(r"--[\w-]+\w", self.format_help()), 1, 0.5)
        hint = f"; did you mean {close[0]}?" if close else ""
        self.error(f"there is no {'option' if word.startswith('-') else 'argument'} {word}{hint}")
