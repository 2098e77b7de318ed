"""Rivals of `split` on counts that were made by hand."""

from math import sqrt

import pytest

from perennial.server.selection.rivals import RIVALS, Evidence, HeldOut, evidence
from perennial.server.selection.split_rule import WITHOUT_TEST_DATA, Select

# Two clients of environment a (9 of 10 and 6 of 10 right), one of b (4 of 8).
PARTS = [HeldOut("one", "a", 10, 9, 2.0), HeldOut("two", "a", 10, 6, 6.0), HeldOut("three", "b", 8, 4, 8.0)]
# One reference, two environments, two classes: samples and right answers by (known, not known).
COUNTS = {
    "kind": "split",
    "samples": [[[[8, 2], [6, 4]], [[5, 5], [4, 2]]]],
    "correct": [[[[8, 1], [3, 0]], [[4, 4], [2, 1]]]],
}
KNOWN = {
    Select.worst_client: 0.5,
    Select.less_deviation: (0.9 + 0.6 + 0.5) / 3 - sqrt((0.9**2 + 0.6**2 + 0.5**2) / 3 - (2 / 3) ** 2),
    Select.worst_environment: 0.5,  # a has 15 of 20
    Select.risk_variance: -(0.7 + 0.09),  # risks 0.4 and 1
    Select.worst_group: 3 / 10,  # class 1 of the first environment
    Select.inferred_group: 1 / 6,  # class 1 among those that the reference does not know: 1 of 4 + 2
}


@pytest.mark.parametrize("select", RIVALS)
def test_each_says_what_its_source_says(select: Select) -> None:
    assert RIVALS[select](Evidence(PARTS, COUNTS)) == pytest.approx(KNOWN[select], abs=1e-12)
    assert RIVALS[select](Evidence([], None)) is None


def test_an_environment_with_two_clients_counts_their_samples_together() -> None:
    small = [HeldOut("one", "a", 90, 81, 9.0), HeldOut("two", "a", 10, 0, 9.0), HeldOut("three", "b", 10, 9, 1.0)]
    assert RIVALS[Select.worst_environment](Evidence(small)) == pytest.approx(0.81)
    assert RIVALS[Select.worst_client](Evidence(small)) == 0


def test_evidence_is_of_one_model_and_round_and_never_of_test_data() -> None:
    row = {"kind": "evaluation", "round": 2, "model": "global", "client": "one", "split": "validation"}
    row |= {"environment": ["a", "b"], "count": [4, 0], "correct": [3, 0], "loss": [1.5, 0.0]}
    others = [{**row, "split": "test"}, {**row, "round": 1}, {**row, "model": "personal"}]
    counts = {**COUNTS, "round": 2, "model": "global"}
    found = evidence([row, *others, counts, {**counts, "round": 1}], "global", 2)
    assert found == Evidence([HeldOut("one", "a", 4, 3, 1.5)], counts), (
        "an environment without samples says nothing"
    )
    del row["correct"]
    assert evidence([row], "global", 2) == Evidence([]), "a task of numbers"


def test_every_selection_but_three_is_a_rival() -> None:
    assert {*WITHOUT_TEST_DATA} - {*RIVALS} == {Select.held_out, Select.by_split, Select.leave_one_out}
