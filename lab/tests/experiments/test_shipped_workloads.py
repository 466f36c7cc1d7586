"""The workloads that `paceline plan` ships are the lab's models, as `bench.shipped_workloads` writes them."""

from pathlib import Path

from paceline_lab.bench.shipped_workloads import FOLDER, write_all


def test_what_is_shipped_is_what_the_models_are(tmp_path: Path) -> None:
    write_all(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert {"resnet50.json", "tiny.json"} <= written.keys()
