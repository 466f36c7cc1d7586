"""A run as one page of HTML: the verdict first, then what it rests on. It needs no network, script or other file.

Every word that comes from the run (its command, hosts, layers, notes) is escaped, and the page forbids itself scripts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from statistics import median

from paceline.diagnosis import Diagnosis, diagnose
from paceline.diagnosis.links import edges_of
from paceline.diagnosis.step_table import StepTable, table_of
from paceline.diagnosis.what_if import exposed_s
from paceline.observe.run_reading import ClockOffset, Run, clock_offsets
from paceline.observe.run_records import PHASES, StepRecord
from paceline.quantities import ms, show_rate
from paceline.version import __version__

_WIDTH = 1000.0
ORDER = (*PHASES[:-1], "other", PHASES[-1])
WORDS = {
    "loading": "loading data",
    "garbage": "garbage collection",
    "recording": "recording itself",
    "other": "other Python",
    "waiting": "waiting for others",
}
_MOST_RANKS = 64
_MOST_POINTS = 1000


def phases(run: Run) -> str:
    """Draw the medians of every phase, stacked, for each rank."""
    shown = run.ranks[:_MOST_RANKS]
    medians = {rank.header.rank: medians_of(rank.steps) for rank in shown}
    scale = max((sum(phases.values()) for phases in medians.values()), default=0.0)
    if not scale:
        return ""
    rows = []
    for rank in shown:
        number, spans, at = rank.header.rank, [], 0.0
        for name in ORDER:
            length = medians[number].get(name, 0.0)
            if length > 0:
                spans.append(Span(at, at + length, name, f"{words_of(name)}: {ms(length)}"))
                at += length
        label = f"rank {number}: " + ", ".join(span.title for span in spans)
        rows.append(row_of(f"rank {number}", strip(spans, scale, label=label), ms(at)))
    names = [
        name for name in ORDER if any(phases.get(name, 0.0) > 0.002 * scale for phases in medians.values())
    ]
    cells = [[f"rank {x}", *(ms(medians[x].get(name, 0.0)) for name in names)] for x in medians]
    more = (
        f"<p class='soft'>{len(run.ranks) - len(shown)} more ranks are left out here.</p>"
        if run.ranks[_MOST_RANKS:]
        else ""
    )
    return (
        "<h2>Where a step goes, by rank</h2><p class='soft'>Medians. A rank that hardly waits is the one that others "
        f"wait for.</p>{rows_of(rows)}{legend(names)}{more}"
        f"<details><summary>As numbers</summary>{table_of_cells(('', *map(words_of, names)), cells)}</details>"
    )


def medians_of(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return the median of each phase; the first steps do not count where there are others."""
    phases = [step.phases_s() for step in steps[3:] or steps]
    return {name: median(each.get(name, 0.0) for each in phases) for name in ORDER} if phases else {}


def over_time(table: StepTable) -> str:
    """Draw the step's length over the run."""
    steps_s = table.steps_s
    if len(steps_s) < 2:
        return ""
    stride = math.ceil(len(steps_s) / _MOST_POINTS)
    shown = [max(steps_s[place : place + stride]) for place in range(0, len(steps_s), stride)]  # peaks stay
    top = max(shown) * 1.05
    worst = max(range(len(steps_s)), key=steps_s.__getitem__)
    label = f"length of {len(steps_s)} steps, {ms(min(steps_s))} to {ms(max(steps_s))}"
    return (
        f"<h2>Steps over time</h2>{_axis(ms(top), f'dashed: step {table.steps[worst]}, the longest')}"
        f"{curve(shown, top, [worst // stride], label)}"
        f"{_axis(f'step {table.steps[0]}', f'step {table.steps[-1]}')}"
    )


