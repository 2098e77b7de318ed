from typing import Any

import pytest
from rich.console import Console

from perennial.common.config import load_config
from perennial.common.tasks import Classes
from perennial.server.cli.tables import cautions, headline_table, traffic_line
from perennial.server.run.progress import Progress, progress_line
from perennial.server.selection.summary import majority, summarise

CONFIG = load_config(options={"method": "ditto", "scenario": "colored-digits", "seed": 3})


def evaluation(
    round_: int, client: str, correct: list[int], *, model: str = "global", split: str = "test",
    count: list[int] | None = None, names: list[str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    names = names or (["validation"] if split == "validation" else ["red", "blue"])
    return {
        "kind": "evaluation", "round": round_, "client": client, "model": model, "split": split,
        "environment": names, "count": count or [10] * len(names), "correct": correct, "loss": [1.0] * len(names),
    }  # fmt: skip


def trained(round_: int, **values: Any) -> dict[str, Any]:
    return {
        "kind": "round", "round": round_, "exchanges": ["train"], "asked": 2, "bytes_down": 100, "bytes_up": 60,
        "left_out": {}, "metrics": {"risk": 0.5}, **values,
    }  # fmt: skip


def both(round_: int, first: list[int], second: list[int], validation: tuple[int, int]) -> list[dict[str, Any]]:
    """Two clients' rows of the global model in one round."""
    return [
        evaluation(round_, "client-0", first),
        evaluation(round_, "client-0", [validation[0]], split="validation"),
        evaluation(round_, "client-1", second),
        evaluation(round_, "client-1", [validation[1]], split="validation"),
    ]


# Test averages 0.7, 0.45, 0.45; held-out 0.6, 0.9, 0.9.
ROWS = [
    trained(1), *both(1, [8, 6], [8, 6], (6, 6)),
    trained(2, bytes_up=20), *both(2, [9, 1], [7, 1], (8, 10)),
    trained(3, asked=4), *both(3, [9, 0], [7, 2], (9, 9)),
]  # fmt: skip


def test_worst_average_and_clients_by_hand() -> None:
    found = summarise(CONFIG, ROWS, seconds=1.23456)
    assert {key: found[key] for key in ("method", "scenario", "seed", "rounds", "wall_seconds", "left_out")} == {
        "method": "ditto", "scenario": "colored-digits", "seed": 3, "rounds": 3, "wall_seconds": 1.235,
        "left_out": {},
    }  # fmt: skip
    final = found["models"]["global"]["final"]
    assert final["round"] == 3
    assert final["accuracy"] == {"red": pytest.approx(0.8), "blue": pytest.approx(0.1)}
    assert final["worst"] == pytest.approx(0.1)
    assert final["average"] == pytest.approx(0.45)
    assert final["validation"] == pytest.approx(0.9)
    assert final["clients"] == {"client-0": {"red": 0.9, "blue": 0.0}, "client-1": {"red": 0.7, "blue": 0.2}}


def test_pooled_counts_a_client_by_its_samples() -> None:
    rows = [
        trained(1),
        evaluation(1, "client-0", [9, 1], count=[10, 10]),
        evaluation(1, "client-1", [2], count=[80], names=["red"]),
    ]
    rows += [evaluation(1, "client-0", [5], split="validation")]
    final = summarise(CONFIG, rows, seconds=0)["models"]["global"]["final"]
    assert final["pooled"] == pytest.approx(12 / 100)
    assert final["average"] != pytest.approx(12 / 100)


def test_bytes_are_per_client_and_round() -> None:
    found = summarise(CONFIG, ROWS, seconds=0)["bytes_per_client_and_round"]
    assert found == {"down": 300 / 8, "up": 140 / 8}
    assert summarise(CONFIG, [], seconds=0)["bytes_per_client_and_round"] == {"down": 0, "up": 0}


def test_validation_takes_the_earliest_of_equals_and_never_looks_at_the_test() -> None:
    found = summarise(CONFIG, ROWS, seconds=0)["models"]["global"]
    assert found.keys() == {"final", "validation"}
    assert found["validation"]["round"] == 2
    spoiled = [
        row | {"correct": [10 - c for c in row["correct"]]} if row.get("split") == "test" else row for row in ROWS
    ]
    assert summarise(CONFIG, spoiled, seconds=0)["models"]["global"]["validation"]["round"] == 2


def test_the_oracle_is_there_on_request_only() -> None:
    found = summarise(CONFIG, ROWS, seconds=0, oracle=True)["models"]["global"]
    assert found["oracle"]["round"] == 1
    assert found["oracle"]["average"] == pytest.approx(0.7)
    assert found["final"] == summarise(CONFIG, ROWS, seconds=0)["models"]["global"]["final"]


def test_the_round_of_a_paper_s_own_test_number_is_there_on_request_only() -> None:
    """Red is best in round 1 of equals, blue in round 1, and the loss, which is per sample, in round 3."""
    lower = [row | {"loss": [4.0 - row["round"]] * len(row["loss"])} if "loss" in row else row for row in ROWS]
    for column, chosen in (("red", 1), ("blue", 1), ("loss", 3)):
        found = summarise(CONFIG, lower, seconds=0, as_in_paper=column)["models"]["global"]
        assert {name: own["round"] for name, own in found.items()} == {
            "final": 3, "validation": 2, "as-in-paper": chosen,
        }  # fmt: skip
    spoiled = [
        row | {"correct": [0, 9]} if row["round"] == 2 and row.get("split") == "test" else row for row in ROWS
    ]
    assert (
        summarise(CONFIG, spoiled, seconds=0, as_in_paper="blue")["models"]["global"]["as-in-paper"]["round"] == 2
    )
    unknown = summarise(CONFIG, ROWS, seconds=0, as_in_paper="green")["models"]["global"]
    assert unknown.keys() == {"final", "validation"}


def test_the_order_of_rows_does_not_matter_to_the_choice() -> None:
    found = summarise(CONFIG, ROWS[::-1], seconds=0, oracle=True)["models"]["global"]
    assert {selection: value["round"] for selection, value in found.items()} == {
        "final": 3, "validation": 2, "oracle": 1,
    }  # fmt: skip


def test_the_mean_is_over_clients_not_over_samples() -> None:
    rows = [evaluation(1, "a", [90, 0], count=[100, 10]), evaluation(1, "b", [1, 10], count=[10, 10])]
    final = summarise(CONFIG, rows, seconds=0)["models"]["global"]["final"]
    assert final["accuracy"] == {"red": pytest.approx(0.5), "blue": pytest.approx(0.5)}


def test_a_client_without_samples_of_an_environment_has_no_say_in_it() -> None:
    rows = [
        evaluation(1, "a", [5, 0], count=[10, 0]),
        evaluation(1, "b", [9], names=["blue"]),
        evaluation(1, "c", [0, 0], count=[0, 0]),
    ]
    final = summarise(CONFIG, rows, seconds=0)["models"]["global"]["final"]
    assert final["accuracy"] == {"red": 0.5, "blue": 0.9}
    assert final["worst"] == 0.5
    assert final["clients"] == {"a": {"red": 0.5}, "b": {"blue": 0.9}, "c": {}}
    assert final["validation"] is None


def test_each_model_chooses_its_own_round() -> None:
    personal = [
        evaluation(n, "client-0", [v], model="personal", split=split, names=["validation"])
        for n, v in ((1, 9), (2, 5))
        for split in ("validation", "test")
    ]
    models = summarise(CONFIG, [*ROWS, *personal], seconds=0)["models"]
    assert models["global"]["validation"]["round"] == 2
    assert models["personal"]["validation"]["round"] == 1


def test_who_was_left_out_how_often_and_why_last() -> None:
    rows = [
        trained(1, left_out={"client-1": "did not answer in time"}),
        {**trained(1), "kind": "evaluation-traffic", "left_out": {"client-1": "is not finite"}},
        trained(2, left_out={"client-0": "failed: no memory"}),
    ]
    summary = summarise(CONFIG, rows, seconds=0)
    assert summary["left_out"] == {
        "client-0": {"replies": 1, "last": "round 2: failed: no memory"},
        "client-1": {"replies": 2, "last": "round 1: is not finite"},
    }
    assert list(cautions(CONFIG, summary))[1] == "client-1: 2 replies left out, the last in round 1: is not finite"


# ---------------------------------------------------------------------- what a person sees


def printed(summary: dict[str, Any]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(headline_table(summary, Classes(2)))
    return capture.get()


def test_the_table_shows_percent_per_environment_and_model() -> None:
    config = load_config(options={"method": "fedavg", "scenario": "colored-digits"})
    lines = [line.split() for line in printed(summarise(config, ROWS, seconds=0)).splitlines()]
    cells = {line[1]: [cell for cell in line if cell[0].isdigit()] for line in lines if len(line) > 2}
    assert cells["red"] == ["80.00", "80.00"]
    assert cells["worst"] == ["10.00", "10.00"]
    assert cells["round"] == ["3", "2"]


def test_the_table_bears_rounds_with_other_environments_and_runs_without_evaluation() -> None:
    fewer = evaluation(4, "client-0", [5], names=["blue"])
    text = printed(summarise(CONFIG, [*ROWS, fewer], seconds=0))
    assert "red" in text
    assert "–" in text
    assert "worst" in printed(summarise(CONFIG, [trained(1)], seconds=0))


def test_sites_with_own_data_have_a_row_each() -> None:
    config = load_config(options={"method": "fedavg", "scenario": "own-data"})

    def cells(rows: list[dict[str, Any]]) -> dict[str, str]:
        lines = [line.strip("│ ").split("│") for line in printed(summarise(config, rows, seconds=0)).splitlines()]
        return {first.strip(): rest[0].strip() for first, *rest in lines if rest}

    one = [
        trained(1),
        evaluation(1, "site-1", [8], names=["own"]),
        evaluation(1, "site-2", [5], names=["own"]),
        evaluation(1, "site-3", [0], names=["own"], count=[0]),
    ]
    found = cells(one)
    assert [found[site] for site in ("site-1", "site-2", "site-3")] == ["80.00", "50.00", "–"]
    assert (found["worst site"], found["average"]) == ("50.00", "65.00")
    assert not {"own", "environment own", "worst"} & found.keys()
    final = summarise(config, one, seconds=0)["models"]["global"]["final"]
    assert (final["worst_site"], final["worst"], final["average"]) == (0.5, 0.65, 0.65)
    assert "worst_site" not in summarise(CONFIG, ROWS, seconds=0)["models"]["global"]["final"]
    two = [trained(1), evaluation(1, "site-1", [8, 4]), evaluation(1, "site-2", [5, 1])]
    found = cells(two)
    assert [found[name] for name in ("site-1", "site-2", "worst site")] == ["60.00", "30.00", "30.00"]
    assert [found[name] for name in ("environment red", "environment blue", "worst")] == [
        "65.00",
        "25.00",
        "25.00",
    ]


def test_lines_read_well() -> None:
    line = progress_line(Progress(3, 9, {"risk": 1.0, "global/accuracy": 0.756}, {"client-1": "is not finite"}))
    assert line == "round 3/9  global 75.6 %  left out client-1: is not finite"
    assert progress_line(Progress(3, 9, {"risk": 1.0}, {})) == ""
    line = progress_line(Progress(3, 9, {}, {"client-1\x1b[2J": "late\nround 4/9\x1b]0;owned\x07"}))
    assert line == "round 3/9  left out client-1: late round 4/9"


def test_strangers_without_end_make_no_line_without_end() -> None:
    left_out = {f"node {number:04}": "is none of this run's clients" for number in range(5000)}
    line = progress_line(Progress(3, 9, {}, left_out))
    assert line.count("node ") == 20
    assert line.endswith("  and 4980 more left out")
    assert progress_line(Progress(3, 9, {}, dict(list(left_out.items())[:20]))).count("node ") == 20
    summary = {"bytes_per_client_and_round": {"down": 1234567.0, "up": 0.0}}
    assert traffic_line(summary) == "per client and round: 1.235 MB down, 0 B up"


def test_a_client_with_most_of_the_samples_is_named() -> None:
    """As one does that claims what nobody can check; of two clients it would say little."""
    rows = [{**trained(1), "majority": {"b": 0.7}}, {**trained(2), "majority": {"a": 0.9}}, trained(3)]
    rows += [
        evaluation(1, name, [0], count=[size], names=["red"])
        for name, size in zip("abcd", (1, 2, 2, 99), strict=True)
    ]
    rows += [
        evaluation(3, name, [0], count=[size], names=["red"]) for name, size in zip("abc", (1, 97, 2), strict=True)
    ]
    found = summarise(CONFIG, rows, seconds=0)
    assert found["majority"] == {"training": {"a": 0.9}, "test": {"b": 0.97}}
    assert [line for line in cautions(CONFIG, found) if " counts " in line] == [
        "a counts 90 % of all training samples in a round; where a method weighs by samples, the model is mostly "
        "its own",
        "b counts 97 % of all test samples; `pooled` and the areas are mostly its own, the means over clients are "
        "not",
    ]
    assert "majority" not in summarise(CONFIG, ROWS, seconds=0)
    assert majority({"a": 1, "b": 99}) == {}
    assert majority({"a": 1, "b": 2, "c": 3}) == {}
    assert majority({"a": 0, "b": 0, "c": 0}) == {}
    assert majority({"a": 10**7, "b": 2, "c": 3}) == {"a": 10**7 / (10**7 + 5)}
