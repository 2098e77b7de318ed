import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from perennial.common.utils import files
from perennial.common.utils.files import (
    PRIVATE,
    load_records,
    load_tensors,
    load_with_facts,
    private_folder,
    save_records,
    save_tensors,
    write_text,
)

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


def test_equal_tensors_and_facts_are_equal_bytes(tmp_path: Path) -> None:
    """safetensors itself writes the facts in another order each time."""
    facts = {f"fact {n}": 'é\x7f\n"' * n for n in range(3)}
    tensors = {"w": torch.arange(6.0), "a": torch.ones(2).half()}
    for name in "12345678":
        save_tensors(tmp_path / name, tensors, facts)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
    with safe_open(tmp_path / "1", "pt") as file:  # by safetensors alone
        assert {name: text for name, text in file.metadata().items() if name in facts} == facts
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_a_file_with_its_facts_in_any_order_is_read(tmp_path: Path) -> None:
    """As the versions before wrote it."""
    save_tensors(tmp_path / "x", {"w": torch.ones(2)}, {"round": "3"})
    whole = (tmp_path / "x").read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["__metadata__"] = dict(reversed(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    (tmp_path / "x").write_bytes(whole[:8] + text + whole[8 + length :])
    assert (tmp_path / "x").read_bytes() != whole
    tensors, facts = load_with_facts(tmp_path / "x")
    assert (tensors["w"].tolist(), facts["round"]) == ([1, 1], "3")


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


def test_what_fails_once_the_file_has_its_name_is_what_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = files.sync

    def fail(path: Path) -> None:
        if path.is_dir():
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(files, "sync", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*x'"):
        write_text(tmp_path / "x", "text")
    assert (tmp_path / "x").read_text() == "text"


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


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_what_a_site_keeps_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "state" / "run" / "client")
    write_text(folder / "text", "x", PRIVATE)
    save_tensors(folder / "tensors", RECORDS["anchor"], mode=PRIVATE)
    save_records(folder / "records", RECORDS, PRIVATE)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    made = (folder, folder.parent, folder.parent.parent)
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_a_folder_that_others_could_enter_is_closed(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o755)
    assert private_folder(tmp_path / "state").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        private_folder(tmp_path / "file" / "state")


@pytest.mark.slow
def test_tensors_outlive_their_file_overwritten_in_place(tmp_path: Path) -> None:
    """A memory map would end the process here."""
    tensors = {"w": torch.arange(5000.0), "none": torch.empty(0, 3)}
    save_tensors(tmp_path / "x", tensors)
    code = (
        "import sys; from pathlib import Path; from perennial.common.utils.files import load_tensors; "
        "path = Path(sys.argv[1]); "
        "tensors = load_tensors(path); path.write_bytes(b''); print(tensors['w'].sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(tensors["w"].sum().item()))


@pytest.mark.parametrize("names", ["[]", '["v"]', '["w", "v"]', "3", '{"w": 1, "v": 2}'])
def test_names_that_are_not_those_of_the_tensors_are_an_error(names: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x", metadata={"names": names})
    if names == "[]":  # a file of somebody else's making, in the order of the alphabet
        assert list(load_tensors(tmp_path / "x")) == ["w"]
    else:
        with pytest.raises(ValueError, match="list of names is not that of its tensors"):
            load_tensors(tmp_path / "x")


def test_a_damaged_file_is_an_error_of_safetensors(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not tensors")
    with pytest.raises(SafetensorError):
        load_records(tmp_path / "x")


def test_any_other_value_type_or_shape_than_was_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_tensors(path, {"w": torch.ones(2, 3), "half": torch.ones(4, dtype=torch.bfloat16), "n": torch.tensor(3)})
    whole = path.read_bytes()
    values = 8 + int.from_bytes(whole[:8], "little")
    for place in range(values, len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError, match="its tensors are not those that were written"):
            load_tensors(path)
    for old, new in ((b"[2,3]", b"[3,2]"), (b'"BF16"', b'"F16" ')):
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(ValueError, match="its tensors are not those that were written"):
            load_tensors(path)


def test_facts_come_back_with_the_tensors(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", {"w": torch.ones(2)}, {"round": "3"})
    tensors, facts = load_with_facts(tmp_path / "x")
    assert tensors["w"].tolist() == [1, 1]
    assert facts.keys() == {"round", "names"}
    assert facts["round"] == "3"
