"""What is trained? A table of models, each with its data and its loss.

`paceline bench workloads` lists them with their parameters.
"""

from __future__ import annotations

from paceline.errors import ConfigurationError
from paceline.lab.bench.workloads.mlstm import MlstmWorkload
from paceline.lab.bench.workloads.resnet import ResNet50Workload
from paceline.lab.bench.workloads.tiny import TinyWorkload
from paceline.lab.bench.workloads.transformer import TransformerWorkload
from paceline.lab.bench.workloads.vgg import Vgg16Workload
from paceline.lab.bench.workloads.wide_mlp import WideMlpWorkload
from paceline.lab.bench.workloads.workload import SizedWorkload, Workload

WORKLOADS: dict[str, SizedWorkload] = {
    "tiny": TinyWorkload(),
    "wide_mlp": WideMlpWorkload(),
    "resnet50": ResNet50Workload(),
    "vgg16": Vgg16Workload(),
    "transformer": TransformerWorkload(),
    "bert": TransformerWorkload.bert_base(),
    "mlstm": MlstmWorkload(),
    "mlstm-4k": MlstmWorkload.of_scale_study(4096),
    "mlstm-8k": MlstmWorkload.of_scale_study(8192),
}


def make_workload(name: str, quick: bool = False) -> SizedWorkload:
    """Return the named workload, at its default or at its smallest size.

    Raises:
        ConfigurationError: There is no such workload.
    """
    if name not in WORKLOADS:
        raise ConfigurationError(f"there is no workload {name!r}. There are: {', '.join(WORKLOADS)}.")
    return WORKLOADS[name].quick() if quick else WORKLOADS[name]


__all__ = ["WORKLOADS", "SizedWorkload", "Workload", "make_workload"]
