import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.client.objectives import pull, squared_distance
from perennial.client.steps import Working


def test_by_hand_over_the_named_tensors_alone() -> None:
    params = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(3.0), "mean": torch.tensor([100.0])}
    anchor = {"w": torch.tensor([[0.0, 4.0]]), "b": torch.tensor(0.0), "mean": torch.tensor([0.0])}
    assert squared_distance(params, anchor, ["w", "b"]).item() == 1 + 4 + 9
    assert squared_distance(params, anchor, iter(["b"])).item() == 9


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.floats(-10, 10))
def test_gradient_is_twice_the_difference_and_none_reaches_the_anchor(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    params, anchor = (
        {n: scale * torch.randn(3, generator=generator, dtype=torch.float64) for n in "ab"} for _ in range(2)
    )
    for tensor in params.values():
        tensor.requires_grad_()
    gradient = torch.autograd.grad(squared_distance(params, anchor, ["a", "b"]), list(params.values()))
    for name, found in zip("ab", gradient, strict=True):
        torch.testing.assert_close(found, 2 * (params[name] - anchor[name]).detach())
    assert not any(tensor.requires_grad for tensor in anchor.values())


def test_a_model_is_at_no_distance_from_itself_with_a_gradient_that_is_finite() -> None:
    """Unlike that of ‖θ − θ'‖, which is not defined there; a personal model starts at its anchor."""
    w = torch.ones(2, requires_grad=True)
    distance = squared_distance({"w": w}, {"w": w.detach()}, ["w"])
    assert distance.item() == 0
    assert torch.autograd.grad(distance, w)[0].tolist() == [0, 0]


def test_maps_over_a_stacked_cohort() -> None:
    stacked = {"w": torch.tensor([[1.0], [2.0], [3.0]])}
    found = torch.func.vmap(lambda w: squared_distance({"w": w}, {"w": torch.zeros(1)}, ["w"]))(stacked["w"])
    assert found.tolist() == pytest.approx([1, 4, 9])


def test_the_envelopes_gradient_is_the_pulls() -> None:
    """With θ held at the minimiser only `(λ/2) ‖θ − ω‖²` depends on ω."""
    anchor, params = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    anchor.requires_grad_()
    (expected,) = torch.autograd.grad(0.7 / 2 * (params - anchor).square().sum(), anchor)
    (found,) = pull([anchor.detach()], [params], 0.7)
    torch.testing.assert_close(found, expected)


def test_an_anchor_pulls_as_its_squared_distance_in_the_loss_does_bit_for_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    start, anchor = ({name: torch.randn(5, 7, generator=draw) for name in "wv"} for _ in range(2))
    plain, pulled = Working(start, "wv"), Working(start, "wv", anchor, 0.3)

    def risk(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        return (tensors["w"] * tensors["v"].exp()).sum()

    inside = risk(plain.tensors) + 0.3 / 2 * squared_distance(plain.tensors, anchor, "wv")
    for found, expected in zip(pulled.gradient(risk(pulled.tensors)), plain.gradient(inside), strict=True):
        assert torch.equal(found, expected)
