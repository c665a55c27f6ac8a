"""Makes faults, one at a time of each kind: to replicas, to workers, to the store.

What it does and how long follows from its seed. It first does everything that it can do once, in an order of its own,
and then goes on at random, so that a short run has seen each fault. It notes every fault from before it was made until
after its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import math
import os
import random
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path

from tests.e2e.history.checker import OBEYED, Fault
from tests.e2e.history.deployment import GRACE, Deployment, Node
from tests.e2e.history.load import Load
from tests.support.etcd import EtcdServer
from tests.support.processes import clear_faults, order_fault

BURST = 40
"""New sessions at once."""
WELL_LIMIT_S = 120.0
"""Within which a worker that is well again must have been found so."""
NOTICED_S = 0.3
"""How long a balancer takes to notice that a replica is away or back."""

ACTS = {
    "replica": ("kill-replica", "freeze-replica", "end-by-admin"),
    "worker": ("kill-worker", "freeze-worker", "sicken-worker", "flap-worker", "hang-worker"),
    "marks": ("cordon-worker", "drain-worker", "remove-worker"),
    "source": ("unname-worker", "break-source"),
    "files": ("fill-disk", "remove-files", "garble-files", "replace-files"),
    "members": (
        "freeze-member",
        "kill-member",
        "kill-leader",
        "freeze-leader",
        "lose-quorum",
        "freeze-store",
        "wipe-store",
        "restore-store",
        "compact",
        "remove-keys",
        "garble-keys",
    ),
    "links": ("cut-links", "cut-links-apart", "hang-calls"),
}
"""By lane: those of one lane come one after another, the lanes go on side by side. `_kill_replica` is kill-replica."""
LANES = {
    "file": ("replica", "worker", "marks", "source", "files"),
    "etcd": ("replica", "worker", "marks", "source", "members", "links"),
}

Act = Callable[[random.Random], Awaitable[None]]


class Nemesis:
    def __init__(
        self,
        deployment: Deployment,
        load: Load,
        *,
        seed: int,
        pause_s: tuple[float, float] = (0.5, 1.5),
        only: Collection[str] = (),
    ) -> None:
        """`pause_s`: between two faults of one lane, from and to; `only` these of `ACTS`, where there are any."""
        self.faults: list[Fault] = []
        self._deployment, self._load, self._seed, self._pause_s = deployment, load, seed, pause_s
        self._only = only
        self._ending = asyncio.Event()
        self._ill: dict[str, asyncio.Task[None]] = {}
        """Workers that were ill and are not found well again; who looks for that."""

    async def run(self, seconds: float) -> None:
        """Returns when everything is well again."""
        lanes: dict[str, list[Act]] = {}
        for name in LANES["file" if self._deployment.cluster is None else "etcd"]:
            acts = [act for act in ACTS[name] if not self._only or act in self._only]
            lanes[name] = [getattr(self, f"_{act.replace('-', '_')}") for act in acts]
        running = [asyncio.ensure_future(self._lane(name, acts)) for name, acts in lanes.items() if acts]
        try:
            await asyncio.wait(running, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._ending.set()
            await asyncio.gather(*running)
            await asyncio.gather(*self._ill.values())

    async def _lane(self, name: str, acts: list[Act]) -> None:
        rng = random.Random(f"{self._seed}/{name}")
        for act in _all_then_any(acts, rng):
            await self._wait(rng.uniform(*self._pause_s))
            if self._ending.is_set():
                return
            await act(rng)

    async def _wait(self, seconds: float) -> None:
        """At most until the end of the run: then a fault ends early."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    def _begin(self, kind: str, target: str = "", **more: object) -> Fault:
        fault = Fault(kind=kind, target=target, start=time.time(), **more)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    # -- replicas

    async def _kill_replica(self, rng: random.Random) -> None:
        replica = rng.choice(self._deployment.replicas)
        fault = self._begin("replica-killed", replica.name)
        replica.process.kill()
        await self._away(replica, rng.uniform(0.3, 1.5))
        await self._deployment.revive(replica)
        self._load.avoided.discard(replica.name)
        fault.end = time.time()

    async def _freeze_replica(self, rng: random.Random) -> None:
        """Mostly for longer than claims live."""
        replica = rng.choice(self._deployment.replicas)
        seconds = min(self._deployment.rules.lifetime, 5.0) * rng.choice([0.3, 1.1, 1.3])
        fault = self._begin("replica-frozen", replica.name)
        replica.process.freeze()
        try:
            await self._away(replica, seconds)
        finally:
            replica.process.thaw()
            fault.end = time.time()
        await asyncio.sleep(rng.uniform(0, NOTICED_S))
        self._load.avoided.discard(replica.name)

    async def _end_by_admin(self, rng: random.Random) -> None:
        for session in self._some_sessions(rng, 4):
            await self.end_session(session, rng)

    async def end_session(self, session: str, rng: random.Random) -> bool:
        """An operator closes it, at the first replica that answers, and orders it again while that is pending; whether
        it is done. Each order is a fault of its own: it ends what stands when it comes, be it the successor of what the
        one before has ended."""
        for _ in range(10):
            for replica in rng.sample(self._deployment.replicas, len(self._deployment.replicas)):
                order = self._begin("claim-ended", session, replica=replica.name)
                order.outcome = await self._deployment.order_end(session, replica)
                order.end = time.time()
                if order.outcome == "pending":
                    break
                if order.outcome:
                    return True
            await asyncio.sleep(0.3)
        return False

    async def _away(self, replica: Node, seconds: float) -> None:
        await asyncio.sleep(NOTICED_S)
        self._load.avoided.add(replica.name)
        await self._wait(max(0.0, seconds - NOTICED_S))

    # -- workers

    def _well_worker(self, rng: random.Random) -> Node | None:
        """One that is not ill; None when only one is left."""
        well = [worker for worker in self._deployment.workers if worker.name not in self._ill]
        return rng.choice(well) if len(well) > 1 else None

    def _befall(self, kind: str, worker: Node) -> Fault:
        """It is ill from now on, until it is watched over: else the last one that is well might be taken out."""
        self._ill[worker.name] = asyncio.ensure_future(asyncio.sleep(0))
        return self._begin(kind, worker.name)

    async def _kill_worker(self, rng: random.Random) -> None:
        if worker := self._well_worker(rng):
            fault = self._befall("worker-killed", worker)
            await self._deployment.kill_worker(worker)
            await self._wait(rng.uniform(0.2, 2.0))
            await self._deployment.revive(worker)
            self._watch_over(worker, fault)

    async def _freeze_worker(self, rng: random.Random) -> None:
        """Slow is not lost: its sessions must wait."""
        if worker := self._well_worker(rng):
            fault = self._begin("worker-frozen", worker.name)
            await self._freeze(worker, rng.uniform(0.3, 1.2))
            fault.end = time.time()

    async def _flap_worker(self, rng: random.Random) -> None:
        """Stops and goes on, each time for less than would make it ill."""
        if worker := self._well_worker(rng):
            fault = self._begin("worker-frozen", worker.name)
            for _ in range(rng.randint(3, 8)):
                await self._freeze(worker, rng.uniform(0.05, 0.4))
                await self._wait(rng.uniform(0.2, 0.6))
            fault.end = time.time()

    async def _hang_worker(self, rng: random.Random) -> None:
        """For so long that probes tell."""
        if worker := self._well_worker(rng):
            fault = self._befall("worker-hung", worker)
            await self._freeze(worker, rng.uniform(2.0, 7.0))
            self._watch_over(worker, fault)

    async def _sicken_worker(self, rng: random.Random) -> None:
        """It fails its turns; its probes too, or not; once, or now and then."""
        worker = self._well_worker(rng)
        if worker is None:
            return
        fault = self._befall("worker-sick", worker)
        kinds: list[dict[str, object]] = [{"mode": "status", "status": 500}, {"mode": "status"}, {"mode": "reset"}]
        kind = rng.choice(kinds)
        for _ in range(rng.choice([1, 1, 4])):
            await order_fault(worker, times=None, probes=rng.random() < 0.5, **kind)
            await self._wait(rng.uniform(0.3, 3.0))
            await clear_faults(worker)
            await self._wait(rng.uniform(0.1, 1.0))
        self._watch_over(worker, fault)

    async def _cordon_worker(self, rng: random.Random) -> None:
        """New sessions go elsewhere, its own stay."""
        if worker := self._well_worker(rng):
            self._ill[worker.name] = asyncio.ensure_future(asyncio.sleep(0))  # nothing else befalls it meanwhile
            if await self._deployment.mark_worker(worker, "cordon", rng):
                fault = self._begin("worker-cordoned", worker.name)
                await self._wait(OBEYED + rng.uniform(1.0, 5.0))
                fault.end = time.time()
            await self._come_back(worker, self._begin("worker-marked", worker.name), rng)

    async def _drain_worker(self, rng: random.Random) -> None:
        """From the deadline on, and not before, its sessions move."""
        if worker := self._well_worker(rng):
            deadline = rng.uniform(0.5, 3.0)
            fault = Fault(kind="worker-removed", target=worker.name, start=time.time() + deadline)
            await self._take_out(worker, f"drain?deadline={deadline:.3f}", fault, deadline, rng)

    async def _remove_worker(self, rng: random.Random) -> None:
        """It is of the fleet no more; and then another one comes under its name."""
        if worker := self._well_worker(rng):
            await self._take_out(
                worker, "remove", Fault(kind="worker-removed", target=worker.name, start=time.time()), 0.0, rng
            )

    async def _take_out(self, worker: Node, word: str, fault: Fault, seconds: float, rng: random.Random) -> None:
        self.faults.append(fault)
        self._ill[worker.name] = asyncio.ensure_future(asyncio.sleep(0))
        if await self._deployment.mark_worker(worker, word, rng):
            await self._wait(seconds + rng.uniform(1.0, 4.0))
        await self._come_back(worker, fault, rng)

    async def _come_back(self, worker: Node, fault: Fault, rng: random.Random) -> None:
        """What was said of it is taken back, by whoever can."""
        give_up_at = time.monotonic() + WELL_LIMIT_S
        while not await self._deployment.mark_worker(worker, "uncordon", rng):
            assert time.monotonic() < give_up_at, f"nobody takes back what was said of {worker.name}"
            await asyncio.sleep(0.2)
        self._watch_over(worker, fault)

    # -- where workers come from

    async def _unname_worker(self, rng: random.Random) -> None:
        """The source names it no more: it is given no new sessions, and its own move when the grace is over, if it is
        not named again before."""
        worker = self._well_worker(rng)
        if worker is None:
            return
        self._ill[worker.name] = asyncio.ensure_future(asyncio.sleep(0))
        removed = self._begin("worker-removed", worker.name)
        removed.start += GRACE
        self._deployment.name_workers(each for each in self._deployment.workers if each is not worker)
        await self._wait(rng.choice([0.5, 2.0, 3.0]) * GRACE)
        self._deployment.name_workers(self._deployment.workers)
        self._watch_over(worker, removed)
        # The source is broken next, perhaps: who has not read it until then goes on without the worker, however long.
        await self._wait(2.0)

    async def _break_source(self, rng: random.Random) -> None:
        """It is empty, cut off, garbage, or not there: where there is a last good view that stands, and nothing at all
        happens."""
        fault = self._begin("source-broken")
        for _ in range(rng.randint(1, 3)):
            broken = rng.choice(["", '[[worker]]\nurl = "http', "\0" * 50, None])
            if broken is None:
                self._deployment.source.unlink(missing_ok=True)
            else:
                self._deployment.write_source(broken)
            await self._wait(rng.uniform(0.1, 3.0))
        self._deployment.name_workers(self._deployment.workers)
        fault.end = time.time()

    async def _freeze(self, worker: Node, seconds: float) -> None:
        worker.process.freeze()
        try:
            await self._wait(seconds)
        finally:
            worker.process.thaw()

    def _watch_over(self, worker: Node, fault: Fault) -> None:
        """The fault is not over before every replica says so. At the end of the run nobody waits for that."""

        async def until_well() -> None:
            give_up_at = time.monotonic() + WELL_LIMIT_S
            while doubts := await self._deployment.doubts(worker):
                if self._ending.is_set():
                    return
                assert time.monotonic() < give_up_at, f"{worker.name} is not found well again: {doubts}"
                await self._wait(0.2)
            fault.end = time.time()
            self._ill.pop(worker.name, None)  # what befell it twice is watched twice

        self._ill[worker.name] = asyncio.ensure_future(until_well())

    # -- claim files

    async def _fill_disk(self, rng: random.Random) -> None:
        fault = self._begin("disk-full")
        undo = self._deployment.fill_disk()
        try:
            await self._wait(rng.uniform(0.5, 2.0))
        finally:
            undo()
            fault.end = time.time()

    async def _remove_files(self, rng: random.Random) -> None:
        for session in self._some_sessions(rng):
            fault = Fault(kind="claim-removed", target=session, start=time.time())
            try:
                self._deployment.claim_file(session).unlink()
            except FileNotFoundError:
                continue
            fault.end = time.time()
            self.faults.append(fault)

    async def _garble_files(self, rng: random.Random) -> None:
        for session in self._some_sessions(rng, 6):
            fault = Fault(kind="claim-garbled", target=session, start=time.time())
            claim = self._deployment.claim_file(session)
            written = self._deployment.claims / f"garbled-{secrets.token_hex(4)}"
            try:
                expires = claim.lstat().st_mtime
                written.write_bytes(rng.choice([b"", b"{", b"\0\0\0", b'{"key": 1}']))
                if rng.random() < 0.5:
                    os.utime(written, (expires, expires))  # looks as young as it was
                written.rename(claim)
            except OSError:  # there is no claim, or the disk is full
                written.unlink(missing_ok=True)
                continue
            self.faults.append(fault)
        await self._mend_garbled(rng)

    async def _mend_garbled(self, rng: random.Random) -> None:
        """An operator ends the sessions of which nothing can be read, after a while."""
        await self._wait(rng.uniform(1.0, 5.0))
        for fault in list(self.faults):
            unread = fault.kind == "claim-garbled" and fault.end == math.inf
            if unread and await self.end_session(fault.target, rng):
                fault.end = time.time()

    async def _replace_files(self, rng: random.Random) -> None:
        """Put a claim of another worker in place of one, as an operator's tool might: with the key's lock."""
        for session in self._some_sessions(rng, 6):
            claim = self._deployment.claim_file(session)
            with self._deployment.lock_file(session).open("rb") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                try:
                    record = json.loads(os.readlink(claim))
                    record["expires"] = max(record["expires"], claim.lstat().st_mtime_ns)
                except (OSError, ValueError):  # there is none, or it was garbled
                    continue
                if record["expires"] < time.time_ns():
                    continue
                others = [w.name for w in self._deployment.workers if w.name != record["value"]["worker"]]
                record["value"] |= {"worker": rng.choice(others), "nonce": secrets.token_hex(12)}
                record["revision"] = secrets.randbits(62) + 1
                written = self._deployment.claims / f"by-hand-{secrets.token_hex(4)}"
                try:
                    written.symlink_to(json.dumps(record))
                except OSError:
                    continue  # the disk is full
                start = time.time()
                written.rename(claim)
            self.faults.append(
                Fault(
                    kind="claim-replaced",
                    target=session,
                    start=start,
                    end=time.time(),
                    worker=record["value"]["worker"],
                )
            )

    def _some_sessions(self, rng: random.Random, count: int = 12) -> list[str]:
        ids = self._load.faithful if rng.random() < 0.5 else list(self._load.ids)
        return rng.sample(ids, min(count, len(ids)))

    # -- members of the cluster

    async def _freeze_member(self, rng: random.Random) -> None:
        await self._disturb_member("member-frozen", rng, leader=False)

    async def _kill_member(self, rng: random.Random) -> None:
        await self._disturb_member("member-killed", rng, leader=False)

    async def _kill_leader(self, rng: random.Random) -> None:
        await self._disturb_member("member-killed", rng, leader=True)

    async def _freeze_leader(self, rng: random.Random) -> None:
        await self._disturb_member("member-frozen", rng, leader=True)

    async def _disturb_member(self, kind: str, rng: random.Random, *, leader: bool) -> None:
        leading = await self._leader()
        member = leading if leader else rng.choice([m for m in self._members if m is not leading])
        fault = self._begin(kind, member.name, leader=leader)
        seconds = rng.uniform(0.5, 3.0) if kind == "member-killed" else rng.choice([1.0, 3.0, 7.0, 7.0])
        await self._stop_members([member], seconds, kill=kind == "member-killed")
        fault.end = time.time()

    async def _lose_quorum(self, rng: random.Random) -> None:
        members = rng.sample(self._members, 2)
        faults = [self._begin("quorum-lost")]
        faults += [self._begin("member-frozen", member.name) for member in members]
        await self._stop_members(members, rng.uniform(0.5, 4.0), kill=False)
        for fault in faults:
            fault.end = time.time()

    async def _stop_members(self, members: list[EtcdServer], seconds: float, *, kill: bool) -> None:
        for member in members:
            await asyncio.to_thread(self._kill if kill else EtcdServer.pause, member)
        try:
            await self._wait(seconds)
        finally:
            for member in members:
                await asyncio.to_thread(member.restart if kill else member.resume)
            await self._leader()
            for member in members:
                await asyncio.to_thread(member.wait_ready)

    def _kill(self, member: EtcdServer) -> None:
        if not self._deployment.members_may_be_killed:
            os.kill(member.pid, signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, member.pid, os.WEXITED | os.WNOWAIT)
        member.kill()

    async def _freeze_store(self, rng: random.Random) -> None:
        """While sessions are being claimed: what it has been asked for it does late."""
        seconds = rng.choice([0.0, 1.0, 3.0, 10.0])
        faults = [self._begin("quorum-lost")]
        faults += [self._begin("member-frozen", member.name) for member in self._members]
        burst = asyncio.ensure_future(self._load.burst(BURST, rng))
        await asyncio.sleep(rng.uniform(0.005, 0.03))
        await self._stop_members(self._members, seconds, kill=False)
        for fault in faults:
            fault.end = time.time()
        await burst

    async def _wipe_store(self, rng: random.Random) -> None:
        fault = self._begin("store-wiped")
        await self._replace_data(None)
        fault.end = time.time()

    async def _restore_store(self, rng: random.Random) -> None:
        """From a copy that is some seconds old."""
        with tempfile.TemporaryDirectory(prefix="coatcheck-backup-") as folder:
            fault = self._begin("quorum-lost")
            await self._replace_data(Path(folder), back=False)
            fault.end = time.time()
            await self._wait(rng.uniform(2.0, 8.0))
            fault = self._begin("store-wiped", "restored")
            await self._replace_data(Path(folder), back=True)
            fault.end = time.time()

    async def _replace_data(self, copy: Path | None, *, back: bool = True) -> None:
        """With the members stopped: remove their data, and put the copy in its place if there is one; or make one."""

        def do() -> None:
            for member in self._members:
                self._kill(member)
            for member in self._members:
                if back:
                    shutil.rmtree(member.data)
                if copy is not None:
                    here, there = (copy / member.name, member.data) if back else (member.data, copy / member.name)
                    shutil.copytree(here, there)
            for member in self._members:
                member.restart(wait=False)
            for member in self._members:
                member.wait_ready()

        await asyncio.to_thread(do)
        await self._leader()

    async def _compact(self, rng: random.Random) -> None:
        fault = self._begin("compacted")
        status = json.loads(await self._ctl("endpoint", "status", "--write-out=json"))
        await self._ctl("compact", str(status[0]["Status"]["header"]["revision"]))
        fault.end = time.time()

    async def _remove_keys(self, rng: random.Random) -> None:
        for session in self._some_sessions(rng, 4):
            fault = Fault(kind="claim-removed", target=session, start=time.time())
            if (await self._ctl("del", self._deployment.etcd_key(session))).strip() != "0":
                fault.end = time.time()
                self.faults.append(fault)

    async def _garble_keys(self, rng: random.Random) -> None:
        for session in self._some_sessions(rng, 6):
            key = self._deployment.etcd_key(session)
            if await self._ctl("get", key, "--keys-only"):
                self._begin("claim-garbled", session)
                await self._ctl("put", key, rng.choice(["x", "{", '{"worker": 1}']))
        await self._mend_garbled(rng)

    # -- the network between replicas and members

    async def _cut_links(self, rng: random.Random) -> None:
        await self._cut(rng, rng.randrange(len(self._deployment.links)), 0.0, rng.uniform(0.3, 5.0))

    async def _cut_links_apart(self, rng: random.Random) -> None:
        """An outage that begins and ends at different times at two replicas."""
        seconds = rng.uniform(2.0, 6.0)
        await asyncio.gather(
            *(
                self._cut(rng, number, rng.uniform(0.0, 5.0), seconds + rng.uniform(0.0, 5.0))
                for number in rng.sample(range(len(self._deployment.links)), 2)
            )
        )

    async def _cut(self, rng: random.Random, number: int, after: float, until: float) -> None:
        """One replica reaches no member, from `after` to `until` in seconds from now: its connections are refused, or
        what is said on them, either way, arrives when the outage is over."""
        how = rng.choice(["refuse", "hold", "hold requests", "hold replies"])
        links = self._deployment.links[number]
        await self._wait(after)
        fault = self._begin("store-cut", self._deployment.replicas[number].name)
        for link in links:
            if how == "refuse":
                link.refuses = True
                link.sever()
            else:
                link.hold(requests=how != "hold replies", replies=how != "hold requests")
        try:
            await self._wait(until - after)
        finally:
            for link in links:
                link.refuses = False
                link.pass_on()
            fault.end = time.time()

    async def _hang_calls(self, rng: random.Random) -> None:
        """One connection at a time is late, the others are not: no outage."""
        number = rng.randrange(len(self._deployment.links))
        fault = self._begin("calls-hang", self._deployment.replicas[number].name)
        for _ in range(rng.randint(3, 10)):
            link = rng.choice(self._deployment.links[number])
            link.hold()
            try:
                await self._wait(rng.uniform(0.1, 1.5))
            finally:
                link.pass_on()
            await self._wait(rng.uniform(0.1, 0.5))
        fault.end = time.time()

    @property
    def _members(self) -> list[EtcdServer]:
        assert self._deployment.cluster is not None
        return self._deployment.cluster.members

    async def _leader(self) -> EtcdServer:
        assert self._deployment.cluster is not None
        return await asyncio.to_thread(self._deployment.cluster.leader)

    async def _ctl(self, *args: str) -> str:
        try:
            return await asyncio.to_thread((await self._leader()).ctl, *args)
        except (subprocess.TimeoutExpired, RuntimeError):  # a busy machine: etcdctl has a deadline of its own
            return await asyncio.to_thread((await self._leader()).ctl, *args)


def _all_then_any(acts: list[Act], rng: random.Random) -> Iterator[Act]:
    yield from rng.sample(acts, len(acts))
    while True:
        yield rng.choice(acts)