def longest(run: Run) -> str:
    """Draw the longest step's timeline, on one clock."""
    rows = [row for row in run.rows() if row[0].step > 3] or run.rows()
    row = max(rows, key=lambda row: median(step.step_s for step in row))
    clocks = clock_offsets(run)
    numbers = [rank.header.rank for rank in run.ranks]

    def at_s(place: int, time_s: float) -> float:
        return clocks[numbers[place]].aligned_s(time_s)

    zero_s = min(at_s(place, step.began_s) for place, step in enumerate(row))
    scale = max(at_s(place, step.ended_s) for place, step in enumerate(row)) - zero_s
    ends = [at_s(place, step.work_ended_s) for place, step in enumerate(row)]
    last = max(range(len(row)), key=ends.__getitem__)
    cells, names = [], {"sent"} if any(step.buckets for step in row) else set()
    for place, step in list(enumerate(row))[:_MOST_RANKS]:
        spans = _timeline(step, at_s(place, step.began_s) - zero_s, names)
        placed = [span for span in spans if span.end > span.start]
        sent = [
            Span(
                at_s(place, x.launched_s) - zero_s,
                at_s(place, x.done_s) - zero_s,
                "sent",
                f"bucket {x.index}, {x.size_bytes / 2**20:.2f} MiB",
            )
            for x in step.buckets
        ]
        mark = " last" if place == last else ""
        title = f"rank {numbers[place]}" + (", last" if place == last else "")
        drawn = strip(placed, scale, label=f"{title}: {', '.join(span.title for span in placed)}")
        drawn += strip(sent, scale, "thin", f"{len(sent)} buckets on the way") if sent else ""
        cells.append(row_of(title, drawn, ms(step.step_s), mark))
    axis = f"<span></span>{_axis('0', ms(scale / 2), ms(scale))}<span></span>"
    about = _who_was_last(row, ends, numbers) + _off(clocks.values())
    return (
        f"<h2>The longest step: {row[0].step}</h2><p class='soft'>{about}</p>"
        f"{rows_of([*cells, axis])}{legend(x for x in (*ORDER, 'sent') if x in names)}"
    )


def _who_was_last(row: Sequence[StepRecord], ends_s: Sequence[float], ranks: Sequence[int]) -> str:
    """Return how much of the waiting is one rank's doing, and how much communication's."""
    exposed = f"Then every rank waited at least {ms(max(0.0, min(step.waited_s for step in row)))} for communication."
    if len(row) < 2:
        return exposed
    *_, second, last = sorted(range(len(row)), key=ends_s.__getitem__)
    lead_s = ends_s[last] - ends_s[second]
    return f"Rank {ranks[last]} had its last gradient {ms(lead_s)} after rank {ranks[second]}. {exposed}"


def _axis(*labels: str) -> str:
    return f"<div class='axis'>{''.join(f'<span>{label}</span>' for label in labels)}</div>"


def _off(clocks: Iterable[ClockOffset]) -> str:
    """Return a sentence on how well the clocks of several hosts are aligned; "" for one host."""
    error_s = max((clock.error_s for clock in clocks), default=0.0)
    if not math.isfinite(error_s):
        return " The hosts' clocks could not be aligned."
    return f" Clocks of different hosts are aligned, and may be off by {ms(error_s)}." if error_s else ""


def _timeline(step: StepRecord, at_s: float, names: set[str]) -> Iterable[Span]:
    """Yield the spans of a rank's step that begins at `at_s`; add their names to `names`."""
    for name, start_s, end_s in step.spans():
        names.add(name)
        inset = name in ("garbage", "recording", "checkpoint")
        yield Span(
            at_s + max(start_s, step.began_s) - step.began_s,
            at_s + min(end_s, step.ended_s) - step.began_s,
            name if name in ORDER else "other",
            f"{words_of(name)}: {ms(end_s - start_s)}",
            inset,
        )


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page_of(run: Run) -> str:
    """Return the page of a run, as far as it could be read. Local and pure."""
    diagnosis, table = diagnose(run), table_of(run)
    parts = [_verdict(diagnosis), _tiles(diagnosis, table)]
    if len(table):
        parts += [_remedies(diagnosis), phases(run), over_time(table), longest(run)]
    parts += [_links(run), _shares(table), _predicted(diagnosis, table), _about(run, diagnosis)]
    command = " ".join(run.header.command)
    style = files("paceline.report").joinpath("look.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(command)}</title><style>{style}</style></head>\n<body>"
        f"<h1>{escape(command)}, {run.num_ranks} ranks</h1>\n{''.join(filter(None, parts))}</body></html>\n"
    )


