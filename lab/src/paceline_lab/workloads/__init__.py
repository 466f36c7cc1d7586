"""Models to train, each with its data and its loss: what benchmarks and examples run.

`paceline bench workloads` lists them with their parameters. `WORKLOADS` is the table by name; a new one is a class that
implements `SizedWorkload`, and a line in it. `Mlstm` and `load_text` are the parts that examples use by themselves.

    workload = make_workload("resnet50")
    model, batch = workload.make_model(), workload.make_batch(rank=0, step=0)
    loss, carry = workload.loss(model, batch, None)
"""

from __future__ import annotations

from paceline.errors import ConfigurationError
from paceline_lab.workloads.convolutional import ResNet50Workload, Vgg16Workload
from paceline_lab.workloads.datasets import Text, load_text
from paceline_lab.workloads.images import load_images
from paceline_lab.workloads.mlstm import Mlstm, MlstmWorkload, State
from paceline_lab.workloads.synthetic import TinyWorkload, WideMlpWorkload
from paceline_lab.workloads.transformer import TransformerWorkload
from paceline_lab.workloads.workload import SizedWorkload, Workload

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


__all__ = [
    "WORKLOADS",
    "Mlstm",
    "SizedWorkload",
    "State",
    "Text",
    "Workload",
    "load_images",
    "load_text",
    "make_workload",
]
