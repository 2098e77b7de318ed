import numpy as np
import pytest
import torch

from perennial.common.data.examples import Examples
from perennial.common.selection import Tally, columns, from_columns, must_add_up
from perennial.common.selection import tally as count_answers
from perennial.common.tasks import Classes, Labels, Numbers

CLASSES, ENVIRONMENTS = 3, 2


def drawn(count: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor, Examples]:
    """Samples of both environments, two references that know some, and a model that does."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    environment = torch.randint(ENVIRONMENTS, (count,), generator=generator)
    known = [torch.rand(count, generator=generator) < 0.7 for _ in range(ENVIRONMENTS)]
    correct = torch.rand(count, generator=generator) < 0.4
    return known, correct, Examples(torch.zeros(count, 1), y, environment)


def tally(known: list[torch.Tensor], correct: torch.Tensor, examples: Examples, classes: int) -> Tally:
    """Of classes: one answer for each sample."""
    kinds = Classes(classes).kinds(examples.y)
    return count_answers([own[:, None] for own in known], correct[:, None], kinds, examples.environment, classes)


def test_counts_by_hand() -> None:
    known, correct, examples = drawn(50, 0)
    found = tally(known, correct, examples, CLASSES)
    for reference, right in enumerate(known):
        for environment in range(ENVIRONMENTS):
            for label in range(CLASSES):
                for kind, told in enumerate((right, ~right)):
                    these = told & (examples.environment == environment) & (examples.y == label)
                    place = reference, environment, label, kind
                    assert found.samples[place] == int(these.sum())
                    assert found.correct[place] == int((these & correct).sum())


NAN = float("nan")
TWO = Labels(("one", "two"))
TARGETS = torch.tensor([[0.0, 1.0], [1.0, NAN], [1.0, 0.0], [NAN, NAN], [0.0, 0.0]])
LOGITS = torch.tensor([[-1.0, 2.0], [-1.0, 3.0], [0.5, -0.1], [1.0, -1.0], [1e-30, 0.0]])


def test_labels_are_answers_each_and_unknown_ones_are_none() -> None:
    assert (TWO.answers, Classes(3).answers, Numbers().answers) == ((2, 2), (3,), ())
    assert TWO.kinds(TARGETS).tolist() == [[0, 3], [1, -1], [1, 2], [-1, -1], [0, 2]]
    right = [[True, True], [False, False], [True, True], [False, False], [False, True]]
    assert TWO.right(LOGITS, TARGETS).tolist() == right  # the smallest logit above 0 says yes, and 0 says no
    found = {name: own.tolist() for name, own in TWO.sums(LOGITS, TARGETS).items()}
    assert TWO.right_of(5, found) == (7, 5)
    with pytest.raises(NotImplementedError, match="numbers have no answers"):
        Numbers().right(LOGITS, TARGETS)


def test_counts_of_labels_by_hand() -> None:
    """A reference that says no to everything, and one that is always right."""
    known = [(TARGETS == 0), ~TARGETS.isnan()]
    environment = torch.tensor([0, 0, 1, 1, 0])
    found = count_answers(known, TWO.right(LOGITS, TARGETS), TWO.kinds(TARGETS), environment, 4)
    # By environment, and (label, value) as one-no, one-yes, two-no, two-yes: right and wrong for the reference.
    no = [[[2, 0], [0, 1], [1, 0], [0, 1]], [[0, 0], [0, 1], [1, 0], [0, 0]]]
    all_ = [[[2, 0], [1, 0], [1, 0], [1, 0]], [[0, 0], [1, 0], [1, 0], [0, 0]]]
    assert found.samples.tolist() == [no, all_]
    no = [[[1, 0], [0, 0], [1, 0], [0, 1]], [[0, 0], [0, 1], [1, 0], [0, 0]]]
    all_ = [[[1, 0], [0, 0], [1, 0], [1, 0]], [[0, 0], [1, 0], [1, 0], [0, 0]]]
    assert found.correct.tolist() == [no, all_]
    must_add_up(found, 7, 5)
    back = from_columns(columns(found), (2, 4), 7, 5)
    assert np.array_equal(back.samples, found.samples)
    for count, correct in ((8, 5), (7, 4)):
        with pytest.raises(ValueError, match="add up"):
            must_add_up(found, count, correct)


@pytest.mark.parametrize("task", [Classes(3), TWO])
def test_a_stack_of_clients_is_right_as_each_client_is(task: Classes | Labels) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(4, 30, task.outputs, generator=generator)
    shape_of_targets = (4, 30, *task.target_shape)
    targets = torch.randint(2, shape_of_targets, generator=generator)
    targets = targets.float() if task is TWO else targets
    right, kinds = task.right(logits, targets), task.kinds(targets)
    assert right.shape == kinds.shape == (4, 30, len(task.answers))
    sums = task.sums(logits, targets)
    for client in range(4):
        own = {name: values[client].tolist() for name, values in sums.items()}
        assert task.right_of(30, own) == (30 * len(task.answers), int(right[client].sum()))


def test_clients_add_up() -> None:
    known, correct, examples = drawn(60, 1)
    first, rest = torch.arange(60) < 25, torch.arange(60) >= 25
    parts = [tally([k[part] for k in known], correct[part], examples[part], CLASSES) for part in (first, rest)]
    whole, added = tally(known, correct, examples, CLASSES), parts[0] + parts[1]
    assert np.array_equal(whole.samples, added.samples)
    assert np.array_equal(whole.correct, added.correct)


def test_nothing_held_out_is_nothing_counted() -> None:
    known, correct, examples = drawn(0, 2)
    found = tally(known, correct, examples, CLASSES)
    assert found.samples.sum() == found.correct.sum() == 0
    assert from_columns(columns(found), (ENVIRONMENTS, CLASSES), 0, 0).samples.shape == found.samples.shape


def small() -> tuple[dict[str, list[int]], Tally, int]:
    known, correct, examples = drawn(40, 3)
    found = tally(known, correct, examples, CLASSES)
    return columns(found), found, int(correct.sum())


def test_there_and_back() -> None:
    given, found, correct = small()
    back = from_columns(given, (ENVIRONMENTS, CLASSES), 40, correct)
    assert np.array_equal(back.samples, found.samples)
    assert np.array_equal(back.correct, found.correct)
    assert all(type(value) is int for values in given.values() for value in values)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        ("samples", lambda values: values[:-1], "another length"),
        ("correct", lambda values: [*values, 0], "another length"),
        ("samples", lambda values: [float(value) for value in values], "no whole number"),
        ("samples", lambda values: [-1, *values[1:]], "-1 is no whole number from 0 to 40"),
        ("samples", lambda values: [2**63, *values[1:]], "no whole number from 0 to 40"),
        ("correct", lambda values: [True, *values[1:]], "True is no whole number"),
        ("samples", lambda values: [values[0] + 1, values[1] - 1, values[2] + 1, *values[3:]], "does not add up"),
        ("correct", lambda values: [0] * len(values), "correct does not add up"),
        ("samples", lambda values: [0] * len(values), "more correct answers than samples"),
    ],
)
def test_columns_that_do_not_fit_are_refused(name: str, change, word: str) -> None:  # type: ignore[no-untyped-def]
    given, _, correct = small()
    with pytest.raises(ValueError, match=word):
        from_columns({**given, name: change(given[name])}, (ENVIRONMENTS, CLASSES), 40, correct)
