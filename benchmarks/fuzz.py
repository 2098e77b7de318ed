"""Hostile messages, files or calls, with random draws: `python benchmarks/fuzz.py MINUTES [--files | --calls]`.

What is judged is what `tests/contract/test_hostile_messages.py`, `test_hostile_files.py` and
`tests/client/serving/test_hostile_calls.py` judge. It prints how many there were. At the first that is neither
refused with a reason nor harmless it ends with an error; hypothesis prints how to draw it again.
"""

import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
import hostile_calls
import hostile_files
import hostile_messages

from perennial.client.host import Host
from perennial.client.serving.inference import Inference
from perennial.client.state import FileStates, Version

HOW = settings(
    max_examples=25, deadline=None, database=None, derandomize=False, suppress_health_check=list(HealthCheck)
)


def judge(subject: str, honest: Path, site: Path, counts: Counter[str]) -> None:
    """Some replies to a method's server half, and as many requests to its client half."""
    actions, states = hostile_messages.honest(subject, honest), FileStates(site / "state")
    states["another-run/client-1"] = [Version(3, 0, {"personal": {"w": torch.ones(2)}})]
    host = Host(states)

    @HOW
    @given(st.data())
    def replies(data: Any) -> None:
        asked = actions[data.draw(st.sampled_from(sorted(actions)))]
        used = hostile_messages.judge_reply(asked, data.draw(hostile_messages.hostile_reply(asked.reply)))
        counts["replies used" if used else "replies left out"] += 1

    @HOW
    @given(st.data())
    def requests(data: Any) -> None:
        request = actions[data.draw(st.sampled_from(sorted(actions)))].request
        changed = data.draw(hostile_messages.hostile_request(request.content))
        answered = hostile_messages.judge_request(host, site, request, changed)
        counts["requests answered" if answered else "requests refused"] += 1

    replies()
    requests()


def judge_files(name: str, counts: Counter[str]) -> None:
    """Some times the files of one reader, with one of them spoilt."""
    reader = next(own for own in hostile_files.READERS if own.name == name)
    with tempfile.TemporaryDirectory() as place:

        @HOW
        @given(st.data())
        def files(data: Any) -> None:
            counts[f"files {hostile_files.judge(reader, data, Path(place))}"] += 1

        files()


def judge_calls(name: str, inference: Inference, counts: Counter[str]) -> None:
    """Some bodies of requests to `perennial serve`, over HTTP or gRPC."""

    @HOW
    @given(st.data())
    def calls(data: Any) -> None:
        if name == "HTTP":
            answered = hostile_calls.judge_json(inference, *data.draw(hostile_calls.hostile_json()))
        else:
            answered = hostile_calls.judge_message(inference, data.draw(hostile_calls.hostile_message()))
        counts[f"{name} {'answered' if answered else 'refused'}"] += 1

    calls()


def main(minutes: float, what: str) -> None:
    """Judge messages of every method, files of every reader, or calls, as long for each as for others."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    end, counts = time.monotonic() + 60 * minutes, Counter[str]()
    subjects = hostile_messages.SUBJECTS
    if what == "--files":
        subjects = [own.name for own in hostile_files.READERS]
    elif what == "--calls":
        subjects = ["HTTP", "gRPC"]
    with tempfile.TemporaryDirectory() as place:
        inference = hostile_calls.serving(Path(place) / "served") if what == "--calls" else None
        spent = dict.fromkeys(subjects, 0.0)
        while (begun := time.monotonic()) < end:
            subject = min(subjects, key=spent.__getitem__)
            if what == "--files":
                judge_files(subject, counts)
            elif inference:
                judge_calls(subject, inference, counts)
            else:
                with tempfile.TemporaryDirectory() as site:
                    judge(subject, Path(place), Path(site), counts)
            spent[subject] += time.monotonic() - begun
            print(subject, dict(counts), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
