"""The rule on counts that are made up, so that the answer is known."""

from itertools import product
from math import sqrt

import numpy as np
import pytest
from counts import P, coloured
from scipy.stats import ttest_ind

from server.split import LARGEST_T, Score, first, more, score, shut, welch


@pytest.mark.parametrize(("a", "d"), product((0.0, 0.3, 0.75, 1.0), (0.0, 0.42, 1.0)))
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_accuracy_where_the_shortcut_agrees_with_probability_p(a: float, d: float, p: float) -> None:
    """Under a perfect follower of the shortcut, accuracy(p) = p a + (1 − p) d, with split its least and mean
    its mean."""
    found = score(coloured(a, d))
    assert found is not None
    agrees = round(1000 * p)
    accuracy = (agrees * a + (1000 - agrees) * d) / 1000
    assert abs(accuracy - (p * found.agreeing + (1 - p) * found.misleading)) < 1e-12
    assert abs(found.score - min(q * a + (1 - q) * d for q in np.linspace(0, 1, 11))) < 1e-12
    assert abs(found.mean - np.mean([q * a + (1 - q) * d for q in np.linspace(0, 1, 11)])) < 1e-12


def test_colour_shape_and_coin() -> None:
    scores = {name: score(coloured(a, d)) for name, (a, d) in {
        "colour": (1.0, 0.0), "shape": (0.75, 0.75), "coin": (0.5, 0.5),
    }.items()}  # fmt: skip
    assert {name: round(found.score, 12) for name, found in scores.items() if found} == {
        "colour": 0.0, "shape": 0.75, "coin": 0.5,
    }  # fmt: skip
    assert all(found and found.constant == 0.5 for found in scores.values())
    assert [name for name, found in scores.items() if found and found.beats_constant] == ["shape"]


def test_standard_error_and_sizes() -> None:
    found = score(coloured(0.8, 0.4))
    assert found is not None
    # Of each environment under the other's reference: 100 + 200 wrong, 900 + 800 right.
    assert (found.right, found.wrong) == (1700, 300)
    assert found.error == pytest.approx(sqrt(0.4 * 0.6 / 300), abs=1e-15)


def test_with_more_environments_a_sample_is_no_further_evidence() -> None:
    two, four = score(coloured(0.8, 0.4)), score(coloured(0.8, 0.4, p=(*P, *P)))
    assert two is not None
    assert four is not None
    assert four.wrong == 6 * two.wrong  # twice the samples, three references each
    assert four.error == pytest.approx(two.error / sqrt(2))


def test_only_other_environments_references_count() -> None:
    row = coloured(0.8, 0.4)
    for number in range(2):
        row["correct"][number][number] = [[0, 0], [0, 0]]
    assert score(row) == score(coloured(0.8, 0.4))


def test_the_best_constant_is_of_one_class() -> None:
    row = coloured(0.5, 0.5)
    # Class 0: 60 of 100 right ones, 10 of 100 wrong ones; class 1: 40 and 90.
    row["samples"] = [[[[60, 10], [40, 90]]] * 2] * 2
    row["correct"] = [[[[60, 10], [0, 0]]] * 2] * 2  # what class 0 everywhere gets right
    found = score(row)
    assert found is not None
    assert found.score == 0.1
    assert found.constant == 0.4
    assert found.balanced == 0.5


def test_balanced_counts_classes_alike() -> None:
    row = coloured(0.5, 0.5)
    row["samples"] = [[[[900, 90], [100, 10]]] * 2] * 2
    row["correct"] = [[[[900, 45], [20, 1]]] * 2] * 2
    found = score(row)
    assert found is not None
    assert found.balanced == pytest.approx(min((1.0 + 0.2) / 2, (0.5 + 0.1) / 2))
    assert found.misleading == pytest.approx(46 / 100)


def test_no_wrong_samples_no_score() -> None:
    row = coloured(0.5, 0.0, p=(1.0, 1.0))
    assert score(row) is None
    assert "0 held-out samples are wrong" in shut(row)


def test_the_earliest_of_equals_is_first() -> None:
    scores = {number: score(coloured(own, own)) for number, own in enumerate((0.5, 0.7, 0.7, 0.6))}
    assert first({number: found for number, found in scores.items() if found}) == 1


def test_a_difference_counts_beyond_two_standard_errors() -> None:
    def of(value: float) -> Score:
        found = score(coloured(1.0, value))
        assert found is not None
        return found

    assert more(of(0.7), of(0.6))  # 0.1 and 2 √(0.7·0.3/300 + 0.6·0.4/300) = 0.077
    assert not more(of(0.65), of(0.6))
    assert not more(of(0.6), of(0.7))


# ---------------------------------------------------------------------- the gate


def test_open_where_the_colour_is_told() -> None:
    assert shut(coloured(1.0, 0.0)) == ""


def test_t_is_welchs() -> None:
    row = coloured(1.0, 0.0)
    groups = [[0.91, 0.88, 0.93], [0.7, 0.85, 0.8, 0.78]]
    row["clients"] = [3, 4]
    row["accuracy"] = [[sum(own) for own in groups]] * 2
    row["squares"] = [[sum(value**2 for value in own) for own in groups]] * 2
    expected = ttest_ind(*groups, equal_var=False).statistic
    assert welch(row) == pytest.approx(np.array([[expected] * 2, [-expected] * 2]))


def test_one_environment_is_shut() -> None:
    assert shut(coloured(1.0, 0.0, p=(0.9,))) == "there is one training environment, p=0.9, and two are needed"


def test_an_environment_that_only_one_client_has_is_shut() -> None:
    assert "p=0.8 has held-out samples at 1 client, not at two" in shut({**coloured(1, 0), "clients": [4, 1]})
    assert "p=0.9 has held-out samples at 0 clients, not at two" in shut({**coloured(1, 0), "clients": [0, 4]})


def test_references_at_chance_are_shut() -> None:
    assert "50.0 % of its own environment's" in shut(coloured(0.5, 0.5, p=(0.5, 0.51)))


def test_few_wrong_samples_are_shut() -> None:
    assert (
        shut(coloured(1.0, 0.0, size=300)) == "90 held-out samples are wrong for a reference, and 100 are needed"
    )


def test_opposite_signs_are_shut() -> None:
    """Each reference does best on its own environment, as under any difference between domains."""
    row = coloured(1.0, 0.0)
    row["accuracy"][1], row["squares"][1] = row["accuracy"][0][::-1], row["squares"][0][::-1]
    assert "do not tell the environments apart (t = +" in shut(row)


def test_environments_that_do_not_differ_are_shut() -> None:
    assert "t = +0.0, +0.0" in shut(coloured(1.0, 0.0, p=(0.85, 0.85)))


def test_clients_that_are_all_the_same_differ_as_much_as_can_be() -> None:
    row = coloured(1.0, 0.0)
    row["accuracy"], row["squares"] = [[3.6, 3.2]] * 2, [[4 * 0.81, 4 * 0.64]] * 2
    assert all(abs(t) > 1000 for own in welch(row) for t in own)
    assert max(t for own in welch(row) for t in own) <= LARGEST_T


def test_one_of_several_environments_apart_is_enough() -> None:
    assert shut(coloured(1.0, 0.0, p=(0.95, 0.9, 0.85, 0.8))) == ""
