"""The README says what the code does: its tables are compared, and `tests/e2e/test_up.py` runs its commands."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from app import options
from app.config import Settings
from app.errors import TABLE
from app.main import create_app
from app.metrics import AFFINITY_OUTCOMES
from app.sessions import identity
from app.sessions.tenants import ADMIN_TOKEN, CREDENTIALS
from app.turn.turn import _KEPT_STATUSES, DRY_RUN
from tests.proxy import test_semantics_end, test_semantics_identity, test_semantics_placement

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def rows(section: str) -> list[list[str]]:
    """The cells of all tables of a section, without heads."""
    text = README.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in found if cells[0].strip(" `")[:3] != "---"]


def test_the_options_are_those_of_the_settings() -> None:
    between = README.partition("<!-- options: begin -->\n")[2].partition("\n<!-- options: end -->")[0]
    assert between == options.options_table(), "put the output of app.options.options_table() there"


def test_the_errors_are_those_of_the_table_that_something_raises() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "app").rglob("*.py"))
    said = {code.strip("`"): (status, retry) for code, status, retry, _ in rows("Errors")[1:]}
    told = {None: "–", False: "no", True: "yes"}
    assert said == {
        code: (
            str(answer.status),
            told[answer.retry] + (f", after {answer.retry_after} s" if answer.retry_after is not None else ""),
        )
        for code, answer in TABLE.items()
        if re.search(rf'(TurnError\(\s*|code = |else )"{code}"', sources)
    }


async def test_the_metrics_are_those_of_a_running_router() -> None:
    app = create_app(Settings.flat(worker=("http://127.0.0.1:9",), claims="memory://"))
    async with app.router.lifespan_context(app):
        text = app.metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    expected = {
        (f"`{name}_total`" if family.type == "counter" else f"`{name}`", family.type, family.documentation)
        for name, family in families.items()
        if name.startswith("coatcheck_")
    }
    assert {tuple(cells) for cells in rows("Metrics")[1:]} == expected


def test_the_headers_are_those_that_are_read() -> None:
    words = {word.lower() for word in re.findall(r"\w+(?:-\w+)*", README)}
    read = identity.Identifier().wanted | identity.HINTS | CREDENTIALS | {ADMIN_TOKEN, DRY_RUN}
    for header in read:
        assert header.decode() in words
    for outcome in AFFINITY_OUTCOMES:
        assert outcome in words


def test_the_sources_of_ids_are_the_settings_default() -> None:
    assert tuple(cells[0].strip("`") for cells in rows("What a session is")[1:]) == identity.DEFAULT_SOURCES
    section = README.partition("\n## What a session is\n")[2].partition("\n## ")[0]
    for field in identity.BODY_FIELDS:
        assert f"`{field}`" in section


def test_what_a_session_is_is_what_the_tests_show() -> None:
    section = README.partition("\n## What a session is\n")[2].partition("\n## ")[0]
    bullets = re.findall(r"^- (.+(?:\n  .+)*)", section, re.M)
    told = [" ".join(bullet.split()) for bullet in bullets]
    shown = [
        sentence
        for table in (test_semantics_identity, test_semantics_placement, test_semantics_end)
        for sentence in table.says
    ]
    assert told == shown


def test_the_statuses_that_keep_a_claim_are_those_of_the_proxy() -> None:
    assert f"After {', '.join(map(str, sorted(_KEPT_STATUSES)))}, 5xx or no answer" in README


def test_every_link_leads_somewhere() -> None:
    anchors = {
        "#" + re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in re.findall(r"^## (.*)$", README, re.M)
    }
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert target in anchors or (ROOT / target).is_file() or target.startswith("https://")


def test_the_changelog_and_the_license_are_whole() -> None:
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text()
    license_text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in license_text
    assert "END OF TERMS AND CONDITIONS" in license_text
