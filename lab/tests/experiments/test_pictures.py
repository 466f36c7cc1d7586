"""Every stored result has its picture; its words lie within it, and no label lies on another."""

from __future__ import annotations

import itertools
import json
import re
import xml.dom.minidom

import pytest

from harness.terminal import REPOSITORY
from paceline_lab.experiments.registry import drawing_of
from paceline_lab.experiments.step.timeline import busy, joined, typical
from paceline_lab.report import look
from paceline_lab.report.figures import draw_figure, show_ratio
from paceline_lab.report.label_places import spread
from paceline_lab.report.look import (
    BASELINE,
    CURVE_COLORS,
    OURS,
    ROW_COLORS,
    look_of,
    marker_of,
    on_dark,
    text_color,
)
from paceline_lab.report.panels import Bar, Bars, Dots, Line, Lines, Stacks

matplotlib_figure = pytest.importorskip("matplotlib.figure")
Text = pytest.importorskip("matplotlib.text").Text  # without the arrows of annotations
RESULTS = REPOSITORY / "lab" / "results"
# One of each kind; those with the most labels.
SHOWN = (
    "allreduce-2ranks",
    "auto-compression",
    "bounded_loss",
    "early_delivery",
    "forward-overlap-cases",
    "large-batch-mlp",
    "memory-2ranks",
    "option-map",
    "resnet-batches",
    "step-bert-2ranks-timed",
    "step_time-wide_mlp-2ranks",
    "study-overlap",
    "study-rank-count",
    "svm-celeba",
    "svm-elimination",
    "timeline-resnet50-4x1-1000mbit",
)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved meanwhile, instead of files."""
    figures = []
    monkeypatch.setattr(
        matplotlib_figure.Figure, "savefig", lambda figure, path, **_: figures.append((str(path), figure))
    )
    return figures


def _check(path, figure):
    """Nothing is cut off at the sides, and no two labels of a panel overlap."""
    figure.draw_without_rendering()
    title, note = figure._suptitle, figure._supxlabel
    texts = {words: Text.get_window_extent(words) for words in (title, note) if words is not None}
    for axes in figure.axes:
        labels = {label: Text.get_window_extent(label) for label in axes.texts if label.get_text()}
        for one, other in itertools.combinations(labels, 2):
            across = min(labels[one].x1, labels[other].x1) - max(labels[one].x0, labels[other].x0)
            along = min(labels[one].y1, labels[other].y1) - max(labels[one].y0, labels[other].y0)
            assert min(across, along) < 3, f"{path}: {one.get_text()!r} lies on {other.get_text()!r}"
        texts |= {label: box for label, box in labels.items() if label is not None}
    for text, box in texts.items():
        words = text.get_text()
        assert figure.bbox.x0 - 1 <= box.x0, f"{path}: {words!r} begins outside the picture"
        assert box.x1 <= figure.bbox.x1 + 1, f"{path}: {words!r} ends outside the picture"
    assert "nan" not in title.get_text()


def test_every_stored_result_is_known_and_every_picture_is_shown():
    pages = [*(REPOSITORY / "docs").rglob("*.md"), REPOSITORY / "README.md"]
    shown = set(re.findall(r"lab/results/([\w.-]+)\.svg", " ".join(page.read_text() for page in pages)))
    assert {file.stem for file in RESULTS.glob("*.svg")} == shown
    for file in set(RESULTS.glob("*.json")) - {RESULTS / "figures.json"}:  # whose figures are the pages'
        drawing_of(file.stem)
    with pytest.raises(KeyError, match="unheard-of"):
        drawing_of("unheard-of")


@pytest.mark.lab
def test_pictures_are_legible(drawn, tmp_path):
    for name in SHOWN:
        assert drawing_of(name)(json.loads((RESULTS / f"{name}.json").read_text()), tmp_path / name)
    assert len(drawn) == 2 * len(SHOWN)  # PNG and SVG of each
    for path, figure in drawn[::2]:
        _check(path, figure)


def test_a_picture_that_is_not_legible_is_noticed(drawn, tmp_path):
    panel = Lines(
        "", "x", "y", [Line("one", [(0, 1), (1, 1)], OURS), Line("another", [(0, 1), (1, 1)], BASELINE)]
    )
    draw_figure(tmp_path / "p.png", "Both end at the same place", [panel])
    _, figure = drawn.pop()
    _check("p", figure)
    first, second = (text for text in figure.axes[0].texts if text.get_text())
    second.set_position(first.get_position())
    with pytest.raises(AssertionError, match="lies on"):
        _check("p", figure)


def test_panels_say_their_values(drawn, tmp_path):
    panels = [
        Bars("", "ms", [Bar("a", 2.0), Bar("b", 1234.0)], {"limit": 3.0}),
        Stacks("", "ms", {"a step": [("forward", 1.0), ("backward", 2.5)]}),
        Dots(
            "",
            "x",
            ["set"],
            [("a side", OURS, [2.0]), ("not measured", BASELINE, [None])],
            {1.0: "1"},
            ("base", 1.0),
        ),
    ]
    assert draw_figure(tmp_path / "p.png", "Three panels", panels, "a note")
    _, figure = drawn[-1]
    words = [{text.get_text() for text in axes.texts} for axes in figure.axes]
    assert words[0] == {"2.00", "1,234", "limit"}
    assert words[1] == {"3.50"}
    assert words[2] == {"a side", "base"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "backward"]


def test_accuracies_show_their_spread_and_those_of_one_seed_are_hollow(drawn, tmp_path):
    """Letter's tuned rates were mostly run with one seed; a reader has to see which."""
    record = json.loads((RESULTS / "large-batch-letter.json").read_text())
    assert drawing_of("large-batch-letter")(record, tmp_path / "p.png")
    _, figure = drawn[-1]
    by_the_rule, tuned = ([line for line in axes.lines if _is_hollow(line)] for axes in figure.axes[:2])
    assert not by_the_rule
    ones = sum(f"{cell}".count("(1 seed)") for row in record["summaries"]["tuned"][1] for cell in row)
    assert sum(len(line.get_xdata()) for line in tuned) == ones > 5
    assert all(axes.collections for axes in figure.axes[:2])  # the bands


