"""`perennial sweep`, `tune`, `compare`, `reproduce` and `report`."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_bytes, write_text
from perennial.common.utils.suggestions import unknown
from perennial.server.cli.completion import method_list, tables
from perennial.server.cli.console import err, out, print_tables, print_troubles, remark, sentences, watching_runs
from perennial.server.cli.options import (
    ConfigFile,
    DataRoot,
    Device,
    Jobs,
    Json,
    MethodArgument,
    MethodOption,
    Pool,
    Prune,
    Rounds,
    ScenarioName,
    Selected,
    Settings,
    TrialRounds,
    app,
)
from perennial.server.runs import MOST, POOL
from perennial.server.selection.split_rule import Select

if TYPE_CHECKING:
    from perennial.server.papers.regret import Size


KEPT = Path("results")
"""The numbers of every seed, as the repository keeps them."""


class Format(StrEnum):
    """How `perennial report` writes."""

    html = "html"
    markdown = "markdown"
    csv = "csv"


ENDINGS = {Format.html: (".html", ".htm"), Format.markdown: (".md", ".markdown"), Format.csv: (".csv",)}


def _form(file: Path | None, said: Format | None) -> Format:
    """What a report is written as: what is said, or as the file ends. Raises `UserError` for another ending."""
    if said or not file or not file.suffix:
        return said or Format.html
    for form, endings in ENDINGS.items():
        if file.suffix.lower() in endings:
            return form
    raise UserError(f"--out {file}: a report ends in .html, .md or .csv; or say what it is with --format")


def _must_be_ours(file: Path, form: Format, option: str = "--out") -> None:
    """Raises `UserError` where a report would be written over a file of somebody's own."""
    from perennial.server.run.output_files import must_be_ours

    must_be_ours(file, ENDINGS[form], option, "scenario,method,settings," if form is Format.csv else "")


