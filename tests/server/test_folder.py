import errno
from pathlib import Path

import pytest
import torch

from common.config import RunConfig, load_config
from common.errors import UserError
from server.folder import Checkpoint, RunFolder

CONFIG = load_config(options={"scenario": "colored-digits", "seed": 3}, settings=["proximity=0.5"])
ARRAYS = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(4)}


def checkpoint(round_: int, **facts: float) -> Checkpoint:
    arrays = {name: tensor + round_ for name, tensor in ARRAYS.items()}
    return Checkpoint(round_, "run-1", arrays, {"anchor": {"g": torch.ones(2)}}, **facts)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", CONFIG)


def test_the_configuration_comes_back_equal(folder: RunFolder) -> None:
    found: RunConfig = RunFolder.open(folder.path).config()
    assert found == CONFIG
    assert found.method.proximity == 0.5  # type: ignore[attr-defined]


def test_a_folder_that_holds_a_run_is_not_written_over(folder: RunFolder) -> None:
    folder.append([{"kind": "round"}])
    with pytest.raises(UserError, match="already holds a run; give another --out, or continue it: perennial"):
        RunFolder.create(folder.path, CONFIG)


def test_a_folder_without_a_configuration_is_no_run_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=r"is not a run folder: it has no config\.toml"):
            RunFolder.open(path)


@pytest.mark.parametrize("blocked", ["mkdir", "stat"])
def test_a_folder_that_cannot_be_written_is_one_sentence(
    blocked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, blocked, deny)
    with pytest.raises(UserError, match=r"--out .*/run cannot be written \(Permission denied\); give"):
        RunFolder.create(tmp_path / "run", CONFIG)


def test_a_file_in_the_way_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder.create(tmp_path / "file" / "run", CONFIG)


# ---------------------------------------------------------------------- log and summary


def test_rows_come_back_whole_and_from_an_offset(folder: RunFolder) -> None:
    first, second = [{"round": 1, "name": "ü\u2028"}], [{"round": 2, "loss": 0.1}, {"round": 3}]
    folder.append(first)
    _, offset = folder.rows_after(0)
    folder.append(second)
    assert folder.rows() == first + second
    with folder.log.open("a") as file:
        file.write('{"half":')  # what somebody who follows a run may see
    found, end = folder.rows_after(offset)
    assert found == second
    assert folder.rows_after(end) == ([], end)
    assert RunFolder(folder.path / "absent").rows_after(5) == ([], 5)


@pytest.mark.parametrize("damage", [b'{"half"', b"\xff\xfe"])
def test_a_damaged_line_is_named(folder: RunFolder, damage: bytes) -> None:
    folder.append([{"round": 1}])
    folder.log.write_bytes(folder.log.read_bytes() + damage + b"\n")
    with pytest.raises(UserError, match=r"metrics.jsonl line 2 is damaged \("):
        folder.rows()


def test_the_log_is_cut_to_where_the_checkpoint_was(folder: RunFolder) -> None:
    folder.append([{"round": 1}])
    length = folder.log.stat().st_size
    folder.append([{"round": 2}])
    folder.cut_log(length)
    assert folder.rows() == [{"round": 1}]
    for _ in range(2):
        with pytest.raises(UserError, match="is shorter than it was at the checkpoint"):
            folder.cut_log(length + 1)
        folder.log.unlink(missing_ok=True)


