import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perennial.common.mathematics.geometric_mean import GeometricMean

NUMBERS = st.floats(-1e3, 1e3).filter(lambda value: value == 0 or abs(value) > 1e-3)
GRADIENTS = st.lists(NUMBERS, min_size=1, max_size=7)


def mean(values: list[float], **how: Any) -> float:
    """Of the same coordinate of some gradients."""
    found = GeometricMean(**how)
    for value in values:
        found.add({"w": torch.tensor([value], dtype=torch.float64)})
    return float(found.result()["w"])


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([4, 9], 6), ([-4, -9], -6), ([1, 4, -2], 2 / 3), ([5], 5), ([-5], -5), ([2, -2], 0), ([7, 7, 7], 7),
        # Not a descent direction: the plain mean is +1/6.
        ([1, 1e-6, -0.5], 2 / 3 * 1e-3 - 0.5 / 3),
    ],
)  # fmt: skip
def test_golden_values(values: list[float], found: float) -> None:
    assert mean(values) == pytest.approx(found, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("values", "exclude", "paper", "official"),
    [
        ([0, 1, 4], 4 / 3, 0, 4 / 3),
        ([0, -1, -4], -4 / 3, 0, -7.3681e-4),
        ([0, 0, 0], 0, 0, -1e-10),
        ([1, 4, -2], 2 / 3, 2 / 3, 2 / 3),
    ],
)
def test_the_rules_for_zeros(values: list[float], exclude: float, paper: float, official: float) -> None:
    assert mean(values, zeros="exclude") == pytest.approx(exclude)
    assert mean(values, zeros="paper") == pytest.approx(paper)
    assert mean(values, zeros="official") == pytest.approx(official, rel=1e-5)


def by_hand(values: list[float]) -> float:
    """The definition: products and roots."""
    total = 0.0
    for sign in (1, -1):
        group = [abs(value) for value in values if sign * value > 0]
        if group:
            total += sign * len(group) / len(values) * math.prod(group) ** (1 / len(group))
    return total


@given(GRADIENTS)
def test_it_is_the_definition(values: list[float]) -> None:
    assert mean(values) == pytest.approx(by_hand(values), rel=1e-9, abs=1e-9)


@given(GRADIENTS, st.floats(1e-3, 1e3), st.sampled_from(["exclude", "paper"]))
def test_it_is_odd_homogeneous_and_blind_to_the_order(values: list[float], factor: float, zeros: Any) -> None:
    found = mean(values, zeros=zeros)
    assert mean([-value for value in values], zeros=zeros) == pytest.approx(-found, rel=1e-9, abs=1e-9)
    scaled = mean([factor * value for value in values], zeros=zeros)
    assert scaled == pytest.approx(factor * found, rel=1e-9, abs=1e-6)
    assert mean(values[::-1], zeros=zeros) == pytest.approx(found, rel=1e-9, abs=1e-9)


@given(GRADIENTS)
def test_neither_sign_has_more_than_its_part_of_the_plain_mean(values: list[float]) -> None:
    for sign in (1, -1):
        side = [value if sign * value > 0 else 0.0 for value in values]
        assert sign * mean(side) <= sign * sum(side) / len(side) + 1e-9
        if len({value for value in side if value}) == 1 and all(side):
            assert mean(side) == pytest.approx(side[0])
    assert abs(mean(values)) <= max(map(abs, values)) + 1e-9


def test_the_parts_of_the_signs_are_equal_to_the_plain_means_only_where_all_are() -> None:
    assert mean([3, 3, -1]) == pytest.approx(2 - 1 / 3)
    assert mean([2, 4, -1]) < 2 - 1 / 3 - 0.1


def stacked(gradients: Tensor) -> Tensor:
    """All gradients (E, n) at once, in float64."""
    gradients = gradients.double()
    total = torch.zeros(gradients.shape[1], dtype=torch.float64)
    for sign in (1, -1):
        group = sign * gradients > 0
        count = group.sum(dim=0).double()
        logs = torch.where(group, gradients.abs().log(), 0.0).sum(dim=0)
        total += sign * count / len(gradients) * (logs / count.clamp(min=1)).exp()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_after_the_other_is_all_at_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(250, 30, generator=generator, dtype=dtype) * 10.0 ** torch.arange(-15, 15)
    gradients[::7, ::3] = 0
    found = GeometricMean()
    for gradient in gradients:
        found.add({"a": gradient[:12].view(3, 4), "b": gradient[12:]})
    result = found.result()
    assert result["a"].shape == (3, 4)
    assert {part.dtype for part in result.values()} == {dtype}
    flat = torch.cat([part.flatten() for part in result.values()])
    torch.testing.assert_close(flat.double(), stacked(gradients), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("agreement", "kept"), [(0.0, [1, 1, 1, 1]), (0.5, [1, 1, 0, 0]), (1.0, [1, 0, 0, 0]), (1.01, [0, 0, 0, 0])]
)
def test_coordinates_on_whose_sign_too_few_agree_are_zero(agreement: float, kept: list[int]) -> None:
    """Mean signs 1, 1/2, 0 and 1/4; a zero has no sign."""
    columns = torch.tensor([[1.0, 2, 1, 3], [2.0, 3, -2, 0], [4.0, 4, 4, 0], [8.0, -1, -8, 0]])
    plain, masked = GeometricMean(), GeometricMean(agreement=agreement)
    for row in columns:
        plain.add({"w": row})
        masked.add({"w": row})
    assert torch.equal(masked.result()["w"], plain.result()["w"] * torch.tensor(kept))


def test_curvatures_meet_in_the_middle() -> None:
    """½ a x² and ½ b x² with a = 100 and b = 0.01: slopes 100 x and 0.01 x, wgeo x, plain mean 50.005 x."""
    for x in (1.0, -3.0):
        assert mean([100 * x, 0.01 * x]) == pytest.approx(x)


def test_the_mean_of_nothing() -> None:
    with pytest.raises(ValueError, match="nothing"):
        GeometricMean().result()
