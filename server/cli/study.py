"""`perennial sweep`, `tune`, `compare`, `reproduce` and `report`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_bytes, write_text
from perennial.common.utils.suggestions import unknown
from perennial.server.cli.completion import method_list, tables
from perennial.server.cli.completion import methods as one_of_methods
from perennial.server.cli.console import counting, err, out, print_outcome, remark, watching_runs
from perennial.server.cli.options import (
    DataRoot,
    Device,
    Jobs,
    Json,
    Pool,
    Prune,
    SearchOptions,
    Selected,
    StudyOptions,
    TrialRounds,
    command,
)
from perennial.server.runs import MOST, POOL
from perennial.server.selection.split_rule import Select

if TYPE_CHECKING:
    from perennial.server.studies import Search
    from perennial.server.study.batch import Watch

KEPT = Path("results")
"""The numbers of every seed, as the repository keeps them."""


Format = Literal["html", "markdown", "csv"]
ENDINGS: dict[Format, tuple[str, ...]] = {
    "html": (".html", ".htm"),
    "markdown": (".md", ".markdown"),
    "csv": (".csv",),
}


def _format_of(file: Path | None) -> Format:
    """What a report is written as, by the file's ending. Raises `UserError` for another ending."""
    if not file or not file.suffix:
        return "html"
    for form, endings in ENDINGS.items():
        if file.suffix.lower() in endings:
            return form
    raise UserError(f"--out {file}: a report ends in .html, .md or .csv; or say what it is with --format")


@command("sweep", plugins=True)
def sweep_method(
    trials: Annotated[int, typer.Option(min=1, max=MOST, help="How many; trial 0 is the defaults.")],
    search: SearchOptions,
    prune: Prune = False,
    as_json: Json = False,
) -> None:
    """Random search over a method's search ranges. Started again, it continues."""
    from perennial.server import studies

    with _watched(search, as_json) as watch:
        found = studies.sweep(**search.arguments(), trials=trials, prune=prune, watch=watch)
    lines = [found.verdict.sentence] if found.verdict.sentence else []
    _print_search(found, as_json, found.table, lines)


@command("tune", plugins=True)
def tune_method(
    trials: Annotated[int, typer.Option(min=2, max=MOST, help="How many; trial 0 is the defaults.")],
    search: SearchOptions,
    prune: Prune = True,
    preset: Path | None = typer.Option(
        None, "--preset-out", metavar="FILE", help="Also add what was chosen to a file of presets."
    ),
    as_json: Json = False,
) -> None:
    """Choose a method's settings without target data, and say why. Started again, it continues."""
    from perennial.server import studies
    from perennial.server.study.presets import add_preset, must_take

    arguments = search.arguments()
    if preset:
        must_take(preset, search.scenario, arguments["optimizers"], arguments["settings"])
    with _watched(search, as_json) as watch:
        found = studies.tune(**arguments, trials=trials, prune=prune, watch=watch)
    lines = found.why
    if preset:
        assert search.scenario
        lines.append(
            add_preset(preset, found.outcomes, found.verdict, search.scenario, arguments["settings"], prune)
        )
    files = [str(file) for file in found.files]
    data = {"trials": found.table, "by": found.verdict.by, "why": lines, "files": files}
    _print_search(found, as_json, data, [*lines, *(f"written: {file}" for file in files)])


def _print_search(found: "Search", as_json: bool, data: object, lines: Iterable[str]) -> None:
    from perennial.server.study.trial_tables import sweep_tables

    print_outcome(as_json, data, sweep_tables(found.outcomes, found.verdict), lines, found.troubles)


