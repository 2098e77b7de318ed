"""What every model must keep (`perennial.testing`), of all of ours."""

import pytest

from perennial.common.models.settings import MODELS
from perennial.testing.models import *  # noqa: F403

pytestmark = pytest.mark.parametrize(
    "model", [pytest.param(own, marks=pytest.mark.slow if own == "resnet18" else ()) for own in sorted(MODELS)]
)
