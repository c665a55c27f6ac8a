"""A worker's record, kept by a sidecar, in virtual time: when it is made, what it says, how it ends. And settings of a
router that change while it runs."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import pytest

from app import registering
from app.config import Settings
from app.fleet.discovery.records import WORKERS, WorkerRecord, decode_record, encode_record
from app.fleet.specs import WorkerError
from app.register import Engine, Registration, Sign, record_of
from app.reloading import Passed, Rereading
from app.sources import EffectiveSettings, read_settings
from backends.base import StoreUnavailable
from backends.memory import MemoryStore
from tests.support.fakes import in_virtual_time

TTL = 15.0
DRAIN = 30.0


class Told(Engine):
    """An engine that answers what a test says."""

    def __init__(self) -> None:
        self.sign = Sign.WELL
        self.serves: tuple[str, ...] | None = ("m",)
        self.has_turns: bool | None = None
        self.began = ""

    async def look(self) -> Sign:
        return self.sign

    async def models(self) -> tuple[str, ...] | None:
        return self.serves

    async def busy(self) -> bool | None:
        return self.has_turns

    async def started(self) -> str:
        return self.began


class Sidecar:
    def __init__(self, store: MemoryStore, engine: Told) -> None:
        loop = asyncio.get_running_loop()
        self._registry = store.registry
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        self.registration = Registration(
            store.registry,
            "w",
            WorkerRecord(url="http://10.0.0.1:1"),
            engine,
            ttl=TTL,
            drain=DRAIN,
            wall=loop.time,
            clock=loop.time,
        )
        self.task = asyncio.create_task(self.registration.keep(self.stop, self.hurry))

    async def record(self, after: float = 0.1) -> WorkerRecord | None:
        await asyncio.sleep(after)
        found = (await self._registry.list(WORKERS)).get("w")
        return None if found is None else decode_record(found)

    async def the_record(self, after: float = 0.1) -> WorkerRecord:
        record = await self.record(after)
        assert record is not None
        return record

    async def end(self) -> None:
        self.stop.set()
        self.hurry.set()
        await self.task


def store() -> MemoryStore:
    return MemoryStore(clock=asyncio.get_running_loop().time)


@in_virtual_time
async def test_a_record_is_made_when_the_engine_is_well_and_follows_what_it_serves() -> None:
    engine = Told()
    engine.sign = Sign.ILL
    sidecar = Sidecar(store(), engine)
    assert await sidecar.record(60) is None
    engine.sign = Sign.WELL
    assert (await sidecar.the_record(TTL / 3)).models == ("m",)
    engine.serves = ("m", "adapter")
    assert (await sidecar.the_record(TTL / 3)).models == ("m", "adapter")
    engine.serves = None
    assert (await sidecar.the_record(10 * TTL)).models == ("m", "adapter")
    await sidecar.end()
    assert await sidecar.record() is None


def test_what_is_said_of_a_worker_is_what_routers_read() -> None:
    parser = argparse.ArgumentParser()
    registering.add_arguments(parser)
    places = ["--kv-events", "tcp://10.0.0.1:5557", "--kv-replay", "tcp://10.0.0.1:5558"]
    given = ["--worker-url", "http://10.0.0.1:1", "--to", "file:///x", "--dp", "2", "--phase", "decode"]
    record = decode_record(encode_record(record_of(parser.parse_args([*given, *places]), "http://10.0.0.1:1")))
    spec = record.spec("w", "")
    assert (spec.ranks, spec.phase) == (2, "decode")
    assert (spec.kv_events, spec.kv_replay) == (places[1], places[3])
    with pytest.raises(WorkerError, match="write it as tcp://host:port"):
        record_of(parser.parse_args([*given, "--kv-events", "tcp://*:5557"]), "http://10.0.0.1:1")


@in_virtual_time
async def test_a_record_that_was_lost_is_there_again_within_one_interval() -> None:
    there, engine = store(), Told()
    sidecar = Sidecar(there, engine)
    assert await sidecar.record()
    await there.registry.remove(WORKERS, "w")
    assert await sidecar.record(TTL / 3)
    await sidecar.end()


@in_virtual_time
async def test_an_ill_engine_stays_registered_and_one_that_is_gone_does_not_and_comes_back_cold() -> None:
    engine = Told()
    sidecar = Sidecar(store(), engine)
    first = await sidecar.the_record()
    engine.sign = Sign.ILL
    assert await sidecar.record(10 * TTL) == first
    engine.sign = Sign.GONE
    assert await sidecar.record(2 * TTL) is None
    engine.sign = Sign.WELL
    again = await sidecar.the_record(TTL)
    assert again.incarnation != first.incarnation
    engine.began = "123.00"  # and one that says when it began is believed
    assert (await sidecar.the_record(TTL)).incarnation == "123.00"
    await sidecar.end()


@in_virtual_time
async def test_a_sidecar_that_was_started_again_takes_a_well_engine_for_the_same() -> None:
    there, engine = store(), Told()
    one = Sidecar(there, engine)
    first = await one.the_record()
    one.task.cancel()  # killed
    other = Sidecar(there, engine)
    assert (await other.the_record(TTL)).incarnation == first.incarnation
    other.task.cancel()
    engine.sign = Sign.GONE
    third = Sidecar(there, engine)
    await asyncio.sleep(1)
    engine.sign = Sign.WELL
    assert (await third.the_record(TTL)).incarnation != first.incarnation
    await third.end()


@pytest.mark.parametrize(
    ("has_turns", "hurried", "lasts"),
    [(None, False, DRAIN), (True, False, DRAIN), (False, False, 2.5), (True, True, 0.0)],
)
def test_how_long_a_drain_lasts(has_turns: bool | None, hurried: bool, lasts: float) -> None:
    @in_virtual_time
    async def check() -> None:
        engine, loop = Told(), asyncio.get_running_loop()
        sidecar = Sidecar(store(), engine)
        assert not (await sidecar.the_record()).draining
        engine.has_turns = has_turns
        sidecar.stop.set()
        began = loop.time()
        if hurried:
            sidecar.hurry.set()
        else:
            draining = await sidecar.the_record()
            assert draining.draining
            assert draining.until == pytest.approx(began + DRAIN / 2)
        await sidecar.task
        assert lasts - 0.01 <= loop.time() - began < lasts + 1.0
        assert await sidecar.record() is None

    check()


@in_virtual_time
async def test_a_registry_that_is_away_is_tried_again() -> None:
    there, engine = store(), Told()
    sidecar = Sidecar(there, engine)
    put = there.registry.put

    async def refused(*_: object) -> None:
        raise StoreUnavailable("away")

    assert await sidecar.record()
    there.registry.put = refused  # type: ignore[assignment,method-assign]
    assert await sidecar.record(2 * TTL) is None
    there.registry.put = put  # type: ignore[method-assign]
    assert await sidecar.record(TTL / 3)
    await sidecar.end()


# -- settings that change


class Source:
    """The settings' sources: a file, and what reading it brings."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "router.toml"
        self.write("worker = 'http://a:1'")
        self.rereading = Rereading(self.read().settings, self.read, self.file)

    def write(self, text: str) -> None:
        other = self.file.with_suffix(".new")
        other.write_text(text)
        other.rename(self.file)

    def read(self) -> EffectiveSettings:
        return read_settings({}, self.file)

    def look(self) -> Settings | None:
        return self.rereading.again(self.rereading.stamps())


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    for name in os.environ:
        if name.upper().startswith("COATCHECK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return Source(tmp_path)


def test_a_file_that_has_changed_is_read_once_it_stands_still(source: Source) -> None:
    assert source.look() is None
    source.write("worker = 'http://b:1'")
    assert source.look() is None  # it may be being written
    source.write("worker = 'http://c:1'")
    assert source.look() is None
    settings = source.look()
    assert settings is not None
    assert settings.workers.worker == ("http://c:1",)
    assert source.look() is None


def test_a_signal_has_it_read_at_once(source: Source) -> None:
    source.write("worker = 'http://b:1'")
    source.rereading.ask()
    settings = source.look()
    assert settings is not None
    assert settings.workers.worker == ("http://b:1",)


@pytest.mark.parametrize("text", ["worker = ", "worker = 'a:1'", None])
def test_what_cannot_be_used_changes_nothing_and_is_told_once(
    text: str | None, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    before = source.rereading.settings
    if text is None:
        source.file.unlink()
    else:
        source.write(text)
    assert [source.look() for _ in range(4)] == [None] * 4
    assert source.rereading.settings is before
    assert len(caplog.records) == 1
    source.write("worker = 'http://b:1'")
    source.look()
    assert source.look() is not None


def test_settings_are_passed_whole_or_not_at_all(source: Source) -> None:
    parent = Passed()
    child = Passed(os.dup(parent.descriptor))
    assert child.read() is None
    first = source.rereading.settings
    parent.write(first)
    assert child.read() == first
    assert child.read() is None
    other = Settings.flat(worker=tuple(f"http://a:{port}" for port in range(1, 400)))
    whole = other.dump().encode()
    # A writer that is interrupted between its steps, also over settings that nobody has read yet:
    os.pwrite(parent.descriptor, whole[:100], 32)
    assert child.read() is None
    parent.write(first)
    os.pwrite(parent.descriptor, first.dump().replace("a:1", "b:1").encode(), 32)
    assert child.read() is None
    parent.write(other)
    assert child.read() == other
    for each in (parent, child):
        os.close(each.descriptor)
