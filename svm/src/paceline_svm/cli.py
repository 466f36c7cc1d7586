"""`paceline svm`: fit, predict and cross-validate a kernel SVM on files."""

from __future__ import annotations

import json
import shutil
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Kernel SVMs on files in LIBSVM's format or CSV (target in the last column).")

_Data = Annotated[Path, typer.Argument(help="A .csv file, or one in LIBSVM's format.")]
_Ranks = Annotated[
    int,
    typer.Option(
        "--ranks-per-host",
        "--nproc-per-node",
        min=1,
        help="Number of worker processes, which this command starts.",
    ),
]
_Task = Annotated[str, typer.Option(help="Kind of model: classify, regress or novelty.")]
_Kernel = Annotated[str, typer.Option(help="Kernel: rbf, linear, poly or sigmoid.")]
_Cost = Annotated[float, typer.Option("--C", help="Penalty of a violation (classify, regress).")]
_Gamma = Annotated[str, typer.Option(help="Kernel coefficient: scale, auto or a number.")]
_Tol = Annotated[float, typer.Option(help="Largest violation of optimality.")]
_Epsilon = Annotated[float, typer.Option(help="Half width of the tube (regress).")]
_Nu = Annotated[float, typer.Option(help="Largest share of outliers (novelty).")]
_Shrinking = Annotated[
    str,
    typer.Option(help="Rule of elimination: auto, none, adaptive, or for example multi-5% or single-500."),
]
_CacheSize = Annotated[
    str,
    typer.Option(help="Megabytes for kernel rows on each rank. auto: 500, and more where that saves time."),
]
OTHER_KERNELS = ("linear", "poly", "sigmoid")  # than rbf
_LARGE = 3_100  # rows of a problem that is too large to be solved as a whole
_AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON to stdout.")]


def register(commands: typer.Typer) -> None:
    """Add `svm` to `paceline`'s commands; the entry point `paceline.commands` names this function."""
    commands.add_typer(app, name="svm")


