"""Files and names as sources of workers: what they say, and what they say when they cannot."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import dns.rcode
import pytest

from app.fleet.discovery import dns as dns_source
from app.fleet.discovery.dns import DnsSource
from app.fleet.discovery.file import FileSource, read_workers
from app.fleet.discovery.source import Aside, Said, Source, Trouble, View
from app.fleet.specs import WorkerSpec, worker_name
from tests.support.nameserver import NameServer
from tests.support.rows import rows

SOON = 0.01


class Heard:
    """What a source says, one after the other, within a moment each."""

    def __init__(self, source: Source) -> None:
        self._says = source.says()

    async def next(self) -> Said:
        async with asyncio.timeout(10):
            return await anext(self._says)

    async def until(self, condition: Callable[[Said], bool]) -> Said:
        while not condition(said := await self.next()):
            pass
        return said

    async def close(self) -> None:
        await self._says.aclose()  # type: ignore[attr-defined]


def urls(said: Said) -> list[str]:
    assert isinstance(said, View), said
    return [each.url for each in said.workers]


# -- files


def test_a_file_describes_workers_as_the_flag_does_or_in_tables() -> None:
    assert read_workers('worker = ["http://a:1,name=x,dp=2", "http://b"]') == (
        WorkerSpec(name="x", url="http://a:1", ranks=2),
        WorkerSpec(name=worker_name("http://b:80"), url="http://b:80"),
    )
    text = """
# a comment
[[worker]]
url = "http://a:1/v1"
name = "x"
dp = 4
draining = true
incarnation = "7"
models = ["m"]
labels = { zone = "z" }

