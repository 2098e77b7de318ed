"""`perennial export`: a model for other programs."""

from pathlib import Path
from typing import Literal

import typer

from perennial.server.cli.console import counting, print_lines, remark
from perennial.server.cli.options import DataRoot, command
from perennial.server.cli.sites import ClientId, RunId

Form = Literal["onnx", "torch"]
ENDINGS: dict[Form, tuple[str, ...]] = {"onnx": (".onnx",), "torch": (".safetensors", ".pt", ".pth")}
"""Of files that may be written over."""


@command("export")
def export_model(
    place: Path = typer.Argument(..., metavar="RUN|STATE", help="A run folder, or a site's state folder."),
    file: Path = typer.Option(..., "--out", "-o", metavar="FILE", help="File to write."),
    model: str | None = typer.Option(None, help=r"global or personal.  \[default: the method's main model]"),
    client: ClientId = None,
    run_id: RunId = None,
    form: Form = typer.Option(
        "onnx",
        "--format",
        help="onnx: takes raw rows, runs anywhere, needs the extra onnx. torch: the tensors, as safetensors.",
    ),
    data_root: DataRoot = None,
) -> None:
    """Write a model to a file for other programs, checked against its own answers."""
    from perennial.common.wire import PERSONAL
    from perennial.server.results.exported import find_model, write_onnx, write_torch  # imports PyTorch
    from perennial.server.run.output_files import must_be_ours

    must_be_ours(file, ENDINGS[form])
    found = find_model(place, model, client, run_id, Path(data_root) if data_root else None)
    if found.changed:
        changed = ", ".join(found.changed)
        remark(f"{changed} changed since the run began; the file may answer otherwise than in its tables")
    with counting(f"writing {file}"):
        written = (write_onnx if form == "onnx" else write_torch)(found, file)
    whose = f" {'of' if found.name == PERSONAL else 'for'} {found.client}" if found.client else ""
    what = f"the {found.name} model of {found.task.method.name}{whose} after round {found.round}"
    print_lines([f"{file}: {what}; {written}"])
