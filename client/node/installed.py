"""What a site answers with the code that is installed there, and what it writes down of it."""

import json
import os
from datetime import UTC, datetime
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord

from perennial.client.node import answer as node
from perennial.client.node.policy import read_policy
from perennial.client.node.settings import settings_in
from perennial.client.node.survey import is_survey, survey_request
from perennial.common.config import parse_task
from perennial.common.flower.names import Run, log
from perennial.common.utils.errors import LONGEST, UserError
from perennial.common.utils.version import __version__, code_digest
from perennial.common.wire import CONFIG, INSISTS, REFUSED, ROUND, RUN, TASK, record_bytes, records

AUDIT = "audit.jsonl"
"""In a site's state folder: a line for every request, append-only."""
APP = "perennial/perennial"
"""As Flower names the app that is this package."""
_runs_of_other_code = set[int]()
"""Runs of whose other code the site has been told."""


def answer(message: Message, context: Context, run: Run) -> Message:
    """Answer a message with this site's own code, if versions and policy allow it. Raises as `answer.answer`."""
    settings = settings_in(context.node_config)
    policy = read_policy(settings.get("policy", ""))

    def must_be_allowed() -> None:
        must_fit(run)
        policy.must_allow_server(settings["superlink"])
        policy.must_allow(message, context.run_config)
        policy.must_have_room(Path(settings["state-dir"]))

    if code_of(context) == "other" and run.run_id not in _runs_of_other_code:
        _runs_of_other_code.add(run.run_id)
        log(WARNING, "perennial: the server's code is not this site's, which runs its own and looks at no other")
    reply = node.answer(message, settings, must_be_allowed)
    policy.must_allow_reply(message, reply)
    if message.metadata.message_type == "query" and policy.insists:
        records(reply.content, ConfigRecord)[CONFIG][INSISTS] = policy.insists
    return reply


def must_fit(run: Run) -> None:
    """Raises `UserError` for a run of another app, or of another version of this one."""
    if run.fab_id != APP:
        raise UserError(f"the run is of the app {run.fab_id!r}, and this site runs its installed {APP} alone")
    if run.fab_version != __version__:
        raise UserError(
            f"the run is of Perennial {run.fab_version}, and this site has {__version__} installed; "
            "install the same version on both sides"
        )


def code_of(context: Context) -> str:
    """Whether the server says that its code is this site's: "same", "other", or "unknown" where it is silent."""
    theirs = context.run_config.get("code")
    if not theirs:
        return "unknown"
    return "same" if theirs == code_digest() else "other"


def audit(message: Message, context: Context, run: Run, reply: Message, seconds: float, again: bool) -> None:
    """Write down who asked what, what was done, and what leaves. Raises `OSError`: then nothing may leave."""
    settings = settings_in(context.node_config)
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "server": settings.get("superlink", ""),
        "account": (run.account_name or run.flwr_aid)[:200],  # here and below: what a server says has no bound
        "app": f"{run.fab_id} {run.fab_version}"[:200],
        "code": code_of(context),
        "flower_run": str(run.run_id),
        **_request_facts(message),
        **_outcome(reply, again),
        "seconds": round(seconds, 3),
    }
    _append(Path(settings["state-dir"]) / AUDIT, json.dumps(line, ensure_ascii=False) + "\n")


def _request_facts(message: Message) -> dict[str, Any]:
    config = records(message.content, ConfigRecord).get(CONFIG, ConfigRecord())
    found: dict[str, Any] = {"run": str(config.get(RUN, ""))[:64], "round": str(config.get(ROUND, ""))[:8]}
    try:
        found["method"] = parse_task(str(config[TASK])).method.name
    except (UserError, KeyError):
        found["method"] = ""
    if is_survey(message):
        found |= _survey_facts(message)
    return {"action": message.metadata.message_type[:80], **found}


def _survey_facts(message: Message) -> dict[str, Any]:
    try:
        request, _, _ = survey_request(message)
    except ValueError:
        return {}
    least, asked = request.question.least, request.asked
    if not asked:
        return {"least": least}
    columns = sorted({*asked.columns, *asked.numbers, *asked.values, *asked.means, *asked.bins})
    return {"step": asked.step, "columns": ", ".join(columns)[:LONGEST], "least": least}


def _outcome(reply: Message, again: bool) -> dict[str, Any]:
    if reply.has_error():
        return {"outcome": "refused", "reason": str(reply.error.reason)[:LONGEST], "left": {}, "bytes": 0}
    arrays, configs = records(reply.content, ArrayRecord), records(reply.content, ConfigRecord)
    left = {name: sum(len(array.data) for array in record.values()) for name, record in arrays.items()}
    left |= {name: record_bytes(record) for name, record in records(reply.content, MetricRecord).items()}
    left |= {name: record_bytes(record) for name, record in configs.items()}
    refusal = str(configs.get(CONFIG, ConfigRecord()).get(REFUSED, ""))
    done = (
        {"outcome": "refused", "reason": refusal}
        if refusal
        else {"outcome": "sent again" if again else "answered"}
    )
    return {**done, "left": left, "bytes": sum(left.values())}


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600), "a+b") as file:
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            text = text if file.read() == b"\n" else f"\n{text}"  # after a line that a full disk has cut off
        file.write(text.encode())
