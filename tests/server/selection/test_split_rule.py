"""The rule on counts that are made up, so that the answer is known."""

import json
from itertools import product
from math import sqrt
from typing import Any

import numpy as np
import pytest
from scipy.stats import hypergeom, norm
from scipy.stats import t as student
from split_counts import P, coloured

from perennial.server.selection.split_rule import (
    Row,
    Score,
    best_of,
    better,
    compared,
    followers,
    gate,
    score,
    unusable,
)


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


@pytest.mark.parametrize(
    ("a", "d", "beats"),
    [
        (1.0, 0.05, False),  # the colour and a little of the shape: worse than a constant where it misleads
        (0.52, 0.51, False),  # near chance: its mean of 0.515 has an error of 0.0157
        (0.49, 0.6, False),  # worse than a constant on the right samples
        (0.65, 0.54, True),  # d alone is only 0.04 above a half, with an error of 0.0288
        (0.9, 0.55, True),
    ],
)
def test_a_model_is_better_than_a_constant_by_its_mean(a: float, d: float, beats: bool) -> None:
    """Of 1700 right and 300 wrong samples; the mean has the error √(a (1 − a)/1700 + d (1 − d)/300) / 2."""
    found = score(coloured(a, d))
    assert found is not None
    assert found.constant_mean == 0.5
    variances = a * (1 - a) * (1 / 900 + 1 / 800) / 4, d * (1 - d) * (1 / 100 + 1 / 200) / 4
    assert found.mean_error == pytest.approx(sqrt(sum(variances)) / 2, abs=1e-15)
    assert found.beats_constant is beats


def test_standard_error_and_sizes() -> None:
    found = score(coloured(0.8, 0.4))
    assert found is not None
    # Of the two environments, 100 + 200 wrong and 900 + 800 right.
    assert (found.right, found.wrong) == (1700, 300)
    assert found.error == pytest.approx(sqrt(0.4 * 0.6 / 100 + 0.4 * 0.6 / 200) / 2, abs=1e-15)
    turned = score(coloured(0.4, 0.8))  # now the score rests on the right ones
    assert turned is not None
    assert turned.error == pytest.approx(sqrt(0.4 * 0.6 / 900 + 0.4 * 0.6 / 800) / 2, abs=1e-15)


def test_a_sample_counts_once_with_however_many_environments() -> None:
    two, four = score(coloured(0.8, 0.4)), score(coloured(0.8, 0.4, p=(*P, *P)))
    assert two is not None
    assert four is not None
    assert four.wrong == 2 * two.wrong  # twice the samples
    assert four.error == pytest.approx(two.error / sqrt(2))


def test_environments_count_alike_whatever_their_sizes() -> None:
    """As clients do in the tables: a personal model is right on what its own environment has."""
    row = coloured(0.8, 0.4)
    row["correct"] = [[[[n[0] * a, n[1] * d] for n in by[e]] for e, (a, d) in enumerate([(1, 0), (0.5, 0.6)])]
                      for by in row["samples"]]  # fmt: skip
    found = score(row)
    assert found is not None
    assert found.agreeing == pytest.approx((1 + 0.5) / 2, abs=1e-15)
    assert found.misleading == pytest.approx((0 + 0.6) / 2, abs=1e-15)
    assert found.error == pytest.approx(sqrt(0 + 0.6 * 0.4 / 200) / 2, abs=1e-15)


def test_only_the_reference_with_the_strongest_shortcut_counts() -> None:
    row = coloured(0.8, 0.4)
    assert followers(row) == [0]
    row["correct"][1] = [[[0, 0], [0, 0]]] * 2
    assert score(row) == score(coloured(0.8, 0.4))


def test_a_shortcut_that_turns_round_has_a_follower_for_each_direction() -> None:
    """p = 0.9, 0.7, 0.3 and 0.1: half of the references follow the colour, half its opposite."""
    row = turning()
    assert followers(row) == [0, 3]
    for followed in (0, 1):  # a model that follows either is right on all or none of what the other knows
        row["correct"] = [
            [[[n[0], 0] if (reference < 2) == (followed == 0) else [0, n[1]] for n in own] for own in by]
            for reference, by in enumerate(row["samples"])
        ]
        found = score(row)
        assert found is not None
        assert (found.score, found.agreeing + found.misleading) == (0.0, 1.0)


