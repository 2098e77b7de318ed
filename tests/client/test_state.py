import os
import stat
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.client.host import Host
from perennial.client.secure_aggregation import Vault
from perennial.client.snapshot import Snapshot
from perennial.client.state import FileStates, Version, before_message, digest, needed, valid
from perennial.client.trainer import Client, Received, Reply, Site
from perennial.common.config import load_config
from perennial.common.utils.errors import UserError
from perennial.common.wire import CONFIG, KEPT, METRICS, RESUMED, ROUND, RUN, TASK

TASK_TEXT = load_config(options={"method": "local", "scenario": "colored-digits"}).task()
PLACE = "run-1/client-0"


class Diary(Client[Any]):
    """Keeps the rounds in which it trained; tells what it had kept before it did anything."""

    def train(self, received: Received) -> Reply:
        reply = self.tell(received)
        before = self.kept.get("personal", {"rounds": torch.zeros(0)})["rounds"]
        self.kept["personal"] = {"rounds": torch.cat([before, torch.tensor([float(received.round)])])}
        return reply

    def tell(self, received: Received) -> Reply:
        if "personal" not in self.kept:
            return Reply(metrics={"rounds": []})
        return Reply(metrics={"rounds": self.kept["personal"]["rounds"].int().tolist()})


def ask(host: Host, action: str, round_: int, kept: list[int], resumed: list[int], id_: str = "") -> list[int]:
    """The rounds that the client had kept when it got this message."""
    config = ConfigRecord({TASK: TASK_TEXT, RUN: "run-1", ROUND: round_, KEPT: kept, RESUMED: resumed})
    message = Message(RecordDict({CONFIG: config}), 1, action)
    message.metadata.__dict__["_message_id"] = id_  # as Flower's SuperNode does
    reply = host.handle(message, 0)
    rounds = reply.content.metric_records[METRICS]["rounds"]
    assert isinstance(rounds, list)
    return [int(number) for number in rounds]


