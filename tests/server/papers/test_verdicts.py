"""The rule of the verdicts, on made-up runs whose verdict is known beforehand."""

from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from tiny_runs import made_line as made

from perennial.common.data import scenarios
from perennial.common.utils.errors import UserError
from perennial.server.papers.claims import counts_of, counts_text
from perennial.server.papers.kept import Kept
from perennial.server.papers.reproduce import Claim, Reproduction, load_reproduction
from perennial.server.papers.verdicts import (
    Finding,
    alike,
    counted,
    findings,
    judged,
    leaders,
)
from perennial.server.selection.split_rule import Select
from perennial.testing.tiny_federation import Toy

CLAIM = Claim(row="A", than="B", column="worst")
FAR = [60.0, 61.0, 62.0], [50.0, 50.0, 51.0]
"""By 10.7 ± 0.3."""

TABLE = """
title = "T"
source = "S"
scenario = "toy"
rounds = 4
seeds = 3
trials = 1
columns = ["worst", "average"]
claims = [
    { row = "FedSDR", than = ["FedAvg", "Ditto", "DRFA"], column = "worst" },
    { row = "FedSDR", than = "FedAvg", column = "average" },
]

[quick]
rounds = 2
"""
ROWS = "".join(
    f"""
[[rows]]
title = "{title}"
method = "{title.lower()}"
paper = {{ worst = {number}, average = {number} }}
"""
    for title, number in (("FedSDR", 60.0), ("FedAvg", 50.0), ("Ditto", 50.0), ("DRFA", 50.0))
)
SEEN = """
[seen]
settings = ["removal"]
rows = ["FedSDR"]
why = "somebody looked"
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reproduction:
    monkeypatch.setitem(scenarios.SCENARIOS, "toy", Toy())
    (tmp_path / "t.toml").write_text(TABLE + ROWS)
    return load_reproduction("t", tmp_path)


def finding(method: list[float], reference: list[float], claim: Claim = CLAIM, **changes: Any) -> Finding:
    return Finding(
        claim, **{"paper": (60.0, 50.0), "method": method, "reference": reference, "size": True, **changes}
    )


def run(row: str, *worst: float, **changes: Any) -> Kept:
    """A row with these numbers in both columns, by seed."""
    numbers = {"worst": [*worst], "average": [*worst]}
    return made(row=row, measures=numbers, runs=["r"] * len(worst), **changes)


def said(table: Reproduction, *lines: Kept) -> list[str]:
    return [own.verdict for own in findings(table, lines)]


METHOD, BASE = run("FedSDR", 0.60, 0.61, 0.62), run("FedAvg", 0.50, 0.50, 0.51)


def test_the_difference_and_its_error_seed_by_seed() -> None:
    found = finding([60, 64, 68], [50, 55, 54])
    assert found.difference == pytest.approx(11)
    assert found.error == pytest.approx(stdev([10, 9, 14]) / sqrt(3))


def test_where_a_seed_is_missing_the_errors_add_up() -> None:
    method, reference = [60.0, 64.0, 68.0], [50.0, 55.0]
    expected = sqrt(stdev(method) ** 2 / 3 + stdev(reference) ** 2 / 2)
    assert finding(method, reference).error == pytest.approx(expected)


def test_two_rows_that_lack_different_seeds_are_not_paired(table: Reproduction) -> None:
    whole = next(findings(table, [run("FedSDR", 0.5, 0.7), run("FedAvg", 0.4, 0.6)]))
    assert whole.error == pytest.approx(0)
    lacking = [
        run(row, *worst).model_copy(update={"runs": ["r"] * 3})
        for row, *worst in (("FedSDR", 0.5, 0.7), ("FedAvg", 0.4, 0.6))
    ]
    assert next(findings(table, lacking)).error == pytest.approx(sqrt(2 * stdev([50, 70]) ** 2 / 2))


NEAR = [50.0, 60.0, 70.0], [49.0, 69.0, 59.0]
"""By 1 ± 5.5: neither 0 nor the paper's 10 is excluded."""
LITTLE = [52.0, 53.0, 55.0], [52.0, 53.0, 54.0]
"""By 0.3 ± 0.3: 0 is not excluded, the paper's 10 is."""


@pytest.mark.parametrize(
    ("numbers", "whole", "less"),
    [
        (FAR, "confirmed", "partly"),
        (FAR[::-1], "not", "partly not"),
        (LITTLE, "not", "partly not"),
        (NEAR, "undecided", "undecided"),
        (([60.0], [50.0]), "not run", "not run"),
        (([], []), "not run", "not run"),
    ],
)
def test_what_holds_and_what_fails_are_cut_down_alike(
    numbers: tuple[list[float], list[float]], whole: str, less: str
) -> None:
    assert finding(*numbers).verdict == whole
    assert finding(*numbers, size=False).verdict == less
    assert finding(*numbers, own=False).verdict == less
    assert finding(*numbers, size=False, own=False).verdict == less


