"""What every method must keep (`perennial.testing`) that depends on the task: ours, with every task that they have
beside classes."""

import pytest

from perennial.common.methods import METHODS
from perennial.testing.methods import (  # noqa: F401
    test_a_client_that_sends_bad_tensors_is_left_out_and_named,
    test_a_stack_does_what_its_clients_do,
    test_resumed_run_equals_unbroken_run,
    test_trains_and_improves,
)
from perennial.testing.tiny_federation import TOYS

PAIRS = [
    f"{name}/{task}"
    for task in TOYS
    for name, method in sorted(METHODS.items())
    if task != "classes" and task in method.tasks
]
pytestmark = pytest.mark.parametrize("method", PAIRS)