def diary_host(states: Any, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr("perennial.client.host.client_class", lambda _: Diary)
    Diary.evaluate = Diary.tell  # type: ignore[method-assign]
    host = Host(states)
    drawing = SimpleNamespace(drawing=lambda *_: nullcontext())  # all that is asked of the network
    monkeypatch.setattr(host, "site", lambda *_: Site("client-0", None, drawing, 0))  # type: ignore[arg-type]
    return host


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_but_its_owner_reads_what_a_site_keeps(umask: int, tmp_path: Path) -> None:
    """Whatever the umask; also where an earlier release left the folder open. What is above the state is not."""
    state = tmp_path / "new" / "state"
    (tmp_path / "old" / "run-1").mkdir(parents=True)
    (tmp_path / "old" / "run-1").chmod(0o755)
    before = os.umask(umask)
    try:
        for folder in (state, tmp_path / "old"):
            FileStates(folder)[PLACE] = [Version(1, 0, {"personal": {"w": torch.zeros(2)}})]
            Snapshot("{}", "client-0", None, Received(1, {}), {}).save(folder / PLACE)
            Vault(folder).write(PLACE, {"secret": "1"})
            Snapshot("{}", "client-0", None, Received(1, {}), {}).save(
                folder / "of a method that keeps nothing" / "x"
            )
    finally:
        os.umask(before)
    found = {path: stat.S_IMODE(path.stat().st_mode) for path in [state, *tmp_path.rglob("*/run-1/**/*")]}
    found |= {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("of a*/**/*")}
    found |= {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*/*/run-1")}
    found[tmp_path / "old" / "run-1"] = stat.S_IMODE((tmp_path / "old" / "run-1").stat().st_mode)
    assert found == {path: 0o700 if path.is_dir() else 0o600 for path in found}
    assert sum(path.is_file() for path in found) == 12


# Of each attempt: how many rounds it gets through, where in the next it dies, if its newest checkpoint is lost.
attempts = st.lists(
    st.tuples(st.integers(0, 7), st.sampled_from(["asked", "trained", "saved"]), st.booleans()),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(attempts, st.sets(st.integers(1, 12)), st.integers(1, 4))
def test_a_resumed_run_reads_what_the_unbroken_run_would_have(
    attempts: list[tuple[int, str, bool]], cohort_rounds: set[int], every: int
) -> None:
    """Any history of crashes and resumes, two checkpoints held, the newest sometimes damaged and put aside."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        states: dict[str, list[Version]] = {}
        host = diary_host(states, monkeypatch)
        held: list[int] = []
        resumed: list[int] = []
        for length, moment, lost in [*attempts, (99, "", False)]:
            if held:
                resumed.append(held[-1])
            told, start = list(held), (held[-1] if held else 0)
            if not held:  # there is nothing to resume from: the user starts again, as another run
                resumed.clear()
                states.clear()
            for number in range(start + 1, 13):
                dies = moment if number == start + 1 + length else ""
                if dies == "asked":
                    break
                if number in cohort_rounds:
                    expected = [r for r in sorted(cohort_rounds) if r < number]
                    assert ask(host, "train", number, told, resumed) == expected
                if dies == "trained":
                    break
                expected = [r for r in sorted(cohort_rounds) if r <= number]
                assert ask(host, "evaluate", number, told, resumed) == expected
                if number % every == 0:
                    held = [*held, number][-2:]
                    if dies == "saved":
                        break
                    told = list(held)
            if lost and len(held) > 1:
                held.pop()
            # What nobody can ask for is not kept: one per held checkpoint, and what was trained since.
            assert len(states.get(PLACE, [])) <= 4


# Of each message: if it begins a round or is another exchange of the same, its action, how often it comes.
deliveries = st.lists(
    st.tuples(st.booleans(), st.sampled_from(["train", "train", "evaluate"]), st.integers(1, 3)), max_size=12
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(deliveries, st.integers(1, 3), st.integers(0, 12))
def test_a_message_that_comes_again_starts_from_the_state_before_it(
    deliveries: list[tuple[bool, str, int]], every: int, crash: int
) -> None:
    """Rounds of several exchanges, messages delivered up to three times, one resume, against once each."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        states: dict[str, list[Version]] = {}
        host, number, trained = diary_host(states, monkeypatch), 1, list[int]()
        held: list[int] = []
        resumed: list[int] = []
        for index, (new_round, action, times) in enumerate(deliveries):
            if new_round and number % every == 0:
                held = [*held, number][-2:]
            number += new_round
            if index == crash and held:
                resumed.append(held[-1])
                number = held[-1] + 1
                trained = [r for r in trained if r < number]
            for _ in range(times):
                assert ask(host, action, number, held, resumed, f"message {index}") == trained
            trained += [number] * (action == "train")
            # One for each checkpoint, the newest, and the one before it.
            assert len(states.get(PLACE, [])) <= len(held) + 2
        assert ask(host, "evaluate", number, held, resumed, "the last") == trained


def test_before_message_by_hand() -> None:
    one, two = Version(1, 0, {}, 0, digest("a")), Version(1, 0, {}, 1, digest("b"))
    assert before_message([one, two], digest("b")) == [one]
    assert before_message([one, two], digest("a")) == [one, two]
    assert before_message([], digest("a")) == []
    nameless = Version(1, 0, {})
    assert digest("") == nameless.message
    assert before_message([nameless], digest("")) == [nameless]


histories = st.lists(st.integers(1, 30), unique=True, max_size=8).map(
    lambda rounds: [Version(r, 0, {}) for r in sorted(rounds)]
)


@given(histories, st.lists(st.integers(1, 30), unique=True, max_size=4))
def test_needed_is_what_some_future_reads_and_no_more(versions: list[Version], checkpoints: list[int]) -> None:
    futures = [99, *checkpoints]
    read = [[v for v in versions if v.round <= c][-1:] for c in futures]
    assert needed(versions, checkpoints) == [v for v in versions if [v] in read]


def test_the_version_before_is_kept_only_where_a_message_can_come_again() -> None:
    history = [Version(1, 0, {}, 0, "a"), Version(2, 0, {}, 0, "b"), Version(2, 0, {}, 1, "c")]
    assert needed(history, []) == history[1:]
    assert needed(history, [1]) == history
    assert needed([*history[:2], Version(2, 0, {}, 1)], []) == [Version(2, 0, {}, 1)]


def test_valid_by_hand() -> None:
    """Resumed after 4, then after 4 again, then after 6."""
    versions = [Version(r, a, {}) for r, a in [(5, 1), (3, 0), (6, 2), (4, 0), (5, 0), (7, 2), (7, 3)]]
    assert [(v.round, v.attempt) for v in valid(versions, [4, 4, 6])] == [(3, 0), (4, 0), (6, 2), (7, 3)]
    assert [(v.round, v.attempt) for v in valid(versions[1:2], [])] == [(3, 0)]
    parts = [Version(2, 0, {}, 0), Version(1, 0, {}, 1), Version(1, 0, {}, 0)]
    assert [(v.round, v.part) for v in valid(parts, [])] == [(1, 0), (1, 1), (2, 0)]


# ---------------------------------------------------------------------- on disk


def version(round_: int, value: float = 0.0, attempt: int = 0) -> Version:
    return Version(round_, attempt, {"personal": {"w": torch.full((2,), value + round_)}})


def names(folder: Path) -> list[str]:
    """Of all files but the snapshots that evaluations leave."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and not path.match("serving*"))


def test_what_was_written_is_read_by_another_process(tmp_path: Path) -> None:
    FileStates(tmp_path)["run-1/client-0"] = [version(3), version(12, attempt=1)]
    found = FileStates(tmp_path)
    assert list(found) == ["run-1/client-0"]
    assert len(found) == 1
    by_round = {v.round: v for v in found["run-1/client-0"]}
    assert {r: v.attempt for r, v in by_round.items()} == {3: 0, 12: 1}
    assert by_round[12].kept["personal"]["w"].tolist() == [12, 12]


def test_the_newest_version_is_replaced_and_stale_ones_are_removed(tmp_path: Path) -> None:
    states = FileStates(tmp_path)
    states[PLACE] = [version(1), version(2)]
    states[PLACE] = [version(2), version(3)]
    assert names(tmp_path) == ["round-2.0.safetensors", "round-3.0.safetensors"]
    states[PLACE] = [version(2), version(3, 0.5)]  # a second exchange of the same round
    assert states[PLACE][-1].kept["personal"]["w"].tolist() == [3.5, 3.5]


def test_part_and_message_are_in_the_file_s_name(tmp_path: Path) -> None:
    written = [
        Version(3, 0, {}),
        Version(3, 0, {}, 1),
        Version(3, 1, {}, 11, digest("../../a")),
        Version(4, 1, {}, 0, "f" * 16),
    ]
    FileStates(tmp_path)[PLACE] = written
    assert valid(FileStates(tmp_path)[PLACE], [3]) == written
    assert [name.partition(".safetensors")[0] for name in names(tmp_path)] == [
        "round-3.0.1", "round-3.0", f"round-3.1.11-{digest('../../a')}", f"round-4.1-{'f' * 16}",
    ]  # fmt: skip


@pytest.mark.parametrize("moment", ["perennial.common.utils.files.sync", "pathlib.Path.unlink"])
def test_killed_while_it_stored_and_asked_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the new file is in its place, or after; in both cases nobody saw a reply."""

    class Crash(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Crash

    host = diary_host(FileStates(tmp_path), monkeypatch)
    for number in (1, 2, 3):
        ask(host, "train", number, [], [], f"message {number}")
    with monkeypatch.context() as patch:
        patch.setattr(moment, crash)
        with pytest.raises(Crash):
            ask(host, "train", 4, [], [], "message 4")
    assert ask(host, "train", 4, [], [], "message 4") == [1, 2, 3]
    assert ask(host, "train", 4, [], [], "another exchange") == [1, 2, 3, 4]
    assert ask(host, "train", 4, [], [], "another exchange") == [1, 2, 3, 4]
    assert ask(host, "evaluate", 4, [], [], "message 6") == [1, 2, 3, 4, 4]
    assert len(names(tmp_path)) == 2


def test_places_come_and_go_as_in_a_dict(tmp_path: Path) -> None:
    states = FileStates(tmp_path / "absent")
    assert list(states) == []
    assert "run-1/client-0" not in states
    with pytest.raises(KeyError):
        del states["run-1/client-0"]
    states["run-1/client-0"] = [version(1)]
    states["run-1/client-1"] = [version(1)]
    del states["run-1/client-0"]
    assert list(dict(states)) == ["run-1/client-1"]


def test_other_files_in_the_folder_are_left_alone_and_not_read(tmp_path: Path) -> None:
    states = FileStates(tmp_path)
    states[PLACE] = [version(1)]
    (tmp_path / PLACE / "notes.txt").write_text("mine")
    (tmp_path / PLACE / ".new-abc").write_text("left by a crash")
    states[PLACE] = [version(2)]
    assert [v.round for v in states[PLACE]] == [2]
    assert (tmp_path / PLACE / "notes.txt").exists()
    assert not (tmp_path / PLACE / ".new-abc").exists()


def test_a_damaged_file_is_named_in_one_sentence(tmp_path: Path) -> None:
    states = FileStates(tmp_path)
    states[PLACE] = [version(1)]
    path = tmp_path / PLACE / "round-1.0.safetensors"
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    other_names = [whole.replace(b'"[', b'"{'), whole.replace(b'l/w\\"', b'l/v\\"')]
    for data in (b"", b"rubbish", whole[:-1], flipped, *other_names):
        assert data != whole
        path.write_bytes(data)
        with pytest.raises(UserError) as caught:
            _ = states[PLACE]
        assert str(caught.value).startswith(f"kept state {path} is damaged (")
        assert str(caught.value).endswith("restore it from a copy or remove it")


@pytest.mark.parametrize("moment", ["write", "rename", "prune"])
def test_a_crash_while_writing_leaves_the_old_versions(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Crash

    states = FileStates(tmp_path)
    states[PLACE] = [version(1), version(2)]
    where = {"write": "safetensors.torch.save_file", "rename": "os.replace", "prune": "pathlib.Path.unlink"}[
        moment
    ]
    with monkeypatch.context() as patch:
        patch.setattr(where, crash)
        with pytest.raises(Crash):
            states[PLACE] = [version(2), version(3)]
    found = sorted(v.round for v in FileStates(tmp_path)[PLACE])
    assert found == ([1, 2, 3] if moment == "prune" else [1, 2])


def test_a_host_on_disk_keeps_what_a_host_in_memory_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: dict[str, list[Version]] = {}
    script = [("train", 1, [], []), ("train", 3, [2], []), ("evaluate", 3, [2], []), ("train", 3, [2], [2])]
    answers = []
    for states in (memory, FileStates(tmp_path)):
        answers.append([ask(diary_host(states, monkeypatch), *step) for step in script])
    assert answers[0] == answers[1] == [[], [1], [1, 3], [1]]
    assert names(tmp_path) == ["round-1.0.safetensors", "round-3.1.safetensors"]
