"""The files of `deploy/` that no test runs: manifests for Kubernetes by its own schemas, the unit file by systemd, and
every metric that rules and board name against a router's own. docker-compose.yml and the load balancers: e2e/."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app import exposition
from app.config import SETTINGS, Settings
from app.main import create_app
from app.metrics import Counter, Histogram
from app.sources import read_settings

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = {
    file.name: list(yaml.safe_load_all(file.read_text()))
    for file in (DEPLOY / "kubernetes").glob("*.yaml")
    if file.name != "kustomization.yaml"
}
OBJECTS = [each for file in MANIFESTS.values() for each in file]
FOREIGN = {"ServiceMonitor"}
"""Kinds of others, which Kubernetes has no schema of."""
RULES = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())
BOARD = json.loads((DEPLOY / "grafana" / "coatcheck.json").read_text())


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in OBJECTS if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found  # type: ignore[no-any-return]


def containers(kind: str, name: str) -> list[dict[str, Any]]:
    return one(kind, name)["spec"]["template"]["spec"]["containers"]  # type: ignore[no-any-return]


# --- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(OBJECTS)))
def test_a_manifest_is_what_kubernetes_takes(number: int) -> None:
    """By the schemas of its API, where nothing unknown may stand."""
    each = OBJECTS[number]
    if each["kind"] not in FOREIGN:
        kubernetes_validate.validate(each, "1.30", strict=True)


def test_a_misspelt_manifest_is_not() -> None:
    each = json.loads(json.dumps(one("Deployment", "coatcheck")))
    each["spec"]["template"]["spec"]["enableServiceLink"] = False
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(each, "1.30", strict=True)


def test_all_files_are_applied_but_for_what_needs_an_operator() -> None:
    said = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    assert {*said["resources"], "monitoring.yaml"} == set(MANIFESTS)
    assert {image["name"] for image in said["images"]} == {"coatcheck"}


def router_settings() -> Settings:
    (router,) = containers("Deployment", "coatcheck")
    command, *words = router["args"]
    assert command == "serve"
    flags: dict[str, Any] = {}
    for word in words:
        name, _, value = word.removeprefix("--").replace("$(NAMESPACE)", "coatcheck").partition("=")
        name = name.replace("-", "_")
        if name.endswith("_file"):  # what is mounted there
            secret = one("Deployment", "coatcheck")["spec"]["template"]["spec"]["volumes"][0]["secret"]["secretName"]
            made = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["secretGenerator"]
            (mount,) = [each["mountPath"] for each in router["volumeMounts"] if each["name"] == "secrets"]
            assert value.removeprefix(f"{mount}/") in {s["name"]: s["files"] for s in made}[secret]
            continue
        flags[name] = [value] if SETTINGS[name].field.annotation == tuple[str, ...] else value
    return read_settings(flags).settings


def test_the_router_takes_its_options_and_gets_the_time_that_it_drains() -> None:
    settings = router_settings()
    pod = one("Deployment", "coatcheck")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings.process.drain_delay + settings.process.drain_timeout
    assert pod["enableServiceLinks"] is False
    (router,) = pod["containers"]
    ports = {each["name"]: each["containerPort"] for each in router["ports"]}
    peers = settings.peer_place
    assert peers is not None
    assert ports == {"http": settings.listen.port, "peers": peers.port}
    probes = {kind: router[f"{kind}Probe"]["httpGet"] for kind in ("readiness", "liveness", "startup")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "readiness": "/ready", "liveness": "/health", "startup": "/health",
    }  # fmt: skip
    assert {probe["port"] for probe in probes.values()} == {"http"}
    # It fails for at least as long as the balancers before it take to hear of it.
    noticed = router["readinessProbe"]["periodSeconds"] * router["readinessProbe"]["failureThreshold"]
    assert settings.process.drain_delay >= 5 * noticed


def test_the_router_finds_its_workers_and_its_store_where_they_are() -> None:
    settings = router_settings()
    (source,) = settings.workers.workers_from
    vllm = one("Service", "vllm")
    assert source == f"dns+srv://_{vllm['spec']['ports'][0]['name']}._tcp.vllm.coatcheck.svc.cluster.local"
    assert vllm["spec"]["clusterIP"] == "None", "its records name the pods"
    assert one("StatefulSet", "vllm")["spec"]["serviceName"] == "vllm", "the pods have names of their own"
    etcd, service = one("StatefulSet", "coatcheck-etcd")["spec"], one("Service", "coatcheck-etcd")
    names = [f"coatcheck-etcd-{number}.{etcd['serviceName']}" for number in range(etcd["replicas"])]
    port = {each["name"]: each["port"] for each in service["spec"]["ports"]}["client"]
    assert settings.store.places == [(name, port) for name in names]
    (command,) = [word for word in etcd["template"]["spec"]["containers"][0]["command"] if "initial-cluster=" in word]
    assert [each.partition("=")[0] for each in command.partition("=")[2].split(",")] == [
        name.partition(".")[0] for name in names
    ]


def test_selectors_select_and_named_ports_exist() -> None:
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]
        for each in OBJECTS
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    for each in OBJECTS:
        spec = each["spec"]
        selector = spec.get("podSelector") or spec.get("selector") or {}
        labels = selector.get("matchLabels", selector)
        if each["kind"] == "ServiceMonitor":
            services = [s for s in OBJECTS if s["kind"] == "Service" and s["metadata"]["labels"] == labels]
            (service,) = services
            assert {end["port"] for end in spec["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}
            continue
        selected = [pod for pod in pods.values() if labels.items() <= pod["metadata"]["labels"].items()]
        assert len(selected) == 1, each["metadata"]["name"]
        named = {port["name"] for c in selected[0]["spec"]["containers"] for port in c["ports"]}
        used = [port.get("targetPort") for port in spec.get("ports", ())]
        used += [port["port"] for rule in spec.get("ingress", ()) for port in rule["ports"]]
        assert set(used) <= named, each["metadata"]["name"]


# --- systemd ---------------------------------------------------------------------------------------------------------

UNIT = DEPLOY / "systemd" / "coatcheck.service"


def test_the_unit_file_is_one(tmp_path: Path) -> None:
    parser = configparser.ConfigParser(strict=True, interpolation=None, delimiters="=", comment_prefixes="#")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT)
    assert parser.sections() == ["Unit", "Service", "Install"]
    service = parser["Service"]
    assert service["ExecReload"].endswith("-HUP $MAINPID")
    defaults = SETTINGS["drain_delay"].field.default + SETTINGS["drain_timeout"].field.default
    assert int(service["TimeoutStopSec"]) > defaults
    # What is refused at start ends with this code, and is not tried again.
    assert service["RestartPreventExitStatus"] == "2"
    verify = shutil.which("systemd-analyze")
    if verify is None:
        return  # what can be said without systemd is said
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/local/bin/coatcheck", shutil.which("true") or "/bin/true"))
    done = subprocess.run([verify, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60)
    own = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, own) == (0, [])


# --- rules and board -------------------------------------------------------------------------------------------------


def expressions() -> list[str]:
    told = [rule["expr"] for group in RULES["groups"] for rule in group["rules"]]
    shown = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    asked = [each["query"]["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"]
    return [*told, *shown, *asked, *(each["expr"] for each in BOARD["annotations"]["list"])]


async def metrics() -> dict[str, dict[str, tuple[str, ...]]]:
    """Every series of a running router by its name: its labels, and the values that each can have; none: any."""
    app = create_app(Settings.flat(worker=("http://127.0.0.1:9,name=w,dp=1",), claims="memory://", probe_path="off"))
    async with app.router.lifespan_context(app):
        text = exposition.text(app.metrics.families()).decode()
    known = {m.name: dict(m.labels) for m in vars(app.metrics).values() if isinstance(m, Counter | Histogram)}
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for family in text_string_to_metric_families(text):
        seen: dict[str, set[str]] = {}
        for sample in family.samples:
            for label, value in sample.labels.items():
                seen.setdefault(label, set()).add(value)
        # Gauges show what there is now: their values are words of ours only where these are all of them.
        labels = {label: tuple(values) if label == "state" else () for label, values in seen.items()}
        labels = {name: tuple(values) for name, values in known.get(family.name, labels).items()}
        if family.type == "histogram":
            for end in ("_bucket", "_sum", "_count"):
                found[family.name + end] = labels | ({"le": ()} if end == "_bucket" else {})
        else:
            found[family.name + "_total" * (family.type == "counter")] = labels
    return found


_SCRAPED = {"job": (), "instance": ()}
"""Prometheus adds these."""


async def test_every_metric_and_label_that_rules_and_board_name_exists() -> None:
    known = {name: labels | _SCRAPED for name, labels in (await metrics()).items()} | {"up": _SCRAPED}
    named = set()
    for text in expressions():
        used = re.findall(r"\b((?:coatcheck|process)_\w+|up)\b(?:\{([^}]*)\})?", text)
        assert used, text
        labels_there: set[str] = set()
        for name, matchers in used:
            if name == "process_resident_memory_bytes" or name in known:
                named.add(name)
            assert name in known, f"{name}: {text}"
            labels_there |= set(known[name])
            for label, _operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers):
                assert label in known[name], f"{name} has no label {label}: {text}"
                values = known[name][label]
                for word in value.split("|") if values else ():
                    assert word in values, f"{label} of {name} is never {word}: {text}"
        for grouped in re.findall(r"\bby \(([^)]*)\)", text):
            assert {label.strip() for label in grouped.split(",")} <= labels_there, text
    assert len(named) > 20


def test_legends_and_annotations_use_labels_that_are_there() -> None:
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            kept = re.search(r"\bby \(([^)]*)\)", target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert kept is None or label in kept[1], panel["title"]
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert {"summary", "description"} == set(rule["annotations"])
            assert rule["labels"]["severity"] in ("critical", "warning")
            kept = re.search(r"\bby \(([^)]*)\)", rule["expr"])
            for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
                assert kept is None or label in kept[1], rule["alert"]


def test_the_panels_of_the_board_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_each_figure_of_the_board_says_itself_when_it_is_good_or_bad() -> None:
    """Grafana's own word is green, and red from 80 on: the wrong way round for workers that are up."""
    for panel in BOARD["panels"]:
        if panel["type"] == "stat":
            colours = {step["color"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]}
            assert colours == {"text"} or ("green" in colours and len(colours) > 1), panel["title"]
            assert panel["description"], panel["title"]
