"""The page of all claims and those of the papers: what they show, and that they are what is kept."""

import importlib.util
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from types import ModuleType
from typing import Any

import pytest
from tiny_runs import SMALL_TABLE, TWO_ROWS, made_line
from typer.testing import CliRunner

from perennial.common.data import scenarios
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.papers import claims, reproduce
from perennial.server.papers.claims import PAPERS, Study
from perennial.server.papers.kept import Kept, keep, kept
from perennial.server.papers.overview import _gains, _large_and_small, _medians, _seven, _share, overview
from perennial.server.papers.paper_page import (
    OPEN,
    _command,
    _drawn,
    _endings,
    _reasons,
    _rows,
    _runs,
    _size,
    _verdict,
    _warnings,
)
from perennial.server.papers.reproduce import (
    LESS_IS_BETTER,
    Claim,
    Reproduction,
    load_reproduction,
    reproductions,
)
from perennial.server.papers.verdicts import HOLDS, Finding, findings, judged
from perennial.server.run.folder import RunFolder
from perennial.server.selection.split_rule import Select
from perennial.server.study.compare import DECIMALS, compare
from perennial.testing.tiny_federation import Toy

ROOT = Path(__file__).parents[3]
CLAIM = Claim(row="A", than="B", column="worst")
PAGE = "results.md"

TABLE, ROWS = (text.replace("FedAvg", "FedSDR").replace("fedavg", "fedsdr") for text in (SMALL_TABLE, TWO_ROWS))


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reproduction:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    (tmp_path / "t.toml").write_text(TABLE + ROWS)
    return load_reproduction("t", tmp_path)


