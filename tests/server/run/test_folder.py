import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import broken_off

from perennial.common.config import RunConfig, load_config
from perennial.common.utils.errors import UserError
from perennial.server.run.folder import Checkpoint, InUse, RunFolder, taken_over
from perennial.server.study.batch import run_one
from perennial.testing.tiny_federation import toy_config

CONFIG = load_config(
    options={"method": "ditto", "scenario": "colored-digits", "seed": 3}, settings=["proximity=0.5"]
)
ARRAYS = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(4)}


def checkpoint(round_: int, **facts: Any) -> Checkpoint:
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
    with pytest.raises(UserError, match=r"already holds a run; give another --out$"):  # there is nothing to resume
        RunFolder.create(folder.path, CONFIG)
    folder.save_checkpoint(checkpoint(1))
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


# ---------------------------------------------------------------------- one process at a time


def test_a_folder_is_held_by_one_at_a_time(folder: RunFolder) -> None:
    word = rf"run is in use by process {os.getpid()} on {re.escape(socket.gethostname())}$"
    with folder.held() as died:
        assert died == ""
        for ask in (RunFolder(folder.path).held().__enter__, RunFolder(folder.path).must_be_free):
            with pytest.raises(InUse, match=word):
                ask()
        assert RunFolder(folder.path).config() == CONFIG  # whoever reads may go on
    folder.must_be_free()
    with folder.held() as died:
        assert died == ""


