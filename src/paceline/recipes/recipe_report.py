"""What a recipe derived, in words: what rank 0 prints before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_ADAPTIVE = ("adam", "adagrad", "rmsprop", "lamb")
_SHOWN_GROUPS = 4


def report_text(facts: Mapping[str, Any]) -> str:
    """Lay out what `LargeMinibatch.as_dict` returns, one fact a line."""
    rows = list(_rows(facts))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {words}" for name, words in rows)


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    unit, warmup, total, done = facts["unit"], facts["warmup"], facts["total"], facts["done"]
    rows = [
        ("global batch", facts["batch"]["words"]),
        ("reference batch", f"{facts['reference_batch']:,} samples"),
        ("factor", f"{facts['factor']:.6g} ({facts['scaling']} scaling)"),
        ("reference rate", _rates(facts["reference_rates"])),
        ("peak rate", _rates(facts["peak_rates"])),
        ("warm-up", _warmup(warmup, unit, facts["factor"])),
        ("decay", facts["decay"]),
        ("total", f"{total['time']:g} {unit}, {total['steps']:,.0f} steps of this batch"),
        ("done", f"{done['steps']:,} steps, {done['samples']:,} samples; rate now {_rates(facts['rates'])}"),
    ]
    rows += [
        ("change", f"after {change['samples']:,} samples: {change['batch']}, factor {change['factor']:.6g}")
        for change in facts["changes"][1:]
    ]
    if "noise" in facts:
        rows.append(("gradient noise", facts["noise"]))
    return rows + [("note", words) for words in _notes(facts)]


def _rates(rates: Sequence[float]) -> str:
    if len(set(rates)) == 1:
        return f"{rates[0]:.6g}"
    shown = ", ".join(f"{rate:.6g}" for rate in rates[:_SHOWN_GROUPS])
    return f"{shown}{', ...' if len(rates) > _SHOWN_GROUPS else ''} (a group each)"


def _warmup(warmup: Mapping[str, Any], unit: str, factor: float) -> str:
    if warmup["kind"] == "none" or warmup["time"] == 0:
        return "none"
    if factor <= 1:
        return "none: the batch is not larger than the reference batch"
    return f"{warmup['kind']}, {warmup['time']:g} {unit}, {warmup['steps']:,.0f} steps of this batch"


def _notes(facts: Mapping[str, Any]) -> list[str]:
    name = facts["optimizer"]
    if facts["scaling"] == "linear" and any(word in name.lower() for word in _ADAPTIVE):
        return [f'{name} follows the square root of the batch more closely: try scaling="sqrt"']
    return []