@pytest.fixture
def only(table: Reproduction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no other table."""
    for module in (claims, reproduce):
        monkeypatch.setattr(module, "reproductions", lambda: {"t": tmp_path / "t.toml"})
        monkeypatch.setattr(module, "load_reproduction", lambda name: table)


def finding(method: list[float], reference: list[float], claim: Claim = CLAIM, **changes: Any) -> Finding:
    return replace(Finding(claim, (60.0, 50.0), method, reference, size=True), **changes)


FAR = [60.0, 61.0, 62.0], [50.0, 50.0, 51.0]
LOSS = finding([0.5, 0.51], [0.6, 0.62], Claim(row="A", than="B", column="loss"), paper=(0.5, 0.6))


def write(folder: Path, name: str, *rows: tuple[str, list[float]], **changes: Any) -> None:
    folder.mkdir(exist_ok=True)
    lines = [
        made_line(row=row, measures={"worst": own, "average": own}, runs=["r"] * len(own), **changes)
        for row, own in rows
    ]
    (folder / f"{name}.jsonl").write_text("".join(f"{line.model_dump_json()}\n" for line in lines))


def test_large_gains_and_small_ones_are_counted_and_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is no gain in points, and what was not run no gain of ours."""
    large, small = finding(*FAR), finding(*FAR[::-1], paper=(51.0, 50.0))
    far_away = finding(*FAR, size=False, unsettled=True)
    found = [large, small, LOSS, finding([60.0], [50.0]), far_away]
    said = _large_and_small(found)
    assert "gains 10 points or more, 1 of 1 claims" in said
    assert said.endswith("less, 0 of 1 are.")
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("perennial.server.results.figures.gains_figure", lambda gains, *_: drawn.update(gains))
    _gains(found)
    assert drawn == {
        "confirmed": [(10, large.difference, 2 * large.error)],
        "partly": [],
        "undecided": [],
        "partly not": [],
        "not": [(1, small.difference, 2 * small.error)],
    }


def test_gains_are_medians_and_a_share_is_marked() -> None:
    found = [finding([own, own], [50.0, 50.0]) for own in (62.0, 53.0, 54.0)]
    assert _medians([*found, LOSS]) == ["+10.0", "+4.0"]
    assert _medians([LOSS]) == ["–", "–"]
    assert (_share(found), _share([])) == ("3 of 3", "–")
    assert _share([replace(found[0], seen=True), *found]) == "4 of 4 ‡"
    assert _share([replace(finding(*FAR[::-1]), seen=True), *found]) == "3 of 4"  # what does not hold


def test_a_verdict_has_its_marks() -> None:
    below = {"constant": [64.0] * 3, "local": [64.0] * 3}
    assert _verdict(finding(*FAR)) == "**confirmed**"
    assert _verdict(finding(*FAR, seen=True, **below), "B") == (
        "**confirmed** ‡ (B), not above the constant, not above Local"
    )
    assert _verdict(finding(*FAR, size=False, constant=[40.0] * 3)) == "*partly*"
    assert _verdict(finding(*FAR[::-1], **below)) == "**not**, reversed"
    assert _verdict(finding(*FAR[::-1], own=False)) == "*partly not*, reversed"


def test_a_claim_may_be_of_several_rows(table: Reproduction, tmp_path: Path) -> None:
    several = TABLE.replace('than = "Ditto", column = "worst"', 'than = "Ditto", column = ["worst", "average"]')
    (tmp_path / "s.toml").write_text(several + ROWS)
    found = load_reproduction("s", tmp_path).claims
    assert [(claim.row, claim.than, claim.column) for claim in found] == [
        ("FedSDR", "Ditto", "worst"),
        ("FedSDR", "Ditto", "average"),
    ]
    (tmp_path / "s.toml").write_text(several.replace('"average"]', '"worst"]') + ROWS)
    with pytest.raises(UserError, match="the claim FedSDR > Ditto, worst stands twice"):
        load_reproduction("s", tmp_path)
    (tmp_path / "s.toml").write_text(TABLE.replace("[quick]", 'claims_of = "cmnist"\n[quick]', 1) + ROWS)
    with pytest.raises(UserError, match="unknown claims_of 'cmnist'"):
        load_reproduction("s", tmp_path)


@pytest.mark.usefixtures("only")
def test_the_pages_say_what_is_kept(table: Reproduction, tmp_path: Path) -> None:
    def run(*words: str) -> int:
        return CliRunner().invoke(app, ["reproduce", *words]).exit_code

    assert (
        "Not run yet. The command is `perennial reproduce t --keep results`."
        in overview(tmp_path, "a.md")["a/fedsdr.md"]
    )
    page, results = tmp_path / "page.md", tmp_path / "results"
    numbers = {"FedSDR": [0.60, 0.64], "Ditto": [0.40, 0.42], "Local": [0.70, 0.73]}
    write(results, "t-3-rounds", *numbers.items(), rounds=3)
    make = ["--overview", str(page), "--keep", str(results)]
    assert run(*make, "--check") == 1
    assert (run(*make), run(*make, "--check")) == (0, 0)
    (own := tmp_path / "own.csv").write_text("age\n")
    assert run("--overview", str(own), "--keep", str(results)) == 2
    assert own.read_text() == "age\n"
    said, paper = page.read_text(), (tmp_path / "page" / "fedsdr.md").read_text()
    assert "](page.svg)" in said
    assert "](page/gains.svg)" in said
    assert (
        "Of 1 claims: 0 confirmed, 1 partly, 0 undecided, 0 partly not, 0 not, 0 not comparable, 0 not run."
        in said
    )
    assert "2 seeds. Size: 3 of 4 rounds. Settings: the table's settings." in paper
    assert "`perennial reproduce t --rounds 3`" in paper
    (line,) = (line for line in paper.splitlines() if line.startswith("| FedSDR > Ditto, worst | 60.00 / 50.00 |"))
    assert line.endswith("| +21.00 ± 1.00 | – | 71.50 | *partly*, not above Local |")
    for row, own_numbers in numbers.items():
        mean, deviation = 100 * fmean(own_numbers), 100 * stdev(own_numbers)
        in_paper = {"FedSDR": " (60.00)", "Ditto": " (50.00)"}.get(row, "")
        assert paper.count(f"\n| {row} | {mean:.2f} ±{deviation:.2f}{in_paper} | ") == 1
    for file in (page, tmp_path / "page" / "fedsdr.md"):
        file.write_text((there := file.read_text()) + " ")
        assert run(*make, "--check") == 1
        file.write_text(there)
    assert run(*make, "--check") == 0


@pytest.mark.usefixtures("only")
def test_the_first_table_has_a_line_for_each_paper(tmp_path: Path) -> None:
    """At the paper's size and with settings from two searches; of others only how many hold."""
    both = (("FedSDR", [0.60, 0.64]), ("Ditto", [0.40, 0.42]))
    write(tmp_path, "t", *both, ("Local", [0.3, 0.3]), ("Constant", [0.5, 0.5]))
    write(
        tmp_path,
        "t-held-out",
        *((row, own) for row, (_, own) in zip(("FedSDR", "Ditto"), both[::-1], strict=True)),
        trials=4,
    )
    lines = _seven(Study.read(tmp_path), "results")
    assert len(lines) == 2 + len(PAPERS)
    (line,) = (line for line in lines if line.startswith("| [FedSDR](results/fedsdr.md) |"))
    assert line.endswith("| +10.0, +21.0 | 1 of 1, 1 above both | 0 of 1 | – |")
    assert all(line.endswith("| –, – | – | – | – |") for line in lines[2:] if "FedSDR" not in line.split("|")[1])


def test_a_claim_that_is_not_so_has_its_reason(table: Reproduction) -> None:
    """One line for each reason, and one for a row that is not the paper's; none of what is so."""
    own = [Claim(row=row, than=than, column="worst", why="B.") for row, than in ("AB", "CB", "BA")]
    low = [0.5, 0.5], [0.6, 0.7]
    found = [finding(*low, own[0]), finding(*low, own[1]), finding(*low[::-1], own[2]), finding([], [], own[2])]
    each = [[one] for one in found]
    assert _reasons(table, each) == ["- **Why not** A > B; C > B: B.", ""]
    bare = [[replace(one[0], claim=one[0].claim.model_copy(update={"why": ""}))] for one in each]
    shared = table.model_copy(update={"why": "All."})
    assert _reasons(shared, [each[0], *bare[1:]]) == ["- **Why not** A > B: B.", "- **Why not** C > B: All.", ""]
    columns = table.model_copy(update={"claims": (CLAIM, Claim(row="A", than="B", column="loss"))})
    assert _reasons(columns, each) == ["- **Why not** A > B, worst; C > B, worst: B.", ""]
    assert _reasons(table, each[2:]) == []
    assert _reasons(table, [[*each[2], found[0]]]) == ["- **Why not** B > A: B.", ""]  # not so in other runs
    assert _reasons(shared, [[*bare[2], found[0]]]) == []
    (ditto,) = (row for row in table.rows if row.title == "Ditto")
    other = ditto.model_copy(update={"comparable": False, "remark": "Other steps."})
    changed = table.model_copy(update={"rows": (*(row for row in table.rows if row is not ditto), other)})
    (claim,) = table.claims
    ran = finding([0.7, 0.7], [0.6, 0.6], claim, made=(made_line(), made_line()))
    assert _reasons(changed, [[ran]]) == ["- **Not the paper's** Ditto: Other steps.", ""]
    assert _reasons(changed, [[finding([], [], claim)]]) == []


def test_the_size_and_the_command(table: Reproduction) -> None:
    two = {"measures": {"worst": [0.5, 0.6]}}
    quick = table.quick.model_copy(update={"settings": {"model.name": "cnn-small"}})
    changed = table.model_copy(update={"quick": quick})
    small = "the small version (model.name=cnn-small), 4 of 4 rounds"
    assert _size(changed, made_line(quick=True, **two), waiting=False) == small
    assert _size(table, made_line(quick=True, rounds=2, **two), False) == "the small version, 2 of 4 rounds"
    more = "the small version, 8 rounds for the paper's 4"
    assert _size(table, made_line(quick=True, rounds=8, **two), False) == more
    assert _size(table.model_copy(update={"seeds": 5}), made_line(**two), False) == "2 of 5 seeds"
    other = table.model_copy(update={"other_data": True, "limit": "a licence"})
    assert _size(other, made_line(**two), False) == "other data than the paper's (a licence)"
    limited = table.model_copy(update={"limit": "hours"})
    assert _size(limited, made_line(**two), waiting=False) == "the paper's"
    assert _size(limited, made_line(**two), waiting=True) == "the paper's, not all rows yet (hours)"
    assert _size(limited, made_line(rounds=2, **two), waiting=False) == "2 of 4 rounds (hours)"
    command = "perennial reproduce t"
    assert _command("t", table, made_line(rounds=2, **two)) == f"{command} --rounds 2"
    assert _command("t", table, made_line(measures={"worst": [0.5] * 3})) == f"{command} --seeds 3"
    searched = made_line(trials=12, trial_rounds=2, by="split", **two)
    assert _command("t", table, searched) == f"{command} --trials 12 --trial-rounds 2 --select split"
    assert _command("t", changed, made_line(quick=True, rounds=2, **two)) == f"{command} --quick --seeds 2"


def test_the_page_says_how_settings_were_chosen(table: Reproduction) -> None:
    both = [made_line(row=row, measures={"worst": [0.5, 0.6]}) for row in ("FedSDR", "Ditto")]
    changed = table.model_copy(update={"chosen": "chosen on test data"})
    searched = [line.model_copy(update={"trials": 12, "trial_rounds": 2}) for line in both]
    assert [
        line.split("Settings: ")[1].split(". Command")[0] for line in _runs("t", changed, [both, searched])
    ] == [
        "chosen on test data",
        "12 trials of 2 rounds by held-out",
    ]
    by_test = [line.model_copy(update={"by": Select.as_in_paper}) for line in searched]
    (labelled,) = _runs("t", changed, [by_test])
    assert "Settings: 12 trials of 2 rounds by as-in-paper, **which reads test data**. Command" in labelled
    (alone,) = _runs("t", table, [both])
    assert alone.startswith("- 2 seeds. Size: the paper's. Settings: the table's settings. Command")
    longer = made_line(row="Local", measures={"worst": [0.5, 0.6, 0.7]})
    (mixed,) = _runs("t", table, [[longer, *both]])
    assert mixed.startswith("- 2 seeds (3 of Local). Size: the paper's.")
    first, second = _runs("t", table, [both, searched[:1]])
    assert first.startswith("- **A**: 2 seeds.")
    assert second.startswith("- **B**: 2 seeds. Size: the paper's, not all rows yet.")


def test_the_round_that_the_paper_s_rule_chooses_is_beside_the_last(table: Reproduction) -> None:
    selections = ("final", "validation")
    rounds = [made_line(row="FedSDR", selection=own, measures={"worst": [0.5, 0.6]}) for own in selections]
    alone = _rows(table, rounds, "")
    (last,) = (line for line in alone if line.startswith("| FedSDR"))
    assert last.startswith("| FedSDR | 55.00")
    assert not any("validation" in line for line in alone)
    both = _rows(table.model_copy(update={"paper_round": "validation"}), rounds, " of runs A")
    assert both[0] == "**All rows** of runs A:"
    assert both[2].startswith("| row | round | worst |")
    assert [line.split(" | ")[1] for line in both[4:-1]] == ["final", "validation"]


def test_the_round_that_a_paper_chose_on_test_data_says_so(table: Reproduction, tmp_path: Path) -> None:
    selections = ("final", "as-in-paper")
    rounds = [made_line(row="FedSDR", selection=own, measures={"worst": [0.5, 0.6]}) for own in selections]
    for column, best in (("p=0.1", "is best at p=0.1"), ("loss", "has the lowest test loss")):
        asked = TABLE.replace("[quick]", f'paper_test = "{column}"\n[quick]')
        (tmp_path / "s.toml").write_text(asked + ROWS)
        chosen = load_reproduction("s", tmp_path)
        assert chosen.plan(quick=True).as_in_paper == column
        shown = _rows(chosen, rounds, "")
        assert [line.split(" | ")[1] for line in shown[4:6]] == ["final", "as-in-paper"]
        assert f"*as-in-paper*: the round that {best}, as in the paper. **It reads test data.**" in shown
        (waiting,) = _warnings(chosen, [rounds[:1]])
        assert waiting == f"- The round that {best}, as in the paper (`as-in-paper`), is not run yet."
        (other,) = _warnings(chosen, [rounds])
        assert other.endswith("is not run yet of Ditto.")
        assert not [*_warnings(chosen, [[*rounds, rounds[1].model_copy(update={"row": "Ditto"})]])]
    assert not any("reads test data" in line for line in _rows(table, rounds[:1], ""))
    (tmp_path / "s.toml").write_text(TABLE.replace("[quick]", 'paper_test = "p=0.3"\n[quick]') + ROWS)
    with pytest.raises(UserError, match=r"unknown paper_test 'p=0\.3'"):
        load_reproduction("s", tmp_path)


def test_the_rounds_in_which_games_ended(table: Reproduction, tmp_path: Path) -> None:
    """Of two seeds the game of the second did not end."""
    comparison = compare(table.plan(quick=False, rounds=2), tmp_path / "pool", 1)
    games = next(choice for choice in comparison.choices if choice.label == "Ditto")
    RunFolder(Path(games.runs[0])).append([{"kind": "equilibrium", "round": 1, "accuracy": 0.5}])
    keep("t", table, comparison, False, Select.held_out, tmp_path)
    (lines,) = kept("t", tmp_path)
    ended = {line.row: line.ended for line in lines}
    assert ended == {
        row: [1, None] if row == "Ditto" else []
        for row in ("FedSDR", "Ditto", "FedAvg", "Local", "Constant")
        if row in ended
    }
    assert ended["Ditto"]
    assert _endings([100, 200, None], 92.2) == "150 ±71, 2 of 3 (92)"
    assert _endings([100, 200], None) == "150 ±71"
    assert _endings([None], None) == "0 of 1"
    assert _endings([], 92.2) == "–"


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cmnist-8.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"cmnist-8\.jsonl, line 1: row: a value is missing"):
        overview(tmp_path, PAGE)
    (tmp_path / "cmnist-8.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=r"cmnist-8\.jsonl, line 1: .*invalid"):
        overview(tmp_path, PAGE)
    none = CliRunner().invoke(
        app, ["reproduce", "--overview", str(tmp_path / "p.md"), "--keep", str(tmp_path / "no")]
    )
    assert none.exit_code == 2
    assert "there is no such folder" in " ".join(none.stderr.split())
    both = CliRunner().invoke(app, ["reproduce", "cmnist-8", "--overview", str(tmp_path / "page.md")])
    neither = CliRunner().invoke(app, ["reproduce"])
    for ended in (both, neither):
        assert ended.exit_code == 2
        assert "TABLE: name one table, or ask for the page of all claims" in ended.output
    file = str(tmp_path / "cmnist-8.jsonl")
    for words, said in (
        (["--check"], "--check is for --overview FILE"),
        (["--keep", file], f"--keep {file} is a file; name a folder"),
        (["--figures", file], f"--figures {file} is a file; name a folder"),
    ):
        ended = CliRunner().invoke(app, ["reproduce", "cmnist-8", *words], env={"COLUMNS": "300"})
        assert (ended.exit_code, said in ended.stderr) == (2, True)


@pytest.mark.parametrize("name", sorted(reproductions()))
def test_every_claim_is_what_the_paper_s_numbers_say(name: str) -> None:
    table = load_reproduction(name)
    papers = {row.title: row.paper for row in table.rows}
    for claim in table.claims:
        better, worse = papers[claim.row][claim.column], papers[claim.than][claim.column]
        assert (better < worse) if claim.column in LESS_IS_BETTER else (better > worse), claim


def test_what_a_search_chose_is_shown_once(table: Reproduction) -> None:
    drawn = {"learning_rate": 0.0123456, "batch_size": 32}
    lines = [made_line(row="FedSDR", trials=2), made_line(row="Ditto", trials=2, settings=drawn)]
    lines += [made_line(row="FedSDR", selection="split", trials=2)]
    fixed = table.rows[0].model_copy(update={"settings": {"momentum": 0.5}})
    own = table.model_copy(update={"rows": (fixed, *table.rows[1:]), "settings": {"local_steps": 10}})
    shown = list(_drawn(own, [lines]))
    assert shown[0] == (
        "**Settings** that the search chose by held-out. Not searched for any row: local_steps=10."
    )
    assert shown[2] == "- FedSDR: the defaults, its first trial; not searched: momentum=0.5"
    shorter = [line.model_copy(update={"rounds": 2}) for line in lines]
    assert list(_drawn(table, [lines, shorter])) == [
        "**Settings** that the search chose by held-out.",
        "",
        "- FedSDR: the defaults, its first trial",
        "- Ditto: learning_rate=0.01235, batch_size=32",
        "",
    ]
    assert list(_drawn(table, [[made_line()]])) == []


def test_the_pages_of_the_repository_are_what_its_results_say() -> None:
    made = overview(ROOT / "results", PAGE)
    for name, text in made.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, name
    there = {path.name for path in (ROOT / "docs" / "results").iterdir()}
    assert there == {Path(name).name for name in made if name.startswith("results/")}
    files = {file.stem for file in (ROOT / "results").glob("*.jsonl")} - {"attacks", "selection-trials"}
    tables = [name for name in reproductions() if kept(name, ROOT / "results")]
    assert all(file.startswith(tuple(tables)) for file in files)
    for lines in (lines for name in tables for lines in kept(name, ROOT / "results")):
        assert all(line.measures for line in lines)


def test_the_first_page_begins_with_one_figure_and_one_table_of_seven_rows() -> None:
    page = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    first = page[: page.index("*Gain* is")]
    assert first.count("\n![") == 1
    assert len(re.findall(r"^\| \[", first, re.M)) == len(PAPERS) == 7
    assert len(page.splitlines()) < 160


def test_what_was_found_in_words_is_what_the_runs_say() -> None:
    """What the sentences of `PAPERS` say, one after the other."""
    study = Study.read(ROOT / "results")
    every = {paper.stem: study.of(paper, study.counted) for paper in PAPERS}
    holding = {stem: [own for own in found if own.verdict in HOLDS] for stem, found in every.items()}

    assert not any(own.above_local for own in holding["cgpfl"])
    better = {own.claim.than for own in every["cgpfl"] if own.reversed}
    assert {"Ditto", "APFL"} <= better
    beaten = {name: [0, 0] for name in ("Ditto", "APFL", "Local")}
    for name in (
        "mnist-3class",
        "fmnist-3class",
        "mnist-3class-dnn",
        "fmnist-3class-dnn",
        "cifar10-3class-subset",
    ):
        rows = {
            line.row: fmean(line.measures["pooled"]) for line in study.files[name][0] if line.selection == "final"
        }
        for other in beaten.keys() & rows.keys():
            beaten[other][0] += rows["CGPFL (K=4), λ = 0.1"] > rows[other]
            beaten[other][1] += 1
    assert beaten == {"Ditto": [4, 5], "APFL": [5, 5], "Local": [5, 5]}

    assert all(own.seen for own in holding["perinvfl"])
    own_settings = findings(study.tables["rc-mnist"], study.files["rc-mnist"][0])
    assert sum(bool(own.above_constant) for own in holding["perinvfl"]) < len(holding["perinvfl"]) / 4
    assert any(own.above_constant for own in own_settings)

    worst = [own for own in holding["fedsdr"] if own.claim.column == "worst"]
    assert median(fmean(own.method) for own in worst) > 3 * median(fmean(own.reference) for own in worst)
    assert not any(own.above_constant for own in worst)

    assert len(holding["fedpin"]) > len(every["fedpin"]) / 2
    assert sum(bool(own.above_local) for own in holding["fedpin"]) < len(holding["fedpin"]) / 2
    for name in ("cmnist-8", "cfmnist-8"):
        worst_of = {line.row: line.measures["worst"] for line in study.files[name][0] if line.selection == "final"}
        assert fmean(worst_of["FedPIN GM"]) < 0.1

    assert not holding["fediir"]
    own_code = (ROOT / "docs/methods/fediir.md").read_text(encoding="utf-8")  # whose table has a test
    ((papers_gain, gain),) = re.findall(r"mean of six \| (\S+) \| (\S+ ± \S+) \|", own_code)
    (said,) = (paper.found for paper in PAPERS if paper.stem == "fediir")
    assert f"it gains {gain} points where the paper has {papers_gain}." in said
    of_loss = [own for own in every["fedilc"] if own.claim.column == "loss"]
    assert sum(own.verdict in HOLDS for own in of_loss) > len(of_loss) / 2
    assert not [own for own in holding["fedilc"] if own.claim.column == "pooled"]

    games = holding["fl_games"]
    for name, more in (("cmnist-games", "six"), ("cfmnist-games", "four")):
        rows = {line.row: line.measures for line in study.files[name][0] if line.selection == "final"}
        means = {row: 100 * fmean(own["p=0.1"]) for row, own in rows.items()}
        others = [row for row in means if row.endswith(", at the mean")]
        assert len(others) == 8
        higher = sum(means[row] > means[row.removesuffix(", at the mean")] for row in others)
        (said,) = (text for text in study.tables[name].remarks if f"{more} of the eight games" in text)
        assert higher == {"six": 6, "four": 4}[more]
        numbers = re.findall(r"\d\d\.\d", said)
        plays, ends = ("F-FL Games, parallel", "F-FL Games (SMOOTH), sequential"), (", at the mean", "")
        four = [f"{means[play + end]:.1f}" for play in plays for end in ends]
        assert numbers in ([], [*four[:2], "67.1", *four[2:]])
    (said,) = (text for text in study.tables["cfmnist-8"].remarks if "comes back to the colour" in text)
    rows = {line.selection: line.measures for line in study.files["cfmnist-8"][0] if line.row == "FedSDR"}
    chosen = [100 * fmean(rows[own][column]) for own in ("split", "final") for column in ("worst", "average")]
    assert re.findall(r"\d\d\.\d", said) == [f"{mean:.1f}" for mean in chosen]
    (said,) = (text for text in study.tables["color-mnist-ilc"].remarks if "lowest test loss, which" in text)
    rows = {(line.row, line.selection): line.measures for line in study.files["color-mnist-ilc"][0]}
    sgd, geo = ([rows[row, own] for own in ("as-in-paper", "final")] for row in ("FedSGD", "Geometric"))
    gains = [
        [a - b for a, b in zip(one["loss"], other["loss"], strict=True)]
        for one, other in zip(sgd, geo, strict=True)
    ]
    said_losses = [fmean(sgd[0]["loss"]), fmean(geo[0]["loss"]), fmean(gains[0]), stdev(gains[0]) / sqrt(5)]
    losses = [f"{number:.3f}" for number in (*said_losses, 0.566 - 0.562, fmean(gains[1]))]
    points = [f"{100 * (fmean(a['pooled']) - fmean(b['pooled'])):.1f}" for a, b in zip(sgd, geo, strict=True)]
    assert re.findall(r"\d\.\d+", said) == [*losses, *points]
    assert len(games) > 0.8 * len(every["fl_games"])
    assert all(own.seen for own in games)
    assert sum(bool(own.above_constant) for own in games) < len(games) / 4


@pytest.fixture(scope="module")
def recount() -> ModuleType:
    path = Path(__file__).with_name("recount.py")
    imported = re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(encoding="utf-8"), re.M)
    assert "perennial" not in imported
    spec = importlib.util.spec_from_file_location("recount", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_another_script_counts_the_same(recount: ModuleType) -> None:
    page = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    assert recount.differences(page) == []


def test_the_other_script_sees_a_page_that_is_wrong_and_a_number_that_has_changed(
    recount: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / PAGE).read_text(encoding="utf-8")
    (counts,) = re.findall(r"\d+ confirmed", page[: page.index("## The rule")])
    assert recount.differences(page.replace(counts, "1 confirmed"))
    line = next(line for line in page.splitlines() if line.startswith("| [FedIIR]") and " of 5 |" in line)
    assert recount.differences(page.replace(line, line.replace(" of 5 |", " of 6 |")))
    for name in ("results", "reproduce"):
        shutil.copytree(ROOT / name, tmp_path / name)
    file = tmp_path / "results" / "mnist-3class.jsonl"
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r'("row":"CGPFL \(K=4\)".*?"pooled":)\[[^]]*\]', r"\1[0.1,0.1,0.1]", text))
    monkeypatch.setattr(recount, "ROOT", tmp_path)
    assert any(said.startswith("CGPFL: ") for said in recount.differences(page))


