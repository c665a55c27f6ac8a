"""What is written says what the code does: tables are compared with it, links lead somewhere, and commands exist. The
commands of the README and of `docs/` that are marked `bash` or `python` are run by `tests/e2e/test_up.py`.
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app import cli, exposition, options
from app.config import CHANGEABLE, SETTINGS, Settings
from app.errors import TABLE
from app.main import Router, create_app
from app.metrics import AFFINITY_OUTCOMES, CLOSE_OUTCOMES, RETRY_REASONS, Counter, Histogram, Values
from app.sessions import identity
from app.sessions.affinity import _KEPT_STATUSES
from app.sessions.tenants import ADMIN_TOKEN, CREDENTIALS
from app.turn.access import Told
from app.turn.request import DRY_RUN
from app.turn.retry import Next
from backends.base import CloseOutcome
from mocker.faults import Fault, Mode
from tests.proxy import test_semantics_end, test_semantics_identity, test_semantics_placement

ROOT = Path(__file__).parents[2]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
LINKED = PAGES | {"benchmarks/README.md": (ROOT / "benchmarks" / "README.md").read_text()}
"""The pages that others lead to."""
README, CONTRIBUTING = PAGES["README.md"], PAGES["CONTRIBUTING.md"]
SESSIONS, OPTIONS, REFERENCE = PAGES["docs/sessions.md"], PAGES["docs/options.md"], PAGES["docs/reference.md"]


def section(page: str, title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section {title!r}"
    return found[1]


def rows(text: str, head: str) -> list[list[str]]:
    """The cells of the first table of a text whose head begins with that cell."""
    lines = text[text.index(f"| {head} |") :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def router() -> Router:
    """One that has not started, with a worker that has a rank."""
    return create_app(Settings.flat(worker=("http://127.0.0.1:9,name=w,dp=1",), claims="memory://"))


def blocks(page: str, *languages: str) -> list[str]:
    return [text for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S) if language in languages]


# --- the front door --------------------------------------------------------------------------------------------------


def test_the_readme_is_a_front_door() -> None:
    assert len(README.encode()) <= 12_000, "what is not needed to begin with belongs into docs/"
    for page in PAGES:
        assert page == "README.md" or f"]({page}" in README, f"the README does not lead to {page}"


def test_what_can_be_run_is_marked_so_that_it_is_run() -> None:
    """`tests/e2e/test_up.py` runs the blocks that are marked `bash` or `python`."""
    for name, page in PAGES.items():
        for text in blocks(page, "sh"):
            assert "curl " not in text, f"{name}: mark this `bash`: {text}"
    assert len(blocks(README, "bash", "python")) == 5


def test_the_make_targets_exist() -> None:
    rules = re.findall(r"^(\w[\w -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    for name, page in PAGES.items():
        named = set(re.findall(r"^make (\w[\w-]*)", "\n".join(blocks(page, "sh")), re.M))
        assert (named | set(re.findall(r"`make (\w[\w-]*)", page))) <= targets, name


def commands() -> list[list[str]]:
    """Each `coatcheck ...` of the pages, in words; of those within a sentence the ones that have flags."""
    text = "\n".join(itertools.chain(*(blocks(page, "sh", "bash") for page in PAGES.values()))).replace("\\\n", " ")
    said = re.findall(
        r"`(coatcheck \w+ [^`]*--[^`]*)`",
        " ".join(re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S) for page in PAGES.values()),
    )
    lines = (line.partition("#")[0].partition(">>")[0].split() for line in [*text.splitlines(), *said])
    return [words[1:] for words in lines if words and words[0].rpartition("/")[2] == "coatcheck"]


def test_commands_and_their_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """One test: what a command says of itself is the same for all that the pages say of it."""
    said = commands()
    assert len(said) > 20
    known: dict[str, set[str]] = {}
    for name in {words[0] for words in said}:
        with pytest.raises(SystemExit) as end:
            cli.main([name, "--help"])
        assert not end.value.code, name
        known[name] = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    unknown = [
        (" ".join(words), flags)
        for words in said
        if (flags := {word for word in words if word.startswith("--")} - known[words[0]])
    ]
    assert not unknown


def anchors(page: str) -> set[str]:
    titles = re.findall(r"^##+ (.*)$", re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}


@pytest.mark.parametrize("name", LINKED)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", LINKED[name]):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.exists(), f"{name} leads to {target}, which is not there"
        if anchor:
            assert anchor in anchors(path.read_text()), f"{name} leads to {target}, and there is no such title"


def test_the_changelog_and_the_license_are_whole() -> None:
    assert "## Unreleased" in PAGES["CHANGELOG.md"]
    license_text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in license_text
    assert "END OF TERMS AND CONDITIONS" in license_text


# --- the reference ---------------------------------------------------------------------------------------------------


def test_the_options_are_those_of_the_settings() -> None:
    between = OPTIONS.partition("<!-- options: begin -->\n")[2].partition("\n<!-- options: end -->")[0]
    assert between == options.options_table(), "put the output of app.options.options_table() there"


def test_the_errors_are_those_of_the_table_that_something_raises() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "app").rglob("*.py"))
    said = {code.strip("`"): (status, retry) for code, status, retry, _ in rows(section(REFERENCE, "Errors"), "Code")}
    told = {None: "–", False: "no", True: "yes"}
    assert said == {
        code: (
            str(answer.status),
            told[answer.retry] + (f", after {answer.retry_after} s" if answer.retry_after is not None else ""),
        )
        for code, answer in TABLE.items()
        if re.search(rf'(TurnError\(\s*|code = |else )"{code}"', sources)
    }


def spoken(labels: Values) -> str:
    """A metric's labels with their values, as the table says them."""
    each = (f"`{name}`" + ": " * bool(values) + ", ".join(f"`{v}`" for v in values) for name, values in labels.items())
    return "; ".join(each) or "–"


