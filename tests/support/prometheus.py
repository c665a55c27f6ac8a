"""Debian's Prometheus with the configuration and the rules of `deploy/`: only the addresses are replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.support.wire import ask

BINARY = shutil.which("prometheus")
_DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
_BOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "coatcheck.json"


def prometheus_command(folder: Path, port: int, replicas: Sequence[int], workers: Sequence[int]) -> list[str]:
    """Write its files for what listens at those ports, and answer how it is started."""
    assert BINARY is not None
    text = (_DEPLOY / "prometheus.yaml").read_text()
    for name, inside, ports in (("replica", 8000, replicas), ("worker", 9001, workers)):
        for number, outside in enumerate(ports, 1):
            text = text.replace(f"{name}-{number}:{inside}", f"127.0.0.1:{outside}")
    (folder / "prometheus.yaml").write_text(text)
    shutil.copy(_DEPLOY / "alerts.yaml", folder)
    return [
        BINARY,
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]


async def firing(url: str) -> list[dict[str, str]]:
    """The labels of each alert that somebody is woken for now."""
    alerts = (await _get(url, "/api/v1/alerts"))["alerts"]
    return [alert["labels"] for alert in alerts if alert["state"] == "firing"]


async def query(url: str, expression: str) -> dict[str, float]:
    """Each value by its labels, as JSON with sorted names."""
    found = await _get(url, f"/api/v1/query?query={quote(expression)}")
    return {json.dumps(each["metric"], sort_keys=True): float(each["value"][1]) for each in found["result"]}


def board() -> list[tuple[str, str]]:
    """The board's panels, each with an expression of its, as Grafana would send it: all replicas, over a minute."""
    variables = {"$job": "coatcheck", "$replica": ".*", "$__rate_interval": "1m", "$__range": "1h"}
    found = []
    for panel in json.loads(_BOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in variables.items():
                expression = expression.replace(name, value)
            found.append((panel["title"], expression))
    return found


async def _get(url: str, target: str) -> Any:
    answer = await ask(url, target=target)
    assert answer.status == 200, answer.body
    return answer.json["data"]
