"""The page of all claims: what is kept of a table, the rule of the verdict, and that the page is what is kept."""

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from tiny_runs import TWO_ROWS
from typer.testing import CliRunner

from perennial.common.data import scenarios
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.papers import reproduce
from perennial.server.papers.overview import (
    Finding,
    Kept,
    _by_method,
    _cells,
    _command,
    _drawn,
    _endings,
    _gains,
    _large_and_small,
    _learnt,
    _once,
    _reasons,
    _rows,
    _section,
    _size,
    best,
    findings,
    keep,
    kept,
    overview,
)
from perennial.server.papers.reproduce import (
    LESS_IS_BETTER,
    Claim,
    Reproduction,
    load_reproduction,
    reproductions,
    side_by_side,
)
from perennial.server.run.folder import RunFolder
from perennial.server.selection.split_rule import Select
from perennial.server.study.compare import compare, entry_config, trials_of
from perennial.testing.tiny_federation import Toy

ROOT = Path(__file__).parents[3]
CLAIM = Claim(row="A", than="B", column="worst")

TABLE = """
title = "T"
source = "S"
scenario = "toy"
rounds = 4
seeds = 2
trials = 1
columns = ["worst", "average"]
claims = [{ row = "FedAvg", than = "Ditto", column = "worst" }]

[quick]
rounds = 2
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reproduction:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    (tmp_path / "t.toml").write_text(TABLE + TWO_ROWS)
    return load_reproduction("t", tmp_path)


def made(**changes: Any) -> Kept:
    """A line of `results/T.jsonl`."""
    line = {"selection": "final", "rounds": 4, "trials": 1, "by": "held-out", "quick": False}
    return Kept.model_validate({"row": "FedAvg", "settings": {}, "measures": {}, "runs": [], **line, **changes})


def finding(method: list[float], reference: list[float], whole: bool = True, claim: Claim = CLAIM) -> Finding:
    return Finding(claim, (60.0, 50.0), method, reference, whole=whole)


def test_the_difference_and_its_error_seed_by_seed() -> None:
    found = finding([60, 64, 68], [50, 55, 54])
    assert found.difference == pytest.approx(11)
    assert found.error == pytest.approx(stdev([10, 9, 14]) / sqrt(3))


def test_where_a_seed_is_missing_the_errors_add_up() -> None:
    method, reference = [60.0, 64.0, 68.0], [50.0, 55.0]
    expected = sqrt(stdev(method) ** 2 / 3 + stdev(reference) ** 2 / 2)
    assert finding(method, reference).error == pytest.approx(expected)


def test_two_rows_that_lack_different_seeds_are_not_paired(table: Reproduction) -> None:
    def line(row: str, runs: int, *worst: float) -> Kept:
        return made(row=row, measures={"worst": list(worst)}, runs=[f"{row}-{seed}" for seed in range(runs)])

    whole = next(findings(table, [line("FedAvg", 2, 0.5, 0.7), line("Ditto", 2, 0.4, 0.6)]))
    assert whole.error == pytest.approx(0)
    lacking = next(findings(table, [line("FedAvg", 3, 0.5, 0.7), line("Ditto", 3, 0.4, 0.6)]))
    assert lacking.error == pytest.approx(sqrt(2 * stdev([50, 70]) ** 2 / 2))


@pytest.mark.parametrize(
    ("method", "reference", "whole", "verdict"),
    [
        ([60, 61, 62], [50, 50, 51], True, "confirmed"),
        ([60, 61, 62], [50, 50, 51], False, "partly"),
        ([50, 50, 51], [60, 61, 62], True, "not"),
        ([50, 60, 70], [49, 69, 59], True, "not"),  # above, and within two standard errors
        ([60], [50], True, "not run"),
        ([], [], False, "not run"),
    ],
)
def test_the_rule(method: list[float], reference: list[float], whole: bool, verdict: str) -> None:
    assert finding(method, reference, whole).verdict == verdict


def test_large_gains_and_small_ones_are_counted_and_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is no gain in points, and what was not run no gain of ours."""
    seeds = [60.0, 61.0, 62.0], [50.0, 50.0, 51.0]
    large, small = finding(*seeds), replace(finding(*seeds[::-1]), paper=(51.0, 50.0))
    loss = finding([0.5, 0.51], [0.6, 0.62], claim=Claim(row="A", than="B", column="loss"))
    found = [large, small, loss, finding([60.0], [50.0])]
    said = _large_and_small(found)
    assert "gains 10 points or more, 1 of 1 claims" in said
    assert said.endswith("less, 0 of 1 are.")
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("perennial.server.results.figures.gains_figure", lambda gains, *_: drawn.update(gains))
    _gains(found)
    assert drawn == {
        "confirmed": [(10, large.difference, 2 * large.error)],
        "partly": [],
        "not": [(1, small.difference, 2 * small.error)],
    }