def test_no_claim_of_the_repository_fails_or_waits_without_a_reason() -> None:
    """What a reader would ask first; why one fails names the file or the row that carries it."""
    for name in reproductions():
        table = load_reproduction(name)
        files = kept(name, ROOT / "results")
        for lines in files or [[]]:
            sizes = [
                found.made and (found.made[0].rounds, found.made[0].quick) for found in findings(table, lines)
            ]
            assert table.limit or all(size == (table.rounds, False) for size in sizes), name
        found = [own for own, _ in judged(table, files)]
        failed = [own.claim.why or table.why for own in found if own.verdict in OPEN]
        assert all("docs/" in why or "row" in why for why in failed), (name, failed)


def texts(values: Sequence[float], error: float = 1.0) -> set[str]:
    """How a reason may write them: each, their mean, and with their deviation, or their standard error."""
    mean, deviation = fmean(values), stdev(values) / error
    both = {f"{mean:.{places}f} ± {deviation:.{places}f}" for places in range(3)}
    return both | {f"{number:.{places}f}" for number in (mean, *values) for places in range(1, 4)}


def columns_of(lines: Sequence[Kept]) -> Iterator[list[list[float]]]:
    """The numbers by seed of all rows, for each column."""
    for column in sorted({column for line in lines for column in line.measures}):
        factor = 1 if column in DECIMALS else 100
        rows = [[factor * own for own in line.measures.get(column, [])] for line in lines]
        yield [own for own in rows if len(own) > 1]


