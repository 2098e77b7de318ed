import pytest
import torch
from hypothesis import settings

# As in every process of the system: two threads that share a core with other workers are many times slower.
torch.set_num_threads(1)

# No timed assertions, and the same examples in every run.
settings.register_profile("perennial", deadline=None, derandomize=True)
settings.load_profile("perennial")

FEW = ("ditto", "fedavg", "fediir")
SLOW = {
    "test_same_seed_same_bits_other_seed_other_bits",
    "test_a_client_that_fails_otherwise_is_left_out_and_named",
    "test_a_round_without_any_client_does_no_harm",
    "test_who_fails_in_a_stack_is_named_alone",
}
"""Tests of what a method must keep that are slow but for a `FEW`: they find what the others of all methods miss in
code that methods share."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long tests first; those of a file on one worker, which share its processes."""
    items.sort(key=lambda item: item.get_closest_marker("runtimes") is None)
    for item in items:
        case, name = getattr(item, "callspec", None), getattr(item, "originalname", "")
        if case and name in SLOW and case.params.get("method") not in FEW:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("runtimes"):
            item.add_marker(pytest.mark.xdist_group(item.path.name))