@app.command("sweep")
def sweep_method(
    count: Annotated[int, typer.Option("--trials", min=1, max=MOST, help="How many; trial 0 is the defaults.")],
    scenario: ScenarioName = None,
    config: ConfigFile = None,
    named: MethodArgument = None,
    method: MethodOption = None,
    select: Selected = Select.by_split,
    prune: Prune = False,
    seed: Annotated[int, typer.Option(help="Keys the draws and the runs.")] = 0,
    rounds: Rounds = None,
    settings: Settings = None,
    jobs: Jobs = None,
    folder: Pool = POOL,
    data_root: DataRoot = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Random search over a method's search ranges. Started again, it continues."""
    from perennial.server import studies
    from perennial.server.study.batch import cores
    from perennial.server.study.trial_tables import sweep_tables

    with sentences():
        name = _one_method(named, method)
        _say_unused(config, scenario)
        with watching_runs(as_json) as watch:
            found = studies.sweep(
                name,
                scenario,
                count,
                config=config,
                select=select.value,
                prune=prune,
                seed=seed,
                rounds=rounds,
                settings=settings or (),
                jobs=jobs or cores(),
                out=folder,
                data_root=data_root,
                device=device,
                watch=watch,
            )
    if as_json:
        out.print_json(data=found.table)
    else:
        print_tables(*sweep_tables(found.outcomes, found.verdict))
        if found.verdict.sentence:
            out.print(found.verdict.sentence, highlight=False, soft_wrap=True)
        print_troubles(found.troubles)


@app.command("tune")
def tune_method(
    count: Annotated[int, typer.Option("--trials", min=2, max=MOST, help="How many; trial 0 is the defaults.")],
    scenario: ScenarioName = None,
    config: ConfigFile = None,
    named: MethodArgument = None,
    method: MethodOption = None,
    select: Selected = Select.by_split,
    prune: Prune = True,
    seed: Annotated[int, typer.Option(help="Keys the draws and the runs.")] = 0,
    rounds: Rounds = None,
    settings: Settings = None,
    jobs: Jobs = None,
    folder: Pool = POOL,
    data_root: DataRoot = None,
    device: Device = None,
    preset: Annotated[
        Path | None,
        typer.Option("--preset-out", metavar="FILE", help="Also add what was chosen to a file of presets."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose a method's settings without target data, and say why. Started again, it continues."""
    from perennial.server import studies
    from perennial.server.study.batch import cores
    from perennial.server.study.presets import add_preset, must_take
    from perennial.server.study.trial_tables import sweep_tables

    with sentences():
        name = _one_method(named, method)
        _say_unused(config, scenario)
        if preset:
            must_take(preset, scenario)
        with watching_runs(as_json) as watch:
            found = studies.tune(
                name,
                scenario,
                count,
                config=config,
                select=select.value,
                prune=prune,
                seed=seed,
                rounds=rounds,
                settings=settings or (),
                jobs=jobs or cores(),
                out=folder,
                data_root=data_root,
                device=device,
                watch=watch,
            )
        lines = found.why
        if preset:
            assert scenario
            lines.append(add_preset(preset, found.outcomes, found.verdict, scenario, settings or [], prune))
    if as_json:
        files = [str(file) for file in found.files]
        out.print_json(data={"trials": found.table, "by": found.verdict.by, "why": lines, "files": files})
    else:
        print_tables(*sweep_tables(found.outcomes, found.verdict))
        lines += [f"written: {file}" for file in found.files]
        out.print("\n".join(lines), highlight=False, soft_wrap=True)
        print_troubles(found.troubles)


@app.command("compare")
def compare_methods(
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, with commas between them; FedAvg, Local and a constant are always in.",
            autocompletion=method_list,
        ),
    ],
    scenario: ScenarioName = None,
    config: ConfigFile = None,
    seeds: Annotated[int, typer.Option(min=1, max=MOST, help="How many: 0, 1, …")] = 3,
    count: Annotated[
        int,
        typer.Option(
            "--trials", min=1, max=MOST, help="Search budget of every method, with seed 0; 1 is the defaults."
        ),
    ] = 1,
    trial_rounds: TrialRounds = None,
    select: Selected = Select.by_split,
    prune: Prune = False,
    rounds: Rounds = None,
    settings: Settings = None,
    jobs: Jobs = None,
    folder: Pool = POOL,
    data_root: DataRoot = None,
    device: Device = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Also the round that is best on test data, labelled so.")
    ] = False,
    each_site: Annotated[
        bool,
        typer.Option("--leave-one-site-out", help="What each method does at a site that nobody trained at."),
    ] = False,
    adapt: Annotated[
        int,
        typer.Option(min=0, help="With --leave-one-site-out: samples that the site then learns from."),
    ] = 0,
    page: Annotated[
        Path | None,
        typer.Option(
            "--report",
            metavar="FILE",
            help="Also write the page of the chosen runs, and of no trial; of sites left out, that of the tables.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Methods side by side, tuned alike. Started again, it continues."""
    from perennial.server import studies
    from perennial.server.study.batch import cores
    from perennial.server.study.compare import comparison_lines, comparison_tables, trouble_lines
    from perennial.server.study.unseen_sites import RARE, scores_table, sites_json, sites_table

    names = [name.strip() for name in methods.split(",")]
    if adapt and not each_site:
        with sentences():
            raise UserError(f"--adapt {adapt} is for --leave-one-site-out; a run has adapt beside test_sites")
    if page:
        with sentences():
            if page.suffix.lower() not in ("", *ENDINGS[Format.html]):
                raise UserError(f"--report {page}: it is a page; let its name end in .html")
            _must_be_ours(page, Format.html, "--report")
    if each_site:
        with sentences(), watching_runs(as_json) as watch:
            if count > 1 or trial_rounds or select is not Select.by_split or prune or oracle:
                raise UserError(
                    "--leave-one-site-out is not possible with --trials, --trial-rounds, --select, --prune or "
                    "--oracle; tune first"
                )
            _say_unused(config, scenario)
            cells, troubles = studies.leave_one_site_out(
                names,
                scenario,
                config=config,
                seeds=seeds,
                rounds=rounds,
                settings=settings or (),
                jobs=jobs or cores(),
                out=folder,
                data_root=data_root,
                device=device,
                watch=watch,
                adapt=adapt,
            )
        by_score = scores_table(cells)
        made = [sites_table(cells, adapt), *([by_score] if by_score else [])]
        notes = [RARE] if by_score else []
        if as_json:
            out.print_json(data=sites_json(cells))
        else:
            print_tables(*made)
            for note in notes:
                out.print(note, highlight=False, soft_wrap=True)
            print_troubles(troubles)
        if page:
            from perennial.server.report.page import write_tables

            with sentences():
                write_tables("Leave one site out", made, [*notes, *troubles], page)
                err.print(f"report: {page}", highlight=False, soft_wrap=True)
        return
    with sentences(), watching_runs(as_json) as watch:
        _say_unused(config, scenario)
        comparison = studies.compare(
            names,
            scenario,
            config=config,
            seeds=seeds,
            trials=count,
            trial_rounds=trial_rounds,
            select=select.value,
            prune=prune,
            rounds=rounds,
            settings=settings or (),
            jobs=jobs or cores(),
            out=folder,
            data_root=data_root,
            device=device,
            oracle=oracle,
            watch=watch,
        )
    if as_json:
        out.print_json(data=comparison.json())
    else:
        print_tables(*comparison_tables(comparison))
        out.print("\n".join(comparison_lines(comparison)), highlight=False, soft_wrap=True)
        print_troubles(trouble_lines(comparison))
    if page:
        from perennial.server.report.page import write_page

        with sentences():
            write_page([Path(run) for choice in comparison.choices for run in choice.runs], page, oracle)
            err.print(f"report: {page}", highlight=False, soft_wrap=True)


@app.command("reproduce")
def reproduce_table(
    name: Annotated[
        str | None,
        typer.Argument(help="A table of a paper, see `perennial list reproductions`.", autocompletion=tables),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version in minutes, not comparable with the paper.")
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds in place of the table's.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, max=MOST, help="Seeds in place of the table's.")] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--trials", min=1, max=MOST, help="Search budget in place of the table's; 1 is its settings."
        ),
    ] = None,
    trial_rounds: TrialRounds = None,
    select: Annotated[
        Select | None, typer.Option("--select", help=r"What a search chooses by.  \[default: the table's]")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--row", help="This row, beside FedAvg and Local; may be repeated.")
    ] = None,
    jobs: Jobs = None,
    folder: Pool = POOL,
    figures: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Also write figures there.")] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--keep", metavar="FOLDER", help="Also keep every seed's numbers there; rows there are not made again."
        ),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--overview", metavar="FILE", help="No table: the page of all claims, from what is kept."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", hidden=True)] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With --overview: write nothing, fail if the page is another one.")
    ] = False,
    data_root: DataRoot = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """A table of a paper beside ours; runs what is missing. Started again, it continues."""
    if config:
        with sentences():
            raise UserError(
                f"--config {config} is not possible; a paper's table belongs to the paper's own scenario, and "
                f"`perennial compare --methods … --config {config}` is for data of your own"
            )
    with sentences():
        if check and not page:
            raise UserError("--check is for --overview FILE: it compares that page with what is kept")
        for option, place in (("--keep", results), ("--figures", figures)):
            if place and place.exists() and not place.is_dir():
                raise UserError(f"{option} {place} is a file; name a folder")
    if name is None or page:
        with sentences():
            if name or not page:
                raise UserError("TABLE: name one table, or ask for the page of all claims with --overview FILE")
        _overview(page, results or KEPT, check)
        return
    from perennial.server.papers import regret

    if name == regret.NAME:
        with sentences():
            if trial_rounds or select:
                raise UserError(f"{name}: --trial-rounds and --select are not possible; it compares all rules")
            full = regret.QUICK if quick else regret.Size()
            for row in only or ():
                if row not in full.methods:
                    raise UserError(unknown("row", row, full.methods))
        size = replace(full, rounds=rounds or full.rounds, seeds=seeds or full.seeds, trials=count or full.trials)
        size = replace(size, methods=tuple(dict.fromkeys(only or full.methods)))
        _print_regret(size, folder, jobs, data_root, device, as_json, results, figures)
        return
    from perennial.server.papers.overview import keep, kept_beside, known
    from perennial.server.papers.reproduce import (
        load_reproduction,
        remark_lines,
        reproduction_json,
        reproduction_table,
    )
    from perennial.server.study.batch import cores
    from perennial.server.study.compare import compare, comparison_lines, trouble_lines, with_baselines

    with sentences(), watching_runs(as_json) as watch:
        table = load_reproduction(name)
        plan = table.plan(
            quick,
            data_root,
            device,
            rounds=rounds,
            seeds=seeds,
            trials=count,
            trial_rounds=trial_rounds,
            select=select,
            only=only or (),
        )
        if results:
            plan = known(name, table, plan, quick, only or (), results)
            if plan.kept:
                err.print(f"not made again, {results} has them: {', '.join(sorted(plan.kept))}", soft_wrap=True)
            if {entry.label for entry in with_baselines(plan.entries)} <= plan.kept:
                if as_json:
                    there = kept_beside(name, table, plan, quick, results)
                    out.print_json(data=[line.model_dump(mode="json") for line in there])
                if figures:
                    remark(f"--figures {figures}: there is nothing to draw, since no row was made")
                raise typer.Exit
        comparison = compare(plan, folder, jobs or cores(), watch)
        if results:
            keep(name, table, comparison, quick, plan.select, results)
    if as_json:
        out.print_json(data=reproduction_json(table, comparison, quick))
    else:
        print_tables(reproduction_table(table, comparison, quick))
        lines = [*remark_lines(table, comparison), *comparison_lines(comparison)]
        out.print("\n".join(lines), highlight=False, soft_wrap=True)
        print_troubles(trouble_lines(comparison))
    if figures:
        from perennial.server.report.pictures import pictures

        with sentences():
            made = pictures(comparison, table.drawn)
            if not made:
                remark(f"--figures {figures}: there is nothing to draw, since no row that is drawn has a run")
            for kind, svg in made.items():
                figures.mkdir(parents=True, exist_ok=True)
                write_text(figures / f"{name}-{kind}.svg", svg)


