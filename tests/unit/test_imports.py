"""Which module may know which: the direction of imports that keeps the parts apart, read from the sources."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "backends", "mocker")
GROUND = {"app.errors", "app.logs", "app.metrics"}
"""Any house may stand on them; they know nothing of ours."""
HOUSES = ("app.http", "app.fleet", "app.sessions", "app.turn")
"""Each may know itself and what is before it."""
CONTROL = {
    "app.control",
    "app.admin",
    "app.management",
    "app.record",
    "app.replicas",
    "app.traffic",
    "app.events",
    "app.overview",
    "app.page",
    "app.exposition",
    "app.gathering",
    "app.gauges",
}
STARTERS = {
    "app.__main__",
    "app.cli",
    "app.config",
    "app.values",
    "app.sources",
    "app.options",
    "app.checking",
    "app.listening",
    "app.sockets",
    "app.completion",
    "app.remote",
    "app.serve",
    "app.up",
    "app.children",
    "app.demo",
    "app.demo.command",
    "app.demo.fleet",
    "app.demo.load",
    "app.demo.play",
    "app.demo.report",
    "app.register",
    "app.registering",
    "app.simulate",
    "app.reloading",
    "app.top",
}
"""They start processes and read settings; what they may know is not the data plane's concern."""
STORE_METHODS = {"create_or_get", "renew", "subscribe", "stamp", "check"}
"""Of ClaimStore; `get`, `close` and `aclose` are other things' words as well."""


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def nodes(name: str) -> list[ast.AST]:
    """All of a module's, itself first. Read by the first test that asks: whoever only collects tests asks nothing. And
    a test goes through all modules by itself: as many tests as modules would have each test process read them all."""
    return list(ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"), str(MODULES[name]))))


def body(name: str) -> list[ast.stmt]:
    module = nodes(name)[0]
    assert isinstance(module, ast.Module)
    return module.body


@cache
def imported(name: str) -> frozenset[str]:
    """Our modules that a module imports, wherever in it."""
    ours: set[str] = set()
    for node in nodes(name):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            base = node.module or ""
            names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names]
        else:
            continue
        ours |= {each for each in names if each.split(".")[0] in PACKAGES}
    return frozenset(ours)


def test_packages_keep_apart() -> None:
    forbidden = {"app": {"mocker"}, "backends": {"app", "mocker"}, "mocker": {"app", "backends"}}
    known = {(name, each) for name in MODULES for each in imported(name)}
    assert len(known) > 100
    assert not {
        (name, each)
        for name, each in known
        if each.split(".")[0] in forbidden[name.split(".")[0]]
        # `coatcheck mock` and `coatcheck up` start mock workers
        and not (name in STARTERS and each.split(".")[0] == "mocker")
    }


def house(name: str) -> str:
    return ".".join(name.split(".")[:2])


def houses_known(name: str) -> set[str]:
    return {house(each) for each in imported(name) if each.startswith("app")}


def test_the_ground_knows_nothing_of_ours() -> None:
    assert {name: imported(name) for name in GROUND} == dict.fromkeys(GROUND, frozenset())


@pytest.mark.parametrize("at", HOUSES)
def test_a_house_knows_only_what_is_below_it(at: str) -> None:
    below = {*HOUSES[: HOUSES.index(at) + 1], *GROUND}
    inside = [name for name in MODULES if house(name) == at]
    assert inside
    assert not {name: above for name in inside if (above := houses_known(name) - below)}


def test_the_control_plane_knows_only_what_is_below_it() -> None:
    inside = [name for name in MODULES if house(name) in CONTROL]
    assert len(inside) >= len(CONTROL)
    assert not {name: above for name in inside if (above := houses_known(name) - {*HOUSES, *GROUND, *CONTROL})}


def test_every_module_of_the_router_has_its_place() -> None:
    placed = {"app", "app.main", "app.making", *HOUSES, *GROUND, *CONTROL, *STARTERS}
    assert {house(name) for name in MODULES if name.split(".")[0] == "app"} <= placed


