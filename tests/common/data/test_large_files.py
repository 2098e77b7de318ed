"""A file that unpacks to more than there is room for is one sentence, before anything is made of it."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from perennial.common.data.site_files import read
from perennial.common.utils import free_memory
from perennial.common.utils.errors import UserError


def test_a_table_of_many_equal_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 1_000_000
    table = pa.table({"a": np.zeros(rows), "label": pa.array(np.zeros(rows, np.int8))})
    parquet.write_table(table, tmp_path / "site.parquet")
    assert (tmp_path / "site.parquet").stat().st_size < 50_000
    monkeypatch.setattr(free_memory, "available", lambda: 32.0 * 2 * rows - 1)
    with pytest.raises(UserError, match=r"parquet takes about 0.1 GB of memory here, and 0.1 GB are available"):
        read(tmp_path / "site.parquet")


def test_arrays_of_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(
        tmp_path / "site.npz", x=np.zeros((100_000, 50), np.float32), y=np.zeros(100_000, np.int64)
    )
    assert (tmp_path / "site.npz").stat().st_size < 100_000
    monkeypatch.setattr(free_memory, "available", lambda: 2e7)
    with pytest.raises(UserError, match=r"site.npz takes about 0.0 GB"):
        read(tmp_path / "site.npz")
