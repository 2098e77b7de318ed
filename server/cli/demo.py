"""`perennial demo`."""

from pathlib import Path
from typing import Annotated

import typer

from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_bytes
from perennial.server.cli.completion import claims
from perennial.server.cli.console import out, print_tables, print_troubles, sentences, watching_runs
from perennial.server.cli.options import Jobs, Json, app


@app.command("demo")
def demo_claims(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="METHOD", help="This method's claim alone. Repeatable.", autocompletion=claims),
    ] = None,
    jobs: Jobs = None,
    folder: Annotated[Path, typer.Option("--out", help="Folder of the runs and the page.")] = Path("runs/demo"),
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the figure of the one claim as an SVG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What the seven methods claim, measured in a few minutes. Started again, it continues."""
    from perennial.server.papers.demo import demo_json, demo_table, load_claims, run_demo, seeds_line
    from perennial.server.run.output_files import must_be_ours
    from perennial.server.study.batch import cores

    with sentences():
        chosen = load_claims(only=only or ())
        if picture and len(chosen) != 1:
            raise UserError(f"--picture {picture} needs one claim; say which with --only METHOD")
        if picture and picture.parent.is_dir():
            must_be_ours(picture, (".svg",), "--picture")
        with watching_runs(as_json) as watch:
            findings = run_demo(chosen, folder, jobs or cores(), watch)
        from perennial.server.report.demo import claim_picture, demo_page

        folder.mkdir(parents=True, exist_ok=True)
        page = folder / "demo.html"
        write_bytes(page, demo_page(findings, folder).encode())
        if picture:
            picture.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(picture, claim_picture(findings[0]).encode())
    if as_json:
        out.print_json(data={**demo_json(findings), "page": str(page)})
        return
    print_tables(demo_table(findings))
    out.print(seeds_line(findings), highlight=False, soft_wrap=True)
    print_troubles(trouble for finding in findings for trouble in finding.troubles)
    out.print(f"{sum(finding.holds for finding in findings)} of {len(findings)} claims hold", highlight=False)
    out.print(f"page: {page}", highlight=False, soft_wrap=True)