def test_the_lock_of_a_process_that_was_killed_is_taken_over_and_it_is_named(folder: RunFolder) -> None:
    code = (
        "import sys, time; from pathlib import Path; from perennial.server.run.folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).held(): print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    with pytest.raises(InUse, match=f"in use by process {process.pid} on"):
        folder.must_be_free()
    process.kill()
    process.wait()
    folder.must_be_free()
    with folder.held() as died:
        assert died.startswith(f"process {process.pid} on ")
    assert f"process {process.pid}" in taken_over(died, folder.path)


def test_who_may_wait_comes_next(folder: RunFolder) -> None:
    order = list[str]()

    def second() -> None:
        with RunFolder(folder.path).held(wait=True):
            order.append("second")

    with folder.held():
        thread = threading.Thread(target=second)
        thread.start()
        order.append("first")
    thread.join(timeout=20)
    assert order == ["first", "second"]


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


@pytest.mark.parametrize("damage", [b'{"half"', b"\xff\xfe", b"7", b"[" * 100_000])
def test_a_damaged_line_is_named(folder: RunFolder, damage: bytes) -> None:
    folder.append([{"round": 1}])
    folder.log.write_bytes(folder.log.read_bytes() + damage + b"\n")
    for read in (folder.rows, lambda: folder.rows_after(0)):
        with pytest.raises(UserError, match=r"metrics.jsonl line 2 is damaged \("):
            read()


def test_a_folder_in_the_place_of_a_log_is_one_sentence(folder: RunFolder) -> None:
    for log in (folder.log, folder.events):
        log.unlink(missing_ok=True)
        log.mkdir()
    for read in (folder.rows, lambda: folder.rows_after(0)):
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be read \(Is a directory\)$"):
            read()
    with pytest.raises(UserError, match=r"log\.jsonl is a folder"), folder.logging():
        pass


def test_commands_in_sentences_can_be_pasted(tmp_path: Path) -> None:
    spaced = RunFolder.create(tmp_path / "a run", CONFIG)
    with pytest.raises(UserError, match=r"perennial run --config '\S+/a run/config.toml' --out"):
        spaced.summary()
    spaced.save_checkpoint(checkpoint(1))
    with pytest.raises(UserError, match=r"\(perennial resume '\S+/a run'\)$"):
        spaced.summary()


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
    with pytest.raises(UserError, match=r"there is nothing to resume; start it again: perennial run --config \S+"):
        folder.summary()
    folder.save_checkpoint(checkpoint(1))
    with pytest.raises(UserError, match="has no summary yet: the run has not ended"):
        folder.summary()
    (folder.path / "error.txt").write_text("metrics.jsonl: No space left on device\n")
    stopped = r"has no summary yet: the run stopped: metrics.jsonl: No space left on device \(perennial resume "
    with pytest.raises(UserError, match=stopped):
        folder.summary()
    with folder.held(), pytest.raises(UserError, match=rf"process {os.getpid()} on \S+ is at work on it$"):
        folder.summary()
    folder.write_summary({"rounds": 3})
    assert folder.summary() == {"rounds": 3}
    for damage in (b"\xff", b"", b"[]", b"[" * 100_000, b"{'a'}"):
        (folder.path / "summary.json").write_bytes(damage)
        with pytest.raises(UserError, match=r"summary.json is damaged \(.{5,300}\)$"):
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
            path.mkdir(exist_ok=True)
            (path / text).touch()

        folder.save_checkpoint(checkpoint(round_), save_clients)
    assert folder.checkpoints() == [10, 100]
    assert folder.load_checkpoint().round == 100
    assert sorted(path.name for path in folder.clients.iterdir()) == ["10", "100", "2", "9"]
    there = sorted(path.name for path in (folder.path / "checkpoint").iterdir())
    assert there == ["clients", "round-10", "round-100"]


@pytest.mark.parametrize("moment", ["safetensors.torch.save_file", "json.dumps", "os.replace", "shutil.rmtree"])
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
    (folder.path / "checkpoint" / ".new-releases").write_text("as a process leaves it that is killed beside them")
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
        ("state.json", b"{", "Invalid JSON"),
        ("state.json", b"\xff", "Invalid JSON"),
        ("state.json", b"null", "State: None is not possible"),
        ("state.json", b'{"round": 4}', "run_id: a value is missing"),
        ("state.json", b"[" * 100_000, "recursion limit"),
        ("state.json", b'{"round": ' + b'{"round": ' * 100_000, "recursion limit"),
        *(
            ("state.json", {name: value}, f"{name}: {value!r} is not possible")
            for name, value in (
                ("log_bytes", -1),
                ("log_bytes", "x"),
                ("log_bytes", 1.5),
                ("seconds", -1),
                ("round", "4"),
                ("run_id", "../other"),
                ("config", 3),
            )
        ),
        ("state.json", {"sha256": {}}, "sha256: there are 0, and 2 are the least"),
        ("state.json", {"sha256": {"arrays.safetensors": ""}}, "sha256: there are 1, and 2 are the least"),
        ("state.json", {"sha256": {"arrays.safetensors": "", "../x": ""}}, "'../x' is not possible"),
        ("state.json", {"round": 3}, "state.json is of round 3"),
        ("state.json", {"later": 1}, "later: there is no such setting"),
    ],
)
def test_a_damaged_checkpoint_is_named_with_what_to_do(
    folder: RunFolder, name: str, data: bytes | dict[str, Any] | None, reason: str
) -> None:
    folder.save_checkpoint(checkpoint(3))
    folder.save_checkpoint(checkpoint(4))
    path = folder.checkpoint_path(4)
    if isinstance(data, dict):
        data = json.dumps({**json.loads((path / name).read_text()), **data}).encode()
    (path / name).write_bytes(data) if data is not None else (path / name).unlink()
    with pytest.raises(UserError) as caught:
        folder.load_checkpoint()
    assert str(caught.value).startswith(f"checkpoint {path} is damaged (")
    assert reason in str(caught.value)
    assert str(caught.value).endswith("; move it away to resume from round 3")
    assert len(str(caught.value)) < 600 + len(str(path))
    path.rename(path.with_name("round-4.damaged"))  # "away" may be beside it
    assert folder.load_checkpoint().round == 3


