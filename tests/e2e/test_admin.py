"""Who may use the admin API of a real router, over real sockets: through a forwarder that adds nothing, through HAProxy
without `forwardfor`, from a web page whose name was looked up again, and at `admin-listen`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.nursery import nursery
from tests.support.processes import Process, Processes, Replica
from tests.support.tcp import TcpProxy
from tests.support.wire import Answer, ask

SBIN = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
HAPROXY = shutil.which("haproxy", path=SBIN)
PATHS = ("/admin/workers", "/admin/sessions", "/admin/session?session=s")
NOBODY = "--worker=http://127.0.0.1:9,name=w"
"""A worker that cannot be reached; nothing here needs one."""


class Routers:
    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self.folder = processes.folder

    def start(self, *options: str) -> Replica:
        process = self._processes.start("router", "app", "serve", "--port=0", NOBODY, *options)
        replica = Replica(process.urls(1)[0], process)
        assert _wait(lambda: _status(replica.url, "/health") == 200)
        return replica

    def run(self, label: str, *command: str) -> Process:
        process = Process(label, command, self.folder / f"{label}.log")
        self._processes.all.append(process)
        return process


@pytest.fixture
def routers(processes: Processes) -> Routers:
    return Routers(processes)


@pytest.fixture(scope="module")
def usual(module_processes: Processes) -> Replica:
    """A router as it is without any setting about admins, for tests that change nothing at it."""
    return Routers(module_processes).start("--claims=memory://")


async def admin(url: str, path: str = PATHS[0], **headers: str) -> Answer:
    """`host` replaces the one of `url`."""
    return await ask(url, target=path, headers=[(name.replace("_", "-"), value) for name, value in headers.items()])


def _status(url: str, path: str) -> int:
    # Nothing here speaks TLS, and reading the machine's CA certificates takes longer than the whole request.
    with contextlib.suppress(httpx.TransportError), httpx.Client(trust_env=False, verify=False, timeout=5) as client:
        return client.get(url + path).status_code
    return 0


def _wait(condition: object, within: float = 20.0) -> bool:
    give_up = time.monotonic() + within
    while not condition():  # type: ignore[operator]
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


async def test_the_machine_itself_gets_in_and_nobody_through_a_forwarder(usual: Replica) -> None:
    port = int(usual.url.rpartition(":")[2])
    for name in ("127.0.0.1", "localhost", "[::1]"):
        assert (await admin(usual.url, host=f"{name}:{port}")).status == 200
    async with TcpProxy("127.0.0.1", port) as forwarder:
        url = f"http://127.0.0.1:{forwarder.port}"
        for path in PATHS:
            refused = await admin(url, path, host="evil.example")
            assert (refused.status, refused.json["error"]["code"]) == (403, "forbidden")
        closing = await ask(url, "DELETE", PATHS[2], headers=[("host", "192.0.2.7:8000")])
        assert closing.status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example:8000"},
        {"host": "evil.example:8000", "origin": "http://evil.example:8000", "sec_fetch_site": "same-origin"},
        {"origin": "http://evil.example", "sec_fetch_site": "cross-site"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
async def test_a_web_page_whose_name_now_leads_here_does_not_get_in(headers: dict[str, str], usual: Replica) -> None:
    for path in PATHS:
        assert (await admin(usual.url, path, **headers)).status == 403
    assert (await ask(usual.url, "DELETE", PATHS[2], headers=_pairs(headers))).status == 403
    preflight = await ask(usual.url, "OPTIONS", PATHS[2], headers=_pairs(headers))
    assert not preflight.get("access-control-allow-origin")


def _pairs(headers: dict[str, str]) -> list[tuple[str, str]]:
    return [(name.replace("_", "-"), value) for name, value in headers.items()]


async def test_nobody_gets_in_through_haproxy_without_forwardfor(routers: Routers, usual: Replica) -> None:
    if HAPROXY is None:
        return  # the forwarder above is what it amounts to
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    conf = routers.folder / "haproxy.cfg"
    conf.write_text(
        f"""
defaults
    mode http
    timeout connect 1s
    timeout client 10s
    timeout server 10s
listen front
    bind 127.0.0.1:{port}
    server one {usual.url.removeprefix("http://")}