def test_the_best_constant_is_of_one_class() -> None:
    row = coloured(0.5, 0.5)
    # Class 0: 60 of 100 right ones, 10 of 100 wrong ones; class 1: 40 and 90.
    row["samples"] = [[[[60, 10], [40, 90]]] * 2] * 2
    row["correct"] = [[[[60, 10], [0, 0]]] * 2] * 2  # what class 0 everywhere gets right
    found = score(row)
    assert found is not None
    assert found.score == 0.1
    assert found.constant == 0.4
    assert found.constant_mean == pytest.approx((40 + 90) / 200)


def test_no_wrong_samples_no_score() -> None:
    row = coloured(0.5, 0.0, p=(1.0, 1.0))
    assert score(row) is None
    assert "0 held-out samples are wrong" in unusable(row)


def test_the_earliest_of_equals_is_first() -> None:
    scores = {number: score(coloured(own, own)) for number, own in enumerate((0.5, 0.7, 0.7, 0.6))}
    assert best_of({number: found for number, found in scores.items() if found}) == 1


def test_a_difference_counts_beyond_two_standard_errors() -> None:
    def of(value: float) -> Score:
        found = score(coloured(1.0, value))
        assert found is not None
        return found

    assert better(of(0.7), of(0.6))  # 0.1 and 2 √(0.7·0.3/300 + 0.6·0.4/300) = 0.077
    assert not better(of(0.65), of(0.6))
    assert not better(of(0.6), of(0.7))


# ---------------------------------------------------------------------- the gate


def counted(shares: list[list[float]], size: int = 1000, **changes: Any) -> Row:
    """A row with these shares of known samples, by reference and environment; two classes, one client each."""
    samples = [[[[round(size * own / 2), round(size * (1 - own) / 2)]] * 2 for own in by] for by in shares]
    names = [f"e{number}" for number in range(len(shares))]
    squares = [[own**2 for own in by] for by in shares]
    return {
        "environments": names, "samples": samples, "correct": samples, "clients": [1] * len(names),
        "accuracy": shares, "squares": squares, **changes,
    }  # fmt: skip


def turning() -> Row:
    p = (0.9, 0.7, 0.3, 0.1)
    return counted([[own if reference < 2 else 1 - own for own in p] for reference in range(4)])


def test_open_where_the_colour_is_told() -> None:
    assert unusable(coloured(1.0, 0.0)) == ""


def test_open_with_one_client_in_each_environment() -> None:
    assert unusable(counted([[0.9, 0.8], [0.9, 0.8]])) == ""
    assert unusable(turning()) == ""


def test_with_one_client_in_each_environment_more_is_needed() -> None:
    """0.9 and 0.83 of 1000 are apart (t = 4.6) where clients can be compared, not where they cannot."""
    one = counted([[0.9, 0.83], [0.9, 0.83]])
    assert "and 1e-06 is the limit" in unusable(one)
    squares = [[4 * 0.9**2, 4 * 0.83**2]] * 2
    assert unusable({**one, "clients": [4, 4], "accuracy": [[3.6, 3.32]] * 2, "squares": squares}) == ""


def test_an_environment_of_one_client_is_judged_by_how_the_others_differ() -> None:
    one = {**counted([[0.9, 0.8], [0.9, 0.8]]), "clients": [4, 1], "accuracy": [[3.6, 0.8]] * 2}
    assert unusable({**one, "squares": [[4 * (0.9**2 + 0.01**2), 0.8**2]] * 2}) == ""
    assert "do not tell" in unusable({**one, "squares": [[4 * (0.9**2 + 0.05**2), 0.8**2]] * 2})
    assert {pair.freedom for pair in compared({**one, "squares": [[3.25, 0.64]] * 2})} == {3}


def test_one_environment_is_shut() -> None:
    assert unusable(coloured(1.0, 0.0, p=(0.9,))) == "there is one training environment, p=0.9, and two are needed"


def test_held_out_samples_of_one_environment_alone_are_shut() -> None:
    empty = coloured(1.0, 0.0)
    for by in empty["samples"]:
        by[1] = [[0, 0], [0, 0]]
    assert (
        unusable({**empty, "clients": [4, 0]})
        == "environment p=0.9 alone has held-out samples, and two are needed"
    )
    for by in empty["samples"]:
        by[0] = [[0, 0], [0, 0]]
    assert unusable({**empty, "clients": [0, 0]}) == "no environment has held-out samples, and two are needed"
    assert score(empty) is None


def test_an_environment_without_held_out_samples_is_passed_over() -> None:
    row = coloured(1.0, 0.0, p=(0.9, 0.8, 0.7))
    for by in row["samples"]:
        by[2] = [[0, 0], [0, 0]]
    row["clients"][2] = 0
    assert unusable(row) == ""
    assert {pair.easier for pair in compared(row)} == {0, 1}


