"""Which module may know which: the direction of imports that keeps the parts apart, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "backends", "mocker")
LEAVES = {"app.headers", "app.sse", "app.errors", "app.metrics", "app.driven", "app.direct"}
STARTERS = {"app.__main__", "app.cli", "app.serve", "app.up", "app.children"}
"""They start processes and read settings; what they may know is not the data plane's concern."""

ALLOWED: dict[str, set[str]] = {
    # module → what of ours it may import besides leaves
    "app.identity": set(),
    "app.upstream": set(),
    "app.asgi": set(),
    "app.workers": {"app.upstream"},
    "app.policies": {"app.workers"},
    "app.affinity": {"app.policies", "app.workers", "backends.base"},
    "app.tenants": set(),
    "app.proxy": {
        "app.affinity",
        "app.asgi",
        "app.identity",
        "app.policies",
        "app.tenants",
        "app.upstream",
        "app.workers",
    },
    "app.server": {"app.proxy"},
    "app.api": {"app.tenants", "app.workers"},
    "app.admin": {"app.affinity", "app.identity", "app.tenants", "app.workers"},
    "app.config": {"app.identity", "app.policies", "app.tenants", "app.workers"},
    "app.remote": {"app.config"},
    "app.discovery": {"app.workers", "app.upstream"},
    "app.children": set(),
}
STORE_METHODS = {"create_or_get", "renew", "subscribe", "stamp", "check"}
"""Of ClaimStore; `get`, `close` and `aclose` are other things' words as well."""


def modules() -> dict[str, ast.Module]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = ast.parse(path.read_text(encoding="utf-8"), str(path))
    return found


MODULES = modules()


def imported(name: str) -> set[str]:
    """Our modules that a module imports, wherever in it."""
    ours: set[str] = set()
    for node in ast.walk(MODULES[name]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        else:
            continue
        ours |= {each for each in names if each.split(".")[0] in PACKAGES}
    return ours


@pytest.mark.parametrize("name", MODULES)
def test_packages_keep_apart(name: str) -> None:
    package = name.split(".")[0]
    forbidden = {"app": {"mocker"}, "backends": {"app", "mocker"}, "mocker": {"app", "backends"}}[package]
    if name in STARTERS:
        forbidden -= {"mocker"}  # `coatcheck mock` and `coatcheck up` start mock workers
    assert not {each for each in imported(name) if each.split(".")[0] in forbidden}


@pytest.mark.parametrize("name", sorted(LEAVES & MODULES.keys()))
def test_leaves_import_only_leaves(name: str) -> None:
    assert imported(name) <= LEAVES


@pytest.mark.parametrize("name", sorted(ALLOWED.keys() & MODULES.keys()))
def test_modules_import_only_what_is_below_them(name: str) -> None:
    assert imported(name) - LEAVES <= ALLOWED[name]


def test_every_module_of_the_router_has_its_rule() -> None:
    free = {"app", "app.main"} | STARTERS | LEAVES
    assert {name for name in MODULES if name.split(".")[0] == "app"} <= free | ALLOWED.keys()


def test_only_main_opens_stores() -> None:
    calling = {
        name
        for name, module in MODULES.items()
        if name.split(".")[0] != "backends"
        for node in ast.walk(module)
        if isinstance(node, ast.Name | ast.Attribute)
        and "open_store" in (getattr(node, "id", ""), getattr(node, "attr", ""))
    }
    assert calling == {"app.main"}


def test_only_the_affinity_calls_a_stores_methods() -> None:
    calling = {
        (name, node.func.attr)
        for name, module in MODULES.items()
        if name.split(".")[0] == "app" and name not in STARTERS
        for node in ast.walk(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STORE_METHODS
    }
    assert {name for name, _ in calling} == {"app.affinity"}


def test_only_main_and_the_affinity_know_the_stores() -> None:
    knowing = {
        name for name in MODULES if name.startswith("app") and any(i.startswith("backends") for i in imported(name))
    }
    assert knowing - STARTERS == {"app.main", "app.affinity"}


@pytest.mark.parametrize("name", MODULES)
def test_nothing_happens_at_import(name: str) -> None:
    """Modules define; they call nothing but what makes a constant, a type or a logger."""
    allowed = (
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Import,
        ast.ImportFrom,
        ast.Assign,
        ast.AnnAssign,
    )
    for node in MODULES[name].body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        if name.endswith("__main__"):
            continue
        assert isinstance(node, allowed), f"{name}:{node.lineno} runs when it is imported: {ast.unparse(node)[:80]}"


@pytest.mark.parametrize("word", ["utils", "common", "helpers", "core", "misc"])
def test_no_module_without_a_subject(word: str) -> None:
    assert not [name for name in MODULES if word in name.split(".")]
