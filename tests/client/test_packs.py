from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client import packs
from perennial.client.packs import Packs
from perennial.client.state import FileStates, SavedStates, Version
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors


def kept(number: float, size: int = 3) -> dict[str, Tensors]:
    """What a client may keep: two records, with a tensor of each kind that a row can have."""
    counter = {
        "steps": torch.tensor(int(number)),
        "empty": torch.zeros(0, 4),
        "half": torch.full((2,), float(number)),
    }
    return {
        "personal": {"w": torch.full((size, 2), float(number)), "b": torch.arange(3.0) * number},
        "optimizer": counter,
    }


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    return [[*own] for own in one.values()] == [[*own] for own in other.values()]  # in their order, too


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_what_clients_keep_comes_back_from_one_file_for_all_of_a_form(tmp_path: Path) -> None:
    wanted = {f"run/client-{number}": {"a": kept(number, 4 if number == 7 else 3)} for number in range(20)}
    wanted["run/client-3"] = {"before": kept(0.5), "a": kept(3)}
    wanted["run/client-4"] = {"a": {}}  # which a version without tensors is
    wanted["other/client-0"] = {"a": kept(9)}
    written = Packs(tmp_path)
    written.write(wanted)
    for found in (written, Packs(tmp_path)):
        assert set(found) == set(wanted)
        for place, records in wanted.items():
            assert {*found.names(place)} == {*records}
            assert all(same(found.load(place, name), own) for name, own in records.items())
    assert len(files(tmp_path)) == 4  # of the other run, of client 7, of client 4, of all others


def test_a_pack_has_a_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 100)  # of two clients' with 40 bytes each
    Packs(tmp_path).write({f"run/{number}": {"a": {"p": {"w": torch.ones(10)}}} for number in range(5)})
    assert len(files(tmp_path)) == 3
    assert set(Packs(tmp_path)) == {f"run/{number}" for number in range(5)}


def test_a_pack_goes_once_half_of_it_is_not_wanted_and_what_is_stays(tmp_path: Path) -> None:
    found = Packs(tmp_path)
    found.write({f"run/{number}": {"a": kept(number)} for number in range(4)})
    found.write({f"run/{number}": {"b": kept(10 + number)} for number in range(2)})
    assert files(tmp_path) == ["run/pack-1.safetensors", "run/pack-2.safetensors"]  # two of four are wanted
    found.write({"run/2": {"a": kept(2), "b": kept(12)}})
    assert len(files(tmp_path)) == 3
    found.write({"run/2": {"b": kept(12)}})
    for read in (found, Packs(tmp_path)):
        names = {place: read.names(place)[-1] for place in sorted(read)}
        assert names == {"run/0": "b", "run/1": "b", "run/2": "b", "run/3": "a"}
        assert same(read.load("run/3", "a"), kept(3))
        assert same(read.load("run/1", "b"), kept(11))
    assert "run/pack-1.safetensors" not in files(tmp_path)


def test_the_newest_is_written_anew_though_one_of_its_name_is_there(tmp_path: Path) -> None:
    """As of a run that broke off before its first checkpoint."""
    found = Packs(tmp_path)
    found.write({"run/0": {"a": kept(1)}})
    found.write({"run/0": {"a": kept(2)}})
    for read in (found, Packs(tmp_path)):
        assert same(read.load("run/0", "a"), kept(2))


def test_what_is_there_stays_whole_if_writing_breaks_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = SavedStates()
    before = [Version(1, 0, kept(1))]
    states.update({"run/0": before, "run/1": before})
    states.save(tmp_path)
    save = packs.save_tensors
    monkeypatch.setattr(packs, "PACK_BYTES", 1)

    def full(path: Path, *rest: Any) -> None:
        if path.name == "pack-3.safetensors":
            raise OSError(28, "No space left on device", str(path))
        save(path, *rest)

    monkeypatch.setattr(packs, "save_tensors", full)
    after = [Version(1, 0, kept(1)), Version(2, 0, kept(2))]
    states.update({"run/0": after, "run/1": after})
    with pytest.raises(OSError, match="No space"):
        states.save(tmp_path)
    for place in ("run/0", "run/1"):
        assert same(FileStates(tmp_path)[place][0].kept, kept(1))
    monkeypatch.undo()
    states.save(tmp_path)  # there is room again
    for place in ("run/0", "run/1"):
        assert [version.round for version in FileStates(tmp_path)[place]] == [1, 2]
        assert same(FileStates(tmp_path)[place][1].kept, kept(2))


def test_a_damaged_pack_is_named(tmp_path: Path) -> None:
    Packs(tmp_path).write({f"run/{number}": {"a": kept(number)} for number in range(3)})
    path = tmp_path / "run" / "pack-1.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40] + bytes(40))
    opened = Packs(tmp_path)

    def load_all() -> None:
        for place in opened:
            opened.load(place, "a")

    with pytest.raises(UserError, match=r"kept state .*pack-1.safetensors is damaged \(its tensors are not"):
        load_all()
    for bad in (b"", whole[:30], b"\xff" * 8 + whole[8:], whole[:8] + b"[" * (len(whole) - 8)):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"kept state .*pack-1.safetensors is damaged"):
            Packs(tmp_path)
