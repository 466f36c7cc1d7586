"""Which workloads are there, and how large is each?"""

import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from paceline.bench.workloads import WORKLOADS, make_workload


def main(
    quick: Annotated[bool, typer.Option(help="The smallest sizes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the workloads with their parameters; models are built without memory."""
    rows = {name: _sizes(name, quick) for name in WORKLOADS}
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    table = Table("workload", "tensors", "parameters", "gradient MB (float32)")
    for name, sizes in rows.items():
        table.add_row(
            name, f"{sizes['tensors']:,}", f"{sizes['parameters']:,}", f"{4e-6 * sizes['parameters']:.1f}"
        )
    Console().print(table)


def _sizes(name: str, quick: bool) -> dict[str, int]:
    with torch.device("meta"):
        parameters = list(make_workload(name, quick).make_model().parameters())
    return {"tensors": len(parameters), "parameters": sum(parameter.numel() for parameter in parameters)}


if __name__ == "__main__":
    typer.run(main)
