"""Whether replicas agree on new sessions: `python -m benchmarks.split`, beside a running `coatcheck up`.

The first two turns of each session leave at once, one for each replica. Where they ran is read from the workers' own
records (`GET /mock/turns`), never from the router. A session that two workers served is split. Turns without a session
go to one or the other replica between them, so that the replicas, left to themselves, would not place alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
from collections import Counter, defaultdict
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

_AT_ONCE = 50
_SECONDS = 0.2
"""Within which those begin, each when it will."""
_BODY = json.dumps({"model": "mock-model", "messages": [{"role": "user", "content": "Where is my coat?"}]}).encode()


async def _ask(when: float, hosts: list[str], session: str = "") -> None:
    """After `when` seconds a request for each, all in one step of this process, on connections that are open."""
    ways = [await asyncio.open_connection(*host.split(":")) for host in hosts]
    await asyncio.sleep(when)
    for host, (_, writer) in zip(hosts, ways, strict=True):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
        head += (
            f"content-type: application/json\r\ncontent-length: {len(_BODY)}\r\nx-dynamo-session-id: {session}\r\n\r\n"
        )
        writer.write(head.encode() + _BODY)
    for reader, writer in ways:
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise SystemExit(f"not answered: {answer[:200]!r}")


async def _run(replicas: list[str], sessions: list[str]) -> None:
    hosts = [urlsplit(url).netloc for url in replicas]
    chance = random.Random(1)
    for start in range(0, len(sessions), _AT_ONCE):
        some = sessions[start : start + _AT_ONCE]
        pairs = [_ask(chance.uniform(0, _SECONDS), chance.sample(hosts, 2), session) for session in some]
        others = [_ask(chance.uniform(0, _SECONDS), [chance.choice(hosts)]) for _ in some]
        await asyncio.gather(*pairs, *others)


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
    whole = Counter(workers[0] for workers in where.values() if len(set(workers)) == 1)
    print(f"{split} of {len(sessions)} sessions are split; {missing} were not served twice")
    print("the others are at", ", ".join(f"{worker}: {count}" for worker, count in sorted(whole.items())))


if __name__ == "__main__":
    main()
