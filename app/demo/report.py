"""The demonstration's report: one HTML file that needs nothing else, with plots as inline SVG, light and dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from app.demo.load import Figures, Served, over_time

_STRETCH = 1.5
"""Seconds of which the plots over time show the mean."""
_MOST_ROWS = 120
"""Sessions that are drawn; of more, every second, third …"""
_STYLE = Path(__file__).parent / "report.css"
_WIDE, _HIGH = 560, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 12, 26


@dataclass(frozen=True)
class Told:
    """What all ways have in common."""

    seed: int
    workers: int
    profile: str
    policy: str
    took: float
    """Seconds, in all."""


@dataclass(frozen=True)
class Shown:
    """One way, played."""

    key: str
    title: str
    about: str
    seconds: float
    served: Sequence[Served]
    events: Sequence[tuple[float, str]]
    figures: Figures


def html(runs: Sequence[Shown], told: Told) -> str:
    """The whole page. The last way is ours."""
    ours = runs[-1]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>coatcheck demo</title>
<style>
{_STYLE.read_text("utf-8")}</style>
</head>
<body>
<header>
  {_ICON}
  <div><h1>Same agents, same fleet{f", {len(runs)} ways in" if len(runs) > 1 else ""}</h1>
  <p>{told.workers} workers, {ours.figures.sessions} agent sessions, {ours.seconds:g} seconds each way. One worker is
  killed and comes back empty{"; coatcheck loses a replica as well" if runs[-1].key == "coatcheck" else ""}.</p></div>
</header>
<main>
<p class="lead">{_lead(runs)}</p>
<section class="cards">{"".join(_card(each, runs) for each in runs)}</section>
<section class="card wide">
  <h2>Where each session was</h2>
  <p class="note">A line is a session, a dash one of its turns, its colour the worker that served it. A line of one
  colour keeps its cache. Point at a dash to see what it found.</p>
  <div class="strips">{"".join(_strip(each) for each in runs)}</div>
  <ul class="legend">{_workers_legend(runs)}</ul>
</section>
<section class="two">
  <div class="card"><h2>Prompt tokens found in a cache</h2>{_legend(runs)}{_cached_plot(runs)}</div>
  <div class="card"><h2>Time to first token</h2>{_legend(runs)}{_ttft_plot(runs)}</div>
</section>
<section class="card wide">
  <h2>All figures</h2>
  <div class="scroll">{_table(runs)}</div>
  {_failures(runs)}
</section>
<section class="card wide small">
  <h2>How it was done</h2>
  <ul>
    <li>Everything runs on one machine as processes of its own: the workers, the replicas, the clients. Workers simulate
    an engine (<code>{escape(told.profile)}</code>: a block cache that all sessions share, batches, chunked prefill), so
    what is cached and how long a prompt takes follow from what was sent where; the models' words are made up.</li>
    <li>Each way begins with new, empty workers and meets the same sessions (seed {told.seed}): shared system prompts,
    histories that grow, pauses, sub-agents. Turns are streamed requests, each on a connection of its own.</li>
    {"".join(f"<li><b>{escape(each.title)}</b>: {_HOW.get(each.key, escape(each.about))}</li>" for each in runs)}
    <li>A failed turn is a request whose client saw an error or a broken stream; the client asks again, at most twice. A
    session is split when a turn of it goes to another worker although the one before is there.</li>
  </ul>
  <p class="note">All of it took {told.took:.0f} s. <code>coatcheck demo --seed {told.seed} --workers {told.workers}
  --policy {escape(told.policy)} --seconds {ours.seconds:g}</code> makes it again.</p>
</section>
</main>
</body>
</html>
"""


_HOW = {
    "turns": "a router that places each turn one worker further and is told no session. Workers that cannot be "
    "connected to are passed over.",
    "hash": "the client hashes the session id onto a ring of workers and connects to its worker itself, with no "
    "process between and knowing at once who is up, which is kinder to it than a balancer. While a worker is away its "
    "sessions go to the next on the ring, and back when it is there.",
    "coatcheck": "two replicas that share claims in a folder; turns reach them alternately, and those of the killed "
    "one reach the other. A session whose worker is lost goes on at another one, and stays there.",
}


