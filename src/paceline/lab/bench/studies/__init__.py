"""The studies of two papers, again, on emulated clusters: each beside what was published.

Source: Li et al., "PyTorch Distributed", VLDB 2020; Puri et al., "Large Scale Language Modeling", 2018.
"""

from __future__ import annotations

from paceline.errors import ConfigurationError
from paceline.lab.bench.studies.bucket_size import BucketSizeStudy
from paceline.lab.bench.studies.model_size import ModelSizeStudy
from paceline.lab.bench.studies.overlap import OverlapStudy
from paceline.lab.bench.studies.rank_count import RankCountStudy
from paceline.lab.bench.studies.round_robin import RoundRobinStudy
from paceline.lab.bench.studies.skipped_sync import SkippedSyncStudy
from paceline.lab.bench.studies.study import Study
from paceline.lab.bench.studies.threads import ThreadsStudy

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        OverlapStudy(),
        BucketSizeStudy(),
        RankCountStudy(),
        SkippedSyncStudy(),
        RoundRobinStudy(),
        ThreadsStudy(),
        ModelSizeStudy(),
    )
}
_FIGURES = {"fig6": "overlap", "fig7": "bucket-size", "fig8": "bucket-size", "fig9": "rank-count"} | {
    "fig10": "skipped-sync",
    "fig12": "round-robin",
}


def find_study(name: str) -> Study:
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