def _is_hollow(line):
    return line.get_markerfacecolor() == "white"


def test_spread_keeps_order_and_distance_and_moves_little():
    assert spread([1.0, 9.0], 2.0) == [1.0, 9.0]
    assert spread([5.0, 5.0], 2.0) in ([4.0, 6.0], [6.0, 4.0])
    for wanted in ([3.0, 1.0, 2.0, 2.0], [0.0, 0.1, 9.0, 9.0, 9.0], [-5.0, 0.0]):
        for lowest in (-100.0, 0.0):
            placed = spread(wanted, 2.0, lowest)
            assert sorted(range(len(placed)), key=placed.__getitem__) == sorted(
                range(len(placed)), key=wanted.__getitem__
            )
            pairs = itertools.pairwise(sorted(placed))
            assert all(above - below >= 2.0 - 1e-9 for below, above in pairs)
            assert min(placed) >= lowest


def test_a_side_has_one_look():
    assert look_of("ours").color == look_of("ours (again)").color == look_of("paceline").color == OURS
    assert look_of("ours (again)").name == "Paceline (again)"
    assert look_of("ours-topk").name == "Paceline, topk"
    assert look_of("torch").color == look_of("gloo").color == look_of("sklearn").color == BASELINE
    assert show_ratio(0.71, "torch's") == "29 % shorter than torch's"
    assert show_ratio(1.09, "torch's") == "9 % longer than torch's"
    assert show_ratio(0.99, "torch's") == "as long as torch's"


def test_the_svg_follows_the_reader_into_dark_mode(tmp_path):
    """Beside the PNG, transparent; each colour of it has one for dark pages, where it stands out."""
    assert draw_figure(tmp_path / "p.png", "A title & more", [Bars("", "ms", [Bar("a", 2.0)])])
    svg = (tmp_path / "p.svg").read_text()
    xml.dom.minidom.parseString(svg)
    assert svg.count("prefers-color-scheme:dark") == 1
    assert f'[id="label"]) [style*="fill: {OURS}"]{{fill:{on_dark(OURS)}!important}}' in svg
    assert "A title &amp; more" in svg
    drawn_again = svg
    draw_figure(tmp_path / "p.png", "A title & more", [Bars("", "ms", [Bar("a", 2.0)])])
    assert (tmp_path / "p.svg").read_text() == drawn_again


@pytest.mark.parametrize("color", [*CURVE_COLORS, *ROW_COLORS, "#000000", "#1f2328"])
def test_text_and_dark_colours_have_contrast(color):
    assert look._contrast(text_color(color), "#ffffff") >= 4.5
    for page in (look.DARK_PAGE, look.SITE_DARK_PAGE):
        assert look._contrast(on_dark(color), page) >= 4.5
        assert look._contrast(on_dark(text_color(color)), page) >= 4.5


def test_white_becomes_the_dark_page_and_each_curve_has_its_own_marker():
    assert on_dark("#ffffff") == look.DARK_PAGE
    assert len({marker_of(color) for color in CURVE_COLORS}) == len(CURVE_COLORS)


def test_a_timeline_shows_two_typical_steps(drawn, tmp_path):
    """From the stored report; bars of the link never overlap, and lie within the picture."""
    record = json.loads((RESULTS / "timeline-resnet50-4x1-1000mbit.json").read_text())
    assert drawing_of(record["name"])(record, tmp_path / "p.png")
    ((_, figure),) = drawn[-1:]
    assert [axes.get_title(loc="left").partition(":")[0] for axes in figure.axes] == [
        "torch",
        "Paceline",
        "Paceline, overlap_forward",
    ]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "forward",
        "backward",
        "communication",
        "optimizer",
    ]
    for sample in record["samples"].values():
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(sample["sent"]))


def test_a_bucket_has_the_link_when_the_one_before_has_arrived():
    assert busy([(0.0, 2.0), (1.0, 3.0), (4.0, 5.0)]) == [(0.0, 2.0), (2.0, 3.0), (4.0, 5.0)]
    assert joined([("forward", 0.0, 1.0), ("forward", 1.0002, 2.0), ("backward", 2.0, 3.0)]) == [
        ("forward", 0.0, 2.0),
        ("backward", 2.0, 3.0),
    ]
    assert typical([0.0, 9.0, 10.0, 11.0, 15.0], 1.0) == 1