def test_references_at_chance_are_shut() -> None:
    assert "50.0 % of its own environment's" in unusable(coloured(0.5, 0.5, p=(0.5, 0.51)))


def test_few_wrong_samples_are_shut() -> None:
    why = "24 held-out samples are wrong for the reference of e0, and 25 are needed"
    assert unusable(counted([[0.95, 0.85], [0.95, 0.85]], size=120)) == why


def test_an_environment_that_is_harder_than_another_has_no_follower() -> None:
    assert followers(coloured(1.0, 0.0, p=(0.95, 0.85, 0.7))) == [0]


def test_a_home_advantage_is_shut() -> None:
    """Each reference does best on its own environment, as under any difference in what samples look like."""
    row = counted([[0.9, 0.7], [0.7, 0.9]])
    assert "do not tell the environments apart" in unusable(row)
    assert all(pair.t < -10 for pair in compared(row))


def test_environments_that_do_not_differ_are_shut() -> None:
    assert "with t = 0.0, which is chance with probability 1, and 0.01 is the limit" in unusable(
        coloured(1.0, 0.0, p=(0.85, 0.85))
    )


def test_clients_that_differ_as_much_as_environments_are_shut() -> None:
    """0.9 and 0.8, but also 0.2 between clients of the same environment."""
    row = coloured(1.0, 0.0)
    row["squares"] = [[4 * (p**2 + 0.1**2) for p in P]] * 2
    assert "do not tell the environments apart" in unusable(row)


def test_other_shares_of_the_classes_are_no_difference() -> None:
    """Class 0 is easy, class 1 hard, the same in both environments; one has mostly class 0, the other class 1."""
    row = counted([[0.92, 0.88], [0.92, 0.88]])
    row["samples"] = [[[[665, 35], [255, 45]], [[285, 15], [595, 105]]]] * 2
    (one, other) = compared(row)
    assert abs(one.t) < 1e-9
    assert abs(other.t) < 1e-9
    assert unusable(row)


def test_t_is_mantel_and_haenszels() -> None:
    generator = np.random.default_rng(0)
    table = generator.integers(20, 200, (2, 2, 3, 2))  # reference, environment, class, known or not
    table[..., 0] += 150  # so that the references have learnt something
    row = {"environments": ["a", "b"], "samples": table.tolist(), "clients": [1, 1]}
    row |= {"accuracy": [[0.5, 0.5]] * 2, "squares": [[0.25, 0.25]] * 2}
    each = []
    for reference in range(2):
        gap = variance = 0.0
        for label in range(3):
            (known_a, other_a), (known_b, other_b) = table[reference, :, label]
            drawn = hypergeom(
                known_a + other_a + known_b + other_b, known_a + known_b, known_a + other_a
            )  # how many of environment a's samples are known, if it does not differ from b
            gap, variance = gap + known_a - drawn.mean(), variance + drawn.var()
        each.append(gap / sqrt(variance))
    found = {(pair.easier, pair.harder): pair for pair in compared(row)}
    assert found.keys() == {(0, 1), (1, 0)}
    for (easier, _), pair in found.items():
        t = min(each) if easier == 0 else min(-value for value in each)
        assert pair.t == pytest.approx(t)
        assert pair.chance == pytest.approx(min(1.0, 2 * norm.sf(t)))


def test_with_clients_to_compare_t_is_students_and_their_spread_counts() -> None:
    row, plain = coloured(1.0, 0.0), counted([[0.9, 0.8], [0.9, 0.8]])
    before = {(pair.easier, pair.harder): pair for pair in compared(plain)}
    for pair in compared(row):  # clients that differ less than a binomial's do not make it surer
        assert pair.t == before[pair.easier, pair.harder].t
        assert pair.freedom == 6
        assert pair.chance == pytest.approx(min(1.0, 2 * student.sf(pair.t, 6)))
    each = {0.9: [0.95, 0.85, 0.97, 0.83], 0.8: [0.75, 0.85, 0.88, 0.72]}
    row["squares"] = [[float(sum(value**2 for value in own)) for own in each.values()]] * 2
    ratio = sum(3 * np.var(own, ddof=1) / (p * (1 - p) / 250) for p, own in each.items()) / 6
    for pair in compared(row):
        assert pair.t == pytest.approx(before[pair.easier, pair.harder].t / sqrt(ratio))


def test_one_of_several_environments_apart_is_enough() -> None:
    assert unusable(coloured(1.0, 0.0, p=(0.95, 0.9, 0.85, 0.8))) == ""


