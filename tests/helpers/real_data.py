"""Where the real data are, on machines that have them."""

import os
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[3] / "shared" / "data"
REAL = Path(os.environ.get("PERENNIAL_DATA") or SHARED)
needs_mnist = pytest.mark.skipif(
    not ((REAL / "MNIST").exists() and (REAL / "FashionMNIST").exists()),
    reason="needs MNIST and Fashion-MNIST in PERENNIAL_DATA or ../shared/data",
)