def unknown_numbers(why: str, table: Reproduction, files: Sequence[Sequence[Kept]]) -> set[str]:
    """Of a reason's numbers those that are of no row, no difference between rows, not the paper's, no setting, and
    not on the page of a method that the reason names."""
    pages = re.findall(r"docs/methods/\w+\.md", why)
    named = " ".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    text = re.sub(r"[λγ] = [\d.]+\d", "", why)
    numbers = re.findall(r"\d+(?:\.\d+)? ± \d+(?:\.\d+)?|(?<![\w.=])\d+\.\d+(?!\w)", text)
    left = {number for number in numbers if number not in named}
    left -= {f"{value:g}" for row in table.rows for value in row.settings.values() if isinstance(value, float)}
    left -= {f"{value:.1f}" for row in table.rows for value in row.paper.values()}
    papers = {row.title: row.paper for row in table.rows}
    left -= {f"{papers[own.row][own.column] - papers[own.than][own.column]:.1f}" for own in table.claims}
    for lines in files if left else ():
        left -= {f"{own:.3f}" for line in lines for own in line.settings.values() if isinstance(own, float)}
        left -= {text for rows in columns_of(lines) for own in rows for text in texts(own)}
    for lines in files if left else ():
        for rows in columns_of([line for line in lines if line.selection in ("final", "–")]):
            for one, other in permutations(rows, 2):
                if len(one) == len(other):
                    left -= texts([a - b for a, b in zip(one, other, strict=True)], sqrt(len(one)))
    return left


def test_the_numbers_of_a_reason_are_of_kept_runs_or_of_the_page_that_it_names() -> None:
    for name in reproductions():
        table = load_reproduction(name)
        files = kept(name, ROOT / "results")
        for why in {claim.why for claim in table.claims} | {table.why}:
            assert not unknown_numbers(why, table, files), (name, why)
    table, files = load_reproduction("mnist-3class-dnn"), kept("mnist-3class-dnn", ROOT / "results")
    assert unknown_numbers("98.3 and 98.0, 0.3 ± 0.2 apart", table, files) == set()
    assert unknown_numbers("157.3 and 98.0, 0.3 ± 7.7 apart", table, files) == {"157.3", "0.3 ± 7.7"}
