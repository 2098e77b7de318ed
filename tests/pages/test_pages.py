"""Pages, sources and docstrings cite no file that the repository does not have."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from math import sqrt
from pathlib import Path, PurePosixPath
from statistics import fmean, stdev
from types import ModuleType

import pytest

from perennial.common.methods import METHODS
from perennial.server.papers.selection_study import page_and_figure

ROOT = Path(__file__).parents[2]
NOTES = "spec" + "/"
"""Where the project's working notes are, which are not in the repository."""


def listed() -> list[str]:
    """All files of the repository, by their paths from its root."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs the repository's list of files")
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return [name for name in found if (ROOT / name).is_file()]


def cited(name: str, text: str) -> Iterator[str]:
    """Relative paths in a page's links, and paths of Markdown and Python files in backticks or from the root.

    Left out are addresses, anchors within the page, globs, and placeholders such as NAME.
    """
    if name.endswith(".md"):
        links = (re.split("[#?]", link)[0] for link in re.findall(r"\]\(<?([^)\s>]+)", text))
        yield from (link for link in links if link and ":" not in link)
    paths = re.findall(r"`([\w./-]+\.(?:md|py))`", text)
    paths += re.findall(r"(?<![\w./*-])((?:docs|client|common|server|strategies)/[\w./-]+\.(?:md|py))\b", text)
    yield from (path for path in paths if not any(part.isupper() for part in re.split("[./]", path)))


def is_there(cite: str, page: str, names: set[str]) -> bool:
    """From the page's folder, from the root, or as the end of a file's path, like `ditto.py`."""
    beside = PurePosixPath(page).parent / cite
    if (ROOT / beside).exists() or (ROOT / cite).exists():
        return True
    return any(f"/{name}".endswith(f"/{cite}") for name in names)


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them, and those that it sets itself."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    own = {f"{name}-{number}" if number else name for name, last in found.items() for number in range(last + 1)}
    return own | {*re.findall(r'<a id="([^"]+)">', text)}


def test_the_first_line_of_every_page_says_for_whom_it_is() -> None:
    """But what a repository has by custom, and three pages that say it in their own way."""
    others = {"README.md", "CHANGELOG.md", "SECURITY.md"}
    others |= {"docs/results.md", "docs/selection.md", "benchmarks/README.md"}
    pages = [name for name in listed() if name.endswith(".md") and name not in others]
    first = {name: (ROOT / name).read_text(encoding="utf-8").split("\n\n")[1] for name in pages}
    assert not [name for name, text in first.items() if not text.startswith("*For ")]
    assert len(pages) > 50


def test_every_methods_page_says_when_to_use_it_and_what_it_needs_and_costs() -> None:
    words = ("When to use it", "What it needs", "What it costs against FedAvg")
    for page in sorted((ROOT / "docs" / "methods").glob("*.md")):
        if page.name != "README.md":
            listed_first = page.read_text(encoding="utf-8").split("\n\n")[2]
            assert re.findall(r"^- \*\*(.*?):\*\*", listed_first, re.MULTILINE) == list(words), page.name


def test_an_empty_line_ends_every_table() -> None:
    """Else Markdown takes the next line, a picture for example, as one more row of it."""
    for name in (name for name in listed() if name.endswith(".md")):
        text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M | re.S)
        assert re.search(r"^\|.*\n(?![|\n]).+", text, re.M) is None, name


def test_every_section_that_is_linked_is_there() -> None:
    missing, checked = [], 0
    for name in listed():
        if not name.endswith(".md"):
            continue
        for link in re.findall(r"\]\(<?([^)\s>]*#[^)\s>]+)", (ROOT / name).read_text(encoding="utf-8")):
            file, _, section = link.partition("#")
            page = (ROOT / name).parent / file if file else ROOT / name
            if ":" in file or page.suffix != ".md":
                continue
            checked += 1
            if section not in anchors(page):
                missing.append(f"{name}: {link}")
    assert not missing
    assert checked > 100


def test_every_file_that_is_cited_is_in_the_repository() -> None:
    names = listed()
    missing, notes = [], []
    for name in names:
        if not name.endswith((".py", ".md", ".toml")):
            continue
        text = (ROOT / name).read_text(encoding="utf-8")
        missing += [f"{name}: {cite}" for cite in cited(name, text) if not is_there(cite, name, set(names))]
        notes += [f"{name}:{number}" for number, line in enumerate(text.split("\n"), 1) if NOTES in line]
    assert not missing
    assert not notes


def test_a_cite_of_a_file_that_is_not_there_is_found() -> None:
    here = "docs"
    page = f"{here}/page.md"
    text = "[a](gone.md#part), [b](https://x.org/y.md), [c](#part), `NAME.py`, `*.py`, "
    text += f"`{here}/gone.py`; {here}/gone.md."
    found = list(cited(page, text))
    assert found == ["gone.md", f"{here}/gone.py", f"{here}/gone.py", f"{here}/gone.md"]
    assert not any(is_there(cite, page, {page, "b/c.py"}) for cite in found)
    assert is_there("c.py", page, {"b/c.py"})
    assert is_there("methods/README.md", page, set())


def test_a_list_on_a_command_line_stands_in_quotes() -> None:
    pages = [name for name in listed() if name.endswith(".md")]
    bare = [name for name in pages if re.search(r"--set [\w.]+=[\[{]", (ROOT / name).read_text(encoding="utf-8"))]
    assert not bare, "a shell takes brackets and double quotes for itself"


def test_who_starts_a_superlink_closes_its_database_to_others_first() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    blocks = [one for page in pages for one in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.S)]
    starting = [block for block in blocks if re.search("^flower-superlink ", block, re.M)]
    assert len(starting) >= 3
    assert all(re.search("^umask 077\\b", block.partition("flower-superlink ")[0], re.M) for block in starting)


def test_nobody_is_told_to_install_with_another_pythons_pip_or_to_lose_what_is_installed() -> None:
    """uv's environment has no pip, and `uv sync --extra X` takes out what other commands installed."""
    wrong = re.compile(r"(?<!uv )\bpip install (?!uv\b)|uv sync --extra")
    files = [name for name in listed() if name.endswith((".py", ".md", ".txt")) and not name.startswith("tests/")]
    assert not [name for name in files if wrong.search((ROOT / name).read_text(encoding="utf-8"))]