@pytest.mark.parametrize(
    ("now", "missing"),
    [
        ({"plugins": ["my_method"]}, "plug-in 'my_method': there is no my_method.py in "),
        ({"method": {"name": "ditto", "old": 1}}, "method.old: there is no such setting"),
    ],
)
def test_a_checkpoint_of_other_code_is_not_called_damaged(
    folder: RunFolder, now: dict[str, Any], missing: str
) -> None:
    for round_ in (3, 4):
        folder.save_checkpoint(checkpoint(round_))
        state = folder.checkpoint_path(round_) / "state.json"
        state.write_text(json.dumps({**json.loads(state.read_text()), "config": {"method": "ditto", **now}}))
    with pytest.raises(UserError) as caught:
        folder.load_checkpoint()
    said = f"checkpoint {state.parent} was made with other code of a plug-in, or of Perennial ({missing}"
    assert str(caught.value).startswith(said)
    assert "damaged" not in str(caught.value)
    assert str(caught.value).endswith("; put that code back, or start a run of its own with another --out")


def test_one_flipped_bit_is_found(folder: RunFolder) -> None:
    folder.save_checkpoint(checkpoint(4))
    path = folder.checkpoint_path(4) / "arrays.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"the checksum of arrays.safetensors does not match\)$"):
        folder.load_checkpoint()


# ---------------------------------------------------------------------- other settings


def taken_up(*settings: str, rounds: int = 8, **options: Any) -> RunConfig:
    given = {"method": "ditto", "scenario": "colored-digits", "rounds": rounds}
    return load_config(options=given | options, settings=settings)


def changes(before: RunConfig, now: RunConfig, round_: int = 4) -> dict[str, list[str]]:
    return Checkpoint(round_, "run-1", ARRAYS, {}, config=before).changes(now)


def test_what_a_run_may_go_on_with_is_told(folder: RunFolder) -> None:
    before = taken_up()
    assert changes(before, before) == {}
    assert Checkpoint(4, "run-1", ARRAYS, {}).changes(before) == {}  # of an older version, which did not note it
    assert changes(before, taken_up("deadline=5", "quorum=0.25", rounds=9, nodes={"client-1": 7})) == {
        "rounds": ["8", "9"],
        "quorum": ["0.5", "0.25"],
        "deadline": ["600.0", "5.0"],
        "nodes.client-1": ["nothing", "7"],
    }
    folder.save_checkpoint(Checkpoint(4, "run-1", ARRAYS, {}, config=before))
    assert folder.load_checkpoint().config == before


@pytest.mark.parametrize(
    ("now", "word"),
    [
        (
            taken_up("proximity=5"),
            "method.proximity was 0.1 in the 4 rounds that are done, and is 5.0 now",
        ),
        (taken_up(seed=3), "seed was 0 in the 4 rounds"),
        (taken_up(method="fedavg"), "method.name was ditto in the 4 rounds"),
        (taken_up("scenario.clients=3"), "scenario.clients was 8 in"),
        (taken_up("participation=0.5"), "participation was"),
        (taken_up("evaluate_every=3"), "evaluate_every was 10"),
        (taken_up("most_examples=9"), "most_examples was"),
        (taken_up(runtime="simulation"), "runtime was local"),
        (taken_up("privacy.mechanism=fixed", method="fedavg"), "method.name was"),
        (taken_up(rounds=3), "rounds: 3 is not possible; 4 of them are done"),
    ],
)
def test_what_would_make_the_record_false_is_refused(now: RunConfig, word: str) -> None:
    with pytest.raises(UserError, match=rf"^config\.toml: {re.escape(word)}"):
        changes(taken_up(), now)


def test_a_schedule_in_fractions_of_all_rounds_must_stay_where_it_was() -> None:
    before, now = (taken_up("personal_start=0.5", "warm_up=0", method="fedpin", rounds=r) for r in (8, 10))
    assert changes(before, now, 4) == {"rounds": ["8", "10"]}  # 4 of 4 were without personal models either way
    with pytest.raises(UserError, match=r"rounds was 8, and is 10 now: personal_start=0\.5 of all rounds"):
        changes(before, now, 5)


