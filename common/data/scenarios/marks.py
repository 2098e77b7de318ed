"""CMNIST's recipe with other shortcuts than a colour: a patch, a lit background, stripes, a rotation."""

from typing import TYPE_CHECKING, Literal

from perennial.common.data.environments import Mark, mark
from perennial.common.data.scenario import with_oracle
from perennial.common.data.scenarios.colored import SmallPairs
from perennial.common.utils.knobs import knob

if TYPE_CHECKING:
    from torch import Tensor


class _Marked(SmallPairs):
    """CMNIST's recipe on grey pictures, whose mark takes the place of the colour."""

    source = "ours, after Tang 2025 §4.5.2"

    mark: Mark = knob(
        "patch", "what agrees with the label: where a bright patch is, which half of the background is lit, "
        "how wide stripes are, or whether the picture is turned by 90 degrees",
    )  # fmt: skip

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (1, self.side, self.side)

    def marked(self, pictures: "Tensor", colour: "Tensor") -> "Tensor":
        return mark(pictures, colour, self.mark).unsqueeze(1)

    def unmarked(self, pictures: "Tensor") -> "Tensor":
        return pictures.unsqueeze(1)


class MarkedDigits(_Marked):
    """From scikit-learn's digits."""

    title = "8x8 digits with a mark that agrees with the label: patch, background, stripes or rotation"
    dataset = "digits"
    side, stride = 8, 1

    name: Literal["marked-digits"] = "marked-digits"


class MarkedMNIST(_Marked):
    """From MNIST."""

    title = "MNIST with a mark that agrees with the label: patch, background, stripes or rotation"
    dataset = "mnist"
    side, stride = 14, 2

    name: Literal["marked-mnist"] = "marked-mnist"
    train_per_class: int = knob(500, "training and validation images of each of a client's digits", ge=1)
    test_per_class: int = knob(100, "test images of each of a client's digits", ge=1)
    validation_fraction: float = knob(
        0.2, "part of a client's own training data that is held out for validation", ge=0, lt=1
    )


PRESETS = with_oracle({"marked-digits": MarkedDigits(), "marked-mnist": MarkedMNIST()})
