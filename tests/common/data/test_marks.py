"""The marks that stand for a label: what each looks like, and how often it agrees."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from perennial.common.data.environments import Mark, mark
from perennial.common.data.scenarios.marks import MarkedDigits

KINDS = get_args(Mark)


def pictures() -> Tensor:
    return torch.rand(6, 14, 14, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", KINDS)
def test_the_two_marks_differ_and_change_nothing_but_what_they_say(kind: Mark) -> None:
    images = pictures()
    one, other = (mark(images, torch.full((6,), bit), kind) for bit in (0, 1))
    assert (one != other).flatten(1).any(dim=1).all()
    both = mark(images, torch.tensor([0, 1] * 3), kind)
    assert torch.equal(both[::2], one[::2])
    assert torch.equal(both[1::2], other[1::2])
    assert float(both.min()) >= 0
    assert float(both.max()) <= 1
    assert torch.equal(images, pictures()), "the argument is left as it was"


def test_what_each_mark_is() -> None:
    black = torch.zeros(2, 14, 14)
    bits = torch.tensor([0, 1])
    left, right = mark(black, bits, "patch")
    assert left.nonzero().tolist() == [[row, column] for row in range(3) for column in range(3)]
    assert torch.equal(left.flip(-1), right)
    upper, lower = mark(black, bits, "background")
    assert (upper[:7] == 0.4).all()
    assert upper.sum() == lower.sum() == pytest.approx(0.4 * 98)
    assert torch.equal(upper.flip(0), lower)
    wide, narrow = mark(black, bits, "stripes")
    assert wide[0].nonzero().flatten().tolist() == [0, 1, 2, 7, 8, 9]
    assert narrow[5].nonzero().flatten().tolist() == [0, 2, 4, 6, 8, 10, 12]
    image = pictures()[:2]
    assert torch.equal(mark(image, bits, "rotation"), torch.stack([image[0], torch.rot90(image[1])]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_has_the_mark_of_its_label_as_often_as_p_says(kind: Mark) -> None:
    scenario, plain = MarkedDigits(mark=kind), MarkedDigits(oracle=True)
    data, without = (own.client_data(0, 0, None) for own in (scenario, plain))
    assert data.train.x.shape == (108, *scenario.input_shape)
    assert torch.equal(data.train.y, without.train.y)
    for name, agreeing in (("p=0.0", 1 - without.test["p=0.0"].y), ("p=1.0", without.test["p=1.0"].y)):
        assert torch.equal(data.test[name].x, mark(without.test[name].x[:, 0], agreeing, kind).unsqueeze(1))
