"""Three workers, three replicas and their claim store, as processes that can be killed, frozen and started again on
the same ports, and the workers' records, which outlive them here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from app.sessions.identity import KeyHasher
from tests.e2e.history.checker import Rules, Served, Violation
from tests.support.etcd import ETCD_BINARIES, EtcdCluster
from tests.support.processes import Process, Processes, metrics, total, wait_until
from tests.support.tcp import TcpProxy
from tests.support.wire import Cut, ask

WORKERS = 3
REPLICAS = 3
WORKER_OPTIONS = ("--ttft-ms", "3", "--itl-ms", "5")
PROBING = ("--probe-interval=0.5", "--probe-timeout=1", "--down-after=1")
"""So that an ill worker is found to be so, and well again, within seconds."""
GRACE = 1.5
"""Seconds that a worker is kept which the source does not name any more."""
DISK_BYTES = 16 << 20
PREFIX = "history"
COUNTERS = (
    "coatcheck_in_flight",
    "coatcheck_turns_running",
    "coatcheck_session_turns_active",
    "coatcheck_pending_closes",
)
MORE_DESCRIPTORS = 24
"""That a replica may have after a run beyond what it had when it was ready: keep-alive connections to three workers and
to the store's members, and descriptors of calls that are under way."""
REVIVE_LIMIT = 240.0
"""Seconds until a killed process serves again; it may be started while the store is away and the machine is busy."""
QUIET_LIMIT = 30.0
"""Seconds within which everything has to come to rest after the last turn."""


class Node:
    """A worker or a replica: a place that outlives its processes."""

    def __init__(self, name: str, url: str, process: Process, arguments: tuple[str, ...]) -> None:
        self.name, self.url, self.process = name, url, process
        self.arguments = arguments
        """That start it again."""
        self.descriptors = 0
        """Open when it was ready."""