def test_a_method_s_claims_are_counted_with_its_variants_and_their_gains_are_medians(table: Reproduction) -> None:
    rows = [row.model_copy(update={"method": "fedsdr"}) for row in table.rows if row.title == "FedAvg"]
    rows += [rows[0].model_copy(update={"method": "fedsdr-pfedme", "title": "B"})]
    variants = table.model_copy(update={"rows": rows})
    own = [CLAIM.model_copy(update={"row": row}) for row in ("FedAvg", "B", "B")]
    gains = [([62.0, 62.0], [50.0, 50.0]), ([53.0, 53.0], [50.0, 50.0]), ([], [])]
    found = [finding(*both, claim=claim) for both, claim in zip(gains, own, strict=True)]
    lines = _by_method({"t": variants}, {"t": [replace(of, made=made()) if of.method else of for of in found]})
    (line,) = (line for line in lines if "FedSDR" in line)
    assert line == "| [FedSDR](methods/fedsdr.md) | 2 | 0 | 0 | 1 | 0 of 0 | +10.0 | +7.5 |"
    assert sum("| – | – | – | – | 0 of 0 | – | – |" in line for line in lines) == 6


def test_a_method_that_is_better_may_still_be_below_the_constant() -> None:
    seeds = [60.0, 61.0, 62.0], [50.0, 50.0, 51.0]
    above, near, below = (replace(finding(*seeds), constant=[constant] * 3) for constant in (58.0, 60.0, 64.0))
    worse = replace(finding(*seeds[::-1]), constant=[40.0] * 3)
    assert _learnt([above, near, below, worse, finding(*seeds)]) == (1, 3)  # 1.0 ± 0.58 is near
    loss = finding([0.5, 0.51], [0.6, 0.62], claim=Claim(row="A", than="B", column="loss"))
    assert _learnt([replace(loss, constant=[0.69] * 2)]) == (1, 1)


def test_a_claim_that_is_not_so_may_be_reversed() -> None:
    low, high = [50.0, 50.0, 51.0], [60.0, 61.0, 62.0]
    assert finding(low, high).reversed
    assert not finding(high, low).reversed
    assert not finding([50.0, 60.0, 70.0], [51.0, 69.0, 63.0]).reversed  # below, and within two standard errors
    assert _cells(replace(finding(low, high), made=made()))[-1] == "**not**, reversed"


def test_a_claim_of_two_tables_is_counted_once(table: Reproduction) -> None:
    """Where the paper's own table was run, and else in the variant."""
    run, waiting = finding([60.0, 61.0], [50.0, 50.0]), finding([], [])
    alone = finding([60.0, 61.0], [50.0, 50.0], claim=Claim(row="A", than="C", column="worst"))
    tables = {"own": table, "variant": table.model_copy(update={"claims_of": "own"})}
    assert _once(tables, {"own": [run], "variant": [run, alone]}) == {"own": [run], "variant": [alone]}
    assert _once(tables, {"own": [waiting], "variant": [run]}) == {"own": [], "variant": [run]}
    assert _once(tables, {"own": [waiting], "variant": [waiting]}) == {"own": [], "variant": [waiting]}


def test_a_claim_may_be_of_several_rows(table: Reproduction, tmp_path: Path) -> None:
    several = TABLE.replace('than = "Ditto", column = "worst"', 'than = "Ditto", column = ["worst", "average"]')
    (tmp_path / "s.toml").write_text(several + TWO_ROWS)
    found = load_reproduction("s", tmp_path).claims
    assert [(claim.row, claim.than, claim.column) for claim in found] == [
        ("FedAvg", "Ditto", "worst"),
        ("FedAvg", "Ditto", "average"),
    ]
    (tmp_path / "s.toml").write_text(several.replace('"average"]', '"worst"]') + TWO_ROWS)
    with pytest.raises(UserError, match="the claim FedAvg > Ditto, worst stands twice"):
        load_reproduction("s", tmp_path)
    (tmp_path / "s.toml").write_text(TABLE.replace("[quick]", 'claims_of = "cmnist"\n[quick]', 1) + TWO_ROWS)
    with pytest.raises(UserError, match="unknown claims_of 'cmnist'"):
        load_reproduction("s", tmp_path)


