"""`draw_step`: one step of one rank as a picture, what it computes above what is on the way meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigurationError

if TYPE_CHECKING:
    from paceline.observe.timings import StepTiming

_COMPUTES = {"forward": "#4477aa", "backward": "#66ccee", "waits": "#bbbbbb", "optimizer": "#228833"}
_SENDS = "#ee6677"


def draw_step(timing: StepTiming) -> Any:
    """Draw a step's forward, backward, waiting and each bucket's reduction over time.

    Args:
        timing: A record of `model.timings`, such as `model.timings.last`. Its optimizer is the one before the forward.

    Returns:
        A `matplotlib.figure.Figure`; a notebook shows it where it is a cell's last value.

    Contract:
        Local; mutates nothing.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  most of a second
    except ImportError:
        raise ConfigurationError(
            "draw_step needs matplotlib, which is not installed. pip install matplotlib"
        ) from None
    num_buckets = len(timing.buckets)
    figure = Figure((8, 1.4 + 0.25 * num_buckets), layout="constrained")
    axes = figure.subplots()
    forward_began_s = timing.started_s - timing.last_forward_s
    backward_ended_s = timing.started_s + timing.backward_s
    spans = {
        "optimizer": (forward_began_s - timing.optimizer_s, timing.optimizer_s),
        "forward": (forward_began_s, timing.last_forward_s),
        "backward": (timing.started_s, timing.backward_s),
        "waits": (backward_ended_s, timing.exposed_s),
    }
    zero_s = spans["optimizer"][0]
    for name, (began_s, duration_s) in spans.items():
        axes.barh(0, 1e3 * duration_s, left=1e3 * (began_s - zero_s), color=_COMPUTES[name], label=name)
    for row, bucket in enumerate(sorted(timing.buckets, key=lambda bucket: bucket.launched_s), start=1):
        axes.barh(
            row,
            1e3 * bucket.communication_s,
            left=1e3 * (bucket.launched_s - zero_s),
            color=_SENDS,
            label="bucket is reduced" if row == 1 else None,
        )
    axes.set_yticks(range(num_buckets + 1), ["compute", *(f"bucket {1 + i}" for i in range(num_buckets))])
    axes.invert_yaxis()
    hidden = timing.overlapped_s / timing.communication_s if timing.communication_s else 1.0
    axes.set(xlabel="ms", title=f"Step {timing.step}: {hidden:.0%} of its communication is hidden")
    figure.legend(loc="outside lower center", ncols=5, fontsize="small", frameon=False)
    return figure