def _overview(page: Path, results: Path, check: bool) -> None:
    """Write the page of all claims with its picture; with `check`, exit code 1 where those there are others."""
    from perennial.server.papers.overview import overview
    from perennial.server.run.output_files import must_be_ours

    with sentences():
        if not check:
            must_be_ours(page, ENDINGS[Format.markdown], "--overview")
        if not results.is_dir():
            raise UserError(f"--keep {results}: there is no such folder; it is the one with a file for each table")
        picture = page.with_suffix(".svg")
        made = dict(zip((page, picture), overview(results, picture.name), strict=True))
        if not check:
            for file, text in made.items():
                write_text(file, text)
        elif any(not file.is_file() or file.read_bytes() != text.encode() for file, text in made.items()):
            err.print(f"{page} is not what {results} says; make it with `perennial reproduce --overview {page}`")
            raise typer.Exit(1)


def _say_unused(config: Path | None, scenario: str | None) -> None:
    from perennial.server.studies import not_used

    if config and not scenario and (sentence := not_used(config)):
        remark(sentence)


def _one_method(named: str | None, method: str | None) -> str:
    """The method of a search, which is said in one of two ways."""
    if (named is None) == (method is None):
        raise UserError(
            "METHOD: name one method, as in `perennial tune fedsdr --scenario colored-digits --trials 6`"
        )
    return named or method or ""


