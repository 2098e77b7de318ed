"""What every method, scenario and model must keep, as tests that your package can run, too (needs pytest).

from perennial.testing.methods import *

pytestmark = pytest.mark.parametrize("method", ["my-method"])
"""

import pytest

pytest.register_assert_rewrite(
    *(f"{__name__}.{room}" for room in ("methods", "models", "scenarios", "kept_and_sent"))
)