@command("compare", plugins=True)
def compare_methods(
    study: StudyOptions,
    named: list[str] = typer.Argument(
        None,
        metavar="[METHOD]...",
        help="Methods, such as `fedsdr ditto`; FedAvg, Local and a constant are always in.",
        autocompletion=one_of_methods,
    ),
    methods: str = typer.Option(
        "", help="The same, with commas between them.", show_default=False, autocompletion=method_list
    ),
    seeds: int = typer.Option(3, min=1, max=MOST, help="How many: 0, 1, …"),
    trials: int = typer.Option(
        1, min=1, max=MOST, help="Search budget of every method, with seed 0; 1 is the defaults."
    ),
    trial_rounds: TrialRounds = None,
    select: Selected = Select.by_split.value,
    prune: Prune = False,
    oracle: bool = typer.Option(False, "--oracle", help="Also the round that is best on test data, labelled so."),
    each_site: bool = typer.Option(
        False, "--leave-one-site-out", help="What each method does at a site that nobody trained at."
    ),
    adapt: int = typer.Option(0, min=0, help="With --leave-one-site-out: samples that the site then learns from."),
    page: Path | None = typer.Option(
        None,
        "--report",
        metavar="FILE",
        help="Also write the page of the chosen runs, and of no trial; of sites left out, that of the tables.",
    ),
    as_json: Json = False,
) -> None:
    """Methods side by side, tuned alike. Started again, it continues."""
    from perennial.server import studies
    from perennial.server.run.output_files import must_be_ours
    from perennial.server.study.compare import comparison_lines, comparison_tables, trouble_lines

    given = [*(named or ()), *([methods] if methods else ())]
    names = [name.strip() for part in given for name in part.split(",")]
    if not names:
        raise UserError(
            "METHOD: name one or more, as in `perennial compare fedsdr ditto --scenario colored-digits`"
        )
    if adapt and not each_site:
        raise UserError(f"--adapt {adapt} is for --leave-one-site-out; a run has adapt beside test_sites")
    if page:
        if page.suffix.lower() not in ("", *ENDINGS["html"]):
            raise UserError(f"--report {page}: it is a page; let its name end in .html")
        must_be_ours(page, ENDINGS["html"], "--report")
    if each_site:
        if trials > 1 or trial_rounds or select != Select.by_split or prune or oracle:
            raise UserError(
                "--leave-one-site-out is not possible with --trials, --trial-rounds, --select, --prune or "
                "--oracle; tune first"
            )
        _leave_one_site_out(study, names, seeds, adapt, page, as_json)
        return
    with _watched(study, as_json) as watch:
        comparison = studies.compare(
            names,
            **vars(study),
            seeds=seeds,
            trials=trials,
            trial_rounds=trial_rounds,
            select=select,
            prune=prune,
            oracle=oracle,
            watch=watch,
        )
    lines = comparison_lines(comparison)
    print_outcome(as_json, comparison.json(), comparison_tables(comparison), lines, trouble_lines(comparison))
    if page:
        from perennial.server.report.page import write_page

        write_page([Path(run) for choice in comparison.choices for run in choice.runs], page, oracle)
        err.print(f"report: {page}", highlight=False, soft_wrap=True)


def _leave_one_site_out(
    study: StudyOptions, names: list[str], seeds: int, adapt: int, page: Path | None, as_json: bool
) -> None:
    from perennial.server import studies
    from perennial.server.study.unseen_sites import RARE, scores_table, sites_json, sites_table

    with _watched(study, as_json) as watch:
        cells, troubles = studies.leave_one_site_out(names, **vars(study), seeds=seeds, adapt=adapt, watch=watch)
    by_score = scores_table(cells)
    made = [sites_table(cells, adapt), *([by_score] if by_score else [])]
    notes = [RARE] if by_score else []
    print_outcome(as_json, sites_json(cells), made, notes, troubles)
    if page:
        from perennial.server.report.page import write_tables

        write_tables("Leave one site out", made, [*notes, *troubles], page)
        err.print(f"report: {page}", highlight=False, soft_wrap=True)


@contextmanager
def _watched(study: StudyOptions, as_json: bool) -> Iterator["Watch"]:
    """How a study is watched; first is said what of its file is not used."""
    from perennial.server.studies import not_used

    if study.config and not study.scenario and (sentence := not_used(study.config)):
        remark(sentence)
    with watching_runs(as_json) as watch:
        yield watch