def _verdict(diagnosis: Diagnosis) -> str:
    finding = diagnosis.finding
    words = finding.sentence if finding else diagnosis.silence
    lines = [f'<p class="verdict{"" if finding else " quiet"}">{escape(words)}</p>']
    if finding is not None:
        lines.append(
            f'<p class="soft">Seen in {finding.sureness:.0%} of {diagnosis.num_steps} steps, which were compared on '
            f"{diagnosis.num_ranks} ranks.</p>"
        )
    lines += [f'<p class="warn">{escape(words)}</p>' for words in diagnosis.health]
    lines += [f'<p class="warn">Of the run: {escape(note)}.</p>' for note in diagnosis.notes]
    if diagnosis.not_measured:
        lines.append(f'<p class="soft">Not measured: {escape("; ".join(diagnosis.not_measured))}.</p>')
    return "".join(lines)


def _tiles(diagnosis: Diagnosis, table: StepTable) -> str:
    """Lay out the most important numbers."""
    if not len(table):
        return ""
    waits = median(max(0.0, rank.step_s - rank.work_s) for row in table.rows for rank in row)
    tiles = [("median step", ms(table.step_s)), ("slowest step", ms(max(table.steps_s)))]
    tiles.append(("of a step is waiting", f"{waits / table.step_s:.0%}"))
    finding = diagnosis.finding
    if finding is not None and finding.without is not None:
        tiles.append(("without the cause", ms(finding.without.step_s)))
    samples = [sum(rank.num_samples for rank in row if rank.num_samples is not None) for row in table.rows]
    if samples and median(samples):
        tiles.append(("samples a second", f"{median(samples) / table.step_s:,.0f}"))
    return f'<div class="tiles">{"".join(f"<div>{name}<b>{escape(value)}</b></div>" for name, value in tiles)}</div>'


def _remedies(diagnosis: Diagnosis) -> str:
    finding = diagnosis.finding
    if finding is None or not finding.remedies:
        return ""
    rows = [("leave it", ms(finding.step_s), "")]
    for remedy in finding.remedies:
        then = remedy.predicted
        saved = "" if then is None else f"{1 - then.step_s / finding.step_s:.0%}"
        span = (
            "not predicted" if then is None else f"{ms(then.step_s)} ({ms(then.low_s)} to {ms(then.high_s)})"
        )
        rows.append((remedy.words, span, saved))
    return f"<h2>What to do, and what it would give</h2>{table_of_cells(('', 'step', 'shorter by'), rows, words=True)}"


def _links(run: Run) -> str:
    """Lay out the connections between the ranks' hosts."""
    edges = edges_of(run)
    if not edges:
        return ""
    rows = [
        (
            f"rank {x.source} to rank {x.target}",
            show_rate(8 * x.bytes_per_s, 3),
            f"{x.lost_ratio:.2%}",
            ms(x.least_rtt_s),
            f"{x.sent_bytes / 2**20:,.1f} MiB",
            x.kind,
        )
        for x in sorted(edges, key=lambda x: (x.source, x.target))
    ]
    return (
        "<h2>Links between ranks</h2>"
        "<p class='soft'>A rate is what was acknowledged while something was on the way.</p>"
        + table_of_cells(("", "rate", "sent again", "round trip", "sent", "by"), rows)
    )


def _shares(table: StepTable) -> str:
    """Lay out the samples of each rank, if they are known and there are several ranks."""
    if not len(table) or len(table.ranks) < 2:
        return ""
    samples = [_known([row[place].num_samples for row in table.rows]) for place in range(len(table.ranks))]
    tokens = [_known([row[place].num_tokens for row in table.rows]) for place in range(len(table.ranks))]
    if not any(samples):
        return ""
    total = sum(samples) or 1.0
    rows = [
        (
            f"rank {rank}",
            f"{samples[place]:g}",
            f"{samples[place] / total:.1%}",
            f"{tokens[place]:g}" if tokens[place] else "-",
        )
        for place, rank in enumerate(table.ranks)
    ]
    return f"<h2>Shares of the batch</h2>{table_of_cells(('', 'samples a step', 'share', 'tokens a step'), rows)}"


def _known(values: Sequence[int | None]) -> float:
    found = [value for value in values if value is not None]
    return median(found) if found else 0.0


