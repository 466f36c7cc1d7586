"""Report of a recipe: what it derived from what, as numbers for JSON and as text for rank 0 to print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline_recipes.large_minibatch import LargeMinibatch

_ADAPTIVE = ("adam", "adagrad", "rmsprop", "lamb")
_SHOWN_GROUPS = 4


def facts_of(recipe: LargeMinibatch) -> dict[str, Any]:
    """Return what a recipe derived from what, as plain numbers."""
    steps_per_unit = recipe.unit_samples / recipe.batch.size
    facts: dict[str, Any] = {
        "batch": {**recipe.batch.as_dict(), "samples": recipe.batch.size, "words": str(recipe.batch)},
        "reference_batch": recipe.reference_batch,
        "scaling": recipe.scaling,
        "factor": recipe.factor,
        "reference_rates": recipe.reference_rates,
        "peak_rates": [rate * recipe.factor for rate in recipe.reference_rates],
        "rates": recipe.get_last_lr(),
        "unit": "steps of the first batch" if recipe.epoch_samples is None else "epochs",
        "warmup": {
            "kind": recipe.curve.warmup_kind,
            "time": recipe.curve.warmup,
            "steps": recipe.curve.warmup * steps_per_unit,
        },
        "decay": recipe.curve.decay_name,
        "total": {"time": recipe.curve.total, "steps": recipe.curve.total * steps_per_unit},
        "done": {"samples": recipe.samples, "steps": recipe.last_epoch, "time": recipe.time},
        "changes": [asdict(change) for change in recipe.changes],
        "optimizer": type(recipe.optimizer).__name__,
    }
    if recipe.noise is not None:
        ratio = recipe.noise.noise_over_signal
        facts["noise_over_signal"] = ratio if math.isfinite(ratio) else None
        facts["noise"] = recipe.noise.in_words(recipe.batch.size)
    return facts


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