@app.command()
def fit(
    data: _Data,
    model: Annotated[Path, typer.Option(help="File of the model, in joblib's format.")] = Path(
        "model.joblib"
    ),
    ranks: _Ranks = 1,
    task: _Task = "classify",
    kernel: _Kernel = "rbf",
    cost: _Cost = 1.0,
    gamma: _Gamma = "scale",
    tol: _Tol = 1e-3,
    epsilon: _Epsilon = 0.1,
    nu: _Nu = 0.5,
    shrinking: _Shrinking = "auto",
    cache_size: _CacheSize = "auto",
    figure: Annotated[
        Path | None, typer.Option(help="File of a picture of the convergence, for example gap.png.")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Fit a model to a file with several processes, and write it to a file."""
    from paceline.given import check_output

    parameters = _parameters(task, kernel, cost, gamma, tol, epsilon, nu, shrinking, cache_size)
    check_output(model, "--model")
    if figure is not None:
        _check_figure(figure)
    result = _run(data, ranks, task, parameters, is_quiet=as_json, model=model)
    if figure is not None:
        _draw(figure, result["progress"])
    if as_json:
        print(json.dumps({**result, "ranks": ranks, "model": str(model)}))
        return
    gap = max(result["gap"])
    print(
        f"{result['num_support']} support vectors of {result['num_samples']} samples; largest violation {gap:.2g} "
        f"over all samples ({'at most' if result['converged'] else 'ABOVE'} tol {result['tol']:g}); "
        f"{result['fit_s']:.2f} s on {ranks} rank(s). Model: {model}"
    )


@app.command()
def predict(
    data: _Data,
    model: Annotated[Path, typer.Option(help="A file that `fit` wrote; only open files you trust.")] = Path(
        "model.joblib"
    ),
    output: Annotated[Path | None, typer.Option(help="File of the predictions.")] = None,
    as_json: _AsJson = False,
) -> None:
    """Predict the targets of a file's rows, one per line, and compare them with the file's targets."""
    import numpy as np

    from paceline.given import check_output
    from paceline_svm.file_job import check_columns, read_model, read_table

    if output is not None:
        check_output(output, "--output")
    fitted = read_model(model)
    table = read_table(data, fitted.n_features_in_)
    check_columns(data, table, fitted)
    predictions = fitted.predict(table.X)
    is_alike = (predictions.dtype.kind == "U") == (table.y.dtype.kind == "U")  # words are compared with words
    score = float(fitted.score(table.X, table.y)) if is_alike and not hasattr(fitted, "offset_") else None
    if as_json:
        print(json.dumps({"predictions": np.asarray(predictions).tolist(), "score": score}))
        return
    lines = "".join(f"{prediction}\n" for prediction in predictions)
    if output is None:
        sys.stdout.write(lines)
    else:
        output.write_text(lines)
    if score is not None:
        name = "accuracy" if hasattr(fitted, "classes_") else "R2"
        print(f"{name} against the file's targets: {score:.4f}", file=sys.stderr)


@app.command("cross-validate")
def cross_validate(
    data: _Data,
    folds: Annotated[int, typer.Option(min=2, help="Number of folds.")] = 5,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed for the folds.")] = 0,
    ranks: _Ranks = 1,
    task: _Task = "classify",
    kernel: _Kernel = "rbf",
    cost: _Cost = 1.0,
    gamma: _Gamma = "scale",
    tol: _Tol = 1e-3,
    epsilon: _Epsilon = 0.1,
    nu: _Nu = 0.5,
    shrinking: _Shrinking = "auto",
    cache_size: _CacheSize = "auto",
    as_json: _AsJson = False,
) -> None:
    """Score a model on parts of a file that it was not fitted to."""
    parameters = _parameters(task, kernel, cost, gamma, tol, epsilon, nu, shrinking, cache_size)
    result = _run(data, ranks, task, parameters, is_quiet=as_json, num_folds=folds, seed=seed)
    if as_json:
        print(json.dumps({**result, "ranks": ranks}))
        return
    name = {"classify": "accuracy", "regress": "R2", "novelty": "fraction taken as inliers"}[task]
    scores = ", ".join(f"{score:.4f}" for score in result["scores"])
    print(f"{name} over {folds} folds: mean {result['mean']:.4f} ({scores})")


@app.command("compile")
def compile_now() -> None:
    """Compile the solver's code for this machine, for example in an image. Then no first fit waits for it."""
    import numpy as np
    import scipy.sparse as sp

    from paceline_svm.classifier import SVC
    from paceline_svm.compiled import shown
    from paceline_svm.single_problem import SVR

    generator = np.random.default_rng(0)
    X, wide = generator.normal(size=(_LARGE, 4)), generator.normal(size=(_LARGE, 64))
    X[np.abs(X) < 0.1] = 0.0
    y = (X[:, 0] + X[:, 1] ** 2 > 0.5).astype(int)
    three = y + (X[:, 2] > 1)
    with shown(always=True) as found:
        for rows, labels in ((X[:200], y[:200]), (X[:200], three[:200]), (X, y), (wide, y)):
            for form in (rows, sp.csr_matrix(rows)):
                SVC(rows="alone").fit(form, labels).predict(form[:10])
        for kernel in OTHER_KERNELS:
            for num in (200, _LARGE):
                SVC(kernel=kernel, gamma=0.1, rows="alone", tol=1.0).fit(X[:num], y[:num]).predict(X[:10])
        SVR(rows="alone", tol=0.1).fit(X[:200], X[:200, 0])
    print(f"{found.num_functions} functions compiled in {found.seconds:.1f} s")


def _parameters(
    task: str,
    kernel: str,
    cost: float,
    gamma: str,
    tol: float,
    epsilon: float,
    nu: float,
    shrinking: str,
    cache_size: str,
) -> dict[str, Any]:
    from paceline.errors import ConfigurationError

    shared: dict[str, Any] = {"kernel": kernel, "tol": tol, "shrinking": shrinking}
    try:
        shared["cache_size"] = "auto" if cache_size == "auto" else float(cache_size)
    except ValueError:
        raise ConfigurationError(f"--cache-size {cache_size} is not auto or a number of megabytes.") from None
    try:
        shared["gamma"] = gamma if gamma in ("scale", "auto") else float(gamma)
    except ValueError:
        raise ConfigurationError(f"--gamma {gamma} is not scale, auto or a number.") from None
    own = {"classify": {"C": cost}, "regress": {"C": cost, "epsilon": epsilon}, "novelty": {"nu": nu}}
    if task not in own:
        raise ConfigurationError(f"--task {task} is not one of {', '.join(own)}.")
    return {**shared, **own[task]}


def _run(
    data: Path,
    ranks: int,
    task: str,
    parameters: dict[str, Any],
    is_quiet: bool,
    model: Path | None = None,
    **more: int,
) -> dict[str, Any]:
    """Perform a job in this process or over ranks, leave its model in a file, and return its result."""
    from paceline.launch import Watchdog, launch, parse
    from paceline_svm.file_job import Job, check, read_table, run

    table = read_table(data)
    check(task, parameters, table, ranks, **more)
    words = ["--standalone", "--nproc-per-node", str(ranks), "--share-devices", "-m", "paceline_svm.file_job"]
    parse(words)  # refuses what cannot be launched
    with Watchdog(uuid.uuid4().hex) as watchdog:  # removes the folder even if we are killed
        job = Job(str(watchdog.folder), task, parameters, is_quiet=is_quiet, **more)
        path = job.save(table)
        if ranks == 1:
            run(job)
        else:
            launch(parse([*words, str(path)]), note=lambda _: None)
        if model is not None:
            shutil.copyfile(job.model_file, model)
        result: dict[str, Any] = json.loads(job.result_file.read_text())
    return result


def _check_figure(path: Path) -> None:
    """Refuse a figure that could not be drawn, before there is something to draw."""
    import importlib.util

    from paceline.errors import ConfigurationError
    from paceline.given import check_output

    check_output(path, "--figure")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--figure needs matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in known:
        raise ConfigurationError(
            f"--figure {path} has none of the endings that can be drawn: {', '.join(known)}."
        )


def _draw(path: Path, progress: list[dict[str, Any]]) -> None:
    """Draw the largest violation after each working set."""
    from matplotlib.figure import Figure

    gaps = [point["gap"] for point in progress]
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.semilogy(range(1, len(gaps) + 1), gaps)
    axes.set(xlabel="working sets", ylabel="largest violation among active samples")
    axes.set_title(f"After {len(gaps)} working sets the largest violation is {gaps[-1]:.1e}")
    figure.savefig(path)
