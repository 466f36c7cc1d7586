"""What is trained? A table of models, each with its data and its loss.

`python -m benchmarks.workloads` lists them with their parameters.
"""

from paceline.bench.errors import UnknownNameError
from paceline.bench.workloads.mlstm import MlstmWorkload
from paceline.bench.workloads.resnet import ResNet50Workload
from paceline.bench.workloads.tiny import TinyWorkload
from paceline.bench.workloads.transformer import TransformerWorkload
from paceline.bench.workloads.wide_mlp import WideMlpWorkload
from paceline.bench.workloads.workload import Workload

WORKLOADS: dict[str, type[Workload]] = {
    "tiny": TinyWorkload,
    "resnet50": ResNet50Workload,
    "transformer": TransformerWorkload,
    "mlstm": MlstmWorkload,
    "wide_mlp": WideMlpWorkload,
}


def make_workload(name: str, quick: bool = False) -> Workload:
    """Return the named workload, at its default or at its smallest size.

    Raises:
        UnknownNameError: there is no such workload.
    """
    if name not in WORKLOADS:
        raise UnknownNameError(f"there is no workload {name!r}. There are: {', '.join(WORKLOADS)}.")
    return WORKLOADS[name].quick() if quick else WORKLOADS[name]()


__all__ = ["WORKLOADS", "Workload", "make_workload"]
