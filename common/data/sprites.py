"""Shapes after dSprites (Matthey et al. 2017), white on black, rendered here, so that nothing is downloaded."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

SIDE = 64
REACH = 0.3
"""Half the width of the largest shape; an image is 2 wide."""
SCALES, TURNS, PLACES = 6, 40, 32
"""How many values each factor has, dSprites' numbers."""


def draw_factors(count: int, rng: np.random.Generator) -> dict[str, Floats]:
    """Independent factors (count,) as `render` takes them, uniform over dSprites' grid of values."""
    scales, turns = np.linspace(0.5, 1, SCALES), np.linspace(0, 2 * np.pi, TURNS, endpoint=False)
    places = np.linspace(REACH - 0.95, 0.95 - REACH, PLACES)  # nothing is cut off
    values = {"scale": scales, "turn": turns, "across": places, "down": places}
    return {name: rng.choice(grid, count).astype(np.float32) for name, grid in values.items()}


def square(u: Floats, v: Floats) -> Mask:
    """|u|, |v| ≤ 0.7."""
    return np.maximum(np.abs(u), np.abs(v)) <= 0.7


def ellipse(u: Floats, v: Floats) -> Mask:
    """u² + (v / 0.6)² ≤ 1."""
    return u * u + v * v / 0.36 <= 1


def heart(u: Floats, v: Floats) -> Mask:
    """(a² + b² − 1)³ ≤ a² b³ for (a, b) = (1.45 u, −1.45 v)."""
    a, b = 1.45 * u, -1.45 * v
    a2, b2 = a * a, b * b
    inner = a2 + b2 - 1
    inside: Mask = inner * inner * inner <= a2 * b2 * b
    return inside


SHAPES = (square, ellipse, heart)
"""What is inside, in the shape's own frame, which is 2 wide. Its place here is its class."""


def render(shape: int, scale: Floats, turn: Floats, across: Floats, down: Floats) -> npt.NDArray[np.uint8]:
    """Images (n, 64, 64) of 0 and 255 of one shape: size, angle and place of each, all (n,).

    A pixel is white where its centre is inside the shape.
    """
    centres = ((2 * np.arange(SIDE) + 1) / SIDE - 1).astype(np.float32)
    size, turn, across, down = (factor[:, None, None] for factor in (REACH * scale, turn, across, down))
    x, y = centres[None, None, :] - across, centres[None, :, None] - down
    cosine, sine = np.cos(turn) / size, np.sin(turn) / size
    inside = SHAPES[shape](cosine * x + sine * y, cosine * y - sine * x)
    return np.where(inside, np.uint8(255), np.uint8(0))
