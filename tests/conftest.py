import os
from collections import Counter

import pytest
import torch
from hypothesis import settings

from perennial.common.flower.grids import be_the_server

be_the_server()  # tests make requests themselves
# As in every process of the system: two threads that share a core with other workers are many times slower.
torch.set_num_threads(1)

# What a test writes need not outlive a power cut, and waiting for the disk is most of a small run's time.
os.fsync = lambda _: None  # type: ignore[assignment]

# No timed assertions, and the same examples in every run.
settings.register_profile("perennial", deadline=None, derandomize=True)
settings.load_profile("perennial")

CONTRACT = {
    "test_trains_and_improves",
    "test_resumed_run_equals_unbroken_run",  # two runs of one seed are the same, too
    "test_a_client_that_sends_bad_tensors_is_left_out_and_named",
    "test_an_absent_client_does_no_harm",
    "test_a_stack_does_what_its_clients_do",
}
"""What `perennial.testing.methods` has that the short suite asks of every method, and of one with every task."""
FEW = ("ditto", "fedavg", "fediir", "fedsgd")
"""For other tests that go through many: a method that keeps a model, one with two exchanges, one of gradients."""
ONE = "ditto"
"""For what is asked of methods with every task: it has a common model and one of each client."""
RARE = {
    "test_each_habit_of_training_is_taken_or_refused",
    "test_same_seed_same_bits_other_seed_other_bits",
}
"""Asked of those few alone in CI, since it takes seconds for each method."""
EVERY_TASK = "test_trains_and_improves"
"""What CI asks of all methods with every task; what else depends on the task it asks of those few."""
MANY = 10


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups, and `-m` the markers, in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long tests first; those of a file on one worker, which share its processes.

    Where a test goes through many methods, most are slow.
    """
    items.sort(key=lambda item: item.get_closest_marker("runtimes") is None)
    cases = Counter(source(item) for item in items if method(item))
    for item in items:
        if item.get_closest_marker("runtimes"):
            item.add_marker(pytest.mark.xdist_group(item.path.name))
        file, name = source(item)
        own, _, task = method(item).partition("/")
        asked = name in CONTRACT and file == "perennial.testing.methods" and (own == ONE or not task)
        if cases[file, name] > MANY and not asked and (task or own not in FEW):
            item.add_marker(pytest.mark.slow)
            if name in RARE or (task and name != EVERY_TASK):
                item.add_marker(pytest.mark.parity)


def method(item: pytest.Item) -> str:
    """The method that a test is about."""
    return str(item.callspec.params.get("method", "")) if hasattr(item, "callspec") else ""


def source(item: pytest.Item) -> tuple[str, str]:
    """The module and the name of a test's function."""
    function = getattr(item, "function", None)
    return getattr(function, "__module__", ""), getattr(function, "__name__", "")
