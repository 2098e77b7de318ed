"""The pytest plug-in: `pytest --perennial NAME` gives the tests of `perennial.testing` that name.

A module that says itself of what (`pytestmark = pytest.mark.parametrize("method", […])`) does not need it.
"""

import pytest

KINDS = ("method", "scenario", "model")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("perennial", "methods, scenarios and models of Perennial")
    group.addoption("--perennial", metavar="NAME", action="append", default=[], help="what to test; repeatable")
    group.addoption(
        "--perennial-set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of the method's toy runs",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives the names to the tests."""
    if not (names := metafunc.config.getoption("--perennial")):
        return
    from perennial.testing.tiny_federation import STRIDES  # imports PyTorch

    for kind in set(KINDS).intersection(metafunc.fixturenames):
        metafunc.parametrize(kind, names)
    given = tuple(metafunc.config.getoption("--perennial-set"))
    STRIDES.update({name: (*STRIDES.get(name, ()), *given) for name in names})