[[worker]]
url = "https://b"
"""
    first, second = read_workers(text)
    assert first == WorkerSpec(
        name="x",
        url="http://a:1",
        ranks=4,
        draining=True,
        incarnation="7",
        models=("m",),
        labels={"zone": "z"},
    )
    assert (second.url, second.ranks) == ("https://b:443", 0)
    assert read_workers("") == ()


@rows(
    ("text", "line"),
    [
        ('worker = ["http://a:1",\n"http://b:1', 2),
        ('worker = [\n"http://a:1",\n"a:1"]', 3),
        ('worker = [\n"http://a:1",\n"http://a:1/v1",\n]', 3),
        ('worker = [\n"http://a:1,name=x",\n"http://b:1,name=x",\n]', 3),
        ('worker = "http://a:1"', 1),
        ("\nworkers = []", 2),
        ('[[worker]]\nurl = "http://a:1"\n\n[[worker]]\nname = "x"', 4),
        ('[[worker]]\nurl = "http://a:1"\n\n[[worker]]\nurl = "http://b:1"\ndp = 0', 4),
        ('[[worker]]\nurl = "http://a:1"\n\n[[worker]]\nurl = "http://b:1"\nnmae = "x"', 4),
        ('[[worker]]\nurl = "http://a:1"\nname = "two words"', 1),
    ],
)
def test_what_is_wrong_with_a_file_is_told_with_its_line(text: str, line: int) -> None:
    with pytest.raises(ValueError, match=rf"\bline {line}\b"):
        read_workers(text)


async def test_a_file_is_read_when_it_changes_and_only_then(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    file.write_text('worker = ["http://a:1"]')
    heard = Heard(FileSource(file, every=SOON))
    assert urls(await heard.next()) == ["http://a:1"]
    nothing = asyncio.create_task(heard.next())
    await asyncio.sleep(10 * SOON)
    assert not nothing.done()
    file.write_text('worker = ["http://a:1", "http://b:1"]')
    assert urls(await nothing) == ["http://a:1", "http://b:1"]
    other = tmp_path / "other"
    other.write_text('worker = ["http://c:1"]')
    other.rename(file)  # as editors do
    assert urls(await heard.next()) == ["http://c:1"]
    target, link = tmp_path / "target.toml", tmp_path / "link"
    target.write_text('worker = ["http://d:1"]')
    link.symlink_to(target)
    link.rename(file)  # as a ConfigMap does
    assert urls(await heard.next()) == ["http://d:1"]
    await heard.close()


async def test_a_file_that_is_broken_or_gone_is_a_trouble_until_it_is_well_again(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    heard = Heard(FileSource(file, every=SOON))
    assert "No such file" in _why(await heard.next())
    file.write_text('worker = ["http://a:1"]')
    assert urls(await heard.until(lambda said: isinstance(said, View))) == ["http://a:1"]
    file.write_text('worker = ["http://a:1",\n"http://b:')
    assert "line 2" in _why(await heard.next())
    os.truncate(file, 0)
    assert await heard.next() == View(())  # for the merger: an empty answer wipes nothing
    file.write_bytes(b"worker = ['\xff']")
    assert "utf-8" in _why(await heard.next())
    file.unlink()
    assert "No such file" in _why(await heard.next())
    file.mkdir()
    assert "cannot be read" in _why(await heard.until(lambda said: "No such" not in str(said)))
    await heard.close()


async def test_a_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "w.toml"
    whole = "".join(f'[[worker]]\nurl = "http://a:{port}"\n' for port in range(1, 40))
    file.write_text(whole)
    heard = Heard(FileSource(file, every=SOON))
    assert len(urls(await heard.next())) == 39
    changed = asyncio.create_task(heard.next())
    with file.open("w") as writing:
        for number, line in enumerate((whole + '[[worker]]\nurl = "http://b:1"\n').splitlines()):
            writing.write(line + "\n")
            writing.flush()
            if number % 4 == 0:
                await asyncio.sleep(SOON / 4)
    assert len(urls(await changed)) == 40  # and nothing between
    await heard.close()


async def test_what_hangs_in_a_thread_delays_nobody_and_is_not_asked_twice() -> None:
    hung, asked = threading.Event(), 0

    def hang() -> str:
        nonlocal asked
        asked += 1
        hung.wait(10)
        return "late"

    aside = Aside("test")
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await aside.run(hang, within=SOON)
    assert asked == 1
    assert await Aside("other").run(lambda: "at once") == "at once"
    hung.set()
    async with asyncio.timeout(10):
        while True:
            try:
                assert await aside.run(lambda: "again") == "again"
                break
            except TimeoutError:
                await asyncio.sleep(SOON)
    with pytest.raises(ZeroDivisionError):
        await aside.run(lambda: 1 / 0)


def _why(said: Said) -> str:
    assert isinstance(said, Trouble), said
    return said.why


# -- names


@pytest.fixture
def server() -> Iterator[NameServer]:
    with NameServer() as server:
        yield server


def of(url: str, server: NameServer, options: str = "") -> DnsSource:
    url = f"{url}?nameserver={server.address}{options}"
    return DnsSource(url, urlsplit(url), every=SOON)


async def test_each_address_of_a_name_is_a_worker(server: NameServer) -> None:
    server.records["gpu.test", "A"] = ["10.0.0.2", "10.0.0.1"]
    server.records["gpu.test", "AAAA"] = ["fd00::1"]
    heard = Heard(of("dns://gpu.test:8000", server, "&dp=2"))
    said = await heard.next()
    assert sorted(urls(said)) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert isinstance(said, View)
    for each in said.workers:
        assert (each.name, each.ranks) == (worker_name(each.url), 2)
    server.records["gpu.test", "A"] = ["10.0.0.1", "10.0.0.3"]
    moved = await heard.until(lambda said: said != View(()) and "10.0.0.3" in str(said))
    assert sorted(urls(moved)) == ["http://10.0.0.1:8000", "http://10.0.0.3:8000"]
    await heard.close()
    for options, expected in {
        "&family=6": ["http://[fd00::1]:8000"],
        "&family=any": ["http://10.0.0.1:8000", "http://10.0.0.3:8000", "http://[fd00::1]:8000"],
        "&family=4&scheme=https": ["https://10.0.0.1:8000", "https://10.0.0.3:8000"],
    }.items():
        heard = Heard(of("dns://gpu.test:8000", server, options))
        said = await heard.next()
        assert sorted(urls(said)) == expected
        assert isinstance(said, View)
        assert {each.tls_name for each in said.workers} == {"gpu.test" if "https" in options else ""}
        await heard.close()


async def test_a_record_is_a_worker_that_keeps_its_name_when_its_address_moves(server: NameServer) -> None:
    server.records["_llm._tcp.test", "SRV"] = ["0 0 8001 pod-0.test.", "0 0 8002 pod-1.test.", "0 0 8003 many.test."]
    server.records["pod-0.test", "A"] = ["10.0.0.1"]
    server.records["pod-1.test", "A"] = ["10.0.0.2"]
    server.records["many.test", "A"] = ["10.0.0.3", "10.0.0.4"]
    heard = Heard(of("dns+srv://_llm._tcp.test", server))
    first = await heard.next()
    assert isinstance(first, View)
    by_url = {each.url: each.name for each in first.workers}
    assert by_url == {
        "http://10.0.0.1:8001": worker_name("http://pod-0.test:8001"),
        "http://10.0.0.2:8002": worker_name("http://pod-1.test:8002"),
        "http://10.0.0.3:8003": worker_name("http://10.0.0.3:8003"),
        "http://10.0.0.4:8003": worker_name("http://10.0.0.4:8003"),
    }
    server.records["pod-0.test", "A"] = ["10.0.0.9"]
    moved = await heard.until(lambda said: "10.0.0.9" in str(said))
    assert isinstance(moved, View)
    assert {each.name: each.url for each in moved.workers}[worker_name("http://pod-0.test:8001")] == (
        "http://10.0.0.9:8001"
    )
    await heard.close()


@pytest.mark.parametrize("what", ["servfail", "refused", "no such name", "no record", "silence", "unavailable"])
@pytest.mark.parametrize("url", ["dns://gpu.test:8000", "dns+srv://gpu.test"])
async def test_no_answer_is_a_trouble_and_no_view(
    url: str, what: str, server: NameServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns_source, "_ANSWER_WITHIN", 0.2)
    server.records["gpu.test", "TXT"] = ["x"]
    match what:
        case "servfail":
            server.rcode = dns.rcode.SERVFAIL
        case "refused":
            server.rcode = dns.rcode.REFUSED
        case "no such name":
            del server.records["gpu.test", "TXT"]
        case "silence":
            server.silent = True
        case "unavailable":
            server.records["gpu.test", "SRV"] = ["0 0 0 ."]
    heard = Heard(of(url, server))
    said = await heard.next()
    if what == "unavailable" and url.startswith("dns+srv"):
        assert said == View(())  # RFC 2782; for the merger it is an empty answer
    else:
        assert "gpu.test is not answered" in _why(said)
    await heard.close()


async def test_the_systems_names_are_looked_up_beside_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        time.sleep(0.3)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    heard = Heard(DnsSource("dns://localhost:8000", urlsplit("dns://localhost:8000"), every=SOON))
    assert urls(await heard.next()) == ["http://127.0.0.1:8000"]
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    failing = asyncio.create_task(heard.until(lambda said: isinstance(said, Trouble)))
    ticks = 0
    while not failing.done():
        await asyncio.sleep(SOON)
        ticks += 1
    assert "Temporary failure" in _why(failing.result())
    assert ticks > 5
    await heard.close()
