"""The command line: every setting has its flag, mistakes cost one clear line and exit code 2."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from app import checking, cli
from app.config import SETTINGS, Settings
from app.sockets import listen

ROOT = Path(__file__).parents[2]
WORKER = ["--worker", "http://127.0.0.1:9"]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.upper().startswith("COATCHECK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(checking, "configure_logging", lambda settings: None)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield holder.getsockname()[1]


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_every_setting_is_in_one_group() -> None:
    assert len(SETTINGS) == sum(len(get_type_hints(Settings)[name].model_fields) for name in Settings.model_fields)


def test_help_names_every_flag_and_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "serve", "--help")
    assert code == 0
    words = " ".join(out.split())
    for name in SETTINGS:
        assert SETTINGS[name].flag in words
        assert f"[{SETTINGS[name].variable}]" in words


def test_check_says_what_would_be_used_and_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("max-stale = 5")
    monkeypatch.setenv("COATCHECK_SESSION_SECRET", "hush")
    code, out, err = command(
        capsys, "serve", "--check", "--config", str(file), *WORKER, "--port", "0", "--no-worker-tls-verify"
    )
    assert (code, err) == (0, "")
    *rows, verdict = out.splitlines()
    assert verdict == "the settings are valid"
    table = {row.split()[0]: row.split()[1:] for row in rows}
    assert set(table) == {name.replace("_", "-") for name in SETTINGS}
    assert table["port"] == ["0", "flag", "--port"]
    assert table["worker-tls-verify"] == ["false", "flag", "--worker-tls-verify"]
    assert table["session-secret"] == ["********", "variable", "COATCHECK_SESSION_SECRET"]
    assert table["max-stale"] == ["5", "max-stale", "in", str(file)]
    assert table["session-ttl"] == ["1800", "default"]
    assert "hush" not in out


def test_check_opens_the_store_for_real(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    assert command(capsys, "serve", "--check", *WORKER, "--claims", folder.as_uri())[0] == 0
    assert folder.is_dir()


def test_check_fails_while_the_store_is_away_and_tells_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # not listening
        claims = f"etcd://me:hush@127.0.0.1:{unused.getsockname()[1]}/p"
        code, out, err = command(capsys, "serve", "--check", *WORKER, "--claims", claims, "--store-deadline", "0.3")
    assert code == 1
    assert "cannot be reached" in err
    assert "etcd://********@127.0.0.1" in out
    assert "hush" not in out + err


@pytest.mark.parametrize("check", [[], ["--check"]])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--claims", "memory://"],
            ["no worker is given", "--worker http://host:port", "COATCHECK_WORKER", "coatcheck up"],
        ),
        ([*WORKER, "--port", "x"], ["--port x", "whole number from 0 to 65535"]),
        ([*WORKER, "--claims", "file://host/x"], ["--claims file://host/x", "write three slashes"]),
        ([*WORKER, "--claims", "etcd://me:hush@h"], ["--claims etcd://********@h", "needs a prefix"]),
        ([*WORKER, "--prot", "1"], ["--prot", "did you mean --port?"]),
        ([*WORKER, "--port"], ["--port", "expected one argument"]),
        ([*WORKER, "extra"], ["there is no argument extra"]),
        ([*WORKER, "--config", "/no/such.toml"], ["/no/such.toml", "No such file"]),
    ],
)
def test_a_mistake_is_told_in_one_line_with_its_remedy(
    arguments: list[str], said: list[str], check: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(capsys, "serve", *check, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") <= 2
    assert "Traceback" not in err
    assert "hush" not in err
    for word in said:
        assert word in err


def test_a_taken_port_is_told_and_ends_with_1(capsys: pytest.CaptureFixture[str], taken_port: int) -> None:
    code, _, err = command(capsys, "serve", *WORKER, "--claims", "memory://", "--port", str(taken_port))
    assert code == 1
    assert f"127.0.0.1:{taken_port}" in err
    assert "choose another --port" in err


def test_a_port_that_wants_rights_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether port 80 does is the system's affair, and who runs the tests."""

    def refused(_: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refused)
    code, _, err = command(capsys, "serve", *WORKER, "--claims", "memory://", "--port", "80")
    assert code == 1
    assert "127.0.0.1:80" in err
    assert "CAP_NET_BIND_SERVICE" in err
    assert "choose a higher --port" in err


def test_a_host_that_is_not_ours_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = command(capsys, "serve", *WORKER, "--claims", "memory://", "--port", "0", "--host", "192.0.2.1")
    assert code == 1
    assert "choose another --host" in err


def test_all_addresses_of_a_name_get_the_same_port() -> None:
    sockets = listen("localhost", 0)
    try:
        assert len({bound.getsockname()[1] for bound in sockets}) == 1
    finally:
        for bound in sockets:
            bound.close()


def test_version_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = command(capsys, "--version")
    assert code == 0
    assert out.startswith("coatcheck ")
    code, out, _ = command(capsys)
    assert code == 2
    for name in ("serve", "mock", "up"):
        assert name in out


HEAVY = {
    "asyncio",
    "pydantic",
    "httpx",
    "fastapi",
    "uvicorn",
    "rich",
    "prometheus_client",
    "watchfiles",
    "aetcd",
    "grpc",
}


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], HEAVY),
        (["--version"], HEAVY),
        (["key", "tenant"], HEAVY - {"asyncio"}),
        (["register", "--help"], HEAVY),
        (["serve", "--help"], {"fastapi", "uvicorn", "rich", "watchfiles", "aetcd", "grpc", "app.main"}),
        (["mock", "--count", "0"], {"pydantic_settings", "prometheus_client", "httptools", "aetcd", "app.config"}),
        (["serve", "--check", "--worker=http://w:1"], {"aetcd", "grpc"}),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_command_imports_only_what_it_needs(arguments: list[str], unwanted: set[str]) -> None:
    script = f"""if True:
        import contextlib, sys
        from app.cli import main
        with contextlib.suppress(SystemExit):
            main({arguments!r})
        print(sorted({unwanted!r} & sys.modules.keys()))
    """
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert said.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mock", "--port", "x"], "--port"),
        (["up", "--replicas", "0"], "from 1 to 64"),
        (["up", "--ttft-ms", "-1"], "ttft_ms"),
        (["up", "--ports", "1"], "did you mean --port?"),
        (["srve"], "'serve'"),
    ],
)
def test_other_commands_explain_mistakes_as_well(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = command(capsys, *arguments)
    assert code == 2
    assert said in err
