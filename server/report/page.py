"""From run folders to one page: runs of the same configuration are one line, whatever their seeds.

Numbers are never filled in: what cannot be read is named and skipped.
"""

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from string import Template

from rich import table as terminal

from perennial.common.utils.errors import UserError
from perennial.common.utils.files import write_bytes
from perennial.server.report.load import find_runs, load_runs
from perennial.server.report.panels import Figure, cluster_figure, drawn, scenario_figures, task_figures
from perennial.server.report.results import Result, by_scenario, results
from perennial.server.report.tables import (
    clustered,
    html_table,
    markdown_table,
    markdown_text,
    reading_guide,
    run_table,
    table_of,
    tables,
    to_csv,
)
from perennial.server.results import figures
from perennial.server.selection.summary import SELECTIONS, SPLIT

TEMPLATE = Path(__file__).parent / "templates" / "page.html"
SCRIPT = TEMPLATE.with_name("page.js")
CLUSTER_FIGURES = 6
TASK_FIGURES = 40


def report(
    folders: Sequence[Path],
    form: str = "html",
    oracle: bool = False,
    told: Callable[[int, int], object] = lambda done, total: None,
) -> tuple[str, list[str]]:
    """The report of all runs at or below the folders, as "html", "markdown" or "csv", and what was skipped.

    `told` is how many runs have been read, and of how many. Raises `UserError` if there is nothing to report.
    """
    paths = list(find_runs(folders))

    def reading() -> Iterator[Path]:
        for done, path in enumerate(paths):
            told(done, len(paths))
            yield path

    runs, skipped = load_runs(reading(), oracle)
    if not runs and not skipped:
        raise UserError("there is no run to report")
    if not runs:
        raise UserError(f"none of {len(skipped)} run folders can be reported; the first: {skipped[0]}")
    found = results(runs)
    counted = any(SPLIT in chosen for run in runs for chosen in run.models.values())
    selections = (*SELECTIONS, *([SPLIT] if counted else []), *(["oracle"] if oracle else []))
    if form == "csv":
        text = to_csv(found, selections)
    else:
        text = (to_markdown if form == "markdown" else to_html)(found, skipped, selections)
    # Half a character (a name from a damaged file) cannot be written.
    return text.encode("utf-8", "replace").decode(), skipped


def write_page(folders: Sequence[Path], file: Path, oracle: bool = False) -> None:
    """The page of all runs at or below the folders. Raises `UserError` as `report` does, `OSError`."""
    write_bytes(file, report(folders, oracle=oracle)[0].encode())


def write_tables(title: str, made: Iterable[terminal.Table], notes: Iterable[str], file: Path) -> None:
    """A page of tables as a terminal shows them, each with its caption, and of notes. Raises `OSError`."""
    parts = (f'{html_table(table_of(own))}<p class="note">{escape(str(own.caption))}</p>\n' for own in made)
    write_bytes(file, framed(title, "".join([*parts, *(f"<p>{escape(note)}</p>\n" for note in notes)])).encode())


def to_markdown(found: Sequence[Result], skipped: Sequence[str], selections: Sequence[str]) -> str:
    """All tables as Markdown."""
    parts = ["# Perennial report", reading_guide(found, selections).replace("<em>", "*").replace("</em>", "*")]
    for scenario, made in tables(found, selections).items():
        parts += [f"## {markdown_text(scenario)}", *map(markdown_table, made)]
    parts += ["## Runs", markdown_table(run_table(found))]
    if skipped:
        parts += ["## Skipped", "\n".join(f"- {markdown_text(line)}" for line in skipped)]
    return "\n\n".join(parts) + "\n"


