import pytest
import torch
from hypothesis import settings

# As in every process of the system: two threads that share a core with other workers are many times slower.
torch.set_num_threads(1)

# No timed assertions, and the same examples in every run.
settings.register_profile("perennial", deadline=None, derandomize=True)
settings.load_profile("perennial")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long tests first, on one worker, while the other does the rest."""
    items.sort(key=lambda item: item.get_closest_marker("runtimes") is None)
    for item in items:
        if item.get_closest_marker("runtimes"):
            item.add_marker(pytest.mark.xdist_group("runtimes"))
