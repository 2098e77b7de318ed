"""What is kept of a table's runs, and that a table goes on from it."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from tiny_runs import SMALL_TABLE, TWO_ROWS, made_line
from typer.testing import CliRunner

from perennial.common.data import scenarios
from perennial.common.utils.errors import UserError
from perennial.server.cli.main import app
from perennial.server.papers import reproduce
from perennial.server.papers.kept import keep, kept
from perennial.server.papers.reproduce import (
    Reproduction,
    load_reproduction,
    side_by_side,
)
from perennial.server.papers.verdicts import findings
from perennial.server.selection.split_rule import Select
from perennial.server.study.compare import compare, entry_config, trials_of
from perennial.testing.tiny_federation import Toy


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reproduction:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    (tmp_path / "t.toml").write_text(SMALL_TABLE + TWO_ROWS)
    return load_reproduction("t", tmp_path)


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
    assert found.size
    assert found.paper == (60, 50)
    assert fmean(found.reference) == pytest.approx(100 * row.measures["worst"].mean)
    (other,) = findings(table, [line.model_copy(update={"rounds": 3}) for line in lines])
    assert not other.size
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
    there = "".join(f"{made_line(row=row, measures={'worst': [0.5, 0.6]}).model_dump_json()}\n" for row in rows)
    file.write_text(there)
    command = ["reproduce", "t", "--jobs", "1", "--out", str(tmp_path / "pool"), "--keep", str(tmp_path)]
    ended = CliRunner().invoke(app, [*command, "--row", "ditto", *options])
    assert ended.exit_code == 2
    assert f"{file} {said}" in ended.stderr
    assert file.read_text() == there
    assert not (tmp_path / "pool").exists()


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