@command("reproduce")
def reproduce_table(
    name: str | None = typer.Argument(
        None, help="A table of a paper, see `perennial list reproductions`.", autocompletion=tables
    ),
    quick: bool = typer.Option(
        False, "--quick", help="A small version in minutes, not comparable with the paper."
    ),
    rounds: int | None = typer.Option(None, min=1, help="Rounds in place of the table's."),
    seeds: int | None = typer.Option(None, min=1, max=MOST, help="Seeds in place of the table's."),
    trials: int | None = typer.Option(
        None, min=1, max=MOST, help="Search budget in place of the table's; 1 is its settings."
    ),
    trial_rounds: TrialRounds = None,
    select: Select | None = typer.Option(
        None,
        help=r"What a search chooses by; as-in-paper: as the paper did, on test data.  \[default: the table's]",
    ),
    only: list[str] | None = typer.Option(
        None, "--row", help="This row, beside FedAvg and Local; may be repeated."
    ),
    jobs: Jobs = None,
    folder: Pool = POOL,
    figures: Path | None = typer.Option(None, metavar="FOLDER", help="Also write figures there."),
    results: Path | None = typer.Option(
        None,
        "--keep",
        metavar="FOLDER",
        help="Also keep every seed's numbers there; rows there are not made again.",
    ),
    page: Path | None = typer.Option(
        None, "--overview", metavar="FILE", help="No table: the page of all claims, from what is kept."
    ),
    config: Path | None = typer.Option(None, hidden=True),
    check: bool = typer.Option(
        False, "--check", help="With --overview: write nothing, fail if the page is another one."
    ),
    data_root: DataRoot = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """A table of a paper beside ours; runs what is missing. Started again, it continues."""
    from perennial.server.papers import selection_study
    from perennial.server.papers.kept import keep, kept_beside, known
    from perennial.server.papers.reproduce import (
        load_reproduction,
        remark_lines,
        reproduction_json,
        reproduction_table,
    )
    from perennial.server.study.batch import cores
    from perennial.server.study.compare import compare, comparison_lines, trouble_lines, with_baselines

    if config:
        raise UserError(
            f"--config {config} is not possible; a paper's table belongs to the paper's own scenario, and "
            f"`perennial compare METHOD --config {config}` is for data of your own"
        )
    if check and name == selection_study.NAME:
        page = page or selection_study.PAGE
    if check and not page:
        raise UserError("--check is for --overview FILE: it compares that page with what is kept")
    for option, place in (("--keep", results), ("--figures", figures)):
        if place and place.exists() and not place.is_dir():
            raise UserError(f"{option} {place} is a file; name a folder")
    if page and name in ("", None, selection_study.NAME):
        _overview(page, results or KEPT, check, bool(name))
        return
    if page or not name:
        raise UserError("TABLE: name one table, or ask for the page of all claims with --overview FILE")
    jobs, rows = jobs or cores(), only or ()
    if name == selection_study.NAME:
        if trial_rounds or select:
            raise UserError(f"{name}: --trial-rounds and --select are not possible; it compares all rules")
        full = selection_study.QUICK if quick else selection_study.Size()
        if strangers := [row for row in rows if row not in full.methods]:
            raise UserError(unknown("row", strangers[0], full.methods))
        size = replace(
            full,
            methods=tuple(dict.fromkeys(rows or full.methods)),
            rounds=rounds or full.rounds,
            seeds=seeds or full.seeds,
            trials=trials or full.trials,
        )
        with watching_runs(as_json) as watch:
            found, troubles = selection_study.measure(size, folder, jobs, watch, data_root, device, results)
        print_outcome(as_json, list(map(asdict, found)), selection_study.tables(found).values(), [], troubles)
        drawn = {"selection": selection_study.figure(found)} if figures and found else {}
    else:
        with watching_runs(as_json) as watch:
            table = load_reproduction(name)
            plan = table.plan(
                quick,
                data_root,
                device,
                rounds=rounds,
                seeds=seeds,
                trials=trials,
                trial_rounds=trial_rounds,
                select=select,
                only=rows,
            )
            if results:
                plan = known(name, table, plan, quick, rows, results)
                if plan.kept:
                    err.print(
                        f"not made again, {results} has them: {', '.join(sorted(plan.kept))}", soft_wrap=True
                    )
                if {entry.label for entry in with_baselines(plan.entries)} <= plan.kept:
                    if as_json:
                        there = kept_beside(name, table, plan, quick, results)
                        out.print_json(data=[line.model_dump(mode="json") for line in there])
                    if figures:
                        remark(f"--figures {figures}: there is nothing to draw, since no row was made")
                    return
            comparison = compare(plan, folder, jobs, watch)
            if results:
                keep(name, table, comparison, quick, plan.select, results)
        made = [reproduction_table(table, comparison, quick)]
        lines = [*remark_lines(table, comparison), *comparison_lines(comparison)]
        print_outcome(as_json, reproduction_json(table, comparison, quick), made, lines, trouble_lines(comparison))
        drawn = {}
        if figures:
            from perennial.server.report.pictures import pictures

            drawn = {f"{name}-{kind}": svg for kind, svg in pictures(comparison, table.drawn).items()}
            if not drawn:
                remark(f"--figures {figures}: there is nothing to draw, since no row that is drawn has a run")
    for stem, svg in drawn.items():
        assert figures
        figures.mkdir(parents=True, exist_ok=True)
        write_text(figures / f"{stem}.svg", svg)


def _overview(page: Path, results: Path, check: bool, of_selection: bool) -> None:
    """Write the page of all claims, or that of the study of selections, and what belongs to it.

    With `check`, exit code 1 where these are others.
    """
    from perennial.server.papers import overview, selection_study
    from perennial.server.run.output_files import must_be_ours

    if not results.is_dir():
        raise UserError(f"--keep {results}: there is no such folder; it is the one with a file for each table")
    if of_selection:
        made = selection_study.page_and_figure(page, results)
    else:
        if not check:
            must_be_ours(page, ENDINGS["markdown"], "--overview")
        made = {page.parent / name: text for name, text in overview.overview(results, page.name).items()}
    if not check:
        for file, text in made.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, text)
    elif any(not file.is_file() or file.read_bytes() != text.encode() for file, text in made.items()):
        what = f"{selection_study.NAME} " * of_selection
        err.print(f"{page} is not what {results} says; make it with `perennial reproduce {what}--overview {page}`")
        raise typer.Exit(1)


