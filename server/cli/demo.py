"""`perennial demo`."""

from pathlib import Path

import typer

from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_text
from perennial.server.cli.completion import claims
from perennial.server.cli.console import print_lines, print_outcome, watching_runs
from perennial.server.cli.options import Jobs, Json, command


@command("demo")
def demo_claims(
    only: list[str] | None = typer.Option(
        None, metavar="METHOD", help="This method's claim alone. Repeatable.", autocompletion=claims
    ),
    jobs: Jobs = None,
    folder: Path = typer.Option(Path("runs/demo"), "--out", help="Folder of the runs and the page."),
    picture: Path | None = typer.Option(
        None, metavar="FILE", help="Also write the figure of the one claim as an SVG file."
    ),
    as_json: Json = False,
) -> None:
    """What the seven methods claim, measured in a few minutes. Started again, it continues."""
    from perennial.server.papers.demo import demo_json, demo_table, load_claims, run_demo, seeds_line
    from perennial.server.run.output_files import must_be_ours
    from perennial.server.study.batch import cores

    chosen = load_claims(only=only or ())
    if picture and len(chosen) != 1:
        raise UserError(f"--picture {picture} needs one claim; say which with --only METHOD")
    if picture and picture.parent.is_dir():
        must_be_ours(picture, (".svg",), "--picture")
    with watching_runs(as_json) as watch:
        findings = run_demo(chosen, folder, jobs or cores(), watch)
    from perennial.server.report.demo import claim_picture, demo_page

    page = folder / "demo.html"
    folder.mkdir(parents=True, exist_ok=True)
    write_text(page, demo_page(findings, folder))
    if picture:
        picture.parent.mkdir(parents=True, exist_ok=True)
        write_text(picture, claim_picture(findings[0]))
    troubles = [trouble for finding in findings for trouble in finding.troubles]
    data = {**demo_json(findings), "page": str(page)}
    print_outcome(as_json, data, [demo_table(findings)], [seeds_line(findings)], troubles)
    if not as_json:
        held = sum(finding.holds for finding in findings)
        print_lines([f"{held} of {len(findings)} claims hold", f"page: {page}"])