async def test_the_metrics_and_their_labels_are_those_of_a_running_router() -> None:
    app = router()
    async with app.router.lifespan_context(app):
        text = exposition.text(app.metrics.families()).decode()
    labels = {
        each.name: dict(each.labels) for each in vars(app.metrics).values() if isinstance(each, Counter | Histogram)
    }
    expected = set()
    for family in text_string_to_metric_families(text):
        if family.name.startswith("coatcheck_"):
            seen: Values = {name: () for sample in family.samples for name in sample.labels if name != "le"}
            total = "_total" if family.type == "counter" else ""
            with_values = spoken(labels.get(family.name, seen))
            expected.add((f"`{family.name}{total}`", family.type, with_values, family.documentation))
    assert {tuple(cells) for cells in rows(section(REFERENCE, "Metrics"), "Metric")} == expected


async def test_the_gauges_that_do_not_add_up_are_named() -> None:
    app = router()
    async with app.router.lifespan_context(app):
        families = app.metrics.families()
    text = " ".join(section(REFERENCE, "Metrics").split())
    added, largest = text.partition("are added up, but for ")[2].partition(", which are the largest of theirs, and ")[
        ::2
    ]
    smallest = largest.partition(", which are the smallest")[0]
    for merge, said in (("max", added), ("min", smallest)):
        assert set(re.findall(r"`(\w+)`", said)) == {each.name for each in families if each.merge == merge}


def test_the_values_of_labels_are_those_that_the_code_counts() -> None:
    """Whatever a line of code counts by a word of its own is a value that the metric knows."""
    metrics = router().metrics
    sources = "".join(file.read_text() for file in (ROOT / "app").rglob("*.py"))
    counted = set()
    for name, counter in vars(metrics).items():
        if isinstance(counter, Counter) and counter.labels:
            values = set(itertools.chain(*counter.labels.values()))
            for call in re.findall(rf"\b{name}\.inc\(([^()]*)\)", sources):
                said = set(re.findall(r'"(\w+)"', call))
                assert said <= values, f"{name}: {said}"
                counted |= {name} if said else set()
    assert counted >= {"connects", "hints_ignored"}
    assert {then.value for then in Next} - {""} == set(RETRY_REASONS)
    assert {outcome.value for outcome in CloseOutcome} | {"expired"} == set(CLOSE_OUTCOMES)


def test_the_events_of_the_log_are_those_that_the_code_tells_of() -> None:
    told = {cells[0].strip("`"): cells[1] for cells in rows(section(REFERENCE, "Log"), "Event")}
    found: dict[str, set[str]] = {}
    for file in (ROOT / "app").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("event", "logs.event"):
                (kind,) = node.args
                assert isinstance(kind, ast.Constant)
                assert isinstance(kind.value, str)
                named = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                more = {*Told.__struct_fields__} if len(named) < len(node.keywords) else set()
                found.setdefault(kind.value, set()).update(name.rstrip("_") for name in named | more)
    assert {kind: set(re.findall(r"`(\w+)`", fields)) for kind, fields in told.items()} == found


def test_the_outcomes_of_turns_are_explained() -> None:
    metrics = router().metrics
    text = section(REFERENCE, "Metrics")
    assert {cells[0].strip("`") for cells in rows(text, "Outcome")} == set(metrics.turns.labels["outcome"])
    known = {f"{m.name}_total": m.labels for m in vars(metrics).values() if isinstance(m, Counter)}
    known |= {m.name: m.labels for m in vars(metrics).values() if isinstance(m, Histogram)}
    values: dict[str, set[str]] = {}
    metric = ""
    for name, value, _ in rows(text[text.index("What the other labels say") :], "Metric"):
        metric = name.strip("`") or metric  # the name stands in the first of its rows
        values.setdefault(metric, set()).add(value.strip("`"))
    for metric, said in values.items():
        assert any(said == set(each) for each in known[metric].values()), metric


