"""What every method must keep (`perennial.testing`): ours, with every task that they have beside classes."""

import pytest

from perennial.common.methods import METHODS
from perennial.testing.methods import *  # noqa: F403
from perennial.testing.tiny_federation import TOYS

PAIRS = [
    f"{name}/{task}"
    for task in TOYS
    for name, method in sorted(METHODS.items())
    if task != "classes" and task in method.tasks
]
pytestmark = pytest.mark.parametrize("method", PAIRS)