@command("report")
def report_runs(
    folders: list[Path] = typer.Argument(..., help="Run folders, or folders that hold some."),
    file: Path | None = typer.Option(
        None, "--out", help=r"File to write.  \[default: report.html in the first folder; others print]"
    ),
    form: Format | None = typer.Option(
        None, "--format", help=r"What to write.  \[default: as the file ends, or html]"
    ),
    oracle: bool = typer.Option(False, "--oracle", help="Also the round that is best on test data, labelled so."),
    live: bool = typer.Option(
        False, "--serve", help="Write nothing: show the page to browsers of this machine, renewed as runs go on."
    ),
    port: int = typer.Option(8002, min=0, max=65535, help="With --serve. 0: any free one."),
) -> None:
    """Write a page about runs: tables, figures, configurations; or its tables alone."""
    if live:
        from perennial.server.report.live import serve

        if file or form:
            raise UserError("--serve writes nothing; leave out --out and --format")
        serve(folders, port, oracle, remark)
        return
    from perennial.server.report.page import report
    from perennial.server.run.output_files import must_be_ours

    form = form or _format_of(file)
    with counting("reading runs") as told:
        text, skipped = report(folders, form, oracle, told)
    if file is None and form == "html":
        file = folders[0] / "report.html"
    if file:
        must_be_ours(file, ENDINGS[form], begins="scenario,method,settings," if form == "csv" else "")
        write_bytes(file, text.encode())
    else:
        print(text, end="")
    for line in skipped:
        err.print(f"skipped: {line}", style="yellow", soft_wrap=True)
    if file:
        err.print(f"report: {file}", highlight=False, soft_wrap=True)
