"""The table of time studies: figures of two papers, measured again on emulated clusters, by name or figure.

Source: Li et al., "PyTorch Distributed", VLDB 2020; Puri et al., "Large Scale Language Modeling", 2018.
"""

from __future__ import annotations

from paceline.errors import ConfigurationError
from paceline_lab.studies.cluster_study import StudyOptions, TimeStudy
from paceline_lab.studies.ddp_scale_figures import RankCountStudy, RoundRobinStudy, SkippedSyncStudy
from paceline_lab.studies.ddp_step_figures import BucketSizeStudy, OverlapStudy
from paceline_lab.studies.model_size import ModelSizeStudy
from paceline_lab.studies.prediction import PredictionStudy
from paceline_lab.studies.worker_threads import ThreadsStudy

STUDIES: dict[str, TimeStudy[StudyOptions]] = {
    study.name: study
    for study in (
        OverlapStudy(),
        BucketSizeStudy(),
        RankCountStudy(),
        SkippedSyncStudy(),
        RoundRobinStudy(),
        ThreadsStudy(),
        ModelSizeStudy(),
        PredictionStudy(),
    )
}
_FIGURES = {
    "fig6": "overlap",
    "fig7": "bucket-size",
    "fig8": "bucket-size",
    "fig9": "rank-count",
    "fig10": "skipped-sync",
    "fig12": "round-robin",
}


def find_study(name: str) -> TimeStudy[StudyOptions]:
    """Return the study of this name, or of this figure.

    Raises:
        ConfigurationError: There is none.
    """
    found = STUDIES.get(_FIGURES.get(name, name))
    if found is None:
        raise ConfigurationError(
            f"there is no study {name!r}. There are: {', '.join(STUDIES)} (or by the paper's figures: "
            f"{', '.join(_FIGURES)})."
        )
    return found