"""
    )
    routers.run("haproxy", HAPROXY, "-db", "-f", str(conf))
    front = f"http://127.0.0.1:{port}"
    assert _wait(lambda: _status(front, "/health") == 200)
    for path in PATHS:
        assert (await admin(front, path, host="router.example")).status == 403


async def test_a_router_that_others_can_reach_has_no_admins_without_a_token_and_says_so(routers: Routers) -> None:
    replica = routers.start("--claims=memory://", "--host=0.0.0.0")
    here = f"http://127.0.0.1:{replica.url.rpartition(':')[2]}"
    assert (await admin(here)).status == 403
    said = [line for line in replica.process.output().splitlines() if "admin-token is not set" in line]
    assert len(said) == 1
    assert replica.url.removeprefix("http://") in said[0]
    guarded = routers.start("--claims=memory://", "--host=0.0.0.0", "--admin-token=hush")
    here = f"http://127.0.0.1:{guarded.url.rpartition(':')[2]}"
    assert (await admin(here)).status == 403
    assert (await admin(here, authorization="Bearer hush", host="evil.example")).status == 200
    assert "admin-token" not in guarded.process.output()


# --- admin-listen ----------------------------------------------------------------------------------------------------


def coatcheck(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("COATCHECK_")}
    return nursery().run(["app", *arguments], clean | environment, timeout=60)


async def test_the_admin_api_at_a_port_of_its_own_is_there_alone(routers: Routers) -> None:
    replica = routers.start("--claims=memory://", "--host=0.0.0.0", "--admin-listen=127.0.0.1:0")
    public, apart = _urls(replica.process)
    for path in PATHS:
        assert (await admin(public.replace("0.0.0.0", "127.0.0.1"), path)).status == 404
    assert (await admin(apart)).status == 200
    assert (await admin(apart, host="evil.example")).status == 403
    for method, path in (("GET", "/health"), ("GET", "/metrics"), ("GET", "/ready")):
        assert (await ask(apart, method, path)).status in (200, 503)
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages"):
        assert (await ask(apart, "POST", path, body=b"{}")).status == 404, "a turn is none of the admin API's"
    assert (
        "/admin/workers"
        not in (await ask(public.replace("0.0.0.0", "127.0.0.1"), target="/openapi.json")).json["paths"]
    )
    assert "admin-token is not set" not in replica.process.output()


async def test_what_holds_for_the_control_plane_holds_at_the_admin_api_s_own_port(routers: Routers) -> None:
    """HEAD wherever GET is answered, no redirect to whatever is called the host, no error that is not ours."""
    replica = routers.start("--claims=memory://", "--admin-listen=127.0.0.1:0")
    _, apart = _urls(replica.process)
    for path in (*PATHS, "/", "/health", "/ready", "/metrics", "/v1/models", "/openapi.json", "/nothing"):
        got, head = await ask(apart, "GET", path), await ask(apart, "HEAD", path)
        assert (head.status, head.get("content-type"), head.body) == (got.status, got.get("content-type"), b""), path
    for path in ("/health/", "/admin/workers/"):
        assert (await ask(apart, "GET", path, headers=[("host", "evil.example")])).status == 404
    described = (await ask(apart, target="/openapi.json")).json
    answers = [each["responses"] for path in described["paths"].values() for each in path.values()]
    assert answers
    assert not any("422" in each for each in answers)


async def test_an_admin_port_that_others_can_reach_needs_the_token(routers: Routers) -> None:
    open_one = routers.start("--claims=memory://", "--admin-listen=0.0.0.0:0")
    _, apart = _urls(open_one.process)
    assert (await admin(apart.replace("0.0.0.0", "127.0.0.1"))).status == 403
    assert "admin-token is not set" in open_one.process.output()
    guarded = routers.start("--claims=memory://", "--admin-listen=0.0.0.0:0", "--admin-token=hush")
    _, apart = _urls(guarded.process)
    assert (await admin(apart.replace("0.0.0.0", "127.0.0.1"))).status == 403
    assert (await admin(apart.replace("0.0.0.0", "127.0.0.1"), authorization="Bearer hush")).status == 200


def _urls(process: Process) -> list[str]:
    assert _wait(lambda: "admin API at " in process.output())
    return process.urls(2)


@pytest.fixture
def path() -> Iterator[Path]:
    """Of a unix socket; short, as those must be."""
    with tempfile.TemporaryDirectory(prefix="ck") as folder:
        yield Path(folder) / "admin"


def test_the_admin_api_at_a_unix_socket_is_for_this_user(routers: Routers, path: Path) -> None:
    replica = routers.start("--claims=memory://", f"--admin-listen=unix:{path}")
    assert _wait(path.exists)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert _status(replica.url, PATHS[0]) == 404
    for how in (["--url", f"unix:{path}"], ["--url", f"unix://{path}"], []):
        done = coatcheck("workers", "--json", *how, COATCHECK_ADMIN_LISTEN=f"unix:{path}")
        assert done.returncode == 0, done.stderr
        assert [worker["name"] for worker in json.loads(done.stdout)["workers"]] == ["w"]
    done = coatcheck("sessions", "list", "--url", f"unix:{path}")
    assert (done.returncode, done.stderr) == (0, "")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://evil.example") as client:
        assert client.get(PATHS[0]).status_code == 403, "whoever forwards to the socket speaks for others"
    replica.process.terminate()
    assert replica.process.wait(15) == 0
    assert not path.exists()
    done = coatcheck("workers", "--url", f"unix:{path}")
    assert done.returncode == 1
    assert f"unix:{path} cannot be reached" in done.stderr


def test_all_processes_answer_at_one_admin_socket(routers: Routers, path: Path) -> None:
    claims = (routers.folder / "claims").as_uri()
    options = (f"--claims={claims}", "--processes=2", "--replica=east", f"--admin-listen=unix:{path}")
    replica = routers.start(*options)
    asked: set[str] = set()

    def both() -> bool:
        done = coatcheck("workers", "--json", "--url", f"unix:{path}")
        if done.returncode == 0:
            asked.add(json.loads(done.stdout)["replica"])
        return len(asked) == 2

    held = []
    with contextlib.ExitStack() as stack:
        # Whoever answers next to many idle connections is one process as well as the other.
        for _ in range(20):
            held.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            held[-1].connect(str(path))
        assert _wait(both, within=40.0), asked
    assert asked == {"east-1", "east-2"}
    assert _status(replica.url, PATHS[0]) == 404
    replica.process.terminate()
    assert replica.process.wait(15) == 0
    assert not path.exists()


def test_the_socket_of_a_killed_router_is_replaced_and_a_living_one_is_not(routers: Routers, path: Path) -> None:
    first = routers.start("--claims=memory://", f"--admin-listen=unix:{path}")
    second = coatcheck("serve", "--port=0", NOBODY, "--claims=memory://", f"--admin-listen=unix:{path}")
    assert second.returncode == 1
    assert f"cannot listen on unix:{path}" in second.stderr
    assert "--admin-listen" in second.stderr
    assert coatcheck("workers", "--url", f"unix:{path}").returncode == 0
    first.process.kill()
    assert path.exists()
    third = routers.start("--claims=memory://", f"--admin-listen=unix:{path}")
    assert coatcheck("workers", "--url", f"unix:{path}").returncode == 0
    third.process.terminate()
    third.process.wait(15)
    path.write_text("not a socket")
    fourth = coatcheck("serve", "--port=0", NOBODY, "--claims=memory://", f"--admin-listen=unix:{path}")
    assert fourth.returncode == 1
    assert path.read_text() == "not a socket"


async def test_whoever_looks_at_the_page_does_not_keep_a_replica_from_stopping(routers: Routers) -> None:
    """They see the end of it, and the log no fault."""
    replica = routers.start("--claims=memory://", "--drain-timeout=300")
    async with (
        httpx.AsyncClient(base_url=replica.url, trust_env=False, verify=False, timeout=60) as client,
        client.stream("GET", "/admin/stream") as looking,
    ):
        lines = looking.aiter_lines()
        assert await anext(lines) == "event: snapshot"
        replica.process.terminate()
        async for _ in lines:
            pass
    assert replica.process.wait(60) == 0
    assert "ERROR" not in replica.process.output()
