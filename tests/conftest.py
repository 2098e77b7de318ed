import pytest
import torch

# As in every process of the system: two threads that share a core with other workers are many times slower.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long tests first, on one worker, while the other does the rest."""
    items.sort(key=lambda item: item.get_closest_marker("runtimes") is None)
    for item in items:
        if item.get_closest_marker("runtimes"):
            item.add_marker(pytest.mark.xdist_group("runtimes"))
