"""Pictures of many stored results at once: which option helps when? Nothing is measured.

five-models            a step of each model on one host, divided by torch's
forward-overlap-cases  steps of every case of forward overlap, divided by the lower bound
option-map             a step with each option, divided by torch's, by how much a step communicates
bounded-loss-tcp       a sum of 25 MB where packets are lost, by bounded loss and TCP
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigurationError
from paceline_lab.bench.provenance import collect
from paceline_lab.checkout import in_repository
from paceline_lab.experiments.options import REPORT_FOLDER, AsJson, Quick, ReportFolder
from paceline_lab.experiments.runner import conclude
from paceline_lab.report.figures import draw_figure
from paceline_lab.report.look import BASELINE, CURVE_COLORS, OURS, look_of, workload_name
from paceline_lab.report.panels import Bar, Bars, Dots, Line, Lines
from paceline_lab.report.publication import Report, stored_report
from paceline_lab.report.summary import Summary

MODELS = ("wide_mlp", "tiny", "resnet50", "transformer", "mlstm")
CASES = tuple(
    (workload, hosts, ratio)
    for workload in ("resnet50", "bert", "mlstm-4k")
    for ratio in ("0.5", "1", "2")
    for hosts in (4, 8)
)
COMPRESSED = ("step-resnet50-2x1-1000mbit-timed", "step-resnet50-2x1-100mbit-timed")
SUMS = (  # a cluster, a side in it, its name
    ("cubic", "Gloo", "Gloo over TCP cubic"),
    ("tuned", "Gloo", "Gloo over tuned TCP"),
    ("cubic", "ours, bound 5 %", "BoundedLoss(bound=0.05)"),
)


def models(stored: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Paceline's step divided by torch's, and the load of the machine."""
    found = {name: stored(f"step_time-{name}-2ranks") for name in MODELS}
    return {
        name: {
            "ratio": record["summaries"]["ours"]["ratio"],
            "load": max(record["provenance"][f"load_average_{when}"] for when in ("before", "after")),
        }
        for name, record in found.items()
    }


def draw_models(samples: Mapping[str, Any], path: Path) -> bool:
    """Draw a bar a model."""
    ratios = {name: Summary(**sample["ratio"]) for name, sample in samples.items()}
    bars = [Bar(workload_name(name), ratio, OURS) for name, ratio in ratios.items()]
    medians = sorted(ratio.median for ratio in ratios.values())
    loads = sorted(sample["load"] for sample in samples.values())
    panel = Bars("", "step time, divided by torch's; lower is better", bars, {"torch": 1.0})
    return draw_figure(
        path,
        f"On one host, steps of five models take {medians[0]:.2f} to {medians[-1]:.2f} of torch's time",
        [panel],
        "Two ranks on two cores, which really compute; a script that says gloo. Medians and quartiles of ratios "
        f"within a round. Other programs ran: load averages of {loads[0]:.1f} to {loads[-1]:.1f}.",
    )


