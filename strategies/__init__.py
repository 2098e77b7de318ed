"""Server halves of all methods, and each as a strategy for somebody's own ServerApp.

`from perennial.strategies import FedIIR`: by the name of the method's hyper-parameter class in `common/methods/`.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if not name[0].isupper():  # a module of this package
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from perennial.strategies.flower_app import named  # imports PyTorch and Flower

    found = globals()[name] = named(name)
    return found