def test_no_circle() -> None:
    above: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        assert name not in above, " → ".join([*above[above.index(name) :], name])
        if name not in done:
            above.append(name)
            for each in imported(name):
                visit(each)
            above.pop()
            done.add(name)

    for name in MODULES:
        visit(name)


def test_stores_are_opened_in_one_place() -> None:
    calling = {
        name
        for name in MODULES
        if name.split(".")[0] != "backends"
        for node in nodes(name)
        if isinstance(node, ast.Name | ast.Attribute)
        and "open_store" in (getattr(node, "id", ""), getattr(node, "attr", ""))
    }
    assert calling == {"app.making"}


def test_only_sessions_call_a_stores_methods() -> None:
    calling = {
        (name, node.func.attr)
        for name in MODULES
        if name.split(".")[0] == "app" and name not in STARTERS
        for node in nodes(name)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STORE_METHODS
    }
    assert {house(name) for name, _ in calling} == {"app.sessions"}


def test_only_main_and_sessions_know_the_stores() -> None:
    knowing = {
        (house(name), each)
        for name in MODULES.keys() - STARTERS - {"app.main", "app.making"}
        for each in imported(name)
        if name.startswith("app") and each.startswith("backends")
    }
    assert knowing == {
        ("app.fleet", "backends.base"),
        ("app.fleet", "backends.registry"),
        ("app.sessions", "backends.base"),
        ("app.sessions", "backends.singleflight"),
        ("app.record", "backends.registry"),
        ("app.replicas", "backends.base"),
        ("app.replicas", "backends.registry"),
    }


def test_nothing_happens_at_import() -> None:
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
    running = []
    at_top = [(name, node) for name in MODULES if not name.endswith("__main__") for node in body(name)]
    for name, node in at_top:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        if not isinstance(node, allowed):
            running.append(f"{name}:{node.lineno} runs when it is imported: {ast.unparse(node)[:80]}")
    assert not running


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def defined(node: ast.AST) -> set[str]:
    """Names that a node gives to something of ours."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
            return {name}
        case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
            return {slot.value for slot in slots if isinstance(slot, ast.Constant) and isinstance(slot.value, str)}
    return set()


DOCUMENTED = {"_replace", "_asdict", "_fields"}
"""Of named tuples: the underscore keeps them apart from the fields."""


def test_no_private_name_of_a_dependency_is_used() -> None:
    """Nothing of them is promised. What is private is looked up, but on modules, only under names that are ours."""
    ours = frozenset(each for name in MODULES for node in nodes(name) for each in defined(node)) | DOCUMENTED
    assert not {name: foreign for name in MODULES if (foreign := foreign_names(name, ours))}


def foreign_names(name: str, ours: frozenset[str]) -> set[str]:
    foreign: set[str] = set()
    modules: set[str] = set()
    for node in nodes(name):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in PACKAGES:
            foreign |= {alias.name for alias in node.names if private(alias.name)}
            foreign |= {node.module or "" for part in (node.module or "").split(".") if private(part)} - {"__future__"}
        elif isinstance(node, ast.Import):
            modules |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    for node in nodes(name):
        if isinstance(node, ast.Attribute) and private(node.attr):
            is_module = isinstance(node.value, ast.Name) and node.value.id in modules
            if is_module or node.attr not in ours:
                foreign.add(ast.unparse(node))
    return foreign


def test_only_uvicorns_server_is_inherited_from() -> None:
    """And nothing of it is overridden that begins with an underscore."""
    inheriting = {}
    for name in MODULES:
        uvicorns = {
            alias.asname or alias.name
            for node in nodes(name)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("uvicorn", "httptools")
            for alias in node.names
        }
        for node in nodes(name):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base) for base in node.bases]
                if any(base in uvicorns or base.split(".")[0] in ("uvicorn", "httptools") for base in bases):
                    inheriting[name] = bases
                    names = {
                        each.name for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                    }
                    assert {each for each in names if private(each)} == set()
    assert inheriting == {"app.serve": ["uvicorn.Server"], "mocker.cli": ["uvicorn.Server"]}


@pytest.mark.parametrize("word", ["utils", "common", "helpers", "core", "misc"])
def test_no_module_without_a_subject(word: str) -> None:
    assert not [name for name in MODULES if word in name.split(".")]
