"""Whatever stands in a file that somebody else wrote, a command reads it or says in one sentence why not."""

from pathlib import Path
from typing import Any

import pytest
from hostile_files import READERS, Reader, judge
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

of_each = pytest.mark.parametrize("reader", READERS, ids=[reader.name for reader in READERS])


@of_each
def test_honest_files_are_read(reader: Reader, tmp_path: Path) -> None:
    reader.files(tmp_path / "files")
    reader.read(tmp_path / "files")


@of_each
def test_a_file_that_somebody_spoilt_is_read_or_refused_with_a_sentence(reader: Reader, tmp_path: Path) -> None:
    """`benchmarks/fuzz.py` does so for as long as you like."""

    examples = 3 if reader.name == "report" else 12  # its figures take half a second

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def spoilt(data: Any) -> None:
        judge(reader, data, tmp_path)

    spoilt()
