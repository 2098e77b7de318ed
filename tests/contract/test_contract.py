"""What every method must keep (`perennial.testing`), of all of ours."""

import pytest

from perennial.common.methods import METHODS
from perennial.testing.methods import *  # noqa: F403

pytestmark = pytest.mark.parametrize("method", sorted(METHODS))
