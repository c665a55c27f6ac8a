"""`coatcheck demo`: its options. What does the work is imported when it is done."""

from __future__ import annotations

import argparse
from pathlib import Path

from app.fleet.policies import POLICIES

WAYS = ("turns", "hash", "coatcheck")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `run` takes."""
    parser.set_defaults(run=_run)
    policies = [name for name in POLICIES if name != "direct"]
    parser.add_argument("--seconds", type=_seconds, default=30.0, metavar="S", help="of each way (%(default)g)")
    parser.add_argument("--workers", type=_several, default=4, metavar="N", help="simulated workers (%(default)s)")
    parser.add_argument("--policy", choices=policies, default=policies[0], help="of the replicas (%(default)s)")
    parser.add_argument(
        "--way",
        action="append",
        choices=WAYS,
        help="only this one; repeatable (all)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the agents (%(default)s)")
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("coatcheck-demo.html"),
        metavar="FILE",
        help="where the report is written (%(default)s)",
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of a picture, as when piped")


def _run(args: argparse.Namespace) -> int:
    from app.demo import play

    return play.run(args)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1 <= number <= 3600:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 1 to 3600, not {text!r}")
    return number


def _several(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 2 to 32, not {text!r}")
    return int(text)
