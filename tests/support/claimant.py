"""Another process that uses a claim store, driven over pipes.

Run as a program it opens the store of a URL, then reads commands (one JSON object a line) and answers each with a line.
`Claimant` is the driver. Blocking on purpose in the child: one command at a time, in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from backends import open_store
from backends.base import Claim, ClaimValue, StoreError

REPO = Path(__file__).parents[2]


class Claimant:
    """`async with Claimant(url) as other: await other.create(key, "w-1", ttl)`."""

    def __init__(self, url: str, *, deadline: float = 2.0) -> None:
        self._command = [sys.executable, "-m", "tests.support.claimant", url, str(deadline)]
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> Claimant:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, cwd=REPO, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24
        )
        assert await self._answer() == "ready"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._process.returncode is None:
            # A stopped process only dies of SIGKILL.
            self._process.kill()
        await self._process.wait()
        # Or the pipes would be closed by a later garbage collection, in some other test.
        self._process._transport.close()  # type: ignore[attr-defined]

    async def do(self, name: str, **arguments: Any) -> Any:
        self.tell(name, **arguments)
        return await self._answer()

    def tell(self, name: str, **arguments: Any) -> None:
        """As `do`, without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": name, **arguments}).encode() + b"\n")

    async def answer(self) -> Any:
        return await self._answer()

    async def create(self, key: str, worker: str, ttl: float) -> Claim:
        return msgspec.convert((await self.do("create", keys=[key], worker=worker, ttl=ttl))[0]["claim"], Claim)

    async def close(self, claim: Claim) -> str:
        return str(await self.do("close", claim=msgspec.to_builtins(claim)))

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def _answer(self) -> Any:
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            line = await self._process.stdout.readline()
        assert line, "the claimant died"
        return json.loads(line)


async def _serve(url: str, deadline: float) -> None:
    store = await open_store(url, deadline=deadline)
    heard: list[tuple[str, float]] = []

    async def listen(ready: asyncio.Event) -> None:
        async for event in store.subscribe():
            heard.append((getattr(event, "key", "reset"), time.monotonic()))
            ready.set()

    async def run(command: dict[str, Any]) -> Any:
        match command.pop("do"):
            case "create":
                if "at" in command:
                    await asyncio.sleep(command["at"] - time.monotonic())
                value = ClaimValue(worker=command["worker"])
                return [
                    msgspec.to_builtins(await store.create_or_get(key, value, command["ttl"]))
                    for key in command["keys"]
                ]
            case "close":
                return (await store.close(msgspec.convert(command["claim"], Claim))).value
            case "stamp":
                return store.stamp(command["key"])
            case "subscribe":
                ready = asyncio.Event()
                tasks.append(asyncio.create_task(listen(ready)))
                await ready.wait()
                return "reset"
            case "heard":
                while not any(key == command["key"] for key, _ in heard):
                    await asyncio.sleep(0.001)
                return next(at for key, at in heard if key == command["key"])
            case "churn":
                return await _churn(store, command["keys"], command["worker"], command["rounds"])
            case "put record":
                if "at" in command:
                    await asyncio.sleep(command["at"] - time.monotonic())
                for value in command["values"]:
                    await store.registry.put("workers", command["record"], value.encode(), command["ttl"])
                return "put"
            case "remove record":
                return await store.registry.remove("workers", command["record"])
            case "list records":
                return {name: value.decode() for name, value in (await store.registry.list("workers")).items()}
            case "hold lock":
                # Until we are killed: the lock that protects this key's file.
                locks.append(store._disk.locked(command["key"]))  # type: ignore[attr-defined]
                locks[-1].__enter__()
                return "held"
            case "identity":
                os.setgid(65534)
                os.setuid(65534)
                return os.getuid()
            case other:
                raise AssertionError(other)

    tasks: list[asyncio.Task[None]] = []
    locks: list[Any] = []
    print(json.dumps("ready"), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        try:
            answer = await run(json.loads(line))
        except StoreError as error:
            answer = {"error": type(error).__name__}
        print(json.dumps(answer), flush=True)


async def _churn(store: Any, keys: list[str], worker: str, rounds: int) -> dict[str, int]:
    """Creates and closes at random; answers per key how many claims this process made less how many it removed."""
    import random

    balance = dict.fromkeys(keys, 0)
    seen: dict[str, Claim] = {}
    for number in range(rounds):
        key = random.choice(keys)
        try:
            if random.random() < 0.5:
                outcome = await store.create_or_get(key, ClaimValue(worker=f"{worker}-{number}"), 600)
                balance[key] += outcome.created
                seen[key] = outcome.claim
            elif key in seen:
                balance[key] -= (await store.close(seen[key])).value == "closed"
        except StoreError as error:
            raise AssertionError(f"churn: {error!r}") from error
    return balance


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2])))