def test_the_gate_as_plain_data() -> None:
    found = gate(coloured(1.0, 0.0))
    assert (found["open"], found["reason"], found["followers"]) == (True, "", [0])
    assert [(pair["easier"], pair["harder"]) for pair in found["pairs"]] == [(0, 1), (1, 0)]
    assert json.loads(json.dumps(found)) == found
    assert gate(coloured(1.0, 0.0, p=(0.9,)))["pairs"] == []


# ---------------------------------------------------------------------- several answers of a sample


def labelled(counts: list[list[list[int]]], answers: tuple[int, ...], clients: int = 4, **changes: Any) -> Row:
    """Two environments, whose samples [kind] = (right, wrong) are the same under both references."""
    names = [f"p={own}" for own in P]
    shares = [sum(right for right, _ in own) / sum(map(sum, own)) for own in counts]
    return {
        "environments": names, "samples": [counts, counts], "correct": [counts, counts], "answers": list(answers),
        "clients": [clients] * 2, "accuracy": [[clients * share for share in shares]] * 2,
        "squares": [[clients * share**2 for share in shares]] * 2, **changes,
    }  # fmt: skip


EASY, HARD = [[300, 10], [150, 40], [450, 0], [0, 50]], [[300, 40], [120, 40], [430, 10], [0, 60]]


def test_a_constant_says_one_thing_for_each_answer() -> None:
    """Against all constants: one label's yes or no with another's yes or no."""
    row = labelled([EASY, HARD], (2, 2))
    found = score(row)
    assert found is not None
    shares = {
        said: [
            np.mean([np.mean([kind in said for kind in range(4) if own[kind][which]]) for own in (EASY, HARD)])
            for which in (0, 1)
        ]
        for said in product((0, 1), (2, 3))
    }
    assert found.constant == pytest.approx(max(map(min, shares.values())), abs=1e-12)
    assert found.constant_mean == pytest.approx(max(map(sum, shares.values())) / 2, abs=1e-12)


def test_every_label_and_value_counts_alike() -> None:
    """Of two labels with 300 and 20 samples that the reference does not know, and with few of one environment."""
    counts = [[[90, 300], [60, 0], [80, 2], [0, 20]], [[90, 300], [60, 0], [80, 0], [0, 20]]]
    right = [[[45, 30], [60, 0], [80, 2], [0, 10]], [[45, 30], [30, 0], [80, 0], [0, 20]]]
    alone, found = (score({**labelled(counts, (2, 2), own), "correct": [right, right]}) for own in (1, 4))
    assert alone is not None
    assert found is not None
    assert found.agreeing == pytest.approx(((0.5 + 1 + 1) / 3 + (0.5 + 0.5 + 1) / 3) / 2)
    assert found.misleading == pytest.approx(((0.1 + 1 + 0.5) / 3 + (0.1 + 1) / 2) / 2)
    first = [(31 / 302, 300), (3 / 4, 2), (11 / 22, 20)]
    second = [(31 / 302, 300), (21 / 22, 20)]
    variance = sum(sum(q * (1 - q) / n for q, n in own) / len(own) ** 2 for own in (first, second)) / 4
    assert found.score == found.misleading
    assert found.error == pytest.approx(sqrt(variance))  # clients that are all alike
    assert alone.error == pytest.approx(sqrt(2 * variance))  # as if both labels of a sample were right at once
    assert alone.mean_error == pytest.approx(sqrt(2) * found.mean_error)


def test_what_is_needed_of_labels() -> None:
    row = labelled([EASY, HARD], (2, 2))
    assert unusable(row) == ""
    assert gate(row)["answers"] == [2, 2]
    assert followers(row) == [0]
    few = [[[own[0], min(own[1], 5)] for own in counts] for counts in (EASY, HARD)]
    assert unusable(labelled(few, (2, 2))) == (
        "35 held-out labels are wrong for the reference of p=0.9, and 50 are needed"
    )
    guessed = [[[250, 60], [0, 190], [450, 0], [0, 50]], HARD]
    assert unusable(labelled(guessed, (2, 2))) == (
        "the reference of p=0.9 is right on 70.0 % of its own environment's held-out labels, which is not surely "
        "more than the 76.0 % of a constant (two standard errors)"
    )


def test_with_one_client_in_each_environment_labels_count_as_one_answer() -> None:
    row = labelled([EASY, HARD], (2, 2), clients=1)
    alone = labelled([EASY, HARD], (4,), clients=1)
    together, apart = (next(pair.t for pair in compared(own) if pair.easier == 0) for own in (row, alone))
    assert together == pytest.approx(apart / sqrt(2), abs=1e-12)