def test_a_search_changes_what_a_row_says_and_nothing_else_of_its_own(table: Reproduction) -> None:
    """The row's own value is the first trial's."""
    row = table.rows[0].model_copy(
        update={"settings": {"learning_rate": 0.123, "momentum": 0.5}, "searched": ("learning_rate",)}
    )
    plan = table.model_copy(update={"rows": (row, *table.rows[1:])}).plan(quick=False, trials=4)
    entry = plan.entries[0]
    configs = [
        config.method.model_dump() for config in trials_of(plan, entry, entry_config(plan, entry, plan.entries))
    ]
    assert configs[0]["learning_rate"] == 0.123
    assert len({config["learning_rate"] for config in configs}) == 4
    assert {config["momentum"] for config in configs} == {0.5}
    assert row.fixed == {"momentum": 0.5}


def test_less_of_a_loss_is_better() -> None:
    claim = Claim(row="A", than="B", column="loss")
    assert finding([0.5, 0.51], [0.6, 0.62], claim=claim).verdict == "confirmed"
    assert finding([0.6, 0.62], [0.5, 0.51], claim=claim).verdict == "not"


@pytest.mark.slow
def test_what_is_kept_is_what_the_comparison_has(table: Reproduction, tmp_path: Path) -> None:
    comparison = compare(table.plan(quick=False), tmp_path / "pool", 1)
    file = keep("t", table, comparison, False, Select.held_out, tmp_path / "results")
    assert file.name == "t.jsonl"
    (lines,) = kept("t", tmp_path / "results")
    assert {line.row for line in lines} == {"FedAvg", "Ditto", "Local", "Constant"}
    own = next(line for line in lines if (line.row, line.selection) == ("Ditto", "final"))
    row = comparison.row("Ditto", "final")
    assert row
    assert own.measures.keys() == {"worst", "average"}
    assert fmean(own.measures["worst"]) == pytest.approx(row.measures["worst"].mean)
    assert len(own.measures["worst"]) == len(own.runs) == 2
    (found,) = findings(table, lines)
    assert found.seeds == 2
    assert found.whole
    assert found.paper == (60, 50)
    assert fmean(found.reference) == pytest.approx(100 * row.measures["worst"].mean)
    (other,) = findings(table, [line.model_copy(update={"rounds": 3}) for line in lines])
    assert not other.whole
    (none,) = findings(table, [line for line in lines if line.row != "Ditto"])
    assert none.verdict == "not run"


@pytest.mark.slow
def test_a_search_is_kept_beside_the_table_s_settings(table: Reproduction, tmp_path: Path) -> None:
    comparison = compare(table.plan(quick=True, trials=2), tmp_path / "pool", 1)
    assert keep("t", table, comparison, True, Select.held_out, tmp_path).name == "t-held-out.jsonl"
    (lines,) = kept("t", tmp_path)
    assert all(line.quick and line.trials == 2 for line in lines)


@pytest.mark.slow
def test_a_table_is_made_row_by_row(table: Reproduction, tmp_path: Path) -> None:
    def kept_of(only: str, rounds: int) -> dict[str, int]:
        comparison = compare(table.plan(quick=False, rounds=rounds, only=[only]), tmp_path / "pool", 1)
        keep("t", table, comparison, False, Select.held_out, tmp_path)
        assert {line.title.lower() for line in side_by_side(table, comparison)} == {
            *(only.lower(), "fedavg", "local", "constant")
        }
        return {line.row: line.rounds for line in kept("t", tmp_path)[0] if line.selection in ("final", "–")}

    assert kept_of("FedAvg", 2) == {"FedAvg": 2, "Local": 2, "Constant": 2}
    assert list(kept_of("ditto", 2)) == ["FedAvg", "Ditto", "Local", "Constant"]
    assert list(kept_of("FedAvg", 2)) == ["FedAvg", "Ditto", "Local", "Constant"]
    assert "Ditto" not in kept_of("FedAvg", 3)
    with pytest.raises(UserError, match="unknown row 'Dito'; did you mean 'Ditto'"):
        table.plan(quick=False, only=["Dito"])