def test_the_headers_are_those_that_are_read() -> None:
    words = {word.lower() for word in re.findall(r"\w+(?:-\w+)*", REFERENCE + SESSIONS)}
    read = identity.Identifier().wanted | identity.HINTS | CREDENTIALS | {ADMIN_TOKEN, DRY_RUN}
    for header in read:
        assert header.decode() in words
    for outcome in AFFINITY_OUTCOMES:
        assert f"`{outcome}`" in section(REFERENCE, "Headers")


def test_the_faults_of_mock_workers_are_those_that_can_be_ordered() -> None:
    told = rows(section(REFERENCE, "Mock workers"), "Fault")
    assert tuple(cells[0].strip("`") for cells in told) == get_args(Mode)
    for _, text in told:
        named = set(re.findall(r"`([a-z]+_[a-z]+)`", text))
        assert named <= {field.name for field in msgspec.structs.fields(Fault)}


def test_the_settings_that_can_change_while_turns_run_are_named() -> None:
    text = section(PAGES["docs/operating.md"], "Changing settings while turns run")
    told = re.findall(r"`([a-z-]+)`", text.partition("What can change is ")[2].partition("; turns that run")[0])
    assert sorted(told) == sorted(SETTINGS[name].key for name in CHANGEABLE)


# --- what a session is -----------------------------------------------------------------------------------------------


def test_the_sources_of_ids_are_the_settings_default() -> None:
    assert tuple(cells[0].strip("`") for cells in rows(SESSIONS, "Source")) == identity.DEFAULT_SOURCES
    for field in identity.BODY_FIELDS:
        assert f"`{field}`" in SESSIONS


def test_what_a_session_is_is_what_the_tests_show() -> None:
    bullets = re.findall(r"^- (.+(?:\n  .+)*)", SESSIONS, re.MULTILINE)
    told = [" ".join(bullet.split()) for bullet in bullets]
    shown = [
        sentence
        for table in (test_semantics_identity, test_semantics_placement, test_semantics_end)
        for sentence in table.says
    ]
    assert told == shown


def test_the_statuses_that_keep_a_claim_are_those_of_the_proxy() -> None:
    assert f"After {', '.join(map(str, sorted(_KEPT_STATUSES)))}, 5xx or no answer" in SESSIONS


# --- the map of the code ---------------------------------------------------------------------------------------------


def test_every_module_is_on_the_map() -> None:
    on_map = section(CONTRIBUTING, "The map")
    houses = dict(re.findall(r"^\| `([\w/]+/)` \|(.*)\|$", on_map, re.MULTILINE))
    missing = []
    for package in ("app", "backends", "mocker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            house = f"{path.parent.relative_to(ROOT)}/"
            if path.stem not in ("__init__", "__main__") and f"`{path.stem}`" not in houses.get(house, ""):
                missing.append(str(path.relative_to(ROOT)))
    assert not missing, f"CONTRIBUTING.md's map has no word of {', '.join(missing)}"


def test_the_map_names_nothing_else() -> None:
    for house, text in re.findall(r"^\| `([\w/]+/)` \|(.*)\|$", section(CONTRIBUTING, "The map"), re.MULTILINE):
        assert (ROOT / house).is_dir(), house
        if house.split("/")[0] in ("app", "backends", "mocker"):
            gone = [name for name in re.findall(r"`(\w+)`", text) if not (ROOT / house / f"{name}.py").is_file()]
            assert not gone, f"CONTRIBUTING.md's map names what is not in {house}: {', '.join(gone)}"


def test_what_is_looked_for_is_where_it_is_said_to_be() -> None:
    found = dict(rows(section(CONTRIBUTING, "Where is ...?"), "Looking for"))
    wanted = (
        "retry law, final close, header rules, rank header, batching, file listing, tenants, drain, dry run, metrics"
    )
    for what in wanted.split(", "):
        assert any(what in each.lower() for each in found), f"CONTRIBUTING.md does not say where the {what} is"
    for what, where in found.items():
        files = re.findall(r"`([\w/]+\.py)`", where)
        assert files, f"{what}: no file is named"
        for file in files:
            assert (ROOT / file).is_file(), f"{what}: {file} is not there"
        named = re.findall(r"`([A-Za-z_]\w*)`", where)
        text = "".join((ROOT / file).read_text() for file in files)
        for name in named:
            assert re.search(rf"\b(def|class) {name}\b|^{name}\b", text, re.M), f"{what}: {files} has no {name}"


def test_every_word_is_explained() -> None:
    words = set(re.findall(r"\*\*([\w -]+)\*\*", section(CONTRIBUTING, "Words")))
    assert words >= {"worker", "rank", "target", "replica", "session", "claim", "store", "revision", "turn", "final"}
    assert words >= {"attempt", "in-flight", "drain", "exchange", "answer", "binding", "entry", "decision", "hint"}
    assert words >= {"proposal", "proof", "stamp", "bucket", "batch"}