def to_html(found: Sequence[Result], skipped: Sequence[str], selections: Sequence[str]) -> str:
    """The page, whole."""
    sections = []
    all_tables = tables(found, selections)
    for number, (scenario, own) in enumerate(by_scenario(found).items()):
        shown, key = drawn(own), f"f{number}"
        of_task = task_figures(key, shown)
        pictures = [*scenario_figures(key, shown, selections), *of_task[:TASK_FIGURES]]
        memberships = [
            cluster_figure(f"{key}m{i}", result, result.runs[0])
            for i, result in enumerate(clustered(own)[:CLUSTER_FIGURES])
        ]
        first, *others = all_tables[scenario]
        scene = own[0].runs[0].config.scenario
        figured = (
            f"<h3>Figures</h3>\n{_legend(key, shown, len(own))}\n"
            f'<div class="figures">{"".join(map(html_figure, pictures))}</div>\n{_not_shown(len(of_task))}'
        )
        sections.append(
            f'<section id="s{number}" data-scenario="{escape(scenario)}"><h2>{escape(scenario)}</h2>\n'
            f"<p>{escape(scene.title)}; {counted(len(scene.client_ids), 'client')}, "
            f"{counted(len(scene.test_environments), 'test environment')}. Source: {escape(scene.source)}.</p>\n"
            f"{html_table(first)}\n{figured if pictures else ''}"
            + "".join(f'<div class="wide">{html_figure(figure)}</div>' for figure in memberships)
            + "".join(map(html_table, others))
            + "</section>"
        )
    links = "".join(
        f'<a href="#s{number}" data-scenario="{escape(title)}">{escape(title)}</a>'
        for number, title in enumerate(all_tables)
    )
    runs = len({run.path for result in found for run in result.runs})
    about = f"{counted(runs, 'run')}, {counted(len(all_tables), 'scenario')}"
    left_out = "".join(f"<li>{escape(line)}</li>" for line in skipped)
    return framed(
        "Perennial report",
        f"<p>{about}</p>\n{_filters(found, [*all_tables])}"
        f'<nav aria-label="Sections">{links}<a href="#runs">Runs and configurations</a>'
        + ('<a href="#skipped">Skipped</a>' if skipped else "")
        + f'</nav>\n<p class="how">{reading_guide(found, selections)}</p>\n'
        + "\n".join(sections)
        + f'\n<section id="runs"><h2>Runs and configurations</h2>\n{html_table(run_table(found))}'
        + f"{_configurations(found)}\n</section>\n"
        + (f'<section id="skipped"><h2>Skipped</h2><ul>{left_out}</ul></section>' if skipped else ""),
    )


def _filters(found: Sequence[Result], scenarios: Sequence[str]) -> str:
    """Choices of what the page's script shows; empty where there is nothing to choose, hidden without script."""
    methods = sorted({result.method for result in found})
    choices = [("scenario", scenarios), ("method", methods)]
    boxes = [
        f'<label>{name} <input type="search" list="every-{name}" data-filter="{name}" placeholder="all {name}s">'
        f'</label><datalist id="every-{name}">'
        + "".join(f'<option value="{escape(one)}"></option>' for one in every)
        + "</datalist>"
        for name, every in choices
        if len(every) > 1
    ]
    return f'<form class="filters" hidden>{"".join(boxes)}</form>\n' if boxes else ""


def counted(number: int, what: str) -> str:
    """`1 run`, `2 runs`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def framed(title: str, body: str) -> str:
    """A whole page with the look of all pages: one script, known by its digest, and nothing that is loaded."""
    script = SCRIPT.read_text(encoding="utf-8")
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        body=body,
        script=script,
        digest=b64encode(sha256(script.encode()).digest()).decode(),
        colours="".join(f"--s{index}:{value};" for index, value in enumerate(figures.LIGHT)),
        dark_colours="".join(f"--s{index}:{value};" for index, value in enumerate(figures.DARK)),
    )


def html_figure(figure: Figure) -> str:
    """A figure with its caption, which also stands for it where nobody sees it."""
    label = escape(f"{figure.caption}; a curve per line of the legend" if figure.curves else figure.caption)
    return (
        f'<figure><figcaption>{escape(figure.caption)}</figcaption><div role="img" aria-label="{label}">'
        f"{figure.svg}</div></figure>\n"
    )


def legend(key: str, names: Mapping[int, str], methods: Mapping[int, str] | None = None) -> str:
    """What the curves are, by style; `key` as for the figures; `methods` as the tables have them."""
    items = "".join(
        f'<li data-style="{style}" data-method="{escape((methods or names)[style])}">'
        f"{figures.swatch(key, style)}<span>{escape(name)}</span></li>"
        for style, name in names.items()
    )
    return f'<ul class="legend">{items}</ul>'


def _legend(key: str, shown: Sequence[Result], among: int) -> str:
    note = (
        "Lines are means over seeds, shades their standard deviation; what is tested is the mean over "
        "environments. The clients are those of all seeds together."
    )
    if len(shown) < among:
        note += (
            f" {len(shown)} of the {among} lines of the table are drawn: of each method the configurations "
            "that are best on held-out training-environment data after the last round."
        )
    names = {style: f"{result.method}, {result.model}" for style, result in enumerate(shown)}
    methods = {style: result.method for style, result in enumerate(shown)}
    return f'{legend(key, names, methods)}<p class="note">{note}</p>'


def _not_shown(made: int) -> str:
    """That there are more figures of test samples than a page takes; empty where it takes all."""
    if made <= TASK_FIGURES:
        return ""
    return (
        f'<p class="note">The last {TASK_FIGURES} figures are the first of {made}. Report fewer runs to see '
        "others.</p>\n"
    )


def _configurations(found: Sequence[Result]) -> str:
    return "".join(
        f'<details data-scenario="{escape(result.scenario)}" data-method="{escape(result.method)}">'
        f"<summary>{escape(f'{result.scenario}: {result.method}, seeds {result.seeds}')}</summary>"
        f"<pre>{escape(result.runs[0].config.toml())}</pre></details>\n"
        for result in found
        if result.headline
    )