def _predicted(diagnosis: Diagnosis, table: StepTable) -> str:
    """Return the measured step next to the one that a replay of the records says is possible."""
    if not len(table):
        return ""
    fastest = median(median(rank.work_s for rank in row) for row in table.rows)
    rows = [("measured", ms(table.step_s), "the median step")]
    finding = diagnosis.finding
    if finding is not None and finding.without is not None:
        rows.append(
            ("predicted without the cause", ms(finding.without.step_s), "the steps played again without it")
        )
    hidden = median(max(rank.work_s for rank in row) for row in table.rows)
    rows.append(
        ("if all communication were hidden", ms(hidden), f"{ms(max(0.0, exposed_s(table)))} of it is not")
    )
    rows.append(("if no rank were late either", ms(fastest), "the median rank's own work"))
    return f"<h2>Measured and possible</h2>{table_of_cells(('', 'step', 'from'), rows, words=True)}"


def _about(run: Run, diagnosis: Diagnosis) -> str:
    rows = [
        (
            f"rank {x.header.rank}",
            x.header.host,
            str(x.header.pid),
            f"{x.header.num_threads} of {x.header.num_cpus}",
            x.header.device,
            x.header.wrapper,
            x.header.torch,
            str(len(x.steps)),
        )
        for x in run.ranks
    ]
    head = ("", "host", "process", "threads of cores", "device", "DDP of", "torch", "steps")
    recorded = f"Recorded by Paceline {escape(run.header.paceline)}, this page by {__version__}."
    return (
        f"<h2>The run</h2>{table_of_cells(head, rows)}<p class='soft'>{recorded} <code>paceline trace RUN</code> "
        "writes the whole timeline for ui.perfetto.dev.</p>"
    )


# ---- small pieces: shapes stretch to any width; words are in HTML outside, and do not


def words_of(phase: str) -> str:
    """Return a phase's name on the page."""
    return WORDS.get(phase, phase)


def row_of(name: str, drawing: str, value: str, mark: str = "") -> str:
    """Return a drawing between its name and a value; `mark` is a class of the name's."""
    label = f'<span class="name{mark}">{escape(name)}</span>'
    return f'{label}<div>{drawing}</div><span class="value">{escape(value)}</span>'


def rows_of(rows: Iterable[str]) -> str:
    """Return rows under each other, their columns aligned."""
    return f'<div class="rows">{"".join(rows)}</div>'


def legend(names: Iterable[str]) -> str:
    """Return what the colours of these phases mean."""
    words = {"sent": "a bucket is on the way"}
    items = "".join(f'<li style="--c:var(--{name})">{words.get(name, words_of(name))}</li>' for name in names)
    return f'<ul class="legend">{items}</ul>'


def table_of_cells(head: Sequence[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """Return a table that scrolls by itself if it is wider than a phone."""
    kind = ' class="words"' if words else ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr><td{kind}>{escape(row[0])}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


@dataclass(frozen=True)
class Span:
    """A piece of a strip."""

    start: float  # on the strip's scale
    end: float  # on the same
    colour: str  # the name of a variable of the style sheet
    title: str  # what a pointer that rests on it is told
    inset: bool = False  # whether it is drawn lower, within another


def strip(spans: Sequence[Span], scale: float, kind: str = "strip", label: str = "") -> str:
    """Draw spans next to each other, from 0 to `scale`."""
    shapes = []
    for span in spans:
        x, width = _WIDTH * span.start / scale, _WIDTH * (span.end - span.start) / scale
        y, height = (4, 2) if span.inset else (0, 10)
        shapes.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.0):.2f}" height="{height}" '
            f'style="fill:var(--{span.colour})"><title>{escape(span.title)}</title></rect>'
        )
    return (
        f'<svg class="{kind}" viewBox="0 0 {_WIDTH:g} 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{"".join(shapes)}</svg>'
    )


def curve(values: Sequence[float], top: float, marked: Sequence[int], label: str) -> str:
    """Draw values from left to right, below `top`, with dashed lines at marked places."""
    last = max(1, len(values) - 1)
    points = " ".join(
        f"{_WIDTH * place / last:.1f},{100 - 100 * min(value / top, 1):.1f}"
        for place, value in enumerate(values)
    )
    lines = "".join(f'<line x1="0" x2="{_WIDTH:g}" y1="{y}" y2="{y}"/>' for y in (25, 50, 75))
    marks = "".join(
        f'<line class="mark" x1="{_WIDTH * place / last:.1f}" x2="{_WIDTH * place / last:.1f}" y1="0" y2="100"/>'
        for place in marked
    )
    return (
        f'<svg class="curve" viewBox="0 0 {_WIDTH:g} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{lines}{marks}<polyline points="{points}"/></svg>'
    )