def _lead(runs: Sequence[Shown]) -> str:
    ours = runs[-1].figures
    others = _in_brackets(f"{each.figures.cached_share:.0%} by {escape(each.title)}" for each in runs[:-1])
    split = _in_brackets(f"{each.figures.moved_needlessly} by {escape(each.title)}" for each in runs[:-1])
    whole = "No session" if not ours.moved_needlessly else f"{ours.moved_needlessly} of {ours.sessions} sessions"
    return (
        f"{escape(runs[-1].title)}: <b>{ours.cached_share:.0%}</b> of all prompt tokens were in a cache{others}. "
        f"<b>{whole}</b> left a worker that was there{split}."
    )


def _in_brackets(some: Iterable[str]) -> str:
    said = ", ".join(some)
    return f" ({said})" if said else ""


def _card(shown: Shown, runs: Sequence[Shown]) -> str:
    now = shown.figures
    longest = max(each.figures.p95 for each in runs) or 1.0
    return f"""<article class="card way {shown.key}">
  <h2><i class="dot"></i>{escape(shown.title)}</h2>
  <p class="note">{escape(shown.about)}</p>
  <div class="big">{100 * now.cached_share:.1f}<small>% cached</small></div>
  <div class="bar"><span style="width:{100 * now.cached_share:.1f}%"></span></div>
  <dl>
    <dt>TTFT p50</dt><dd>{_ms(now.p50)}<em style="width:{100 * now.p50 / longest:.0f}%"></em></dd>
    <dt>TTFT p95</dt><dd>{_ms(now.p95)}<em style="width:{100 * now.p95 / longest:.0f}%"></em></dd>
    <dt>sessions split</dt><dd class="{"good" if not now.moved_needlessly else "bad"}">{now.moved_needlessly}<span> of
      {now.sessions}</span></dd>
    <dt>failed turns</dt><dd>{now.failed - now.cut_by_replica}<span>{_with_replica(now)}</span></dd>
  </dl>
</article>"""


def _with_replica(now: Figures) -> str:
    """The others lose no replica."""
    return f" + {now.cut_by_replica} with the replica" if now.cut_by_replica else f" of {now.turns + now.failed}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


# --- plots -----------------------------------------------------------------------------------------------------------


def _legend(runs: Sequence[Shown]) -> str:
    keys = "".join(f'<li class="{each.key}"><i class="dot"></i>{escape(each.title)}</li>' for each in runs)
    return f'<ul class="legend">{keys}</ul>'


def _workers_legend(runs: Sequence[Shown]) -> str:
    names = _workers(runs)
    keys = (
        f'<li><i class="dot" style="background:{_hue(at, len(names))}"></i>{name}</li>' for at, name in enumerate(names)
    )
    return "".join(keys) + '<li><i class="cross">×</i>failed</li>'


def _workers(runs: Sequence[Shown]) -> list[str]:
    return sorted(
        {each.worker for shown in runs for each in shown.served if each.worker}, key=lambda name: (len(name), name)
    )


def _hue(at: int, count: int) -> str:
    """Colours that are told apart, on light and on dark."""
    few = ("#3b6cf0", "#f08a24", "#19a974", "#d6409f", "#8b6cf2", "#c9a400", "#22b8cf", "#e5484d")
    return few[at] if count <= len(few) else f"hsl({360 * at // count} 65% 52%)"


