"""Whether replicas agree on new sessions: `python -m benchmarks.split`, beside a running `coatcheck up`.

The first two turns of each session leave at once, one for each replica. Where they ran is read from the workers' own
records (`GET /mock/turns`), never from the router. A session that two workers served is split.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
from collections import Counter, defaultdict
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

_AT_ONCE = 50
_BODY = json.dumps({"model": "mock-model", "messages": [{"role": "user", "content": "Where is my coat?"}]}).encode()


async def _first_turns(replicas: list[str], session: str) -> None:
    """Both requests leave within one step of this process, on connections that are open already."""
    hosts = [urlsplit(url).netloc for url in replicas]
    ways = [await asyncio.open_connection(*host.split(":")) for host in hosts]
    for host, (_, writer) in zip(hosts, ways, strict=True):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(_BODY)}\r\nx-dynamo-session-id: {session}\r\n\r\n"
        writer.write(head.encode() + _BODY)
    for reader, writer in ways:
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"not answered: {answer[:200]!r}")


async def _run(replicas: list[str], sessions: list[str]) -> None:
    for start in range(0, len(sessions), _AT_ONCE):
        some = enumerate(sessions[start : start + _AT_ONCE])
        await asyncio.gather(*(_first_turns(replicas[:: 1 if n % 2 else -1], session) for n, session in some))


def _served(workers: list[str], sessions: list[str]) -> dict[str, list[str]]:
    """The workers of each session's turns."""
    opener = build_opener(ProxyHandler({}))
    where = defaultdict(list)
    for worker in workers:
        for record in json.load(opener.open(f"{worker}/mock/turns"))["turns"]:
            where[record["session"]].append(worker)
    return {session: where[session] for session in sessions}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split", description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=300)
    parser.add_argument("--replicas", nargs=2, default=["http://127.0.0.1:8000", "http://127.0.0.1:8001"])
    parser.add_argument("--workers", nargs="+", default=["http://127.0.0.1:9001", "http://127.0.0.1:9002"])
    args = parser.parse_args()
    sessions = [f"split-{secrets.token_hex(6)}" for _ in range(args.sessions)]
    asyncio.run(_run(args.replicas, sessions))
    where = _served(args.workers, sessions)
    missing = sum(len(workers) != 2 for workers in where.values())
    split = sum(len(set(workers)) > 1 for workers in where.values())
    spread = Counter(workers[0] for workers in where.values() if workers)
    print(f"{split} of {len(sessions)} sessions are split; {missing} were not served twice")
    print("begun at", ", ".join(f"{worker}: {count}" for worker, count in sorted(spread.items())))


if __name__ == "__main__":
    main()
