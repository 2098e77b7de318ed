import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from common import files
from common.files import load_records, load_with_facts, save_records, save_tensors, write_text

RECORDS = {
    "personal": {"a/b.weight": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(3)},
    "anchor": {"w": torch.ones(2).half()},
}


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    save_records(tmp_path / "x", RECORDS)
    back = load_records(tmp_path / "x")
    assert {name: list(part) for name, part in back.items()} == {"personal": ["a/b.weight", "n"], "anchor": ["w"]}
    for name, part in RECORDS.items():
        for key, tensor in part.items():
            assert torch.equal(back[name][key], tensor)
            assert back[name][key].dtype == tensor.dtype


def test_nothing_is_a_record_too(tmp_path: Path) -> None:
    save_records(tmp_path / "x", {})
    assert load_records(tmp_path / "x") == {}


def test_tensors_that_share_memory_can_be_saved(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    save_records(tmp_path / "x", {"r": {"all": base, "part": base[1:3], "again": base}})
    assert load_records(tmp_path / "x")["r"]["part"].tolist() == [1, 2]


@pytest.mark.parametrize("write", [lambda p: write_text(p, "x"), lambda p: save_tensors(p, {"w": torch.ones(2)})])
@pytest.mark.parametrize("broken", ["sync", "replace"])
def test_a_failure_while_writing_leaves_the_old_file_and_no_rubbish(
    write: Callable[[Path], None], broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((files, "sync") if broken == "sync" else (os, "replace")), fail)
    with pytest.raises(OSError, match="No space"):
        write(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_bytes_are_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (seen.append("replace"), replace(*names)))
    write_text(tmp_path / "x", "text")
    assert seen[:2] == ["fsync", "replace"]


def test_files_are_readable_by_others(tmp_path: Path) -> None:
    """A container writes as another user than the one who looks at the results."""
    write_text(tmp_path / "x", "text")
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


def test_a_damaged_file_is_an_error_of_safetensors(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not tensors")
    with pytest.raises(SafetensorError):
        load_records(tmp_path / "x")


def test_facts_come_back_with_the_tensors(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", {"w": torch.ones(2)}, {"round": "3"})
    tensors, facts = load_with_facts(tmp_path / "x")
    assert tensors["w"].tolist() == [1, 1]
    assert facts["round"] == "3"
