"""What a client sends is left out with its name or harmless; what a server asks changes nothing that it may not.

`benchmarks/fuzz.py` does the same with other draws for as long as one likes.
"""

import json
from pathlib import Path
from typing import Any

import hostile_messages
import pytest
import torch
from flwr.app import Message, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from perennial.client.host import Host
from perennial.client.state import FileStates, Version
from perennial.common.flower.arrays import carried
from perennial.common.utils.errors import RunStopped
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import SpoilingGrid

REPLIES, REQUESTS = 180, 50
"""Per method; of all methods together they are more than ten thousand."""
FEW = ("fediir", "fedavg+secagg")
SUBJECT = pytest.mark.parametrize(
    "subject",
    [pytest.param(own, marks=() if own in FEW else pytest.mark.slow) for own in hostile_messages.SUBJECTS],
)
CALM = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("honest")


@SUBJECT
def test_an_honest_reply_is_used(subject: str, folder: Path) -> None:
    actions = hostile_messages.honest(subject, folder)
    assert {"query", "evaluate"} <= actions.keys()
    assert any(action.startswith("train") for action in actions)
    assert all(hostile_messages.judge_reply(asked, asked.reply) for asked in actions.values())


@SUBJECT
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_hostile_reply_is_left_out_or_harmless(subject: str, folder: Path) -> None:
    actions = hostile_messages.honest(subject, folder)

    @settings(max_examples=REPLIES, suppress_health_check=CALM)
    @given(st.data())
    def judged(data: Any) -> None:
        asked = actions[data.draw(st.sampled_from(sorted(actions)))]
        hostile_messages.judge_reply(asked, data.draw(hostile_messages.hostile_reply(asked.reply)))

    judged()


@SUBJECT
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_hostile_request_changes_nothing_it_may_not(subject: str, folder: Path, tmp_path: Path) -> None:
    actions = hostile_messages.honest(subject, folder)
    states = FileStates(tmp_path / "state")
    host = Host(states)
    states["another-run/client-1"] = [Version(3, 0, {"personal": {"w": torch.ones(2)}})]

    @settings(max_examples=REQUESTS, suppress_health_check=CALM)
    @given(st.data())
    def judged(data: Any) -> None:
        request = actions[data.draw(st.sampled_from(sorted(actions)))].request
        hostile_messages.judge_request(
            host, tmp_path, request, data.draw(hostile_messages.hostile_request(request.content))
        )

    judged()


@SUBJECT
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_hostile_client_ends_nobodys_run(subject: str, tmp_path: Path) -> None:
    """All that it sends after its enrolment has something wrong in it."""
    config = hostile_messages.subject_config(subject).model_copy(update={"rounds": 4})

    @settings(max_examples=1, suppress_health_check=CALM)
    @given(st.data())
    def judged(data: Any) -> None:
        here = LocalRuntime(config)

        def spoil(request: Message, reply: Message) -> Message:
            if request.metadata.dst_node_id != 2 or request.metadata.message_type == "query" or reply.has_error():
                return reply
            sent = carried(RecordDict(dict(reply.content)))
            return Message(data.draw(hostile_messages.hostile_reply(sent)), reply_to=request)

        here.grid = SpoilingGrid(here.grid, spoil)  # type: ignore[assignment]
        try:
            summary = here.run(RunFolder.create(tmp_path / "run", config))
        except RunStopped:
            assert subject == "fedavg+secagg"  # whose sum does not tell who has spoiled it
            return
        json.dumps(summary, allow_nan=False)
        assert summary["left_out"].keys() <= {"client-1"}
        for path in (tmp_path / "run" / "models").iterdir():
            assert all(bool(torch.isfinite(tensor).all()) for tensor in load_file(path).values())

    judged()
