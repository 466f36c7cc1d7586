"""A run as one page of HTML: the verdict first, then what it rests on. It needs no network, script or other file.

Every word that comes from the run (its command, hosts, layers, notes) is escaped, and the page forbids itself scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from statistics import median

from paceline.diagnosis import Diagnosis, diagnose
from paceline.diagnosis.links import edges_of
from paceline.diagnosis.step_table import StepTable, table_of
from paceline.diagnosis.what_if import exposed_s
from paceline.observe.run_reading import Run
from paceline.quantities import ms, show_rate
from paceline.report import charts
from paceline.report.markup import table_of_cells
from paceline.version import __version__

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page_of(run: Run) -> str:
    """Return the page of a run, as far as it could be read. Local and pure."""
    diagnosis, table = diagnose(run), table_of(run)
    parts = [_verdict(diagnosis), _tiles(diagnosis, table)]
    if len(table):
        parts += [_remedies(diagnosis), charts.phases(run), charts.over_time(table), charts.longest(run)]
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
    """The few numbers that one asks for first."""
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
    """Connections between the ranks' hosts."""
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
    """Samples a rank, if they are known and there are several ranks."""
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
