"""`paceline svm` as a user types it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sklearn.datasets import dump_svmlight_file

from harness.svm_oracle import two_classes
from harness.terminal import paceline
from paceline.cli import main
from paceline.errors import ConfigurationError
from paceline_svm import SVC, cli, validation
from paceline_svm.file_job import read_table

pytestmark = pytest.mark.compiles


def csv(X, y):
    return "".join(",".join([*map(str, row), str(label)]) + "\n" for row, label in zip(X, y, strict=True))


def test_fit_over_ranks_predict_and_cross_validate(tmp_path):
    """As typed; the files say the same in both formats, so the models do too."""
    X, y = two_classes(300)
    words = np.where(y, "yes", "no")
    (tmp_path / "data.csv").write_text("a,b,c,d,class\n" + csv(X, words))
    dump_svmlight_file(X, y, str(tmp_path / "data.svm"), zero_based=False)
    fit = ["svm", "fit", "--gamma", "0.5", "data.svm", "--ranks-per-host", "2", "--figure", "gap.png"]
    fitted = paceline(*fit, cwd=tmp_path)
    assert fitted.code == 0, fitted.err
    assert "over all samples (at most tol 0.001)" in fitted.out
    assert (tmp_path / "gap.png").stat().st_size > 0
    predicted = paceline("svm", "predict", "data.svm", "--output", "p.txt", cwd=tmp_path)
    assert "accuracy against the file's targets: 0.9" in predicted.err
    expected = SVC(gamma=0.5, tol=1e-5).fit(X, words)
    far = np.abs(expected.decision_function(X)) > 1e-2
    numbers = np.loadtxt(tmp_path / "p.txt")
    assert np.array_equal(np.where(numbers == 1, "yes", "no")[far], expected.predict(X)[far])


def test_json_and_other_tasks_in_one_process(tmp_path, monkeypatch, capsys):
    X, y = two_classes(200)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text(csv(X, np.where(y, "yes", "no")))
    (tmp_path / "real.csv").write_text(csv(X, X[:, 0] ** 2))

    def said(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["svm", *arguments])
        assert ended.value.code == 0
        return capsys.readouterr().out

    result = json.loads(said("fit", "data.csv", "--json"))
    assert result["gap"][0] <= 1e-3
    assert result["progress"][-1]["num_active"] == 200
    assert result["counters"][0]["num_steps"] > 0
    assert json.loads(said("predict", "data.csv", "--json"))["score"] > 0.9
    assert said("cross-validate", "data.csv", "--folds", "3").startswith("accuracy over 3 folds: mean 0.")
    assert "support vectors of 200" in said("fit", "real.csv", "--task", "regress")
    assert said("predict", "real.csv").count("\n") == 200
    assert said("cross-validate", "real.csv", "--task", "regress").startswith("R2 over 5 folds: mean 0.")
    assert len(json.loads(said("cross-validate", "real.csv", "--task", "novelty", "--json"))["scores"]) == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fit", "nothing.svm"], "there is no file nothing.svm"),
        (["fit", "bad.csv"], "bad.csv, line 3, column 1: 'x' is not a number"),
        (["fit", "bad.csv", "--task", "guess"], "--task guess is not one of classify, regress, novelty"),
        (["fit", "bad.csv", "--gamma", "wide"], "--gamma wide is not scale, auto or a number"),
        (["predict", "bad.csv"], "there is no model model.joblib"),
    ],
)
def test_mistakes_are_one_paragraph_and_exit_2(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("1,2,0\n3,4,1\nx,4,1\n")
    with pytest.raises(SystemExit) as ended:
        main(["svm", *words])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert says in said.err


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.svm", "1 1:2\n0 2:1 1:3\n", "line 2: index 1 after 2"),
        ("a.svm", "1 1:2\n0 1:x\n", "line 2: '1:x' is not index:value"),
        ("a.svm", "1 1:2\none 1:3\n", "line 2: 'one' is not a number"),
        ("a.svm", "1 0:2\n", "line 1: index 0 after 0"),
        ("a.svm", "1 9:2\n", "line 1: index 9, but the model has 4 features"),
        ("a.svm", "", "has no rows"),
        ("a.csv", "1,2\n1,2,3\n", "line 2: 3 columns, expected 2"),
        ("a.csv", "1\n", "line 1: 1 columns, expected 2"),
        ("a.csv", "", "has no rows"),
        ("a.csv", "a,b,class\n", "has no rows"),
        ("a.csv", "1,2,0\n3,4x,1\n", "line 2, column 2: '4x' is not a number"),
        ("a.csv", "1,2.0O,0\n3,4,1\n", "line 1, column 2: '2.0O' is not a number"),
        ("a.csv", "1x,yes\n3,no\n", "line 1, column 1: '1x' is not a number"),
        ("a.csv", "NA,yes\n3,no\n4,yes\n", "line 1, column 1: 'NA' is not a number"),
        ("a.csv", ",a,class\n0,3,1\n", "line 1, column 1: '' is not a number"),
        ("a.csv", "a,3,class\n1,3,1\n", "line 1, column 1: 'a' is not a number"),
        ("a.csv", "a,b,class\nc,d,class\n1,3,1\n", "line 2, column 1: 'c' is not a number"),
        ("a.svm", "\ufeff1 1:2\n0 1:3\n", "line 1: '.*1' is not a number"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_line(name, content, says, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigurationError, match=says):
        read_table(tmp_path / name, 4)


@pytest.mark.parametrize(
    "first", ["", "\ufeff", "a,length (cm),#c,d2,class\n", "\ufeffa,b,c,d,class\n", "\n"]
)
def test_no_row_of_csv_is_dropped(first, tmp_path):
    """Whether it begins with a byte-order mark, a header, both or an empty line."""
    X, y = two_classes(20)
    (tmp_path / "a.csv").write_text(first + csv(X, y), encoding="utf-8")
    table = read_table(tmp_path / "a.csv")
    assert np.allclose(table.X, X)
    assert np.array_equal(table.y, y)


def test_both_formats_hold_the_same(tmp_path):
    X, y = two_classes(20)
    (tmp_path / "a.csv").write_text(csv(X, y))
    dump_svmlight_file(X, y, str(tmp_path / "a.svm"), zero_based=False)
    dense, sparse = read_table(tmp_path / "a.csv"), read_table(tmp_path / "a.svm", 4)
    assert np.allclose(dense.X, sparse.X.toarray())
    assert np.array_equal(dense.y, sparse.y)


@pytest.mark.lab
def test_compile_now(capsys, monkeypatch):
    """What it has compiled, no fit waits for: another look finds nothing to do. A kernel takes seconds, so not all."""
    assert {"rbf", "precomputed", *cli.OTHER_KERNELS} == set(validation.KERNELS)
    monkeypatch.setattr(cli, "OTHER_KERNELS", ("linear", "poly"))  # which other tests compile, too
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            main(["svm", "compile"])
        assert ended.value.code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 functions compiled in 0.0 s"