def test_a_summary_that_is_missing_or_damaged_is_one_sentence(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="has no summary yet: the run has not ended"):
        folder.summary()
    folder.write_summary({"rounds": 3})
    assert folder.summary() == {"rounds": 3}
    (folder.path / "summary.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"summary.json is damaged \("):
        folder.summary()


# ---------------------------------------------------------------------- checkpoints


def test_a_checkpoint_comes_back_as_it_was(folder: RunFolder) -> None:
    folder.save_checkpoint(checkpoint(7, seconds=1.5, log_bytes=10))
    found = RunFolder(folder.path).load_checkpoint()
    assert (found.round, found.run_id, found.seconds, found.log_bytes) == (7, "run-1", 1.5, 10)
    assert list(found.arrays) == ["w", "n"]  # in this order, which safetensors alone would not keep
    assert all(torch.equal(found.arrays[n], t + 7) and found.arrays[n].dtype == t.dtype for n, t in ARRAYS.items())
    assert found.strategy["anchor"]["g"].tolist() == [1, 1]


def test_the_two_newest_are_kept_with_what_clients_wrote(folder: RunFolder) -> None:
    for round_ in (2, 9, 10, 100):

        def save_clients(path: Path, text: str = str(round_)) -> None:
            path.mkdir()
            (path / "c").write_text(text)

        folder.save_checkpoint(checkpoint(round_), save_clients)
    assert folder.checkpoints() == [10, 100]
    assert folder.load_checkpoint().round == 100
    assert (folder.checkpoint_path(10) / "clients" / "c").read_text() == "10"
    assert sorted(path.name for path in (folder.path / "checkpoint").iterdir()) == ["round-10", "round-100"]


@pytest.mark.parametrize("moment", ["common.files.save_file", "json.dumps", "os.replace", "shutil.rmtree"])
def test_a_crash_at_any_moment_leaves_the_previous_one_whole(
    folder: RunFolder, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Crash

    folder.save_checkpoint(checkpoint(1))
    folder.save_checkpoint(checkpoint(2))
    with monkeypatch.context() as patch:
        patch.setattr(moment, crash)
        with pytest.raises(Crash):
            folder.save_checkpoint(checkpoint(3))
    again = RunFolder(folder.path)
    assert again.load_checkpoint().round == 2
    assert torch.equal(again.load_checkpoint().arrays["w"], ARRAYS["w"] + 2)
    again.save_checkpoint(checkpoint(3))
    assert again.checkpoints() == [2, 3]
    assert not list((folder.path / "checkpoint").glob(".new-*"))  # nor does the torso take space for ever


def test_a_checkpoint_of_the_same_round_is_replaced(folder: RunFolder) -> None:
    folder.save_checkpoint(checkpoint(2, seconds=1))
    folder.save_checkpoint(checkpoint(2, seconds=9))
    assert folder.load_checkpoint().seconds == 9


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("arrays.safetensors", None, "No such file"),
        ("strategy.safetensors", b"rubbish", "checksum of strategy.safetensors does not match"),
        ("state.json", b"{", "Expecting"),
        ("state.json", b"\xff", "codec"),
        ("state.json", b"null", "NoneType"),
        ("state.json", b'{"round": 4}', "sha256"),
        ("state.json", b'{"sha256": {}, "round": 4}', "run_id"),
        ("state.json", b'{"sha256": {}, "round": 4, "run_id": "x", "later": 1}', "later"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_what_to_do(
    folder: RunFolder, name: str, data: bytes | None, reason: str
) -> None:
    folder.save_checkpoint(checkpoint(3))
    folder.save_checkpoint(checkpoint(4))
    path = folder.checkpoint_path(4)
    (path / name).write_bytes(data) if data is not None else (path / name).unlink()
    with pytest.raises(UserError) as caught:
        folder.load_checkpoint()
    assert str(caught.value).startswith(f"checkpoint {path} is damaged (")
    assert reason in str(caught.value)
    assert str(caught.value).endswith("; move it away to resume from round 3")
    path.rename(path.with_name("round-4.damaged"))  # "away" may be beside it
    assert folder.load_checkpoint().round == 3


def test_one_flipped_bit_is_found(folder: RunFolder) -> None:
    folder.save_checkpoint(checkpoint(4))
    path = folder.checkpoint_path(4) / "arrays.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"the checksum of arrays.safetensors does not match\)$"):
        folder.load_checkpoint()


def test_without_a_checkpoint_there_is_nothing_to_resume(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="has no checkpoint to resume from"):
        folder.load_checkpoint()


def test_every_resume_is_remembered_also_a_second_one_from_the_same_checkpoint(folder: RunFolder) -> None:
    assert folder.resumes() == []
    folder.save_checkpoint(checkpoint(4))
    assert folder.add_resume(4) == [4]
    assert RunFolder(folder.path).add_resume(4) == [4, 4]
    folder.save_checkpoint(checkpoint(6))
    assert folder.resumes() == [4, 4]
    (folder.path / "checkpoint" / "resumes.json").write_text("[4")
    with pytest.raises(UserError, match=r"resumes\.json is damaged"):
        folder.add_resume(6)


def test_models_are_saved_by_name(folder: RunFolder) -> None:
    from safetensors.torch import load_file

    folder.save_model("global", ARRAYS)
    folder.save_model("global", ARRAYS)
    assert load_file(folder.path / "models" / "global.safetensors")["n"].item() == 4
    assert [path.name for path in (folder.path / "models").iterdir()] == ["global.safetensors"]
