"""Settings and their three sources: a mistake is found at start and explained in the words in which it was made."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import certifi
import pytest
from pydantic import SecretStr

from app.config import CHANGEABLE, SECRETS, SETTINGS, Settings
from app.sources import SettingsError, read_settings, service_links
from app.values import mask, shown_value
from tests.support.rows import rows

FILES = Path(__file__).parent / "files"
KEYS, WORKER_KEY, SECRET = FILES / "api-keys", FILES / "worker-key", FILES / "secret"
ROUTER = FILES / "router.pem"
"""A certificate and its key; `other.key` is another one's, and `locked.key` the same with a password."""

# For every setting: what a user may write, and what is then used. None of them is the default.
WRITTEN: dict[str, tuple[str, Any]] = {
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("8123", 8123),
    "uds": ("/run/coatcheck/http", "/run/coatcheck/http"),
    "tls_cert": (str(ROUTER), ROUTER),
    "tls_key": (str(ROUTER), ROUTER),
    "processes": ("3", 3),
    "claims": ("file:///srv/claims", "file:///srv/claims"),
    "worker": ("http://a:1 http://b:2,name=b", ("http://a:1", "http://b:2,name=b")),
    "workers_from": ("dns://gpu:8000 file:///w.toml", ("dns://gpu:8000", "file:///w.toml")),
    "worker_grace": ("5", 5.0),
    "policy": ("round-robin", "round-robin"),
    "prefix_memory": ("128", 128),
    "prefill_from": ("4096", 4096),
    "tokenize_timeout": ("2", 2.0),
    "session_ttl": ("90.5", 90.5),
    "kept_ttl": ("86400", 86400.0),
    "max_stale": ("10", 10.0),
    "claim_cache": ("7", 7),
    "on_store_outage": ("refuse", "refuse"),
    "store_deadline": ("0.5", 0.5),
    "session_secret": ("hush", SecretStr("hush")),
    "replica": ("east-1", "east-1"),
    "connect_timeout": ("2", 2.0),
    "first_byte_timeout": ("0", 0.0),
    "idle_timeout": ("9", 9.0),
    "max_turns": ("8", 8),
    "max_turns_per_tenant": ("4", 4),
    "queue_limit": ("0", 0),
    "queue_timeout": ("2.5", 2.5),
    "turn_timeout": ("100", 100.0),
    "worker_keepalive": ("0", 0.0),
    "model_alias": ("small=qwen3-8b big=b", ("small=qwen3-8b", "big=b")),
    "models_interval": ("0", 0.0),
    "unknown_models": ("pass", "pass"),
    "probe_path": ("off", "off"),
    "probe_interval": ("0.5", 0.5),
    "probe_timeout": ("10", 10.0),
    "good_probes": ("1", 1),
    "suspect_after": ("5", 5),
    "down_after": ("60", 60.0),
    "slow_start": ("0", 0.0),
    "worker_ca": (certifi.where(), Path(certifi.where())),
    "worker_tls_verify": ("false", False),
    "max_body_bytes": ("4096", 4096),
    "max_header_bytes": ("8192", 8192),
    "client_head_timeout": ("10", 10.0),
    "client_body_timeout": ("0", 0.0),
    "client_read_timeout": ("90", 90.0),
    "trusted_proxies": ("127.0.0.1,10.0.0.0/8 fd00::/8", ("127.0.0.1", "10.0.0.0/8", "fd00::/8")),
    "keepalive_timeout": ("5", 5),
    "drain_delay": ("1.5", 1.5),
    "drain_timeout": ("0", 0),
    "otel_endpoint": ("http://collector:4318", "http://collector:4318"),
    "log_level": ("debug", "debug"),
    "log_format": ("json", "json"),
    "access_log": ("all", "all"),
    "session_from": ("x-chat-id/x-chat-parent body:user", ("x-chat-id/x-chat-parent", "body:user")),
    "rank_header": ("X-Rank", "X-Rank"),
    "engine_paths": ("/tokenize /score", ("/tokenize", "/score")),
    "allowed_origins": ("https://a.example,* http://b:3000", ("https://a.example", "*", "http://b:3000")),
    "overload": ("16", 16),
    "parent_slack": ("0", 0),
    "hints": ("pass", "pass"),
    "hint_conflict": ("reject", "reject"),
    "api_keys": (str(KEYS), KEYS),
    "worker_api_key": ("sk-hush", SecretStr("sk-hush")),
    "worker_api_key_file": (str(WORKER_KEY), WORKER_KEY),
    "admin_token": ("hush", SecretStr("hush")),
    "admin_token_file": (str(SECRET), SECRET),
    "admin_listen": ("unix:/run/coatcheck/admin", "unix:/run/coatcheck/admin"),
    "peer_listen": ("0.0.0.0:8001", "0.0.0.0:8001"),
    "peer_address": ("10.0.0.7", "10.0.0.7"),
    "session_secret_file": (str(SECRET), SECRET),
    "log_bindings": ("0.01", 0.01),
    "affinity": ("soft", "soft"),
}
# What must be given beside it.
ALSO = {"affinity": {"overload": "16"}, "tls_key": {"tls_cert": str(ROUTER)}}

