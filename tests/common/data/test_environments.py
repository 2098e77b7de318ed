import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perennial.common.data.environments import (
    binary_label,
    colourise,
    downsample,
    draw_colour,
    flip,
    grey,
    rotate,
    rotate_quarter,
    unit_range,
)
from perennial.common.utils.seeding import torch_generator

N = 20_000


def bits() -> torch.Tensor:
    return torch.randint(2, (N,), generator=torch_generator(0, "bits"))


def images(n: int = 6, height: int = 5, width: int = 7) -> torch.Tensor:
    return torch.rand(n, height, width, generator=torch_generator(0, "images"))


def test_labels_are_the_class_group() -> None:
    classes = torch.arange(10)
    assert binary_label(classes, range(5, 10)).tolist() == [0] * 5 + [1] * 5
    assert binary_label(classes, {5, 7, 9}).tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0, 1]
    assert binary_label(classes, range(5)).dtype == torch.int64


@given(st.floats(0, 1), st.integers(0, 2**31))
def test_flips_are_as_many_as_the_probability_says(probability: float, seed: int) -> None:
    labels = bits()
    flipped = flip(labels, probability, torch_generator(seed, "noise"))
    assert flipped.dtype == torch.int64
    assert set(flipped.tolist()) <= {0, 1}
    share = (flipped != labels).float().mean().item()
    # Six standard errors, since hypothesis looks for the worst seed; 3/N where the error is tiny.
    assert abs(share - probability) <= 6 * math.sqrt(probability * (1 - probability) / N) + 3 / N


def test_flips_hit_both_labels_alike() -> None:
    labels = bits()
    changed = flip(labels, 0.25, torch_generator(1, "noise")) != labels
    for label in (0, 1):
        chosen = changed[labels == label].float()
        assert abs(chosen.mean().item() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / len(chosen))


def test_flip_keeps_its_argument_and_repeats_its_draw() -> None:
    labels = bits()
    before = labels.clone()
    first, again, other = (flip(labels, 0.3, torch_generator(seed, "noise")) for seed in (1, 1, 2))
    assert torch.equal(labels, before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_colour_agrees_with_the_label_at_its_probability() -> None:
    labels = bits()
    for p in (0.1, 0.5, 0.9, 0.95):
        for label in (0, 1):
            agree = (draw_colour(labels, p, torch_generator(3, p)) == labels)[labels == label].float()
            assert abs(agree.mean().item() - p) < 4 * math.sqrt(p * (1 - p) / len(agree))
    assert torch.equal(draw_colour(labels, 1.0, torch_generator(3)), labels)
    assert torch.equal(draw_colour(labels, 0.0, torch_generator(3)), 1 - labels)


def test_bytes_become_unit_floats_and_floats_stay() -> None:
    scaled = unit_range(torch.tensor([[0, 51, 255]], dtype=torch.uint8))
    assert scaled.dtype == torch.float32
    assert scaled.tolist() == [[0, pytest.approx(0.2), 1]]
    assert unit_range(scaled) is scaled


def test_downsampling_starts_with_the_first_row_and_column() -> None:
    image = torch.arange(16).reshape(1, 4, 4)
    assert downsample(image, 2).tolist() == [[[0, 2], [8, 10]]]
    assert downsample(torch.zeros(3, 28, 28), 2).shape == (3, 14, 14)
    assert torch.equal(downsample(image, 1), image)


def test_the_image_is_in_its_colours_channel_and_nowhere_else() -> None:
    source = images()
    colour = torch.tensor([0, 1, 1, 0, 1, 0])
    coloured = colourise(source, colour)
    assert coloured.shape == (6, 2, 5, 7)
    for place, bit in enumerate(colour.tolist()):
        assert torch.equal(coloured[place, bit], source[place])
        assert not coloured[place, 1 - bit].any()


def test_grey_has_the_image_in_both_channels() -> None:
    source = images()
    both = grey(source)
    assert torch.equal(both[:, 0], source)
    assert torch.equal(both[:, 1], source)
    both[:, 0] = 0
    assert both[:, 1].any()
    assert source.any()


def test_no_image_can_be_turned() -> None:
    assert rotate(torch.zeros(0, 1, 8, 8), 30.0).shape == (0, 1, 8, 8)


def test_a_quarter_turn_is_counter_clockwise() -> None:
    image = torch.tensor([[1, 2], [3, 4]])
    assert rotate_quarter(image, 1).tolist() == [[2, 4], [1, 3]]


@given(st.integers(-5, 5))
def test_turning_back_recovers_the_image(turns: int) -> None:
    source = colourise(images(), torch.tensor([0, 1, 1, 0, 1, 0]))
    assert torch.equal(rotate_quarter(rotate_quarter(source, turns), -turns), source)
    assert torch.equal(rotate_quarter(source, turns), rotate_quarter(source, turns + 4))
