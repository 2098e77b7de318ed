"""Whoever follows a run on Flower is told how it ended, also when it is Flower that ends."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import broken_off

from perennial.common.config import RunConfig
from perennial.common.flower.processes import free_port
from perennial.common.utils.errors import RunStopped, UserError
from perennial.server.deployment import submission
from perennial.server.deployment.submission import Connection, FlowerFailed
from perennial.server.run.folder import RunFolder
from perennial.server.runs import Watched, begin, go_on
from perennial.testing.tiny_federation import toy_config

AWAY = UserError("the SuperLink cannot be reached: Connection refused")


class Scripted(Connection):
    """Says of a run what it is told to, word after word; something may happen between two."""

    def __init__(self, *words: Any) -> None:
        super().__init__("here", {}, " --superlink here:1 --insecure")
        self.words = list(words)

    def status(self, run_id: str) -> str:
        word = self.words.pop(0)
        if callable(word):
            word = word()
        if isinstance(word, UserError):
            raise word
        return str(word)

    def _call(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.CompletedProcess(arguments, 0, "the log of Flower\n", "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(submission, "STATUS_EVERY", -1.0)
    monkeypatch.setattr(submission, "SILENCE", 0.0)
    monkeypatch.setattr("time.sleep", lambda _: None)
    return RunFolder.create(tmp_path / "run", toy_config("fedavg"))


def rounds(connection: Connection, folder: RunFolder) -> list[int]:
    return [row["round"] for row in connection.follow("7", folder.path)]


def test_rows_are_told_as_they_come_and_the_last_ones_after_the_end(folder: RunFolder) -> None:
    def write(number: int, status: str) -> Any:
        return lambda: (folder.append([{"round": number}]), status)[1]

    connection = Scripted(write(1, "running"), "running", write(2, "running"), write(3, "finished:completed"))
    assert rounds(connection, folder) == [1, 2, 3]


@pytest.mark.slow
def test_of_a_run_that_is_taken_up_again_the_rows_after_the_checkpoint_are_told(tmp_path: Path) -> None:
    """What was written after the checkpoint is gone before anybody follows, or the rest would be read amiss."""
    config = toy_config("fedavg", rounds=6, runtime="deployment")
    folder, origin = broken_off(config, tmp_path / "run", 3)
    folder.append([{"kind": "round", "round": 3, "left_out": {"client-0": "did not answer in time"}}] * 2)
    told: list[int] = []

    class Link:
        def execute(self, config: RunConfig, out: Path, resume: bool) -> Iterator[dict[str, Any]]:
            assert resume
            assert folder.log.stat().st_size == origin.log_bytes

            def write(number: int, status: str) -> Any:
                row = {"kind": "round", "round": number, "metrics": {}, "left_out": {}}
                return lambda: (folder.append([row]), status)[1]

            connection = Scripted("running", write(3, "running"), write(4, "finished:completed"))
            return connection.follow("7", out, resume=True)

    go_on(folder, nullcontext(Link()), Watched(round=lambda progress: told.append(progress.round)))  # type: ignore[arg-type]
    assert told == [3, 4]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"kind": "round"},
        {"kind": "round", "round": 1, "metrics": [], "left_out": {}},
        {"kind": "round", "round": 1, "metrics": {"risk": "none"}, "left_out": {}},
        {"kind": "round", "round": "one", "metrics": {}, "left_out": {}},
        {"kind": "round", "round": 1, "metrics": {}, "left_out": {"client-0": 1}},
    ],
)
def test_a_row_that_no_server_of_this_project_writes_is_one_sentence(row: dict[str, Any], tmp_path: Path) -> None:
    link: Any = SimpleNamespace(execute=lambda *_: iter([row]))
    config = toy_config("fedavg", runtime="deployment")
    with pytest.raises(UserError, match=rf"^the files of {tmp_path} are damaged or of another version"):
        begin(config, tmp_path, nullcontext(link))


def test_from_another_desk_they_are_read_once_the_log_comes_anew(folder: RunFolder) -> None:
    (folder.path / "server.txt").write_text("/on/the/server")
    folder.append([{"round": 1}, {"round": 2, "left_out": {"client-0": "a long reason of a round that was lost"}}])
    receiver = SimpleNamespace(log_comes=False, drained=lambda _: None)

    def come() -> str:
        folder.log.write_text('{"round": 1}\n{"round": 2}\n')
        receiver.log_comes = True
        return "running"

    connection = Scripted("running", "running", come, "finished:completed")
    rows = connection.follow("7", folder.path, receiver, resume=True)  # type: ignore[arg-type]
    assert list(rows) == [{"round": 1}, {"round": 2}]


def test_a_superlink_that_comes_back_is_no_end(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "SILENCE", 1e6)
    assert rounds(Scripted("running", AWAY, AWAY, "running", "finished:completed"), folder) == []


def test_a_superlink_that_stays_away_is_the_end(folder: RunFolder) -> None:
    away = f"the SuperLink has not answered for 0 seconds ({AWAY})"
    with pytest.raises(RunStopped) as caught:
        rounds(Scripted("running", AWAY, AWAY), folder)
    assert str(caught.value) == away
    (folder.path / "checkpoint" / "round-1").mkdir(parents=True)
    with pytest.raises(RunStopped) as caught:
        rounds(Scripted("running", AWAY, AWAY), folder)
    goes_on = f"`perennial resume {folder.path} --superlink here:1 --insecure` goes on from the last checkpoint"
    assert str(caught.value) == f"{away}; once it is back, {goes_on}"


def test_a_superlink_that_is_gone_is_said_to_be(tmp_path: Path) -> None:
    link = {"address": f"127.0.0.1:{free_port()}", "insecure": True}
    with pytest.raises(UserError, match=r"^the SuperLink cannot be reached: .*Connection refused"):
        submission._connection(tmp_path, link).status("7")


def test_a_run_that_was_done_before_the_superlink_went_is_done(folder: RunFolder) -> None:
    folder.append([{"round": 1}])
    folder.write_summary({"rounds": 1})
    assert rounds(Scripted(AWAY), folder) == [1]


def test_a_superlink_that_has_lost_its_database_is_the_end(folder: RunFolder) -> None:
    lost = UserError("the SuperLink says: Run ID not found.")
    with pytest.raises(RunStopped, match=r"without its database and does not know run 7$"):
        rounds(Scripted("running", lost), folder)
    (folder.path / "checkpoint" / "round-1").mkdir(parents=True)
    with pytest.raises(RunStopped, match=r"without its database and does not know run 7; `perennial resume"):
        rounds(Scripted("running", lost), folder)


def test_the_servers_own_word_is_told(folder: RunFolder) -> None:
    (folder.path / "error.txt").write_text("round 3: only 1 of 4 clients\n")
    with pytest.raises(RunStopped, match=r"^round 3: only 1 of 4 clients$"):
        rounds(Scripted("finished:failed"), folder)
    (folder.path / "error.txt").write_bytes(b"no UTF-8: \xff\n")
    with pytest.raises(RunStopped, match=r"^no UTF-8: \N{REPLACEMENT CHARACTER}$"):
        rounds(Scripted("finished:failed"), folder)


def test_a_server_that_died_without_a_word_leaves_flowers_log(folder: RunFolder) -> None:
    with pytest.raises(FlowerFailed, match=r"Flower says of run 7: finished:failed; its log is in .*flower\.log"):
        rounds(Scripted("running", "finished:failed"), folder)
    assert (folder.path / "flower.log").read_text() == "the log of Flower\n"
    folder.checkpoint_path(2).mkdir(parents=True)
    with pytest.raises(FlowerFailed, match=rf"flower\.log; `perennial resume {folder.path} --superlink here:1"):
        rounds(Scripted("finished:failed"), folder)


def test_a_folder_that_somebody_removed_is_the_reason(folder: RunFolder) -> None:
    def remove() -> str:
        shutil.rmtree(folder.path)
        return "finished:failed"

    folder.append([{"round": 1}])
    with pytest.raises(RunStopped, match=rf"^{folder.path} was removed while the run wrote into it; start the"):
        rounds(Scripted("running", remove), folder)
    assert not folder.path.exists()


def test_flowers_reasons_come_without_its_greeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"success": false, "error-message": "Using SuperLink: here (h:1)\\n\\nIt is\\nunavailable."}'
    done = subprocess.CompletedProcess([], 0, answer, "")
    monkeypatch.setattr(Connection, "_call", lambda *_: done)
    with pytest.raises(UserError, match=r"^flwr run here: It is unavailable.$"):
        Connection("here", {}).submit(toy_config("fedavg"), tmp_path / "run")