def _strip(shown: Shown) -> str:
    """Its sessions by their first turn, each a row of its turns."""
    rows: dict[str, list[Served]] = {}
    for each in sorted(shown.served, key=lambda each: each.at):
        rows.setdefault(each.session, []).append(each)
    every = max(1, math.ceil(len(rows) / _MOST_ROWS))
    drawn = list(rows.values())[::every]
    names = _workers([shown])
    names += [f"w{number}" for number in range(1, len(names) + 2) if f"w{number}" not in names]
    names.sort(key=lambda name: (len(name), name))
    left, right, top, row = 6.0, 6.0, 32.0, 4.0
    end = max([shown.seconds, *(each.ended for each in shown.served)])
    high = top + row * len(drawn) + 22
    per_second = (400 - left - right) / end
    parts = []
    for number, (at, what) in enumerate(shown.events):
        # Their words stand in two rows, for they may come close together.
        x, y = left + at * per_second, top - 20 + 12 * (number % 2)
        kind = "bad" if "killed" in what else "good"
        parts.append(f'<line class="event {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8}" y2="{high - 18}"/>')
        parts.append(_words(x, y, kind, what))
    for number, turns in enumerate(drawn):
        y = top + number * row
        first, last = left + turns[0].at * per_second, left + turns[-1].ended * per_second
        parts.append(f'<line class="thread" x1="{first:.1f}" x2="{last:.1f}" y1="{y + 1.5}" y2="{y + 1.5}"/>')
        for each in turns:
            x = left + each.at * per_second
            if each.trouble:
                parts.append(
                    f'<text class="cross" x="{left + each.ended * per_second:.1f}" y="{y + 4}">×<title>'
                    f"{escape(each.session)} at {each.at:.1f} s: {escape(each.trouble)}</title></text>"
                )
                continue
            width = max(2.5, (each.ended - each.at) * per_second)
            share = each.cached / each.prompt if each.prompt else 0.0
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="3" rx="1.2" '
                f'fill="{_hue(names.index(each.worker) if each.worker in names else 0, len(names))}"><title>'
                f"{escape(each.session)} at {each.at:.1f} s, {escape(each.worker)}: {share:.0%} of {each.prompt:,} "
                f"tokens cached, TTFT {_ms(each.first_token)}</title></rect>"
            )
    ticks = "".join(
        f'<text x="{left + at * per_second:.1f}" y="{high - 6}" text-anchor="middle">{at} s</text>'
        for at in range(0, int(end) + 1, _step(end))
        if at
    )
    return (
        f"<figure><figcaption>{escape(shown.title)} <span>{shown.figures.moved_needlessly} split</span></figcaption>"
        f'<svg viewBox="0 0 400 {high:.0f}" role="img" aria-label="sessions by {escape(shown.title)}">'
        f"{''.join(parts)}{ticks}</svg></figure>"
    )


def _cached_plot(runs: Sequence[Shown]) -> str:
    end = max(each.seconds for each in runs)
    parts = [_grid([(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)], _seconds_ticks(end))]
    parts += _event_lines(runs[-1], end)
    for each in runs:
        points = []
        for at, some in over_time(each.served, end, max(_STRETCH, end / 24)):
            prompt = sum(one.prompt for one in some)
            if prompt:
                points.append((at / end, sum(one.cached for one in some) / prompt))
        parts.append(_line(points, each.key))
    return _svg(parts, "share of prompt tokens that were cached, over time")


def _ttft_plot(runs: Sequence[Shown]) -> str:
    """How many of the turns had their first token within a time, on a logarithmic scale."""
    values = {each.key: sorted(one.first_token for one in each.served if not one.trouble) for each in runs}
    everything = sorted(value for some in values.values() for value in some) or [0.01, 1.0]
    low = max(0.005, everything[0])
    high = max(everything[-1], 2 * low)

    def place(seconds: float) -> float:
        return (math.log(max(low, seconds)) - math.log(low)) / (math.log(high) - math.log(low))

    marks = [each for each in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= each <= high]
    rows = [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 0.95)]
    parts = [_grid(rows, [(place(each), f"{1000 * each:g} ms" if each < 1 else f"{each:g} s") for each in marks])]
    for each in runs:
        some = values[each.key]
        step = max(1, len(some) // 150)
        points = [(place(some[at]), (at + 1) / len(some)) for at in range(0, len(some), step)]
        parts.append(_line([*points, (place(some[-1]), 1.0)] if some else [], each.key))
    return _svg(parts, "share of turns by their time to first token")


def _seconds_ticks(end: float) -> list[tuple[float, str]]:
    return [(at / end, f"{at} s") for at in range(0, int(end) + 1, _step(end)) if at]


def _step(end: float) -> int:
    return next((each for each in (1, 2, 5, 10, 20, 60, 120, 300, 600) if end / each <= 7), 1200)


def _x(part: float) -> float:
    return _LEFT + part * (_WIDE - _LEFT - _RIGHT)


def _y(part: float) -> float:
    return _TOP + (1 - part) * (_HIGH - _TOP - _BOTTOM)


def _grid(rows: Iterable[tuple[float, str]], columns: Iterable[tuple[float, str]]) -> str:
    lines = (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDE - _RIGHT}" y1="{_y(at):.1f}" y2="{_y(at):.1f}"/>'
        f'<text x="{_LEFT - 7}" y="{_y(at) + 4:.1f}" text-anchor="end">{label}</text>'
        for at, label in rows
    )
    marks = (f'<text x="{_x(at):.1f}" y="{_HIGH - 7}" text-anchor="middle">{label}</text>' for at, label in columns)
    return "".join((*lines, *marks))