def overlaps(stored: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """The steps of each case in seconds, and the lower bound."""
    found = {}
    for workload, hosts, ratio in CASES:
        record = stored(f"forward_overlap-{workload}-{hosts}x1-1000mbit-ratio{ratio}")
        sides = record["summaries"]["sides"]
        found[f"{workload} {hosts} {ratio}"] = {
            **{name: side["steady_s"]["median"] for name, side in sides.items()},
            "least": record["summaries"]["least_s"],
            "is_on": sides["ours-forward"]["is_on"],
        }
    return found


def draw_overlaps(samples: Mapping[str, Any], path: Path) -> bool:
    """Draw a row a case, a dot a side."""
    rows = []
    for name in samples:
        workload, hosts, ratio = name.split()
        rows.append(f"{workload_name(workload.removesuffix('-4k'))}, {hosts} hosts, {ratio} x")
    sides = [
        (look_of(side).name, color, [case[side] / case["least"] for case in samples.values()])
        for side, color in (("torch", BASELINE), ("ours", OURS), ("ours-forward", CURVE_COLORS[2]))
    ]
    ticks = {1.0: "1", 1.2: "1.2", 1.4: "1.4", 1.6: "1.6", 1.8: "1.8"}
    num_on = sum(case["is_on"] for case in samples.values())
    return draw_figure(
        path,
        f"Forward overlap shortens the steps of {num_on} of {len(samples)} cases, and stays off in the others",
        [Dots("", "step time, divided by the lower bound; lower is better", rows, sides, ticks, ("", 1.0))],
        "Emulated hosts behind 1 Gbit/s, layers sleep 450 ms per step. 2 x: communication takes twice as long as "
        "backward. Lower bound: no order of sending is faster.",
    )


def options(stored: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Return by side: (communication divided by computing, step divided by torch's)."""
    found: dict[str, list[tuple[float, float]]] = {}
    names = [f"forward_overlap-{name}-{hosts}x1-1000mbit-ratio{ratio}" for name, hosts, ratio in CASES]
    for name in names:
        summaries = stored(name)["summaries"]
        floor, sides = summaries["floor"], summaries["sides"]
        for side in ("ours", "ours-forward"):
            if side == "ours" or sides[side]["is_on"]:
                point = (floor["communication_s"] / floor["computation_s"], sides[side]["to_first"])
                found.setdefault(side, []).append(point)
    for name in COMPRESSED:
        summaries = stored(name)["summaries"]
        limit = summaries["limit"]
        x = limit["communication_s"] / (limit["forward_s"] + limit["backward_s"] + limit["optimizer_s"])
        for side, value in summaries["sides"].items():
            if side != "torch" and "again" not in side:
                found.setdefault(side, []).append((x, value["ratio"]["median"]))
    return {side: sorted(points) for side, points in found.items()}


def draw_options(samples: Mapping[str, Any], path: Path) -> bool:
    """Draw a cloud of points a side."""
    others = [color for color in CURVE_COLORS if color not in (OURS, BASELINE)]
    colors = dict(zip(samples, (OURS, BASELINE, *others), strict=True))
    lines = [
        Line(look_of(side).option, [(x, y) for x, y in points], colors[side], "")
        for side, points in samples.items()
    ]
    panel = Lines(
        "",
        "communication, divided by computing",
        "step time, divided by torch's",
        lines,
        {1 / 3: "1/3", 2 / 3: "2/3", 4 / 3: "4/3", 8 / 3: "8/3"},
        log_x=True,
        levels={"torch": 1.0},
    )
    return draw_figure(
        path,
        "The more a step communicates, the more compression saves",
        [panel],
        "Lower is better. Each point is one run on 2 to 8 emulated hosts: ResNet-50, BERT, mLSTM; layers sleep, "
        "gradients and traffic are real. Forward overlap: where it turned itself on. Compression rounds gradients.",
    )


def sums(stored: Callable[[str], Mapping[str, Any]]) -> dict[str, Any]:
    """Median milliseconds of a sum by side, for each loss."""
    cases = stored("bounded_loss")["summaries"]
    found: dict[str, list[tuple[float, float]]] = {name: [] for _, _, name in SUMS}
    for loss in (0, 1, 3):
        for tcp, side, name in SUMS:
            case = cases[f"25 MB, 4 hosts, 100mbit, loss {loss}%, {tcp}"]
            found[name].append((loss, case[side]["ms"]))
    return found


def draw_sums(samples: Mapping[str, Any], path: Path) -> bool:
    """Draw a line a side."""
    colors = (BASELINE, CURVE_COLORS[2], OURS)
    lines = [
        Line(side, [(x, y) for x, y in points], color)
        for (side, points), color in zip(samples.items(), colors, strict=True)
    ]
    cubic, tuned, bounded = (points[-1][1] for points in samples.values())
    title = f"If 3 % of packets are lost, BoundedLoss is {cubic / bounded:.1f} times as fast as TCP cubic"
    if abs(tuned / bounded - 1) < 0.05:
        title += ", and as fast as tuned TCP"
    return draw_figure(
        path,
        title,
        [Lines("", "packets lost, %", "time of a sum of 25 MB, ms", lines, {0: "0", 1: "1", 3: "3"})],
        "Lower is better. Medians of 12 sums among four emulated hosts behind 100 Mbit/s. Tuned: BBR, and a smallest "
        "retransmission timeout of 5 ms; it ran in a cluster of its own.",
    )


OVERVIEWS = {
    "five-models": ("How long is a step of five models, divided by torch's?", models, draw_models),
    "forward-overlap-cases": ("How near to the lower bound are steps of 18 cases?", overlaps, draw_overlaps),
    "option-map": ("Which option makes a step shorter, by how much it communicates?", options, draw_options),
    "bounded-loss-tcp": ("How long is a sum where packets are lost?", sums, draw_sums),
}


def main(quick: Quick = False, as_json: AsJson = False, report_folder: ReportFolder = REPORT_FOLDER) -> None:
    """Collect stored results into overviews, and draw them."""
    folder = in_repository("lab/results", "the stored results")

    def stored(name: str) -> Mapping[str, Any]:
        return stored_report(folder / f"{name}.json")

    for name, (question, collected, _) in OVERVIEWS.items():
        samples = collected(stored)
        report = Report(
            name=name,
            question=question,
            columns=("", "stored"),
            rows=tuple((row, f"{len(value)} values") for row, value in samples.items()),
            verdicts=(),
            notes=("collected from stored results; nothing was measured",),
            config={"quick": quick},
            summaries={},
            samples=samples,
            provenance=collect(1),
        )
        conclude(report, report_folder, as_json, draw)


def draw(record: Mapping[str, Any], path: Path) -> bool:
    """Draw one of the overviews from its stored report."""
    if record["name"] not in OVERVIEWS:
        raise ConfigurationError(f"there is no overview {record['name']}. There are: {', '.join(OVERVIEWS)}.")
    return OVERVIEWS[record["name"]][2](record["samples"], path)
