"""What every scenario must keep (`perennial.testing`), of small ones of ours."""

import pytest

from perennial.testing.scenarios import *  # noqa: F403

pytestmark = pytest.mark.parametrize(
    "scenario",
    [
        "causes-and-shortcut",
        "colored-digits",
        "digits-contexts",
        "diabetes-sites",
        "linear-scm",
        "labels-and-shortcut",
        "event-and-shortcut",
    ],
)