def _event_lines(shown: Shown, end: float) -> list[str]:
    parts = []
    for number, (at, what) in enumerate(shown.events):
        x, kind = _x(at / end), "bad" if "killed" in what else "good"
        parts.append(f'<line class="event {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HIGH - _BOTTOM}"/>')
        parts.append(_words(x, _HIGH - _BOTTOM - 5 - 12 * (number % 2), kind, what))
    return parts


def _words(x: float, y: float, kind: str, event: str) -> str:
    """Of an event, beside its line."""
    who = escape(event.split()[1])
    return f'<text class="what {kind}" x="{x + 3:.1f}" y="{y}">{who} {"killed" if kind == "bad" else "back"}</text>'


def _line(points: Sequence[tuple[float, float]], key: str) -> str:
    path = " ".join(f"{'L' if at else 'M'}{_x(x):.1f} {_y(y):.1f}" for at, (x, y) in enumerate(points))
    return f'<path class="line {key}" d="{path}"/>'


def _svg(parts: Iterable[str], what: str) -> str:
    return f'<svg viewBox="0 0 {_WIDE} {_HIGH}" role="img" aria-label="{escape(what)}">{"".join(parts)}</svg>'


# --- words -----------------------------------------------------------------------------------------------------------


def _table(runs: Sequence[Shown]) -> str:
    rows: tuple[tuple[str, Callable[[Figures], str]], ...] = (
        ("prompt tokens cached", lambda now: f"{now.cached_share:.1%}"),
        ("TTFT p50", lambda now: _ms(now.p50)),
        ("TTFT p95", lambda now: _ms(now.p95)),
        ("TTFT p99", lambda now: _ms(now.p99)),
        ("turns", lambda now: f"{now.turns:,}"),
        ("failed turns", lambda now: f"{now.failed:,}"),
        ("… cut by the worker's death", lambda now: f"{now.cut_by_worker:,}"),
        ("… cut by the replica's death", lambda now: f"{now.cut_by_replica:,}"),
        ("sessions", lambda now: f"{now.sessions:,}"),
        ("sessions split", lambda now: f"{now.moved_needlessly:,}"),
        ("sessions that moved because their worker died", lambda now: f"{now.moved_on_loss:,}"),
    )
    head = "".join(f'<th class="{each.key}"><i class="dot"></i>{escape(each.title)}</th>' for each in runs)
    body = "".join(
        f"<tr><th>{label}</th>{''.join(f'<td>{said(each.figures)}</td>' for each in runs)}</tr>" for label, said in rows
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table>"


def _failures(runs: Sequence[Shown]) -> str:
    ours = runs[-1].figures
    if not ours.cut_by_replica:
        return ""
    return (
        f'<p class="note">The replica that was killed had {ours.cut_by_replica} answers under way: a stream ends with '
        "the process that passes it on. Their clients asked again, and the other replica knew where their sessions "
        "are. Nothing of the kind was killed in the other ways.</p>"
    )


_ICON = (
    '<svg class="icon" viewBox="0 0 32 32" aria-hidden="true"><path d="M16 5a3.2 3.2 0 0 1 1.4 6.1V13l10.2 8.3c1.5 '
    '1.3.6 3.7-1.4 3.7H5.8c-2 0-2.9-2.4-1.4-3.7L16 12" fill="none" stroke="currentColor" stroke-width="2.2" '
    'stroke-linecap="round" stroke-linejoin="round"/></svg>'
)