def _print_regret(
    size: "Size",
    folder: Path,
    jobs: int | None,
    data_root: str | None,
    device: str | None,
    as_json: bool,
    results: Path | None,
    figures: Path | None,
) -> None:
    from perennial.server.papers.regret import harm_table, measure, regret_figure, regret_json, regret_table
    from perennial.server.study.batch import cores

    with sentences(), watching_runs(as_json) as watch:
        cases, troubles = measure(size, folder, jobs or cores(), watch, data_root, device, results)
        if figures:
            figures.mkdir(parents=True, exist_ok=True)
            write_text(figures / "selection.svg", regret_figure(cases))
    if as_json:
        out.print_json(data=regret_json(cases))
    else:
        print_tables(regret_table(cases), harm_table(cases))
        said = [
            f"{case.method} on {case.scenario}, seed {case.seed}: {case.sentence}"
            for case in cases
            if case.sentence
        ]
        print_troubles([*said, *troubles])


@app.command("report")
def report_runs(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    file: Annotated[
        Path | None,
        typer.Option("--out", help=r"File to write.  \[default: report.html in the first folder; others print]"),
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help=r"What to write.  \[default: as the file ends, or html]")
    ] = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Also the round that is best on test data, labelled so.")
    ] = False,
) -> None:
    """Write a page about runs: tables, figures, configurations; or its tables alone."""
    from perennial.server.report.page import report

    with sentences():
        form = _form(file, form)
        text, skipped = report(folders, form.value, oracle)
        if file is None and form is Format.html:
            file = folders[0] / "report.html"
        if file:
            _must_be_ours(file, form)
            write_bytes(file, text.encode())
        else:
            print(text, end="")
        for line in skipped:
            err.print(f"skipped: {line}", style="yellow", soft_wrap=True)
        if file:
            err.print(f"report: {file}", highlight=False, soft_wrap=True)