class Deployment:
    """Started by `start`; its processes end with the `Processes`, its store with `stop`."""

    def __init__(self, processes: Processes, folder: Path, rules: Rules, etcd: Path | None = None) -> None:
        """`etcd`: the server to run; one that survives SIGKILL where there is one."""
        self.rules = rules
        self.workers: list[Node] = []
        self.replicas: list[Node] = []
        self.served: list[Served] = []
        self.cluster: EtcdCluster | None = None
        self.etcd = etcd or ETCD_BINARIES.get("etcd-3.4", ETCD_BINARIES["etcd-3.5"])
        """etcd 3.5.0 to 3.5.2 may apply entries twice or not at all after a SIGKILL under load (etcd-io/etcd issue
        13766): its members then answer differently for good, and no client can help that. The wheel has 3.5.1."""
        self.links: list[list[TcpProxy]] = []
        """Of each replica: what it reaches the cluster's members through."""
        self.claims = folder / "claims"
        self.source = folder / "workers.toml"
        """Says to the replicas which workers there are."""
        self._processes = processes
        self._links = contextlib.AsyncExitStack()
        self._mount: subprocess.Popen[bytes] | None = None
        """Unmounts when its input ends, so also when we are killed."""
        self._key = KeyHasher().key

    # -- starting and stopping

    async def start(self) -> None:
        if self.rules.store == "etcd":
            self.cluster = EtcdCluster(self.etcd)
            await asyncio.to_thread(self.cluster.start)
            for _ in range(REPLICAS):
                links = [TcpProxy("127.0.0.1", member.client_port) for member in self.cluster.members]
                self.links.append([await self._links.enter_async_context(link) for link in links])
        else:
            self.claims.mkdir()
            self._mount_disk()
        for number, worker in enumerate(self._processes.workers(WORKERS, *WORKER_OPTIONS, apart=True)):
            again: tuple[str, ...] = ("mocker", "--port", str(urlsplit(worker.url).port), *WORKER_OPTIONS)
            self.workers.append(Node(f"w{number}", worker.url, worker.process, again))
        options = [
            f"--session-ttl={self.rules.ttl}",
            f"--max-stale={self.rules.max_stale}",
            f"--store-deadline={self.rules.deadline}",
            "--worker-keepalive=1",
            *PROBING,
            f"--workers-from={self.source.as_uri()}",
            f"--worker-grace={GRACE}",
        ]
        self.name_workers(self.workers)
        stores = [f"--claims={self._store_url(number)}" for number in range(REPLICAS)]
        for number, replica in enumerate(self._processes.replicas_with(*([store, *options] for store in stores))):
            again = ("app", "serve", "--port", str(urlsplit(replica.url).port), stores[number], *options)
            node = Node(f"r{number}", replica.url, replica.process, again)
            node.descriptors = _descriptors(node)
            self.replicas.append(node)

    def _store_url(self, number: int) -> str:
        if self.cluster is None:
            return f"file://{self.claims}"
        # Each begins at another member, so that a lost one is not the same to all.
        endpoints = [f"127.0.0.1:{link.port}" for link in self.links[number]]
        return f"etcd://{','.join(endpoints[number:] + endpoints[:number])}/{PREFIX}"

    async def unlink(self) -> None:
        """When no replica needs the store any more."""
        await self._links.aclose()

    def stop(self) -> None:
        """The store, when the processes that use it have ended."""
        if self.cluster is not None:
            self.cluster.stop()
        if self._mount is not None:
            self._mount.communicate()

    async def ready(self) -> None:
        """Returns when every replica works with the store: what comes before is no fault of the nemesis."""

        async def well() -> bool:
            samples = [await metrics(replica) for replica in self.replicas]
            return all(
                total(each, "coatcheck_store_up") == total(each, "coatcheck_store_watching") == 1 for each in samples
            )

        await wait_until(well, REVIVE_LIMIT)

    async def revive(self, node: Node) -> None:
        """Start a killed node again; returns when it serves."""
        node.process = self._processes.start(node.name, *node.arguments)
        path = "/ready" if node in self.replicas else "/health"
        give_up_at = time.monotonic() + REVIVE_LIMIT
        while True:
            with contextlib.suppress(OSError, Cut, TimeoutError):
                if (await ask(node.url, target=path)).status == 200:
                    break
            assert node.process.alive, node.process.output()
            assert time.monotonic() < give_up_at, f"{node.name} does not come up again:\n{node.process.output()}"
            await asyncio.sleep(0.03)
        if node in self.replicas:
            node.descriptors = _descriptors(node)

    async def doubts(self, worker: Node) -> list[str]:
        """What those replicas say that answer and have not found the worker to be up. One that was cut off from the
        store when its removal was taken back does not have it at all, and takes it for lost."""
        found = []
        for replica in self.replicas:
            with contextlib.suppress(OSError, Cut, TimeoutError):
                said = await ask(replica.url, target="/admin/workers")
                if said.status != 200:  # its port is somebody else's until it is started again
                    continue
                seen = [each for each in said.json["workers"] if each["name"] == worker.name]
                if not seen or any(each["state"] != "up" for each in seen):
                    found.append(f"{replica.name}: {seen}")
        return found

    async def order_end(self, session: str, replica: Node) -> str:
        """What the replica answers an operator who closes the session: closed, pending, gone or superseded; empty:
        nothing, so that it may have been done."""
        with contextlib.suppress(OSError, Cut, TimeoutError):
            said = await ask(replica.url, "DELETE", f"/admin/session?session={session}")
            if said.status == 200:
                return str(said.json["outcome"])
        return ""

    async def mark_worker(self, node: Node, word: str, rng: random.Random) -> bool:
        """An operator says it (`cordon`, `drain?deadline=1` ...) to the first replica that can take it; whether one
        could."""
        for replica in rng.sample(self.replicas, len(self.replicas)):
            with contextlib.suppress(OSError, Cut, TimeoutError):
                said = await ask(replica.url, "POST", f"/admin/workers/{node.name}/{word}")
                if said.status == 200:
                    return True
        return False

    def name_workers(self, workers: Iterable[Node]) -> None:
        """The source names these from now on."""
        self.write_source("".join(f'[[worker]]\nurl = "{each.url}"\nname = "{each.name}"\n' for each in workers))

    def write_source(self, text: str) -> None:
        self.source.write_text(text)

    async def kill_worker(self, node: Node) -> None:
        """Take what it has recorded, then SIGKILL. What it does in the moment between is not known."""
        records = await self._records(node)
        node.process.kill()
        self._note(records, running_end=time.time())

    # -- the workers' records

    async def collect(self) -> None:
        """Note what the running workers have served."""
        for worker in self.workers:
            self._note(await self._records(worker), running_end=time.time())

    async def _records(self, node: Node) -> list[Served]:
        answer = await ask(node.url, target="/mock/turns")
        return [
            Served(
                id=record["request_id"] or "",
                session=record["session"] or "",
                worker=node.name,
                start=record["start"],
                end=record["end"] or float("inf"),
                outcome=record["outcome"],
            )
            for record in msgspec.json.decode(answer.body)["turns"]
        ]

    def _note(self, records: list[Served], running_end: float) -> None:
        for record in records:
            record.end = min(record.end, running_end)
        self.served += records

    # -- the store, from outside

    def claim_file(self, session: str) -> Path:
        return self.claims / "claims" / self._key(b"", session.encode())

    def lock_file(self, session: str) -> Path:
        return self.claims / "locks" / self._key(b"", session.encode())[:2]

    def etcd_key(self, session: str) -> str:
        return f"{PREFIX}/{self._key(b'', session.encode())}"

    async def claims_left(self) -> list[str]:
        """The names of the claims that stand."""
        if self.cluster is not None:
            cluster = self.cluster
            said = await asyncio.to_thread(cluster.members[0].ctl, "get", f"{PREFIX}/0", f"{PREFIX}/g", "--keys-only")
            return said.split()
        return [name for name in os.listdir(self.claims / "claims") if not name.startswith(".")]

    async def claim_text(self, name: str) -> str:
        """What stands there."""
        if self.cluster is not None:
            return await asyncio.to_thread(self.cluster.members[0].ctl, "get", name, "--print-value-only")
        try:
            return os.readlink(self.claims / "claims" / name)
        except OSError as error:
            return str(error)

    @property
    def members_may_be_killed(self) -> bool:
        return self.etcd != ETCD_BINARIES["etcd-3.5"]

    async def members_agree(self) -> bool:
        """Whether all members of the cluster hold the same. It must be at rest."""
        assert self.cluster is not None
        members = self.cluster.members

        def ask_all() -> set[tuple[int, int]]:
            found = set()
            for member in members:
                status = json.loads(member.ctl("endpoint", "status", "--write-out=json"))[0]["Status"]
                hashed = json.loads(member.ctl("endpoint", "hashkv", "--write-out=json"))[0]["HashKV"]
                found.add((status["header"]["revision"], hashed["hash"]))
            return found

        for _ in range(20):
            if len(await asyncio.to_thread(ask_all)) == 1:
                return True
            await asyncio.sleep(0.2)
        return False

    def _mount_disk(self) -> None:
        """A small file system of its own, to be filled. Needs root."""
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(self.claims)]
        if os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0:
            unmount = ["sh", "-c", 'cat > /dev/null; umount --lazy "$0"', str(self.claims)]
            self._mount = subprocess.Popen(unmount, stdin=subprocess.PIPE, start_new_session=True)

    def fill_disk(self) -> Callable[[], None]:
        """Leave no space for a claim; answers what undoes it. Where nothing can be mounted, the kernel refuses the
        replicas every write to a file instead."""
        if self._mount is not None:
            filler = self.claims / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))
            with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(64))
            return filler.unlink
        pids = [replica.process.pid for replica in self.replicas if replica.process.alive]
        limits = {pid: resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids}
        for pid, (_, hard) in limits.items():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))

        def undo() -> None:
            for pid, limit in limits.items():
                with contextlib.suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)

        return undo

    # -- rest

    async def leftovers(self) -> list[Violation]:
        """What has not come to rest `QUIET_LIMIT` after the last turn: counters, claims, descriptors, the watch."""
        found: list[Violation] = []

        def note(text: str) -> None:
            found.append(Violation(rule="left over", session="", at=time.time(), text=text))

        for replica in self.replicas:

            async def quiet(replica: Node = replica) -> bool:
                samples = await metrics(replica)
                at_rest = not any(total(samples, name) for name in COUNTERS)
                well = total(samples, "coatcheck_store_up") == total(samples, "coatcheck_store_watching") == 1
                return at_rest and well and _descriptors(replica) <= replica.descriptors + MORE_DESCRIPTORS

            try:
                await wait_until(quiet, QUIET_LIMIT)
            except AssertionError:
                samples = await metrics(replica)
                shown = {name: total(samples, name) for name in (*COUNTERS, "coatcheck_store_up")}
                note(f"{replica.name}: {shown}, {_descriptors(replica)} descriptors, {replica.descriptors} at first")
            samples = await metrics(replica)
            if failed := total(samples, "coatcheck_turns_total", 'outcome="failed"'):
                note(f"{replica.name}: {failed} turns ended by a fault of ours:\n{replica.process.output()[-4000:]}")
        if self.cluster is not None and not await self.members_agree():
            note("the members of the etcd cluster do not agree: what they said is not the routers' fault")
        left: list[str] = []
        for _ in range(20):
            left = await self.claims_left()
            if not left:
                break
            await asyncio.sleep(0.1)
        if left:
            texts = [f"{name} {await self.claim_text(name)}" for name in left[:5]]
            note("\n".join([f"{len(left)} claims of closed sessions:", *texts]))
        return found


def _descriptors(node: Node) -> int:
    return len(os.listdir(f"/proc/{node.process.pid}/fd"))
