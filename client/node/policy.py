"""What a site lets a server ask of it: `perennial join --policy FILE`."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from flwr.app import ArrayRecord, Message, MetricRecord
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from perennial.client.node.survey import is_survey, survey_request
from perennial.client.request import checked
from perennial.common.config import RunConfig, parse_task
from perennial.common.measures.ranking import BATCH
from perennial.common.measures.scores import SCORES
from perennial.common.methods import method_class
from perennial.common.privacy.mechanisms import Clipping
from perennial.common.privacy.secure_aggregation import ACTIONS, TERMS
from perennial.common.selection import SPLIT
from perennial.common.utils.errors import UserError
from perennial.common.utils.parsing import from_toml
from perennial.common.utils.suggestions import sentence
from perennial.common.wire import records


class Policy(BaseModel):
    """What is allowed; a key that is left out allows everything."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    servers: tuple[str, ...] = ()
    """SuperLinks, `HOST:PORT`, that `join` may name."""
    methods: tuple[str, ...] = ()
    max_rounds: int | None = Field(default=None, ge=1)
    require: Literal["secagg"] | None = None
    """Nothing that was made from the data leaves but as a part of a sum that hides it."""
    epsilon: float | None = Field(default=None, gt=0)
    """The largest ε of the differential privacy that the server announces for all of the run."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """The δ of that ε, whatever δ the run reports its own with."""
    max_state: int | None = Field(default=None, ge=1)
    """Bytes of all files in the state folder, from which on nothing new is done."""

    @model_validator(mode="after")
    def _one_protection(self) -> Self:
        if self.require and self.epsilon:
            raise ValueError(
                "require and epsilon are not possible together: a run has secure aggregation or differential "
                "privacy; leave one out"
            )
        return self

    @property
    def insists(self) -> str:
        """The protection without which this site takes part in no run, in a few words; or nothing."""
        return "secure aggregation" if self.require else f"epsilon {self.epsilon:g}" if self.epsilon else ""

    def must_allow_server(self, superlink: str) -> None:
        """Raises `UserError` for a SuperLink that is not on the list."""
        if self.servers and superlink not in self.servers:
            raise UserError(
                f"this site's policy allows the servers {', '.join(self.servers)}, and not {superlink}"
            )

    def must_have_room(self, state: Path) -> None:
        """Raises `UserError` where the state folder has reached its bound: each new run keeps models there."""
        if self.max_state is None:
            return
        kept = sum(file.lstat().st_size for file in state.rglob("*") if file.is_file() and not file.is_symlink())
        if kept >= self.max_state:
            raise UserError(
                f"this site's policy allows {self.max_state} bytes of state, and {kept} are there; its owner can "
                "remove the folders of finished runs"
            )

    def must_allow(self, message: Message, announced: Mapping[str, Any]) -> None:
        """Raises `UserError` for a request that is not allowed, of a run with this Flower configuration."""
        if self == Policy():
            return
        if is_survey(message):
            if self.require and not survey_request(message)[0].question.secure:
                raise self._no("a survey without secure aggregation", f"requires {self.require!r}")
            return
        request = checked(message)
        task, action = parse_task(request.task), message.metadata.message_type
        if self.methods and task.method.name not in self.methods:
            raise self._no(f"method {task.method.name!r}", f"allows {', '.join(self.methods)}")
        if self.max_rounds and request.round > self.max_rounds:
            raise self._no(f"round {request.round}", f"allows {self.max_rounds} rounds")
        harmless = action in ("query", "evaluate", *ACTIONS)
        if self.require and not harmless and TERMS not in records(message.content, ArrayRecord):
            raise self._no(f"{action!r} without secure aggregation", "requires 'secagg'")
        if self.require and not request.settings.keys().isdisjoint((SCORES, BATCH)):
            raise self._no("counts of test rows by score (scores=on)", f"requires {self.require!r}")
        if self.max_rounds or self.require or self.epsilon:
            run = _announced(str(announced.get("config", "")))
            if parse_task(run.task()) != task:
                raise UserError(
                    "the request is not of the run that the server has announced; this site does nothing for it"
                )
            self._must_allow_run(run)

    def must_allow_reply(self, message: Message, reply: Message) -> None:
        """Raises `UserError` for a reply with arrays, or counts for `split` or by score, that nothing hides."""
        if not self.require:
            return
        hidden = message.metadata.message_type in ACTIONS or TERMS in records(message.content, ArrayRecord)
        names = (name.split("/") for record in records(reply.content, MetricRecord).values() for name in record)
        counts = any(
            len(parts) > 1 and (parts[1] == SPLIT or parts[-1] not in _summed(checked(message).task))
            for parts in names
        )
        if counts or (not hidden and records(reply.content, ArrayRecord)):
            raise self._no(f"{message.metadata.message_type!r} without secure aggregation", "requires 'secagg'")

    def _must_allow_run(self, run: RunConfig) -> None:
        if self.max_rounds and run.rounds > self.max_rounds:
            raise self._no(f"a run of {run.rounds} rounds", f"allows {self.max_rounds}")
        if self.require and run.privacy.mechanism != self.require:
            raise self._no(f"privacy.mechanism {run.privacy.mechanism!r}", f"requires {self.require!r}")
        if self.require and run.scores == "on":
            raise self._no("scores=on", f"requires {self.require!r}, and counts of test rows are not hidden by it")
        if self.epsilon:
            privacy = run.privacy
            spent = None
            if isinstance(privacy, Clipping):
                spent = privacy.model_copy(update={"delta": self.delta}).report(run.rounds)["epsilon"]
            if spent is None or spent > self.epsilon:
                after = f"after {run.rounds} rounds (delta {self.delta:g})"
                what = "no epsilon" if spent is None else f"epsilon {spent:.3g} {after}"
                raise self._no(f"privacy.mechanism {privacy.mechanism!r} with {what}", f"allows {self.epsilon:g}")

    @staticmethod
    def _no(what: str, instead: str) -> UserError:
        return UserError(f"this site's policy does not allow {what}; it {instead}")


@lru_cache
def _summed(task: str) -> set[str]:
    """The columns of an evaluation that are sums over an environment's samples alone."""
    columns = parse_task(task).predicts.columns
    return {"count", "loss", *(name for name, column in columns.items() if not column.by_score)}


@lru_cache
def read_policy(path: str) -> Policy:
    """The policy in a TOML file; without a path, one that allows everything. Raises `UserError`."""
    if not path:
        return Policy()
    try:
        policy = Policy.model_validate(from_toml(Path(path).read_text(encoding="utf-8-sig")))
    except OSError as error:
        raise UserError(f"--policy {path}: {error.strerror}") from None
    except ValidationError as error:
        raise UserError(f"--policy {path}: {sentence(error, Policy.model_fields)}") from None
    except ValueError as error:  # no TOML, or no text
        raise UserError(f"--policy {path}: {error}") from None
    try:
        for name in policy.methods:
            method_class(name)
    except UserError as error:
        raise UserError(f"--policy {path}: {error}") from None
    return policy


@lru_cache(maxsize=8)
def _announced(text: str) -> RunConfig:
    """The run that its server announces, from its configuration as JSON. Raises `UserError`.

    Not by `load_config`, which is for what this machine's owner asks for: it loads plug-ins of the current folder.
    """
    if not text:
        raise UserError(
            "this site's policy asks for rounds and privacy, which the run does not announce; `perennial run` does"
        )
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        raise UserError(f"the run that the server announces cannot be read: {sentence(error):.1000}") from None
