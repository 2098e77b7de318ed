"""The development tools, as a package of which uv installs only what it depends on.

It is the project's group `dev`, so `uv run` and `uv sync` install the tools. Flower runs `uv sync` as well, in its
own copy of the app. That copy has no tests, so there this package depends on nothing.
"""

from pathlib import Path

from setuptools import setup

TOOLS = [
    "pytest>=8.3,<10",
    "pytest-xdist>=3.6,<4",
    "hypothesis>=6.115,<7",
    "ruff>=0.9",
    "mypy>=1.14,<3",
    "pyyaml>=6,<7",
    "grpcio-tools==1.76.0",  # exact: a test makes *_pb2*.py anew and compares
]

tests = Path(__file__).resolve().parents[1] / "tests"
setup(name="perennial-development", version="0", py_modules=[], install_requires=TOOLS if tests.is_dir() else [])
