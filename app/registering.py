"""The words of `coatcheck register` and of `mock --register`. What they do is in `register`: to read the words, and to
run mock workers that do not register, nothing of the router is imported.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

_TTL = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `app.register.run` takes."""
    parser.add_argument("--worker-url", required=True, metavar="URL", help="where routers reach the worker")
    parser.add_argument("--to", required=True, metavar="CLAIMS_URL", help="the routers' claims: file:///dir, etcd://…")
    parser.add_argument("--ask", metavar="URL", help="where the worker is asked how it is. Default: the worker URL")
    parser.add_argument("--name", metavar="NAME", help="the worker's name. Default: made of the URL, as routers do")
    parser.add_argument("--dp", type=_ranks, default=0, metavar="RANKS", help="its data-parallel ranks. Default: none")
    parser.add_argument(
        "--phase", choices=("both", "prefill", "decode"), default="both", help="what it does of a turn. Default: both"
    )
    parser.add_argument(
        "--handover", choices=("vllm", "sglang"), default="vllm", help="whose way of it, with a phase. Default: vllm"
    )
    parser.add_argument(
        "--bootstrap-port", type=int, default=8998, metavar="PORT", help="of an SGLang that prefills. Default: 8998"
    )
    parser.add_argument(
        "--kv-events", default="", metavar="tcp://HOST:PORT", help="where it publishes its KV events (rank 0)"
    )
    parser.add_argument("--kv-replay", default="", metavar="tcp://HOST:PORT", help="where it replays them (rank 0)")
    parser.add_argument(
        "--label", action="append", default=[], type=_label, metavar="KEY=VALUE", help="said of it; repeatable"
    )
    parser.add_argument("--ttl", type=_seconds, default=_TTL, metavar="SECONDS", help="%(default)g: the record's life")
    parser.add_argument(
        "--drain", type=_seconds, default=30.0, metavar="SECONDS", help="%(default)g: for its turns to end, on SIGTERM"
    )
    parser.add_argument("--worker-api-key-file", type=Path, metavar="FILE", help="holds the key that the worker wants")


def add_mock_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `app.register.beside_mocks` takes."""
    parser.add_argument("--register", metavar="CLAIMS_URL", help="register the workers there, as `coatcheck register`")
    parser.add_argument(
        "--register-ttl", type=_seconds, default=_TTL, metavar="SECONDS", help="%(default)g: their records' life"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.3 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError("must be a number of seconds from 0.3 to 86400")
    return seconds


def _ranks(text: str) -> int:
    from app.fleet.specs import WorkerError, checked_ranks  # rarely asked for, and not cheap

    try:
        return checked_ranks(int(text) if text.isascii() and text.isdigit() else 0)
    except WorkerError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError("write KEY=VALUE")
    return key, value