@pytest.mark.parametrize("numbers", [FAR, FAR[::-1], NEAR])
def test_what_cannot_be_settled_is_said_only_of_runs_that_are_not_the_papers(
    numbers: tuple[list[float], list[float]],
) -> None:
    assert finding(*numbers, unsettled=True, size=False).verdict == "not comparable"
    assert finding(*numbers, unsettled=True, own=False).verdict == "not comparable"
    assert finding(*numbers, unsettled=True).verdict == finding(*numbers).verdict
    assert finding([], [], unsettled=True, size=False).verdict == "not run"


def test_a_claim_that_is_not_so_may_be_reversed() -> None:
    assert finding(*FAR[::-1]).reversed
    assert finding(*FAR[::-1], size=False).reversed
    assert not finding(*FAR).reversed
    assert not finding([50.0, 60.0, 70.0], [51.0, 69.0, 63.0]).reversed  # below, and within two standard errors


def test_less_of_a_loss_is_better() -> None:
    claim = Claim(row="A", than="B", column="loss")
    assert finding([0.5, 0.51], [0.6, 0.62], claim, paper=(0.5, 0.6)).verdict == "confirmed"
    assert finding([0.6, 0.62], [0.5, 0.51], claim, paper=(0.5, 0.6)).verdict == "not"


def test_a_method_that_is_better_may_still_be_below_the_constant_or_local(table: Reproduction) -> None:
    near = [60.0, 60.0, 60.0]  # the method's 61 is 1.0 ± 0.58 above it
    for name in ("constant", "local"):
        answers = [
            getattr(finding(*FAR, **{name: other}), f"above_{name}")
            for other in ([58.0] * 3, near, [64.0] * 3, [])
        ]
        assert answers == [True, False, False, None]
    loss = finding([0.5, 0.51], [0.6, 0.62], Claim(row="A", than="B", column="loss"))
    assert replace(loss, constant=[0.69] * 2).above_constant
    others = [
        run("Local", 0.7, 0.7, 0.7),
        made(row="Constant", selection="–", measures={"worst": [0.5, 0.5, 0.5]}),
    ]
    first = next(findings(table, [METHOD, BASE, *others]))
    assert (first.above_constant, first.above_local) == (True, False)


def test_the_size_is_rounds_and_seeds_and_data(table: Reproduction) -> None:
    assert said(table, METHOD, BASE) == ["confirmed", "not run", "not run", "confirmed"]
    for changed in ({"rounds": 3}, {"quick": True}):
        assert said(table, *(line.model_copy(update=changed) for line in (METHOD, BASE)))[0] == "partly"
    more = [line.model_copy(update={"rounds": 5}) for line in (METHOD, BASE)]
    assert said(table, *more)[0] == "confirmed"
    for wanted, verdict in ((3, "confirmed"), (5, "partly")):
        assert said(table.model_copy(update={"seeds": wanted}), METHOD, BASE)[0] == verdict
    assert said(table.model_copy(update={"other_data": True}), METHOD, BASE)[0] == "partly"


def test_a_row_that_is_not_the_papers_is_partly_so_at_best(table: Reproduction) -> None:
    rows = [row.model_copy(update={"comparable": row.title != "FedSDR", "remark": "Other."}) for row in table.rows]
    ours = table.model_copy(update={"rows": rows})
    turned = [METHOD.model_copy(update={"row": "FedAvg"}), BASE.model_copy(update={"row": "FedSDR"})]
    assert (said(ours, METHOD, BASE)[0], said(ours, *turned)[0]) == ("partly", "partly not")


def test_settings_that_were_seen_on_test_data_mark_a_claim(table: Reproduction, tmp_path: Path) -> None:
    """But not if a search drew all of them; a search that kept the defaults drew none."""
    (tmp_path / "s.toml").write_text(TABLE + SEEN + ROWS)
    seen = load_reproduction("s", tmp_path)
    searched = METHOD.model_copy(update={"trials": 12, "settings": {"removal": 2.0, "momentum": 0.5}})
    for line, marked in ((METHOD, True), (searched, False), (searched.model_copy(update={"settings": {}}), True)):
        assert next(findings(seen, [line, BASE])).seen is marked
        assert not next(findings(table, [line, BASE])).seen
    found = [finding(*FAR, seen=True), finding(*FAR), finding(*NEAR)]
    assert counts_text(found).startswith("Of 3 claims: 2 confirmed (1 ‡), 0 partly, 1 undecided, 0 partly not,")
    for wrong, message in (
        ('"removal"]', r"setting of the row 'FedSDR' 'penalty'"),
        ('"FedSDR"]', r"row of `seen` 'X'"),
    ):
        other = "penalty" if "removal" in wrong else "X"
        (tmp_path / "s.toml").write_text(TABLE + SEEN.replace(wrong, f'"{other}"]') + ROWS)
        with pytest.raises(UserError, match=message):
            load_reproduction("s", tmp_path)


