"""`perennial export`: a model for other programs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from perennial.server.cli.console import out, remark, sentences
from perennial.server.cli.options import DataRoot, app
from perennial.server.cli.sites import ClientId, RunId


class Form(StrEnum):
    """What a model is written as."""

    onnx = "onnx"
    torch = "torch"


ENDINGS = {Form.onnx: (".onnx",), Form.torch: (".safetensors", ".pt", ".pth")}
"""Of files that may be written over."""


@app.command("export")
def export_model(
    place: Annotated[Path, typer.Argument(metavar="RUN|STATE", help="A run folder, or a site's state folder.")],
    file: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write.")],
    model: Annotated[
        str | None, typer.Option(help=r"global or personal.  \[default: the method's main model]")
    ] = None,
    client: ClientId = None,
    run_id: RunId = None,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="onnx: takes raw rows, runs anywhere, needs the extra onnx. torch: the tensors, as safetensors.",
        ),
    ] = Form.onnx,
    data_root: DataRoot = None,
) -> None:
    """Write a model to a file for other programs, checked against its own answers."""
    with sentences():
        from perennial.common.wire import PERSONAL
        from perennial.server.results.exported import take, write_onnx, write_torch  # imports PyTorch
        from perennial.server.run.output_files import must_be_ours

        must_be_ours(file, ENDINGS[form])
        taken = take(place, model, client, run_id, Path(data_root) if data_root else None)
        if taken.changed:
            changed = ", ".join(taken.changed)
            remark(f"{changed} changed since the run began; the file may answer otherwise than in its tables")
        said = (write_onnx if form is Form.onnx else write_torch)(taken, file)
        whose = f" {'of' if taken.name == PERSONAL else 'for'} {taken.client}" if taken.client else ""
        what = f"the {taken.name} model of {taken.task.method.name}{whose} after round {taken.round}"
        out.print(f"{file}: {what}; {said}", highlight=False, soft_wrap=True)
