"""What every method must keep (`perennial.testing`), of all of ours with every task that they have beside classes; and
what is refused of the others."""

import pytest

from perennial.common.methods import METHODS
from perennial.testing.methods import *  # noqa: F403
from perennial.testing.tiny_federation import TOYS

pytestmark = pytest.mark.parametrize(
    "method",
    [
        f"{name}/{task}"
        for task in TOYS
        if task != "classes"
        for name in sorted(METHODS)
        if task in METHODS[name].tasks
    ],
)