def benchmark(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parity
@pytest.mark.parametrize("method", sorted(METHODS))
def test_what_a_method_costs_is_what_the_table_says(method: str) -> None:
    costs = benchmark("method_costs")
    page = (ROOT / "docs" / "methods" / "README.md").read_text(encoding="utf-8")
    (said,) = re.findall(
        rf"^\| \[.*\]\(\w+\.md\) `{method}` \|.*\| (.*? \| .*? \| .*? \| .*?) \|$", page, re.MULTILINE
    )
    found = costs.measure(method).of(costs.measure("fedavg"))
    if method == "l2sgd":  # draws how many steps it takes: R + 1 in the mean
        found[2] = "1.1"
    assert said.split(" | ")[-4:] == found


def test_the_tables_of_robust_rules_are_what_the_kept_runs_say() -> None:
    attacks = benchmark("attacks")
    assert attacks.text(attacks.made(attacks.POOL)) in (ROOT / "docs" / "robust.md").read_text()


def test_the_tables_of_the_study_of_split_are_what_the_kept_trials_say() -> None:
    for file, text in page_and_figure(ROOT / "docs" / "selection.md", ROOT / "results").items():
        assert file.read_bytes() == text.encode(), f"perennial reproduce selection --overview makes {file.name}"


DIFFERENCES = [  # page, file of results, row, of which it is below, what the page says
    ("fediir.md", "rotated-mnist-50-0", "FedIIR", "FedAvg", "1.2 ± 0.9"),
    ("fediir.md", "rotated-mnist-50-75", "FedIIR", "FedAvg", "0.7 ± 0.2"),
    ("fediir.md", "rotated-mnist-50-0", "FedIIR, γ = 0.05", "FedAvg", "4.1 ± 0.6"),
    ("fediir.md", "rotated-mnist-50-75", "FedIIR, γ = 0.05", "FedAvg", "7.4 ± 3.3"),
    ("fediir.md", "rotated-mnist-50-0", "FedIIR, bias_correction", "FedAvg", "1.1 ± 0.5"),
    ("fediir.md", "rotated-mnist-50-75", "FedIIR, bias_correction", "FedAvg", "0.7 ± 0.3"),
    ("cgpfl.md", "cifar10-3class-subset-40-rounds", "CGPFL (K=4)", "CGPFL-Heur", "1.9 ± 0.3"),
]
"""Seed by seed, after the last round: the mean, and its standard error."""
ELSEWHERE = {
    # Of the authors' own code, tested below.
    "fediir.md": {f"{own} ± {error}" for own, error in (("0.7", "0.8"), ("1.1", "2.4"), ("0.9", "0.8"))},
    "fedavg.md": {"72.0 ± 0.8"},  # a run that the page names
    "fl_games.md": {"56.4 ± 8.4", "44.4 ± 10.3"},  # of the seeds in a table of the page
    "perinvfl.md": {"48.0 ± 7.0", "31.7 ± 11.2"},  # of an earlier version of the code, as the page says
}


def test_the_table_of_the_authors_own_code_is_that_of_its_runs() -> None:
    """FedIIR minus FedAvg by angle over seeds, and the mean of the six angles over the seeds that all have."""
    runs = [json.loads(line) for line in (ROOT / "results/outside/fediir-authors-code.jsonl").open()]
    by_key = {(run["algorithm"], run["angle"], run["seed"]): run for run in runs}
    page = (ROOT / "docs/methods/fediir.md").read_text(encoding="utf-8")
    angles = (0, 15, 30, 45, 60, 75)

    def difference(angle: int, seed: int, rule: str) -> float:
        return float(by_key["FedIIR", angle, seed][rule] - by_key["FedAvg", angle, seed][rule])

    def text(values: list[float]) -> str:
        return f"{fmean(values):+.1f} ± {stdev(values) / len(values) ** 0.5:.1f}".replace("-", "−")

    rules = ("final", "validation")
    for angle in angles:
        seeds = [seed for seed in range(4) if ("FedAvg", angle, seed) in by_key]
        cells = " | ".join(text([difference(angle, seed, rule) for seed in seeds]) for rule in rules)
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {angle} | +"))
        assert line.endswith(f" | {cells} |")
    means = [
        text([fmean(difference(angle, seed, rule) for angle in angles) for seed in range(3)]) for rule in rules
    ]
    assert f"| mean of six | +2.2 | {means[0]} | {means[1]} |" in page
    for name in ("FedAvg", "FedIIR"):
        mean = fmean(by_key[name, angle, seed]["final"] for angle in angles for seed in range(3))
        assert f"{mean:.1f}" in page


@pytest.mark.parametrize(("page", "file", "row", "other", "text"), DIFFERENCES)
def test_differences_on_methods_pages_are_those_of_the_kept_runs(
    page: str, file: str, row: str, other: str, text: str
) -> None:
    lines = [json.loads(line) for line in (ROOT / "results" / f"{file}.jsonl").open()]
    final = {line["row"]: line["measures"]["pooled"] for line in lines if line["selection"] in ("final", "–")}
    below = [100 * (b - a) for a, b in zip(final[row], final[other], strict=True)]
    assert text == f"{fmean(below):.1f} ± {stdev(below) / sqrt(len(below)):.1f}", page


def test_means_and_deviations_of_methods_pages_are_those_of_the_kept_runs() -> None:
    """But what `perennial demo` prints, whose paragraphs begin with "In small"."""
    rows = [json.loads(line) for file in (ROOT / "results").glob("*.jsonl") for line in file.open()]
    seeds = [own for row in rows for own in row.get("measures", {}).values() if len(own) > 1]
    kept = {
        f"{factor * fmean(own):.{decimals}f} ± {factor * stdev(own):.{decimals}f}"
        for own in seeds
        for factor in (1, 100)
        for decimals in (1, 2, 3)
    }
    checked = 0
    for page in sorted(path for folder in ("methods", "notes") for path in (ROOT / "docs" / folder).glob("*.md")):
        paragraphs = page.read_text(encoding="utf-8").split("\n\n")
        text = "\n\n".join(own for own in paragraphs if not own.startswith("**In small**"))
        said = {" ".join(found.split()) for found in re.findall(r"(?<![\d.+-])\d+\.\d+\s±\s\d+\.\d+", text)}
        differences = {text for own, *_, text in DIFFERENCES if own == page.name and page.parent.name == "methods"}
        assert differences <= said, page.name
        assert said - differences - ELSEWHERE.get(page.name, set()) <= kept, page.name
        checked += len(said & kept)
    assert checked > 40
