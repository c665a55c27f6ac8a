"""Clients: many sessions at once, each with a mind of its own, that note what they sent and what they saw."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time

from tests.e2e.history.checker import LEFT, Sent
from tests.support.wire import Cut, Wire

DONE = b"data: [DONE]"
PIECE_S = 0.005
"""The inter-token latency that the workers should have, for turns that are to last."""
FAITHFUL = 4
"""One session in so many is never ended by its client, and so has claims that stand for long."""
HEEDLESS = 0.1
"""The share of turns that are sent to a replica that the others have seen to be away."""


class Load:
    """`sessions` clients over `replicas` (name → URL). What they do follows from `seed`, not from what happens."""

    def __init__(
        self, replicas: dict[str, str], *, seed: int, sessions: int, ttl: float, lifetime: float, think_s: float = 1.0
    ) -> None:
        """`think_s`: between two turns, on average; `ttl` and `lifetime` of claims: some idle times are near them."""
        self.replicas = replicas
        self.sent: list[Sent] = []
        self.ids: dict[str, None] = {}
        """Every session that there was, in order."""
        self.faithful: list[str] = []
        """Those that are never ended."""
        self.avoided: set[str] = set()
        """Replicas that a load balancer would have noticed to be away."""
        self._seed, self._sessions = seed, sessions
        self._ttl, self._lifetime, self._think_s = ttl, lifetime, think_s
        self._numbers = itertools.count()
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Until `end` was called and every turn is over."""
        await asyncio.gather(*(self._live(number) for number in range(self._sessions)))

    def end(self) -> None:
        self._ending.set()

    async def close_all(self) -> None:
        """A final turn for every session that there was."""
        rng = random.Random(f"{self._seed}/close")
        waiting = iter(list(self.ids))

        async def close_some() -> None:
            for session in waiting:
                await self._turn(session, rng, final=True)

        await asyncio.gather(*(close_some() for _ in range(20)))

    async def burst(self, count: int, rng: random.Random) -> None:
        """So many new sessions at once; each is used a few times more, and then left."""
        number = next(self._numbers)
        names = [f"{self._seed}-burst{number}-{life}" for life in range(count)]
        self.ids |= dict.fromkeys(names)
        self.faithful += names

        async def live(session: str, rng: random.Random) -> None:
            for _ in range(4):
                await self._turn(session, rng)
                await self._pause(rng.uniform(0.0, 3.0))

        await asyncio.gather(*(live(name, random.Random(rng.random())) for name in names))

    async def _live(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        names = (f"{self._seed}-{number}-{life}" for life in itertools.count())
        session = next(names)
        if number % FAITHFUL == 0:
            self.faithful.append(session)
        await self._pause(rng.uniform(0, self._think_s))
        while not self._ending.is_set():
            self.ids[session] = None
            if await self._act(session, rng, faithful=number % FAITHFUL == 0) and rng.random() < 0.3:
                session = next(names)
            await self._pause(self._think_time(rng))

    def _think_time(self, rng: random.Random) -> float:
        kind = rng.random()
        if self._ttl <= 5:
            if kind < 0.06:
                return self._lifetime + rng.uniform(0.1, 0.6)
            if kind < 0.16:
                return self._ttl * rng.uniform(0.6, 0.97)
        return min(rng.expovariate(1 / self._think_s), 3 * self._think_s)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    async def _act(self, session: str, rng: random.Random, *, faithful: bool) -> bool:
        """One thing that a client does; a faithful one never ends its session. True: the session has ended."""
        endings = 0 if faithful else 1
        what = rng.choices(
            ["turn", "together", "final", "finals", "final beside", "late final", "leave", "leave final", "last"],
            [40, 12, 14 * endings, 3 * endings, 4 * endings, 5 * endings, 8, 3 * endings, 1 if self._ttl <= 5 else 0],
        )[0]
        turn = self._turn
        match what:
            case "turn":
                await turn(session, rng)
            case "together":
                await asyncio.gather(*(turn(session, rng) for _ in range(rng.choice([2, 2, 3]))))
            case "final":
                await turn(session, rng, final=True)
            case "finals":
                await asyncio.gather(turn(session, rng, final=True), turn(session, rng, final=True))
            case "final beside":
                await asyncio.gather(turn(session, rng, tokens=rng.randint(1, 60)), turn(session, rng, final=True))
            case "late final":
                await self._late_final(session, rng)
            case "leave":
                await turn(session, rng, leave=rng.choice(["sent", "head", "piece"]))
            case "leave final":
                await turn(session, rng, final=True, leave=rng.choice(["sent", "head", "piece"]))
            case "last":
                await self._last(session, rng, faithful=faithful)
        if "final" not in what:
            return False
        if rng.random() < 0.8:
            await turn(session, rng)  # at once: what has been closed must be closed
            return False
        return True

    async def _late_final(self, session: str, rng: random.Random) -> None:
        """Two final turns of which the later one finds the next claim in place of its own."""
        late = asyncio.ensure_future(self._turn(session, rng, final=True, stream=True, tokens=rng.randint(30, 60)))
        await asyncio.sleep(0.03)
        await self._turn(session, rng, final=True, tokens=1)
        await self._turn(session, rng, tokens=1)
        await late

    async def _last(self, session: str, rng: random.Random, *, faithful: bool) -> None:
        """A stream that lasts longer than the TTL, alone or with others beside it."""
        stream = asyncio.ensure_future(
            self._turn(session, rng, stream=True, tokens=int(rng.uniform(1.1, 1.6) * self._ttl / PIECE_S))
        )
        if rng.random() < 0.5:
            for _ in range(3):
                await self._pause(self._ttl / 4)
                await self._turn(session, rng, final=not faithful and rng.random() < 0.1)
        await stream

    async def _turn(
        self,
        session: str,
        rng: random.Random,
        *,
        final: bool = False,
        stream: bool | None = None,
        tokens: int | None = None,
        leave: str = "",
    ) -> None:
        """One turn; as a balancer would, at another replica when one takes no connection."""
        stream = rng.random() < 0.5 if stream is None else stream
        tokens = rng.randint(1, 10) if tokens is None else tokens
        leave_at_done = final and rng.random() < 0.5
        content = f"{rng.getrandbits(64):x} says {rng.choice(['the sea', 'a ship', 'the wind'])}."
        names = list(self.replicas)
        rng.shuffle(names)
        if rng.random() >= HEEDLESS:
            names.sort(key=lambda name: name in self.avoided)
        for name in names:
            sent = Sent(
                id=f"t{next(self._numbers)}",
                session=session,
                replica=name,
                start=time.time(),
                final=final,
                stream=stream,
            )
            self.sent.append(sent)
            try:
                wire = await Wire.to(self.replicas[name])
            except OSError as error:
                sent.end, sent.outcome, sent.note = time.time(), "refused", str(error)
                continue
            async with wire:
                headers = [("x-request-id", sent.id)]
                wire.chat(session=session, final=final, stream=stream, tokens=tokens, content=content, headers=headers)
                try:
                    await _follow(wire, sent, tokens, leave or ("done" if leave_at_done else ""), rng)
                except TimeoutError:  # an OSError, too
                    sent.outcome, sent.end = "timeout", time.time()
                except (Cut, OSError) as error:
                    sent.outcome, sent.note, sent.end = "cut", str(error), time.time()  # perhaps after `[DONE]`
                if sent.end == float("inf"):
                    sent.end = time.time()
            return


async def _follow(wire: Wire, sent: Sent, tokens: int, leave: str, rng: random.Random) -> None:
    """Read the answer, and leave where that is wanted. Raises Cut and OSError."""
    if leave == "sent":
        await asyncio.sleep(rng.uniform(0, 0.01))
        sent.outcome, sent.end = "aborted", time.time()
        return
    head = await wire.head()
    sent.head, sent.status = time.time(), head.status
    sent.affinity, sent.worker = head.get("x-coatcheck-affinity"), head.get("x-coatcheck-worker")
    if leave == "head":
        sent.outcome, sent.end = "aborted", time.time()
        return
    if head.status >= 400:
        sent.note = (await wire.body()).decode(errors="replace")
        sent.outcome = "error"
    elif not sent.stream:
        body = await wire.body()
        sent.end = time.time()
        if json.loads(body)["usage"]["completion_tokens"] != tokens:
            sent.outcome = "incomplete"
    else:
        await _follow_stream(wire, sent, leave)


async def _follow_stream(wire: Wire, sent: Sent, leave: str) -> None:
    tail = b""
    done = False
    while piece := await wire.read():
        tail = tail[-len(DONE) :] + piece
        if not done and DONE in tail:
            done, sent.end = True, time.time()
            if leave == "done":
                sent.note = LEFT
                return
        elif b'"error"' in tail:
            sent.outcome, sent.note = "broken", tail.decode(errors="replace")
            return
        if leave == "piece":
            sent.outcome, sent.end = "aborted", time.time()
            return
    if not done:
        sent.outcome = "incomplete"
