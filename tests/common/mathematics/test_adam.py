from typing import Any

import pytest
import torch
from torch import Tensor

from perennial.common.mathematics.adam import Adam


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) * 10.0 ** (-step) for shape in ((3, 4), (4,))]


def torchs(steps: int) -> list[Tensor]:
    params = [torch.ones(3, 4), torch.ones(4)]
    optimizer = torch.optim.Adam(params, lr=0.1)
    for step in range(steps):
        for param, gradient in zip(params, gradients(step), strict=True):
            param.grad = gradient
        optimizer.step()
    return params


def ours(steps: int, remake: Any = lambda adam: adam) -> list[Tensor]:
    params, adam = [torch.ones(3, 4), torch.ones(4)], Adam()
    for step in range(steps):
        adam = remake(adam)
        torch._foreach_add_(params, adam.direction(gradients(step)), alpha=-0.1)
    return params


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_it_is_torchs(steps: int) -> None:
    for found, expected in zip(ours(steps), torchs(steps), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_its_state_is_all_there_is() -> None:
    whole, pieces = ours(7), ours(7, lambda adam: Adam(adam.state()))
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


def test_the_first_step_has_the_length_one_in_every_coordinate_and_leaves_the_gradient() -> None:
    gradient = [torch.tensor([3.0, -0.5, 0.0])]
    assert Adam().direction(gradient)[0].tolist() == pytest.approx([1.0, -1.0, 0.0])
    assert gradient[0].tolist() == [3.0, -0.5, 0.0]


def test_what_was_kept_is_left_as_it_was() -> None:
    adam = Adam()
    adam.direction([torch.ones(2)])
    kept = adam.state()
    before = {name: tensor.clone() for name, tensor in kept.items()}
    Adam(kept).direction([torch.full((2,), 5.0)])
    assert all(torch.equal(kept[name], before[name]) for name in kept)
    assert Adam().state() == {}