@pytest.mark.parametrize(
    ("rows", "word"),
    [
        ([1, 1], "does not hold the 2 rounds of the checkpoint"),
        ([1], "does not hold the 2 rounds of the checkpoint"),
        ([1, 2], "KeyError: 'left_out'|KeyError: 'asked'"),  # nothing but kind and round
        ([1, None], "does not hold the 2 rounds of the checkpoint"),
    ],
)
def test_a_log_that_is_not_the_checkpoints_is_one_sentence(folder: RunFolder, rows: list[Any], word: str) -> None:
    folder.append([{"kind": "round", "round": number} for number in rows])
    folder.save_checkpoint(checkpoint(2, log_bytes=folder.log.stat().st_size))
    with pytest.raises(UserError, match=rf"^the files of \S+ are damaged or of another version \(.*({word})"):
        folder.origin(CONFIG)


def test_a_noised_run_goes_on_only_if_its_releases_are_known(folder: RunFolder) -> None:
    private = taken_up("privacy.mechanism=fixed", method="fedavg")
    folder.save_checkpoint(checkpoint(0, config=private))
    assert folder.origin(private).round == 0
    folder.save_checkpoint(checkpoint(2, config=private))
    for count in range(2):
        with pytest.raises(UserError, match=r"releases\.json must say how many models .* at least 2, or ε"):
            folder.origin(private)
        folder.add_release()
        assert folder.releases() == count + 1
    with pytest.raises(UserError, match=r"metrics\.jsonl does not hold"):  # the next thing that is looked at
        folder.origin(private)
    for damage in ("-1", "x", "1.5", '"3"'):
        (folder.path / "checkpoint" / "releases.json").write_text(damage)
        with pytest.raises(UserError, match=r"releases\.json is damaged"):
            folder.origin(private)


def test_a_run_cannot_end_with_a_round_that_was_not_evaluated(tmp_path: Path) -> None:
    config = toy_config("fedavg", "evaluate_every=2", "checkpoint_every=1", rounds=6)
    run_one(config, tmp_path / "run", lambda _: None, until=3)
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=r"^config.toml: rounds: 3 is not possible; .*; take 4 or more$"):
        folder.origin(config.model_copy(update={"rounds": 3}))
    assert folder.origin(config.model_copy(update={"rounds": 4})).round == 3
    run_one(config, folder.path, lambda _: None, until=4)
    assert folder.origin(config.model_copy(update={"rounds": 4})).round == 4


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
    for damage in ("[4", "3", '["4"]', "[-1]", "[" * 100_000):
        (folder.path / "checkpoint" / "resumes.json").write_text(damage)
        with pytest.raises(UserError, match=r"resumes\.json is damaged \(.{5,300}\); restore it from a copy$"):
            folder.add_resume(6)


def test_models_are_saved_by_name(folder: RunFolder) -> None:
    from safetensors.torch import load_file

    folder.save_model("global", ARRAYS)
    folder.save_model("global", ARRAYS)
    assert load_file(folder.path / "models" / "global.safetensors")["n"].item() == 4
    assert [path.name for path in (folder.path / "models").iterdir()] == ["global.safetensors"]


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "log.jsonl", "models", "checkpoint"])
def test_a_run_writes_nothing_where_a_link_in_somebody_elses_folder_leads(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine\n")
    config = toy_config("fedavg", "local_steps=1", "checkpoint_every=1", rounds=3)
    folder, _ = broken_off(config, tmp_path / "theirs", after=2)
    place = folder.path / name
    if place.is_dir():
        shutil.rmtree(place)
        place.symlink_to(mine)
    else:
        place.unlink(missing_ok=True)
        place.symlink_to(mine / "file")
    with (
        pytest.raises(UserError, match=rf"{re.escape(name)} is a link, and a run writes into its own"),
        folder.held(),
    ):
        raise AssertionError
    assert [own.name for own in mine.iterdir()] == ["file"]
    assert (mine / "file").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "checkpoint/round-1/state.json"])
@pytest.mark.parametrize("device", [True, False])
def test_a_pipe_or_a_device_in_somebody_elses_folder_is_not_read(name: str, device: bool, tmp_path: Path) -> None:
    """It would keep a command for ever, or fill the memory."""
    RunFolder.create(tmp_path / "run", CONFIG)
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    if device:
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(file)
    with pytest.raises(UserError, match=rf"{re.escape(name)} is a pipe or a device, or a link to one; remove it"):
        RunFolder.open(tmp_path / "run")
