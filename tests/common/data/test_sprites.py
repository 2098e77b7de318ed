import numpy as np
import pytest

from perennial.common.data.sprites import PLACES, REACH, SCALES, SHAPES, SIDE, TURNS, draw_factors, render


def one(shape: int, scale: float = 1.0, turn: float = 0.0, across: float = 0.0, down: float = 0.0) -> np.ndarray:
    factors = (np.array([value], np.float32) for value in (scale, turn, across, down))
    return render(shape, *factors)[0] > 0


@pytest.mark.parametrize(("shape", "area"), [(0, 4 * 0.7**2), (1, np.pi * 0.6)], ids=["square", "ellipse"])
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_areas_are_the_shapes(shape: int, area: float, scale: float) -> None:
    pixels = (REACH * scale * SIDE / 2) ** 2  # in a unit square of the shape's frame
    found = [one(shape, scale, turn).sum() for turn in np.linspace(0.1, 1.4, 20)]
    assert np.mean(found) == pytest.approx(area * pixels, rel=0.03)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_a_quarter_turn_turns_the_picture(shape: int) -> None:
    # A pixel whose centre is on the edge may fall on either side of it.
    differing = one(shape, 0.93, np.pi / 2) != np.rot90(one(shape, 0.93), -1)
    assert differing.sum() <= 4


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_a_shape_is_where_it_is_put(shape: int) -> None:
    middle = one(shape, 0.93)
    moved = one(shape, 0.93, across=8 / SIDE * 2, down=-5 / SIDE * 2)
    assert (moved != np.roll(middle, (-5, 8), (0, 1))).sum() <= 4


def test_the_shapes_are_different_and_a_heart_is_symmetric_upright_and_dented() -> None:
    heart = one(2)
    assert np.array_equal(heart, heart[:, ::-1])
    rows = np.flatnonzero(heart.any(axis=1))
    middle = heart[:, SIDE // 2 - 1 : SIDE // 2 + 1].all(axis=1)
    assert np.flatnonzero(middle)[0] > rows[0]  # the dent
    assert heart[rows[0]].sum() > heart[rows[-1]].sum()  # wide at the top, pointed at the bottom
    pictures = [one(shape) for shape in range(3)]
    assert all((pictures[a] != pictures[b]).sum() > 50 for a, b in ((0, 1), (0, 2), (1, 2)))


def test_factors_are_dsprites_grid_drawn_independently() -> None:
    factors = draw_factors(20_000, np.random.default_rng(0))
    assert {name: len(np.unique(values)) for name, values in factors.items()} == {
        "scale": SCALES, "turn": TURNS, "across": PLACES, "down": PLACES,
    }  # fmt: skip
    correlation = np.corrcoef(list(factors.values())) - np.eye(4)
    assert np.abs(correlation).max() < 4 / np.sqrt(20_000)
