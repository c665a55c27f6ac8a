"""`coatcheck sessions`, `workers` and `key`: what they print and how they end. The router that they ask is real."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import Trouble, cli
from app.admin import _stands
from app.config import Settings
from app.main import create_app
from app.remote import fitting
from app.serve import Server
from app.sessions.identity import KeyHasher
from app.sessions.tenants import read_keys
from app.sockets import listen
from app.top import snapshots
from tests.support.raw import OK, Worker, answers

TOKEN = "hush"


@pytest.fixture(scope="module")
def router() -> Iterator[str]:
    """The URL of one with the admin token TOKEN, that knows the sessions session-0 to session-6, all at one worker."""
    (bound,) = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with Worker(answers(OK)) as worker:
            spoken = (f"{worker.url},name=w0,dp=2", "http://127.0.0.1:9,name=w1")
            settings = Settings.flat(
                worker=spoken, claims="memory://", admin_token=TOKEN, replica="r1", probe_path="off"
            )
            server = Server(create_app(settings), settings)
            serving = asyncio.create_task(server.serve(sockets=[bound]))
            async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False) as client:
                for number in range(7):
                    headers = {"x-dynamo-session-id": f"session-{number}", "x-dynamo-worker-instance-id": "w0"}
                    assert (await client.post("/v1/completions", headers=headers, content=b"{}")).status_code == 200
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)
            server.should_exit = True
            await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(60)
    yield url
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.upper().startswith("COATCHECK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # not for this


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def key(number: int) -> str:
    return KeyHasher().key(b"", b"session-%d" % number)


def test_sessions_are_listed_by_their_hash(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys, "sessions", "list", "--url", router, "--token", TOKEN, "--limit", "3")
    assert (code, err) == (0, "")
    head, *rows, sum_ = out.splitlines()
    assert head.split()[:3] == ["session", "worker", "rank"]
    hashes = sorted(key(number) for number in range(7))
    assert [row.split()[0] for row in rows] == hashes[:3]
    assert {row.split()[1] for row in rows} == {"w0"}
    assert "3 of the 7 sessions" in sum_
    assert "--all" in sum_
    code, out, _ = command(capsys, "sessions", "list", "--url", router + "/", "--token", TOKEN, "--all")
    assert [row.split()[0] for row in out.splitlines()[1:-1]] == hashes
    assert "--all" not in out
    code, out, _ = command(capsys, "sessions", "list", "--url", router, "--token", TOKEN, "--worker", "w1", "--json")
    assert (code, json.loads(out)["sessions"]) == (0, [])


def test_a_turns_answer_says_which_replica_gave_it(router: str) -> None:
    answer = httpx.post(f"{router}/v1/completions", content=b"{}", trust_env=False, verify=False, timeout=30)
    assert answer.headers["x-coatcheck-replica"] == "r1"


def test_a_session_is_not_said_to_stand_longer_than_is_promised() -> None:
    """Stores keep claims some longer (etcd's leases, by a quarter)."""
    assert _stands(expires_at=1800.0 * 1.25, now=0.0, ttl=1800.0) == 1800.0
    assert _stands(expires_at=1000.0, now=400.0, ttl=1800.0) == 600.0
    assert _stands(expires_at=1000.0, now=1001.0, ttl=1800.0) == 0.0
    assert _stands(expires_at=0.0, now=0.0, ttl=1800.0) is None


def test_pages_are_put_together(
    router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.remote._PAGE", 2)
    for arguments, count in ((["--all"], 7), (["--limit", "5"], 5), (["--limit", "9"], 7)):
        _, out, _ = command(capsys, "sessions", "list", "--url", router, "--token", TOKEN, "--json", *arguments)
        listed = [each["session"] for each in json.loads(out)["sessions"]]
        assert listed == sorted(key(number) for number in range(7))[:count]


def test_a_session_is_shown_and_closed(
    router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COATCHECK_ADMIN_TOKEN", TOKEN)
    code, out, err = command(capsys, "sessions", "show", "session-1", "--url", router)
    assert (code, err) == (0, "")
    assert key(1) in out
    assert "created by" in out
    code, out, _ = command(capsys, "sessions", "show", key(1), "--hash", "--url", router, "--json")
    assert json.loads(out)["worker"] == "w0"
    code, out, _ = command(capsys, "sessions", "show", "session-1", "--agent", "a", "--tenant", "t", "--url", router)
    assert (code, out) == (1, "")
    headers = {"x-dynamo-session-id": "doomed", "x-dynamo-worker-instance-id": "w0"}
    httpx.post(f"{router}/v1/completions", headers=headers, content=b"{}", trust_env=False, verify=False)
    code, out, err = command(capsys, "sessions", "close", "doomed", "--url", router)
    assert (code, err) == (0, "")
    assert out.split()[1] == "closed"
    code, out, err = command(capsys, "sessions", "close", "doomed", "--url", router)
    assert (code, err) == (1, "coatcheck: no such session is bound\n")


def test_workers_are_listed(router: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(f'admin-token = "{TOKEN}"')
    code, out, err = command(capsys, "workers", "--url", router, "--config", str(file))
    assert (code, err) == (0, "")
    head, first, second = (line.split() for line in out.splitlines())
    assert head[0] == "name"
    assert (first[0], first[2], first[5:8]) == ("w0", "up", ["0", "0:0", "1:0"])
    assert (second[0], second[6]) == ("w1", "–")
    _, out, _ = command(capsys, "workers", "--url", router, "--token", TOKEN, "--json")
    assert [each["name"] for each in json.loads(out)["workers"]] == ["w0", "w1"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["sessions"], 2, "ACTION"),
        (["sessions", "lst"], 2, "lst"),
        (["sessions", "show"], 2, "takes an ID"),
        (["sessions", "list", "x"], 2, "takes no ID"),
        (["sessions", "list", "--limit", "0"], 2, "1 or more"),
        (["sessions", "show", "x", "--hash", "--token", TOKEN], 2, "40 hex digits"),
        (["sessions", "list", "--url", "localhost"], 2, "--url localhost"),
        (["sessions", "list", "--config", "/no/such.toml"], 2, "/no/such.toml"),
        (["sessions", "list", "--url", "http://127.0.0.1:9"], 1, "cannot be reached"),
        (["sessions", "list"], 1, "needs the admin token"),
        (["workers", "--token", "wrong"], 1, "needs the admin token"),
        (["sessions", "show", "nobody", "--token", TOKEN], 1, "no such session"),
        (["workers", "extra"], 2, "extra"),
        (["key"], 2, "TENANT"),
        (["key", "a b"], 2, "no tenant name"),
    ],
)
def test_trouble_is_told_in_one_line(
    arguments: list[str], code: int, said: str, router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--url" not in arguments and arguments[0] != "key":
        arguments = [*arguments, "--url", router]
    ended, out, err = command(capsys, *arguments)
    assert (ended, out) == (code, "")
    assert said in err
    assert err.count("\n") <= 2
    assert "Traceback" not in err


def test_what_is_no_router_is_told(capsys: pytest.CaptureFixture[str], router: str) -> None:
    code, _, err = command(capsys, "workers", "--url", f"{router}/health", "--token", TOKEN)
    assert code == 1
    assert "there is nothing at" in err


def test_a_key_and_its_line_let_in_whose_it_is(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, line, err = command(capsys, "key", "alice")
    assert code == 0
    made = err.split()[-1]
    assert made not in line
    file = tmp_path / "keys"
    file.write_text(line)
    assert read_keys(file).authenticate({b"authorization": [b"Bearer " + made.encode()]}) == b"alice"
    assert command(capsys, "key", "alice")[1] != line


def test_operators_decide_about_workers(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    def say(*arguments: str) -> str:
        code, out, err = command(capsys, "workers", *arguments, "--url", router, "--token", TOKEN)
        assert (code, err) == (0, "")
        return out

    def listed() -> dict[str, dict[str, Any]]:
        said = json.loads(say("--json"))
        return {each["name"]: each for each in (*said["workers"], *said["absent"])}

    try:
        assert say("cordon", "w1") == "w1 is cordoned\n"
        cordoned = listed()["w1"]
        assert cordoned["mark"] == "cordoned"
        assert cordoned["by"].endswith(f"@{socket.gethostname()}")
        assert f"cordoned by {cordoned['by']}" in say("list")
        assert say("drain", "w1", "--deadline", "600").startswith("w1 is draining, until 2")
        assert listed()["w1"]["deadline"] == pytest.approx(time.time() + 600, abs=60)
        assert say("add", "http://127.0.0.1:19,name=a/b-c") == "a/b-c is added\n"
        assert listed()["a/b-c"]["source"] == "operator"
        assert say("remove", "a/b-c") == "a/b-c is removed\n"
        assert listed()["a/b-c"]["mark"] == "removed"
        assert "a/b-c" in say()
    finally:
        say("uncordon", "w1")
    assert listed()["w1"]["mark"] == "none"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cordon"], "takes a NAME"),
        (["add"], "takes a URL"),
        (["list", "w0"], "takes no NAME"),
        (["cordon", "nobody"], "nobody here knows a worker called nobody"),
        (["add", "http://127.0.0.1:9,name=other"], "is at http://127.0.0.1:9 already"),
        (["add", "http://127.0.0.1:29,name=w1"], "w1 is at"),
        (["add", "w9"], "write it as http://host:port"),
        (["cordon", "w0", "--deadline", "5"], "--deadline is for drain"),
        (["drain", "w0", "--deadline", "soon"], "a number of seconds"),
        (["pause", "w0"], "pause"),
    ],
)
def test_a_wrong_word_about_workers_is_explained(
    arguments: list[str], said: str, router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, "workers", *arguments, "--url", router, "--token", TOKEN)
    assert (code, out) == (2, "")
    assert said in err


def test_a_session_is_found_by_the_first_digits_of_its_hash(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((key(3)[:12],), (key(3)[:8], "--hash"), (key(3),)):
        code, out, err = command(capsys, "sessions", "show", *words, "--json", "--url", router, "--token", TOKEN)
        assert (code, err) == (0, "")
        assert json.loads(out)["session"] == key(3)


def test_a_tenants_session_whose_id_looks_like_a_hash_is_that_tenants(
    router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("sessions", "show", key(3)[:12], "--tenant", "acme")
    code, out, err = command(capsys, *words, "--url", router, "--token", TOKEN)
    assert (code, out, "no such session" in err) == (1, "", True)


@pytest.mark.parametrize("digits", ["0" * 12, "12345", "g" * 12])
def test_digits_of_no_session_are_said_to_be_of_none(
    router: str, capsys: pytest.CaptureFixture[str], digits: str
) -> None:
    code, _, err = command(capsys, "sessions", "show", digits, "--hash", "--url", router, "--token", TOKEN)
    assert code
    assert "hash" in err


def test_a_wrong_token_is_told_from_none(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = [command(capsys, "workers", "--url", router, "--token", token) for token in ("", "wrong")]
    assert [code for code, _, _ in said] == [1, 1]
    assert "another one" not in said[0][2]
    assert "another one" in said[1][2]
    assert all("--token" in err for _, _, err in said)


def test_a_token_that_no_header_can_carry_is_said_to_be_wrong(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(capsys, "workers", "--url", router, "--token", "schlüssel")
    assert (code, "ASCII" in err) == (2, True)


@pytest.mark.parametrize("width", [70, 40])
def test_a_narrow_table_leaves_out_whole_columns_and_never_the_worker(width: int) -> None:
    columns = ["session", "worker", "rank", "age", "source"]
    rows = [["0123456789ab", "a-worker-of-some-length", "–", "12", "x" * 30]] * 3
    shown = fitting(columns, rows, width)
    assert list(shown[:2]) == [0, 1]
    assert sum(max(len(row[at]) for row in [columns, *rows]) + 1 for at in shown) <= width
    assert 2 not in shown, "what says nothing goes first"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_actions_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(capsys, "completion", shell)
    assert (code, err) == (0, "")
    for word in ("sessions", "cordon", "--claims", "--worker", "--url", "zsh"):
        assert re.search(rf"(?<![\w-]){word}(?![\w-])", out), word
    if shell == "zsh":
        assert out.index("compinit") < out.index("bashcompinit"), "which needs it"
    if shell == "bash":
        asked = f'{out}\nCOMP_WORDS=(coatcheck workers cor); COMP_CWORD=2; _coatcheck; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == ["cordon"]


def test_who_reads_no_further_is_no_trouble(router: str) -> None:
    """As of `coatcheck sessions list | head`."""
    asked = f"{sys.executable} -m app sessions list --url {router} --token {TOKEN} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", asked], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_state_that_is_no_folder_is_named_as_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    code, _, err = command(capsys, "up", "--state", str(file))
    assert code == 2
    assert f"--state {file}" in err


def test_top_shows_the_fleet_in_eighty_columns(
    router: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command(capsys, "top", "--once", "--url", router, "--token", TOKEN)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    row = next(line.split() for line in lines if line.startswith("w0 "))
    assert row[1] == "up"
    assert "7" in row, "its sessions"
    assert any(line.startswith("r1 *") for line in lines), "the replica"
    code, out, _ = command(capsys, "top", "--once", "--url", router, "--token", TOKEN, "--find", "w1")
    assert "w1" in out
    assert "w0 " not in out


def test_top_without_the_token_shows_numbers_and_with_a_wrong_one_nothing(
    router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = command(capsys, "top", "--once", "--url", router, "--token", "")
    assert code == 0
    assert "whoever has the admin token" in out
    code, out, err = command(capsys, "top", "--once", "--url", router, "--token", "wrong")
    assert (code, out) == (1, "")
    assert "needs the admin token" in err
    code, _, err = command(capsys, "top", "--once", "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "cannot be reached" in err


def answering(body: bytes) -> httpx.Client:
    return httpx.Client(base_url="http://r", transport=httpx.MockTransport(lambda _: httpx.Response(200, content=body)))


def test_top_reads_every_text_and_no_router_is_told() -> None:
    message = "a\u2028b\u2029c\x85d"
    body = f"event: snapshot\r\ndata: {json.dumps({'m': message}, ensure_ascii=False)}\r\n\r\n".encode()
    with answering(body) as client:
        assert list(snapshots(client, "http://r", {})) == [{"m": message}]
    with answering(b"<html>\n</html>") as client, pytest.raises(Trouble, match="does not answer as a router"):
        next(snapshots(client, "http://r", {}))
