"""What every method must keep, of my-fedprox."""

import pytest

from perennial.testing.methods import *  # noqa: F403

pytestmark = pytest.mark.parametrize("method", ["my-fedprox"])