@pytest.mark.slow
def test_a_table_goes_on_without_its_runs(
    table: Reproduction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are kept with these seeds at this size are not made again, unless named."""
    monkeypatch.setattr(reproduce, "load_reproduction", lambda _: table)
    pools = (tmp_path / f"pool-{number}" for number in range(9))

    def methods_run(*options: str) -> set[str]:
        pool = next(pools)
        command = ["reproduce", "t", "--jobs", "1", "--out", str(pool), "--keep", str(tmp_path / "kept"), *options]
        ended = CliRunner().invoke(app, command)
        assert ended.exit_code == 0, ended.output
        return {path.name.split("-")[0] for path in pool.glob("*") if path.is_dir()}

    assert methods_run("--row", "FedAvg") == {"fedavg", "local"}
    assert methods_run("--row", "ditto") == {"ditto"}
    assert methods_run() == set()
    command = [
        "reproduce",
        "t",
        "--keep",
        str(tmp_path / "kept"),
        "--json",
        "--figures",
        str(tmp_path / "figures"),
    ]
    again = CliRunner().invoke(app, command)
    assert {line["row"] for line in json.loads(again.stdout)} == {"FedAvg", "Ditto", "Local", "Constant"}
    assert "there is nothing to draw, since no row was made" in again.stderr
    assert methods_run("--row", "FedAvg") == {"fedavg"}
    assert [line.row for line in kept("t", tmp_path / "kept")[0] if line.selection in ("final", "–")] == [
        *("FedAvg", "Ditto", "Local", "Constant")
    ]
    assert methods_run("--seeds", "3") == {"fedavg", "ditto", "local"}
    assert methods_run("--rounds", "3", "--row", "ditto") == {"fedavg", "ditto", "local"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--quick",),
            "holds rows of 4 rounds with 1 trial, which rows of 2 rounds with 1 trial of the small version cannot "
            "join; give another --keep folder",
        ),
        (
            ("--rounds", "5"),
            "holds rows of 4 rounds with 1 trial, which rows of 5 rounds with 1 trial cannot join",
        ),
        (
            ("--seeds", "1"),
            "holds 2 seeds of the row FedAvg, which 1 would replace; say --seeds, or give another --keep folder",
        ),
    ],
)
def test_numbers_that_are_kept_are_never_lost(
    options: tuple[str, ...], said: str, table: Reproduction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproduce, "load_reproduction", lambda _: table)
    file = tmp_path / "t.jsonl"
    rows = ("FedAvg", "Ditto", "Local")
    there = "".join(f"{made(row=row, measures={'worst': [0.5, 0.6]}).model_dump_json()}\n" for row in rows)
    file.write_text(there)
    command = ["reproduce", "t", "--jobs", "1", "--out", str(tmp_path / "pool"), "--keep", str(tmp_path)]
    ended = CliRunner().invoke(app, [*command, "--row", "ditto", *options])
    assert ended.exit_code == 2
    assert f"{file} {said}" in ended.stderr
    assert file.read_text() == there
    assert not (tmp_path / "pool").exists()


@pytest.mark.slow
def test_the_page_says_what_is_kept(table: Reproduction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = "perennial.server.papers.overview"
    monkeypatch.setattr(f"{here}.reproductions", lambda: {"t": tmp_path / "t.toml"})
    monkeypatch.setattr(f"{here}.load_reproduction", lambda name: table)
    assert "Not run yet. The command is `perennial reproduce t --keep results`." in overview(tmp_path, "a.svg")[0]
    monkeypatch.setattr(reproduce, "load_reproduction", lambda name: table)
    page, results = tmp_path / "page.md", tmp_path / "results"
    run = ["reproduce", "t", "--jobs", "1", "--out", str(tmp_path / "pool"), "--keep", str(results)]
    ended = CliRunner().invoke(app, [*run, "--rounds", "2"])
    assert ended.exit_code == 0, ended.output
    make = ["reproduce", "--overview", str(page), "--keep", str(results)]
    assert CliRunner().invoke(app, [*make, "--check"]).exit_code == 1
    assert CliRunner().invoke(app, make).exit_code == 0
    assert CliRunner().invoke(app, [*make, "--check"]).exit_code == 0
    (own := tmp_path / "own.csv").write_text("age\n")
    assert CliRunner().invoke(app, ["reproduce", "--overview", str(own), "--keep", str(results)]).exit_code == 2
    assert own.read_text() == "age\n"
    (found,) = findings(table, kept("t", results)[0])
    assert f">{found.verdict}</text>" in page.with_suffix(".svg").read_text()
    said = page.read_text()
    assert "](page.svg)" in said
    assert "Size: 2 of 4 rounds. Settings: the table's settings." in said
    assert "`perennial reproduce t --rounds 2`" in said
    assert "| [CGPFL](methods/cgpfl.md) | – | – | – | – | 0 of 0 | – | – |" in said
    line = next(line for line in said.splitlines() if line.startswith("| FedAvg > Ditto, worst | 60.00 / 50.00 |"))
    assert f"{found.difference:+.2f} ± {found.error:.2f} | 2 |" in line
    assert f"{fmean(found.constant):.2f}" in line
    shown = [own for own in kept("t", results)[0] if own.selection != "validation"]
    assert [own.row for own in shown] == ["FedAvg", "Ditto", "Local", "Constant"]
    for own in shown:
        mean, deviation = 100 * fmean(own.measures["worst"]), 100 * stdev(own.measures["worst"])
        in_paper = {"FedAvg": " (60.00)", "Ditto": " (50.00)"}.get(own.row, "")
        assert said.count(f"| {own.row} | {mean:.2f} ±{deviation:.2f}{in_paper} | ") == 1
        assert said.count(f"\n| {own.row} | ") == 1
    for file in (page, page.with_suffix(".svg")):
        file.write_text(file.read_text().replace("<", "<!-- --><", 1).replace("worst |", "best |"))
        assert CliRunner().invoke(app, [*make, "--check"]).exit_code == 1
        assert CliRunner().invoke(app, make).exit_code == 0


def test_a_claim_that_is_not_so_has_its_reason(table: Reproduction) -> None:
    """One line for each reason, and one for a row that is not the paper's; none of what is so."""
    claims = [Claim(row=row, than=than, column="worst", why="B.") for row, than in ("AB", "CB", "BA")]
    found = [finding([0.5, 0.5], [0.6, 0.7], claim=claim) for claim in claims[:2]]
    found += [finding([0.6, 0.7], [0.5, 0.5], claim=claims[2]), finding([], [], claim=claims[2])]
    assert _reasons(table, found) == ["- **not** A > B; C > B: B.", ""]
    own = [*claims[:1], *(claim.model_copy(update={"why": ""}) for claim in claims[1:])]
    common = [replace(one, claim=claim) for one, claim in zip(found, own, strict=False)]
    shared = table.model_copy(update={"why": "All."})
    assert _reasons(shared, common) == ["- **not** A > B: B.", "- **not** C > B: All.", ""]
    columns = table.model_copy(update={"claims": (CLAIM, Claim(row="A", than="B", column="loss"))})
    assert _reasons(columns, found) == ["- **not** A > B, worst; C > B, worst: B.", ""]
    assert _reasons(table, found[2:]) == []
    (ditto,) = (row for row in table.rows if row.title == "Ditto")
    other = ditto.model_copy(update={"comparable": False, "remark": "Other steps."})
    changed = table.model_copy(update={"rows": (*(row for row in table.rows if row is not ditto), other)})
    (claim,) = table.claims
    assert _reasons(changed, [replace(finding([0.7, 0.7], [0.6, 0.6], claim=claim), made=made())]) == [
        "- Ditto: Other steps.",
        "",
    ]
    assert _reasons(changed, [finding([], [], claim=claim)]) == []


def test_the_size_and_the_command_of_the_small_version(table: Reproduction) -> None:
    quick = table.quick.model_copy(update={"settings": {"model.name": "cnn-small"}})
    changed = table.model_copy(update={"quick": quick})
    small = "the small version (model.name=cnn-small), 4 of 4 rounds"
    assert _size(changed, made(quick=True), whole=False, waiting=False) == small
    assert _size(table, made(quick=True, rounds=2), False, False) == "the small version, 2 of 4 rounds"
    more = "the small version, 8 rounds for the paper's 4"
    assert _size(table, made(quick=True, rounds=8), False, False) == more
    assert _size(table, made(), False, False) == "4 of 4 rounds, other data than the paper's"
    command = "perennial reproduce t --quick"
    assert _command("t", table, made(quick=True, rounds=2), 1) == command
    assert _command("t", table, made(quick=True), 3) == f"{command} --rounds 4 --seeds 3"


def test_the_page_says_how_settings_were_chosen(table: Reproduction) -> None:
    both = [made(row=row, measures={"worst": [0.5, 0.6]}) for row in ("FedAvg", "Ditto")]
    changed = table.model_copy(update={"chosen": "chosen on test data"})
    assert "Settings: chosen on test data. Command" in _section("t", changed, both, counted=[0])[0]
    assert "Settings: the table's settings. Command" in _section("t", table, both, counted=[0])[0]
    searched = [line.model_copy(update={"trials": 12, "trial_rounds": 2}) for line in both]
    assert (
        "Settings: 12 trials of 2 rounds by held-out. Command" in _section("t", changed, searched, counted=[0])[0]
    )


def test_the_round_that_the_paper_s_rule_chooses_is_beside_the_last(table: Reproduction) -> None:
    rounds = [made(selection=selection, measures={"worst": [0.5, 0.6]}) for selection in ("final", "validation")]
    alone = _rows(table, rounds)
    (last,) = (line for line in alone if line.startswith("| FedAvg"))
    assert last.startswith("| FedAvg | 55.00")
    assert not any("validation" in line for line in alone)
    both = _rows(table.model_copy(update={"paper_round": "validation"}), rounds)
    assert both[0].startswith("| row | round | worst |")
    assert [line.split(" | ")[1] for line in both[2:-1]] == ["final", "validation"]


def test_the_rounds_in_which_games_ended(table: Reproduction, tmp_path: Path) -> None:
    """Of two seeds the game of the second did not end."""
    comparison = compare(table.plan(quick=False, rounds=2), tmp_path / "pool", 1)
    games = next(choice for choice in comparison.choices if choice.label == "Ditto")
    RunFolder(Path(games.runs[0])).append([{"kind": "equilibrium", "round": 1, "accuracy": 0.5}])
    keep("t", table, comparison, False, Select.held_out, tmp_path)
    (lines,) = kept("t", tmp_path)
    assert {line.row: line.ended for line in lines} == {
        "FedAvg": [],
        "Ditto": [1, None],
        "Local": [],
        "Constant": [],
    }
    assert _endings([100, 200, None], 92.2) == "150 ±71, 2 of 3 (92)"
    assert _endings([100, 200], None) == "150 ±71"
    assert _endings([None], None) == "0 of 1"
    assert _endings([], 92.2) == "–"


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "cmnist-8.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"cmnist-8\.jsonl, line 1: row: a value is missing"):
        overview(tmp_path, "a.svg")
    (tmp_path / "cmnist-8.jsonl").write_bytes(b"\xff\xfe\n")
    with pytest.raises(UserError, match=r"cmnist-8\.jsonl, line 1: .*invalid"):
        overview(tmp_path, "a.svg")
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


def test_what_a_search_chose_is_shown(table: Reproduction) -> None:
    drawn = {"learning_rate": 0.0123456, "batch_size": 32}
    lines = [made(trials=2), made(row="Ditto", trials=2, settings=drawn), made(selection="split", trials=2)]
    fixed = table.rows[0].model_copy(update={"settings": {"momentum": 0.5}})
    own = table.model_copy(update={"rows": (fixed, *table.rows[1:]), "settings": {"local_steps": 10}})
    shown = _drawn(own, lines)
    assert shown[0] == "The settings that the search chose. Not searched for any row: local_steps=10."
    assert shown[2] == "- FedAvg: the defaults, its first trial; not searched: momentum=0.5"
    assert _drawn(table, lines) == [
        "The settings that the search chose.",
        "",
        "- FedAvg: the defaults, its first trial",
        "- Ditto: learning_rate=0.01235, batch_size=32",
        "",
    ]
    assert _drawn(table, [made()]) == []


def test_the_size_says_what_keeps_a_table_from_being_whole(table: Reproduction) -> None:
    limited = table.model_copy(update={"limit": "hours"})
    assert _size(limited, made(), whole=True, waiting=False) == "the paper's"
    assert _size(limited, made(), whole=True, waiting=True) == "the paper's, not all rows yet (hours)"
    assert _size(limited, made(rounds=2), whole=False, waiting=False) == "2 of 4 rounds (hours)"


def test_below_the_first_runs_of_a_table_stands_only_what_was_run(table: Reproduction) -> None:
    """A search that is not done yet is said to be there; a claim that it lacks one row of is not in it."""
    searched = {"trials": 12, "trial_rounds": 2, "measures": {"worst": [0.5, 0.6]}}
    rows = [made(**searched)]
    said, *others = _section("t", table, rows, counted=[])
    assert said.startswith(
        "Size: the paper's, not all rows yet. Settings: 12 trials of 2 rounds by held-out. Command"
    )
    assert "*not run*" not in "".join(others)
    assert any(line.startswith("| FedAvg | 55.00") for line in others)
    assert "*not run*" in "".join(_section("t", table, rows, counted=[0]))
    failed = [*rows, made(row="Ditto", **searched)]
    changed = table.model_copy(update={"why": "see the row Ditto"})
    assert "see the row Ditto" in "".join(_section("t", changed, failed, counted=[0]))
    below = "".join(_section("t", changed, failed, counted=[]))
    assert "**not**" in below
    assert "see the row Ditto" not in below


def test_a_claim_is_judged_by_the_largest_runs_that_have_it(table: Reproduction, tmp_path: Path) -> None:
    def write(name: str, *rows: str, **changes: Any) -> None:
        lines = [made(row=row, measures={"worst": [0.5, 0.6]}, **changes) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{line.model_dump_json()}\n" for line in lines))

    def judged() -> Kept | None:
        files = kept("t", tmp_path)
        ((finding, number),) = best(table, files)
        assert finding.made is None or finding.made in files[number]
        return finding.made

    both, split = ("FedAvg", "Ditto"), {"trials": 12, "by": "split", "trial_rounds": 2}
    by_split = table.model_copy(update={"select": Select.by_split})
    assert judged() is None
    write("t-held-out", *both, trials=12)
    table = by_split
    assert judged() is None
    write("t", *both, rounds=2, quick=True)
    write("t-split", "FedAvg", **split)
    write("t-10", *both, rounds=10)  # a table whose name has a number more
    write("t-b", *both)
    small = judged()
    assert small
    assert small.quick
    write("t-split-3-rounds", *both, rounds=3, **split)
    searched = judged()
    assert searched
    assert searched.rounds == 3
    file = tmp_path / "t.jsonl"
    file.write_text("".join(f"{made(row=row, measures={'worst': [0.5]}).model_dump_json()}\n" for row in both))
    assert judged() == searched  # one seed says nothing
    write("t", *both)
    own = judged()
    assert own
    assert own.trials == 1


def test_the_page_of_the_repository_is_what_its_results_say() -> None:
    page, picture = overview(ROOT / "results", "results.svg")
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page
    assert (ROOT / "docs" / "results.svg").read_text(encoding="utf-8") == picture
    files = {file.stem for file in (ROOT / "results").glob("*.jsonl")} - {"attacks", "selection"}
    tables = [name for name in reproductions() if kept(name, ROOT / "results")]
    assert all(file.startswith(tuple(tables)) for file in files)
    for lines in (lines for name in tables for lines in kept(name, ROOT / "results")):
        assert all(line.measures for line in lines)


def test_no_claim_of_the_repository_fails_or_waits_without_a_reason() -> None:
    """What a reader would ask first; why one fails names the file or the row that carries it."""
    for name in reproductions():
        table = load_reproduction(name)
        files = kept(name, ROOT / "results")
        for lines in files or [[]]:
            sizes = [found.made and (found.made.rounds, found.made.quick) for found in findings(table, lines)]
            assert table.limit or all(size == (table.rounds, False) for size in sizes), name
        found = [own for own, _ in best(table, files)]
        failed = [own.claim.why or table.why for own in found if own.verdict == "not"]
        assert all("docs/" in why or "row" in why for why in failed), (name, failed)