# A bad value for each setting that can have one, and a word of the remedy.
BAD = [
    ("host", "", "not empty"),
    ("port", "eighty", "whole number from 0 to 65535"),
    ("port", "65536", "whole number from 0 to 65535"),
    ("port", "-1", "whole number from 0 to 65535"),
    ("processes", "0", "whole number from 1 to 256"),
    ("claims", "redis://x", "write memory://"),
    ("worker", "a:1", "http://host:port"),
    ("worker", "http://a:1,nmae=x", "URL[,name=NAME][,dp=RANKS][,phase=PHASE]"),
    ("worker", "http://a:1,phase=fill", "write prefill, decode or both"),
    ("worker", "http://a:1,dp=0", "1 to 1024"),
    ("worker", "http://a:1,dp=two", "1 to 1024"),
    ("worker", "http://a:1 http://b:1,name=x http://c:1,name=x", "another name"),
    ("worker", "http://a:1 http://a:1/v1,name=x", "remove one"),
    ("workers_from", "redis://x", "dns+srv://name"),
    ("workers_from", "memory://", "nobody else can write"),
    ("workers_from", "dns://name", "write dns://name:port"),
    ("workers_from", "dns+srv://name:1", "its records say the ports"),
    ("workers_from", "dns://name:1?dq=2", "is no option"),
    ("workers_from", "dns://name:1?nameserver=ns", "write one like 10.0.0.2"),
    ("workers_from", "file://host/w.toml", "write three slashes"),
    ("workers_from", "dns://name:1 dns://name:1", "remove one"),
    ("worker_grace", "-1", "from 0 to 86400"),
    ("policy", "random", "least-loaded"),
    ("prefix_memory", "0", "1 to 65536"),
    ("prefill_from", "-1", "0 or more"),
    ("tokenize_timeout", "0", "above 0"),
    ("session_ttl", "0", "number from 1 to 31536000"),
    ("session_ttl", "nan", "number from 1 to 31536000"),
    ("kept_ttl", "-1", "number from 0 to 31536000"),
    ("max_stale", "0", "above 0 and at most 3600"),
    ("claim_cache", "0", "1 or more"),
    ("on_store_outage", "panic", "degrade, refuse"),
    ("store_deadline", "0", "above 0 and at most 60"),
    ("replica", "x" * 101, "1 to 100 characters"),
    ("connect_timeout", "0", "above 0"),
    ("first_byte_timeout", "inf", "0 or more"),
    ("idle_timeout", "-1", "0 or more"),
    ("max_turns", "-1", "0 or more"),
    ("max_turns_per_tenant", "many", "0 or more"),
    ("queue_limit", "1000001", "from 0 to 1000000"),
    ("queue_timeout", "0", "above 0"),
    ("turn_timeout", "soon", "0 or more"),
    ("worker_keepalive", "3601", "from 0 to 3600"),
    ("model_alias", "small", "write ALIAS=MODEL"),
    ("models_interval", "-1", "from 0 to 86400"),
    ("unknown_models", "guess", "refuse, pass"),
    ("probe_path", "health", "write one like /health, or off"),
    ("probe_interval", "0", "from 0.1 to 3600"),
    ("probe_timeout", "0", "above 0 and at most 300"),
    ("good_probes", "0", "from 1 to 100"),
    ("suspect_after", "0", "from 1 to 1000"),
    ("down_after", "0", "above 0 and at most 3600"),
    ("slow_start", "-1", "from 0 to 3600"),
    ("worker_ca", "/no/such/file", "PEM file"),
    ("worker_ca", __file__, "no certificates in it; name a PEM file"),
    ("worker_tls_verify", "perhaps", "true or false"),
    ("max_body_bytes", "1", "1024 or more"),
    ("max_header_bytes", "100", "from 1024 to 1048576"),
    ("client_head_timeout", "-1", "from 0 to 3600"),
    ("client_body_timeout", "never", "from 0 to 3600"),
    ("client_read_timeout", "-1", "from 0 to 86400"),
    ("trusted_proxies", "localhost", "write one like 10.0.0.0/8"),
    ("trusted_proxies", "10.0.0.1/8", "write one like 10.0.0.0/8"),
    ("keepalive_timeout", "0", "from 1 to 3600"),
    ("drain_delay", "601", "from 0 to 600"),
    ("drain_timeout", "1.5", "whole number"),
    ("log_level", "loud", "debug, info, warning, error"),
    ("log_format", "yaml", "one of text, json"),
    ("access_log", "some", "one of off, errors, all"),
    ("session_from", "x-chat id:x", "dynamo, claude-code, codex, opencode, header:NAME or body:FIELD"),
    ("hints", "drop", "follow, pass"),
    ("session_from", "opencod", "did you mean opencode?"),
    ("session_from", "claude_code", "did you mean claude-code?"),
    ("session_from", "body:messages", "prompt_cache_key, user, metadata.session_id, metadata.user_id"),
    ("session_from", "X-Request-ID", "cannot name a session"),
    ("engine_paths", "tokenize", "write one like /tokenize"),
    ("engine_paths", "/sleep", "an admin may send it without this setting"),
    ("allowed_origins", "chat.example.com", "write one like https://chat.example.com, or * for any"),
    ("allowed_origins", "https://a.example/path", "write one like"),
    ("rank_header", "X Rank", "X-data-parallel-rank"),
    ("affinity", "firm", "hard, soft"),
    ("overload", "-1", "0 or more"),
    ("parent_slack", "many", "whole number, 0 or more"),
    ("hint_conflict", "fight", "override, reject"),
    ("api_keys", "/no/such/file", "name a file of API keys"),
    ("api_keys", __file__, "line 1 is not TENANT sha256:HEX; `coatcheck key TENANT`"),
    ("api_keys", "/dev/null", "it has no keys; `coatcheck key TENANT`"),
    ("worker_api_key_file", "/no/such/file", "name a file with one key"),
    ("worker_api_key_file", __file__, "without spaces"),
    ("worker_api_key_file", "/dev/null", "holds no secret"),
    ("admin_token_file", "/no/such/file", "name a file with one token"),
    ("admin_token_file", "/dev/null", "holds no secret"),
    ("admin_token_file", __file__, "without spaces"),
    ("session_secret_file", "/no/such/file", "name a file with the secret"),
    ("session_secret_file", "/dev/null", "holds no secret"),
    ("session_secret_file", __file__, "longer than 64 bytes"),
    ("peer_listen", "8001", "HOST:PORT"),
    ("peer_listen", "unix:/run/peers", "unix socket"),
    ("peer_address", "10.0.0.1:http", "HOST:PORT"),
    ("peer_address", "unix:/run/peers", "HOST:PORT"),
    ("otel_endpoint", "collector:4317", "write one like http://collector:4318"),
    ("uds", "http.sock", "absolute"),
    ("uds", "unix:/" + "x" * 107, "at most 107 bytes"),
    ("tls_cert", "/no/such/file", "name a PEM file with certificates"),
    ("tls_cert", __file__, "the file is not PEM"),
    ("tls_key", "/no/such/file", "name a PEM file with the private key"),
    ("admin_listen", "8001", "HOST:PORT"),
    ("admin_listen", "localhost", "HOST:PORT"),
    ("admin_listen", "localhost:http", "HOST:PORT"),
    ("admin_listen", "localhost:65536", "HOST:PORT"),
    ("admin_listen", "::1:8001", "[IPV6]:PORT"),
    ("admin_listen", "http://localhost:8001", "HOST:PORT"),
    ("admin_listen", "unix:admin", "absolute"),
    ("admin_listen", "unix:/" + "x" * 107, "at most 107 bytes"),
    ("log_bindings", "2", "from 0 to 1"),
]


