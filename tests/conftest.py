import pytest
import torch
from hypothesis import settings

# As in every process of the system: two threads that share a core with other workers are many times slower.
torch.set_num_threads(1)

# No timed assertions, and the same examples in every run.
settings.register_profile("perennial", deadline=None, derandomize=True)
settings.load_profile("perennial")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long tests first; those of a file on one worker, which share its processes."""
    items.sort(key=lambda item: item.get_closest_marker("runtimes") is None)
    for item in items:
        if item.get_closest_marker("runtimes"):
            item.add_marker(pytest.mark.xdist_group(item.path.name))