def test_a_row_against_copies_of_one_counts_once(table: Reproduction) -> None:
    """To a tenth of a point in every seed and column."""
    copy, third = run("Ditto", 0.501, 0.50, 0.51), run("DRFA", 0.40, 0.41, 0.41)
    found = list(findings(table, [METHOD, BASE, copy, third]))
    assert [own.verdict for own in found] == ["confirmed"] * 4
    assert leaders(table, found) == [0, 0, 2, 3]
    assert len(counted({"t": table}, {"t": found})["t"]) == 3
    near = run("Ditto", 0.5011, 0.50, 0.51)
    assert not alike(BASE, near, table.columns)
    assert leaders(table, list(findings(table, [METHOD, BASE, near, third]))) == [0, 1, 2, 3]
    other_column = copy.model_copy(update={"measures": {**copy.measures, "average": [0.5, 0.6, 0.7]}})
    assert not alike(BASE, other_column, table.columns)
    fewer = run("Ditto", 0.501, 0.50)
    assert not alike(BASE, fewer, table.columns)
    assert leaders(table, list(findings(table))) == [0, 1, 2, 3]  # nothing was run, so nothing is a copy


def test_a_claim_of_two_tables_is_counted_once(table: Reproduction) -> None:
    """Where the paper's own table was run, and else in the variant."""
    ran, waiting = finding([60.0, 61.0], [50.0, 50.0]), finding([], [])
    alone = finding([60.0, 61.0], [50.0, 50.0], Claim(row="A", than="C", column="worst"))
    tables = {"own": table, "variant": table.model_copy(update={"claims_of": "own"})}
    assert counted(tables, {"own": [ran], "variant": [ran, alone]}) == {"own": [ran], "variant": [alone]}
    assert counted(tables, {"own": [waiting], "variant": [ran]}) == {"own": [], "variant": [ran]}
    assert counted(tables, {"own": [waiting], "variant": [waiting]}) == {"own": [], "variant": [waiting]}


def test_all_claims_of_a_row_are_judged_by_settings_that_were_chosen_in_one_way(table: Reproduction) -> None:
    """The table's settings are better against FedAvg, but only `split` was run against all."""
    third = table.model_copy(update={"select": Select.by_split})
    searched = {"trials": 12, "by": "split"}
    alone = [run("FedSDR", 0.70, 0.71, 0.72), BASE]
    low = [run("FedSDR", 0.40, 0.41, 0.42, **searched)]
    others = [run(row, 0.50, 0.50, 0.51, **searched) for row in ("FedAvg", "Ditto", "DRFA")]
    found = judged(third, [alone, [*low, *others]])
    assert [(own.verdict, number) for own, number in found] == [("not", 1)] * 4
    assert said(table, *alone) == ["confirmed", "not run", "not run", "confirmed"]
    equal = judged(third, [alone, [*low, others[0]]])
    assert [(own.verdict, number) for own, number in equal] == [
        ("confirmed", 0),
        ("not run", 0),
        ("not run", 0),
        ("confirmed", 0),
    ]


def test_of_several_lengths_the_longest_that_has_both_rows_counts(table: Reproduction) -> None:
    long = [METHOD, BASE]
    short = [line.model_copy(update={"rounds": 2}) for line in (METHOD, BASE, run("Ditto", 0.5, 0.5, 0.51))]
    found = judged(table, [long, short])
    assert [(own.verdict, number) for own, number in found] == [
        ("confirmed", 0),
        ("partly", 1),
        ("not run", 0),
        ("confirmed", 0),
    ]


def test_a_search_by_another_rule_than_split_and_the_tables_does_not_count(table: Reproduction) -> None:
    lines = [run(row, 0.5, 0.6, trials=12, by="leave-one-out") for row in ("FedSDR", "FedAvg")]
    assert [own.verdict for own, _ in judged(table, [lines])] == ["not run"] * 4


def test_every_verdict_is_counted() -> None:
    found = [finding(*FAR), finding(*FAR, size=False), finding(*NEAR), finding(*LITTLE, size=False)]
    found += [finding(*LITTLE), finding(*FAR, size=False, unsettled=True), finding([], [])]
    assert counts_of(found) == [1, 1, 1, 1, 1, 1, 1]