# Of what is secret nothing is repeated.
BAD_SECRETS = [
    ("worker_api_key", "a b", "without spaces"),
    ("worker_api_key", " \n", "nothing but white space"),
    ("admin_token", "a b", "without spaces"),
    ("admin_token", " \n", "nothing but white space"),
    ("session_secret", "x" * 65, "longer than 64 bytes"),
    ("session_secret", "\t", "nothing but white space"),
]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.upper().startswith("COATCHECK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def problems(flags: dict[str, Any] | None = None, file: Path | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read_settings(flags or {}, file)
    return [*caught.value.lines]


def written(tmp_path: Path, text: str, name: str = "c.toml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


DEFAULTS = Settings.flat()


def test_the_examples_here_cover_every_setting() -> None:
    assert set(WRITTEN) == set(SETTINGS)
    assert {name for name, _, _ in BAD + BAD_SECRETS} == set(SETTINGS)


@rows("name", WRITTEN)
def test_every_setting_can_be_given_as_flag_variable_and_file_key(name: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        can_be_given_as_flag_variable_and_file_key(name, monkeypatch, Path(folder))


def can_be_given_as_flag_variable_and_file_key(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text, value = WRITTEN[name]
    assert SETTINGS[name].value(DEFAULTS) != value

    also = ALSO.get(name, {})
    by_flag = read_settings({name: text, **also})
    assert SETTINGS[name].value(by_flag.settings) == value
    assert str(by_flag.origins[name]) == f"flag {SETTINGS[name].flag}"

    dashed = name.replace("_", "-")
    for key, file in (
        (dashed, written(tmp_path, f'{dashed}: "{text}"\n', "c.yaml")),
        (name, written(tmp_path, f'{name} = "{text}"')),
    ):
        by_file = read_settings(also, file)
        assert SETTINGS[name].value(by_file.settings) == value
        assert str(by_file.origins[name]) == f"{key} in {file}"

    monkeypatch.setenv(SETTINGS[name].variable, text)
    by_variable = read_settings(also)
    assert SETTINGS[name].value(by_variable.settings) == value
    assert str(by_variable.origins[name]) == f"variable {SETTINGS[name].variable}"


def test_files_may_use_their_own_types(tmp_path: Path) -> None:
    toml = written(
        tmp_path, 'port = 1\nsession-ttl = 2.5\nworker-tls-verify = false\nworker = ["http://a:1", "http://b:1"]'
    )
    yaml = written(
        tmp_path, "port: 1\nsession_ttl: 2.5\nworker_tls_verify: no\nworker:\n- http://a:1\n- http://b:1\n", "c.yml"
    )
    for file in (toml, yaml):
        settings = read_settings({}, file).settings
        assert (settings.listen.port, settings.store.session_ttl, settings.workers.worker_tls_verify) == (1, 2.5, False)
        assert settings.workers.worker == ("http://a:1", "http://b:1")


def test_flag_goes_before_variable_before_file_before_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = written(tmp_path, "port = 3\nclaim_cache = 3\nmax_stale = 3")
    monkeypatch.setenv("COATCHECK_PORT", "2")
    monkeypatch.setenv("COATCHECK_CLAIM_CACHE", "2")
    settings, origins = read_settings({"port": "1"}, file)
    assert (
        settings.listen.port,
        settings.store.claim_cache,
        settings.store.max_stale,
        settings.limits.idle_timeout,
    ) == (1, 2, 3.0, 300.0)
    kinds = [origins[name].kind for name in ("port", "claim_cache", "max_stale", "idle_timeout")]
    assert kinds == ["flag", "variable", "file", "default"]


def test_a_variable_may_name_the_file_and_a_flag_goes_before_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COATCHECK_CONFIG", str(written(tmp_path, "port = 3", "named.toml")))
    assert read_settings({}).settings.listen.port == 3
    assert read_settings({}, written(tmp_path, "port = 4")).settings.listen.port == 4


def test_an_empty_variable_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATCHECK_PORT", "")
    monkeypatch.setenv("COATCHECK_CONFIG", "")
    assert read_settings({}).settings.listen.port == 8000


@rows(("name", "value", "remedy"), BAD)
def test_a_bad_value_is_explained_as_it_was_written(name: str, value: str, remedy: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as folder:
        is_explained_as_it_was_written(name, value, remedy, monkeypatch, Path(folder))


def is_explained_as_it_was_written(
    name: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (problem,) = problems({name: value})
    assert problem.startswith(f"{SETTINGS[name].flag} {value or repr(value)}: ")
    assert remedy in problem

    file = written(tmp_path, f'{name} = "{value}"')
    (problem,) = problems({}, file)
    assert problem.startswith(f"{name} = {value or repr(value)} in {file}: ")
    assert remedy in problem

    if value:
        monkeypatch.setenv(SETTINGS[name].variable, value)
        (problem,) = problems()
        assert problem.startswith(f"{SETTINGS[name].variable}={value}: ")
        assert remedy in problem


def test_all_problems_are_told_at_once() -> None:
    assert len(problems({"port": "x", "policy": "y", "idle_timeout": "z"})) == 3


@pytest.mark.parametrize("text", ["port = true", "session_ttl = true"])
def test_a_truth_value_is_no_number(text: str, tmp_path: Path) -> None:
    (problem,) = problems({}, written(tmp_path, text))
    assert "number" in problem


def test_a_key_that_is_none_is_not_shown() -> None:
    (problem,) = problems({"worker_api_key": "two words"})
    assert problem == "--worker-api-key ********: a key is visible ASCII characters without spaces"


def test_a_number_is_no_secret(tmp_path: Path) -> None:
    (problem,) = problems({}, written(tmp_path, "session_secret = 123456"))
    assert "in quotes" in problem
    assert "123456" not in problem


@rows(
    ("flags", "names"),
    [
        ({"processes": "2", "claims": "memory://"}, ("processes", "claims")),
        ({"store_deadline": "5", "session_ttl": "5"}, ("store_deadline", "session_ttl")),
        ({"turn_timeout": "5", "connect_timeout": "5"}, ("turn_timeout", "connect_timeout")),
        ({"affinity": "soft", "overload": "0"}, ("affinity", "overload")),
        ({"hints": "pass", "hint_conflict": "reject"}, ("hints", "hint_conflict")),
        ({"hints": "pass", "policy": "direct"}, ("hints", "policy")),
        ({"worker_ca": certifi.where(), "worker_tls_verify": False}, ("worker_ca", "worker_tls_verify")),
        ({"tls_cert": str(ROUTER), "uds": "/run/http"}, ("tls_cert", "uds")),
        ({"tls_key": str(ROUTER)}, ("tls_key",)),
    ],
)
def test_settings_that_do_not_fit_together_are_both_named(flags: dict[str, Any], names: tuple[str, ...]) -> None:
    (problem,) = problems(flags)
    for name in names:
        written_as = "--no-worker-tls-verify" if flags[name] is False else f"{SETTINGS[name].flag} {flags[name]}"
        assert written_as in problem


@pytest.mark.parametrize(
    ("cert", "key", "said"),
    [
        (ROUTER, FILES / "other.key", "they do not fit together"),
        (ROUTER, FILES / "locked.key", "the key has a password; write it to a file without one"),
        (FILES / "other.key", FILES / "other.key", "there is no such pair"),
        (Path(certifi.where()), ROUTER, "they do not fit together"),
    ],
)
def test_a_certificate_and_a_key_that_are_no_pair_are_told_at_start(cert: Path, key: Path, said: str) -> None:
    (problem,) = problems({"tls_cert": str(cert), "tls_key": str(key)})
    assert f"--tls-cert {cert} with --tls-key {key}: " in problem
    assert said in problem


def test_a_relation_with_a_default_says_so() -> None:
    (problem,) = problems({"session_ttl": "1.5"})
    assert "--store-deadline 2 (the default) with --session-ttl 1.5" in problem


def test_an_unknown_file_key_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    for file in (written(tmp_path, "sesion-ttl = 1"), written(tmp_path, "sesion-ttl: 1", "c.yaml")):
        (problem,) = problems({}, file)
        assert str(file) in problem
        assert "'sesion-ttl'" in problem
        assert "did you mean session-ttl?" in problem


@pytest.mark.parametrize(("name", "text"), [("c.toml", "Port = 1\nport = 2"), ("c.yaml", "Port: 1\nport: 2\n3: 4")])
def test_a_key_in_capitals_is_another_key(name: str, text: str, tmp_path: Path) -> None:
    said = problems({}, written(tmp_path, text, name))
    assert said[0].endswith("there is no setting 'Port'; did you mean port?")
    assert len(said) == text.count("\n")


def test_a_file_that_a_variable_names_is_told_as_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATCHECK_CONFIG", "/no/such.toml")
    (problem,) = problems()
    assert problem.startswith("COATCHECK_CONFIG=/no/such.toml: cannot be read")


def test_an_unknown_variable_is_refused_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COATCHECK_WORKERS", "http://a:1")
    (problem,) = problems()
    assert "COATCHECK_WORKERS" in problem
    assert problem.endswith("did you mean COATCHECK_WORKER?")


# What Kubernetes 1.33 sets in a pod beside the Services coatcheck and coatcheck-peers, the latter of IPv6.
SERVICE_LINKS = {
    "COATCHECK_SERVICE_HOST": "10.96.14.3",
    "COATCHECK_SERVICE_PORT": "8000",
    "COATCHECK_SERVICE_PORT_HTTP": "8000",
    "COATCHECK_PORT": "tcp://10.96.14.3:8000",
    "COATCHECK_PORT_8000_TCP": "tcp://10.96.14.3:8000",
    "COATCHECK_PORT_8000_TCP_PROTO": "tcp",
    "COATCHECK_PORT_8000_TCP_PORT": "8000",
    "COATCHECK_PORT_8000_TCP_ADDR": "10.96.14.3",
    "COATCHECK_PEERS_SERVICE_HOST": "fd00::7",
    "COATCHECK_PEERS_SERVICE_PORT": "8001",
    "COATCHECK_PEERS_PORT": "tcp://[fd00::7]:8001",
    "COATCHECK_PEERS_PORT_8001_UDP_ADDR": "fd00::7",
}


def test_what_kubernetes_makes_of_services_is_no_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COATCHECK_SESSION_TTL", "900")
    settings, origins = read_settings({}, written(tmp_path, "port = 8005"))
    assert (settings.listen.port, settings.store.session_ttl) == (8005, 900)
    assert origins["port"].kind == "file"
    assert service_links() == sorted(SERVICE_LINKS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COATCHECK_PORT", "tcp://0.0.0.0:8000"),  # where to listen, in somebody's own words
        ("COATCHECK_PORT", "tcp://127.0.0.1:8000"),
        ("COATCHECK_PORT", "http://10.0.0.1:8000"),
        ("COATCHECK_PORT", "10.0.0.1:8000"),
        ("COATCHECK_PORT", "80a"),
        ("COATCHECK_SERVICE_HOST", "router.example"),
        ("COATCHECK_SERVICE_PORT", "http"),
        ("COATCHECK_PORT_8000_TCP_PROTO", "http"),
        ("COATCHECK_PORT_8000", "tcp://10.0.0.1:8000"),
        ("COATCHECK_SERVICE_HOSTS", "10.0.0.1"),
    ],
)
def test_a_mistake_that_looks_like_a_services_variable_stays_one(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    (problem,) = problems()
    assert name in problem


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("c.toml", "port = ", "correct the file"),
        ("c.yaml", "port: [", "correct the file"),
        ("c.yaml", "port: 1\nport: 2", "port is given twice"),
        ("c.toml", "max_stale = 1\nmax-stale = 1", "given twice"),
        ("c.yaml", "- port", "top level"),
        ("c.json", "{}", "TOML or YAML"),
        ("c.toml", None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    name: str, text: str | None, said: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    (problem,) = problems({}, file)
    assert str(file) in problem
    assert said in problem
    assert "\n" not in problem


def test_an_empty_yaml_file_says_nothing(tmp_path: Path) -> None:
    assert read_settings({}, written(tmp_path, "# nothing\n", "c.yaml")).settings.listen.port == 8000


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    assert shown_value(SecretStr("hush")) == "********"
    assert shown_value("etcd://me:hush@h:1,i:2/p") == "etcd://********@h:1,i:2/p"
    assert mask("see etcd://me:hu/sh@h:1/p and http://b:1") == "see etcd://********@h:1/p and http://b:1"
    for flags in ({"session_secret": "hush" * 20}, {"claims": "etc://me:hush@h/p"}, {"worker": "http://me:hush@h:1"}):
        assert "hush" not in " ".join(problems(flags))


def test_the_settings_survive_the_way_to_another_process_with_their_secrets() -> None:
    apart = ("worker_tls_verify", "hints", "uds", *(f"{name}_file" for name in SECRETS))  # do not go with others
    flags = {name: text for name, (text, _) in WRITTEN.items() if name not in apart}
    settings = read_settings(flags).settings
    assert Settings.load(settings.dump()) == settings
    assert Settings.load(settings.dump()).store.session_secret.get_secret_value() == "hush"


@pytest.mark.parametrize(("name", "text", "remedy"), BAD_SECRETS)
def test_a_bad_secret_is_explained_and_not_repeated(name: str, text: str, remedy: str) -> None:
    (line,) = problems({name: text})
    assert line.startswith(f"{SETTINGS[name].flag} ********: ")
    assert remedy in line


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_the_same_however_it_is_given_and_whatever_white_space_is_around_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def used() -> set[str]:
        settings = read_settings({}).settings
        return {settings.workers.key, settings.access.token, settings.store.secret} - {""}

    file = tmp_path / "secret"
    for text in ("hush", "hush\n", "hush\r\n", " \thush \n\n"):
        with monkeypatch.context() as patch:
            patch.setenv(SETTINGS[name].variable, text)
            assert used() == {"hush"}
        file.write_text(text)
        with monkeypatch.context() as patch:
            patch.setenv(SETTINGS[f"{name}_file"].variable, str(file))
            assert used() == {"hush"}
    given = problems({name: "hush", f"{name}_file": str(file)})
    assert len(given) == 1
    assert "given twice" in given[0]
    assert "hush" not in given[0]


def test_every_secret_has_a_file_form() -> None:
    assert set(SECRETS) == {"worker_api_key", "admin_token", "session_secret"}
    assert {f"{name}_file" for name in SECRETS} <= set(SETTINGS)


def test_all_processes_have_the_secrets_that_were_read_at_start(tmp_path: Path) -> None:
    files = {f"{name}_file": tmp_path / name for name in SECRETS}
    for file in files.values():
        file.write_text("hush\n")
    dumped = read_settings(dict(files)).settings.dump()
    for file in files.values():
        file.write_text("changed")
    later = Settings.load(dumped)
    assert (later.workers.key, later.access.token, later.store.secret) == ("hush",) * 3


@rows(
    ("text", "place", "url", "is_local"),
    [
        ("127.0.0.1:8001", ("127.0.0.1", 8001, None), "http://127.0.0.1:8001", True),
        ("[::1]:8001", ("::1", 8001, None), "http://[::1]:8001", True),
        ("localhost:0", ("localhost", 0, None), "http://localhost:0", True),
        ("0.0.0.0:8001", ("0.0.0.0", 8001, None), "http://0.0.0.0:8001", False),
        ("[::]:8001", ("::", 8001, None), "http://[::]:8001", False),
        ("192.0.2.1:8001", ("192.0.2.1", 8001, None), "http://192.0.2.1:8001", False),
        ("unix:/run/admin", ("", 0, Path("/run/admin")), "unix:/run/admin", True),
        ("unix:///run/admin", ("", 0, Path("/run/admin")), "unix:/run/admin", True),
    ],
)
def test_a_place_to_listen_is_read_and_known_to_be_local_or_not(
    text: str, place: tuple[str, int, Path | None], url: str, is_local: bool
) -> None:
    found = read_settings({"admin_listen": text}).settings.access.admin_place
    assert found == place
    assert (found.url, found.is_local) == (url, is_local)


def test_secrets_leave_in_clear_only_where_that_is_asked_for() -> None:
    settings = read_settings({"session_secret": "hush", "admin_token": "hush", "worker_api_key": "hush"}).settings
    assert "hush" not in f"{settings!r} {settings.model_dump_json()} {settings.model_dump()}"
    assert "hush" in settings.dump()


def test_claims_are_kept_in_the_users_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    assert read_settings({}).settings.store.claims == f"file://{tmp_path}/a%20folder/coatcheck/claims"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_settings({}).settings.store.claims == f"file://{tmp_path}/.local/state/coatcheck/claims"


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        read_settings({}).settings.listen.port = 1  # type: ignore[misc]


# -- while the router runs


def test_what_can_change_while_the_router_runs_does_and_the_rest_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, 'worker = "http://a:1"\nidle-timeout = 5')
    before = read_settings({"port": "1"}, file).settings
    written(tmp_path, 'worker = "http://b:1"\nidle-timeout = 6\nsession-ttl = 9\nport = 7')
    after, changed, fixed = read_settings({"port": "1"}, file).change(before)
    assert (after.workers.worker, after.limits.idle_timeout) == (("http://b:1",), 6.0)
    assert (after.store.session_ttl, after.listen.port) == (before.store.session_ttl, 1)
    assert (changed, fixed) == (["worker", "idle-timeout"], ["session-ttl"])
    # What is made anew at each reading is no change: replica, and the folder of the claims.
    same, changed, fixed = read_settings({"port": "1", "session_ttl": "1800"}, file).change(after)
    assert (same, changed, fixed) == (after, [], [])
    assert set(CHANGEABLE) <= set(SETTINGS)


def test_what_is_wrong_in_a_file_is_told_with_its_line(tmp_path: Path) -> None:
    for text, line in (
        ('# one\nport = "x"', 2),
        ("port = 1\n\nprot = 2", 3),
        ("port = 1\nhost = ", 2),
        ('host = "a"\nworker = ["http://a:1",', 2),
        ('host = "a"\nworker = ["http://a:1", "http://b:1"]\nclaims = "x:"', 3),
    ):
        said = problems({}, written(tmp_path, text))
        assert any(re.search(rf"\bline {line}\b", each) for each in said), (text, said)
    assert "line 2" in problems({}, written(tmp_path, "host: a\nport: x\n", "c.yaml"))[0]
