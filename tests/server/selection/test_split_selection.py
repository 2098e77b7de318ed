"""The third selection of rounds: in the summary, the run's table and the report."""

from typing import Any

import pytest
from rich.console import Console
from split_counts import coloured

from perennial.common.config import load_config
from perennial.common.tasks import Classes
from perennial.server.cli.tables import headline_table, split_line
from perennial.server.report.tables import reading_guide
from perennial.server.selection.summary import summarise
from perennial.server.study.run_names import config_digest, name_without_code

CONFIG = load_config(options={"method": "fedavg", "scenario": "colored-digits"})


def rows(*scores: tuple[float, float], **changes: Any) -> list[dict[str, Any]]:
    """Rounds with a and d as given; on held-out data and in the test each is better than the one before."""
    made: list[dict[str, Any]] = []
    for number, (a, d) in enumerate(scores, 1):
        common = {"round": number, "model": "global", "loss": [1.0]}
        made += [
            {"kind": "round", "round": number, "asked": 1, "bytes_down": 1, "bytes_up": 1, "left_out": {}},
            {**common, "kind": "evaluation", "client": "client-0", "split": "test", "environment": ["red"],
             "count": [100], "correct": [number]},
            {**common, "kind": "evaluation", "client": "client-0", "split": "validation",
             "environment": ["validation"], "count": [100], "correct": [50 + number]},
            {**coloured(a, d), "round": number, **changes},
        ]  # fmt: skip
    return made


ROWS = rows((0.9, 0.3), (0.8, 0.6), (0.8, 0.6), (1.0, 0.0))


def test_the_best_score_is_picked_the_earliest_of_equals() -> None:
    summary = summarise(CONFIG, ROWS, seconds=0)
    found = summary["models"]["global"]
    assert {name: chosen["round"] for name, chosen in found.items()} == {"final": 4, "validation": 4, "split": 2}
    assert found["split"]["split"]["score"] == pytest.approx(0.6)
    assert found["final"]["split"]["score"] == 0
    assert found["split"]["split"]["constant"] == 0.5
    assert summary["split"]["open"]
    assert summary["split"]["reason"] == ""


def test_without_references_the_summary_is_what_it_was() -> None:
    summary = summarise(CONFIG, [row for row in ROWS if row["kind"] != "split"], seconds=0)
    assert "split" not in summary
    assert summary["models"]["global"].keys() == {"final", "validation"}
    assert "split" not in summary["models"]["global"]["final"]
    assert split_line(summary) == ""


def test_a_shut_gate_picks_no_round_and_says_why() -> None:
    summary = summarise(CONFIG, rows((0.8, 0.6), clients=[4, 0]), seconds=0)
    assert summary["models"]["global"].keys() == {"final", "validation"}
    assert split_line(summary) == (
        "split does not speak: environment p=0.9 alone has held-out samples, and two are needed"
    )
    assert summary["models"]["global"]["final"]["split"]["score"] == pytest.approx(0.6)


@pytest.mark.parametrize(("shut", "open_"), [(1, True), (4, False)])
def test_split_speaks_as_it_does_after_the_last_round(shut: int, open_: bool) -> None:
    told = [row | {"clients": [4, 0]} if (row["kind"], row["round"]) == ("split", shut) else row for row in ROWS]
    assert summarise(CONFIG, told, seconds=0)["split"]["open"] == open_


def test_the_choice_never_looks_at_the_test() -> None:
    spoiled = [row | {"correct": [100 - row["correct"][0]]} if row.get("split") == "test" else row for row in ROWS]
    without = [row for row in ROWS if row.get("split") != "test"]
    for other in (spoiled, without):
        found = summarise(CONFIG, other, seconds=0)["models"]["global"]
        assert {name: chosen["round"] for name, chosen in found.items()} == {
            "final": 4,
            "validation": 4,
            "split": 2,
        }


def test_the_table_has_the_score_its_error_and_the_constant() -> None:
    summary = summarise(CONFIG, ROWS, seconds=0)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(headline_table(summary, Classes(2)))
    lines = {
        line.split("│")[1].strip(): line.split("│")[2:5] for line in capture.get().splitlines() if "│" in line
    }
    assert [cell.strip() for cell in lines["split"]] == ["0.00", "0.00", "60.00"]
    assert [cell.strip() for cell in lines["best constant"]] == ["50.00"] * 3
    assert lines["its standard error"][2].strip() == "3.00"
    assert "1700 held-out samples that the references know and 300" in split_line(summary)


def test_the_report_says_what_it_is() -> None:
    assert "<em>split</em> is the round" in reading_guide([], ("final", "split"))
    assert "<em>split</em>" not in reading_guide([], ("final", "validation", "oracle"))


def test_where_the_references_lie_is_not_in_a_runs_name_but_that_there_are_some() -> None:
    one, other = (CONFIG.model_copy(update={"references": place}) for place in ("a/b", "c"))
    assert config_digest(one) == config_digest(other)
    assert config_digest(one) != config_digest(CONFIG)
    assert name_without_code(one) == name_without_code(other)
