"""A site's half of a survey (`common/survey.py`): what it tells of its table, and what it keeps to itself."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from logging import INFO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from pydantic import ValidationError

from perennial.client.node.settings import Consent
from perennial.client.node.told import must_differ_enough
from perennial.client.secure_aggregation import Participant, Vault
from perennial.client.site_data import OwnSite
from perennial.client.trainer import Received
from perennial.common import wire
from perennial.common.data import tables
from perennial.common.data.columns import LEAST, MOST_CATEGORIES
from perennial.common.data.site_files import LABEL, Found, for_survey, read
from perennial.common.flower.names import log
from perennial.common.privacy.secure_aggregation import ACTIONS, TERMS
from perennial.common.survey import (
    BINS,
    MOST_LETTERS,
    MOST_NAMES,
    RECORD,
    SHAPE,
    SUMS,
    SURVEY,
    TOLD,
    Asked,
    ColumnShape,
    Entry,
    Question,
    Request,
    Shape,
    Spellings,
    all_names,
    edges,
    limbs,
    spelt_alike,
)
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import sentence
from perennial.common.utils.tensors import Tensors

Numbers = npt.NDArray[np.float64]
FEW = 20
"""Different texts that a column may have in any case; beyond, more than half of the rows is free text."""
DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}")


@dataclass
class Table:
    """One site's table, of which each column is read once."""

    found: Found
    question: Question
    consent: Consent = Consent.full
    least: int = LEAST
    """Rows of which the site tells something, to this question."""
    own_least: int = LEAST
    """The same to any question: neighbours that no two questions tell apart."""
    _cells: dict[str, Numbers | list[str]] = field(default_factory=dict)

    def shape(self) -> Shape:
        """Names and kinds. Raises `UserError` where there is nothing to tell."""
        environments = self.found.environments
        try:
            return Shape(
                classes=self._frequent(self.found.labels),
                environments=None if environments is None else self._frequent(environments),
                columns={name: self._column(name) for name in self.found.columns},
            )
        except ValidationError:
            raise UserError(
                f"{self.found.name} has more than {MOST_NAMES} classes or environments, or a name of a column or "
                f"class that is empty, has more than {wire.LONGEST_NAME} letters or some that cannot be shown"
            ) from None

    def must_have_targets(self) -> None:
        """Raises `UserError` where a column that is to be predicted has what its task cannot have."""
        targets = self.question.targets
        yes_or_no = {"labels": targets, "event": targets[1:]}.get(self.question.target, ())
        for name in targets:
            cells = self._read(name)
            if isinstance(cells, list):
                raise UserError(f"{self.found.name}: column {name!r}, which is to be predicted, has no numbers")
            if name in yes_or_no and (wrong := (cells != 0) & (cells != 1) & ~np.isnan(cells)).any():
                self._refuse(name, wrong, "is neither 0 nor 1")
            if self.question.target == "event" and name == targets[0] and (wrong := cells < 0).any():
                self._refuse(name, wrong, "is a time before 0")

    def _refuse(self, name: str, wrong: npt.NDArray[np.bool_], why: str) -> None:
        where = f"row {int(wrong.argmax()) + 1}, column {name!r}"
        raise UserError(f"{self.found.name}: {where} {why}", f"{self.found.name}: column {name!r}: a row {why}")

    def sums(self, asked: Asked) -> list[float]:
        """One number for each of `asked.entries()`; 0 where less than `least` rows would be in it.

        Raises `UserError` for a column that the table does not have.
        """
        if asked.step == "counts":
            found = self._counts(asked)
        elif asked.step == "squares":
            found = {("square", name, 0): self._square(name, mean) for name, mean in asked.means.items()}
        elif asked.step == "bins":
            bins = {name: self._bins(name, *ends) for name, ends in asked.bins.items()}
            found = {("bin", name, place): count for name, own in bins.items() for place, count in enumerate(own)}
        else:
            found = self._intervals(asked.times)
        return [found[entry] for entry in asked.entries()]

    def spellings(self) -> Spellings:
        """All names in it, those of few rows included; they stay on this machine."""
        categories = {}
        for name in self.found.columns:
            cells = [] if name in self.question.drop else self._read(name)
            if isinstance(cells, list) and _kind(texts := [text for text in cells if text]) == "category":
                categories[name] = texts
        return all_names(self.found.labels, self.found.environments, categories)

    # ------------------------------------------------------------------ inside

    def _column(self, name: str) -> ColumnShape:
        if name in self.question.drop:
            return ColumnShape(kind="dropped")
        cells = self._read(name)
        if isinstance(cells, list):
            texts = [text for text in cells if text]
            kind = _kind(texts)
            return ColumnShape(kind=kind, names=self._frequent(texts) if kind == "category" else ())
        known = np.sort(cells[~np.isnan(cells)])
        if not len(known):
            return ColumnShape(kind="empty")
        wanted = self.consent == Consent.full and self.question.rule(name) == "most-frequent"
        return ColumnShape(
            kind="number",
            values=tuple(self._frequent(known.tolist())[:MOST_CATEGORIES]) if wanted else (),
            all_different=bool(len(known) > FEW and (np.diff(known) > 0).all() and (known % 1 == 0).all()),
        )

    def _counts(self, asked: Asked) -> dict[Entry, float]:
        labels, environments = Counter(self.found.labels), Counter(self.found.environments)
        found: dict[Entry, float] = {("rows", "", 0): len(self.found)}
        found |= {("class", name, 0): self._if_enough(labels[name]) for name in asked.classes}
        found |= {("environment", name, 0): self._if_enough(environments[name]) for name in asked.environments}
        for name in asked.columns:
            cells = self._read(name)
            empty = cells.count("") if isinstance(cells, list) else int(np.isnan(cells).sum())
            found["empty", name, 0] = empty
        for name in asked.numbers:
            known = self._known(name)
            found |= {("count", name, 0): len(known), ("sum", name, 0): math.fsum(known)}
        for name, values in asked.values.items():
            known = self._known(name)
            found |= {("value", name, value): self._if_enough(int((known == value).sum())) for value in values}
        return found

    def _intervals(self, times: Sequence[float]) -> dict[Entry, float]:
        """How many rows have their event in each interval and after the last, and how many are censored there;
        those of each of `_groups` all at their mean time."""
        every = [self._read(name) for name in self.question.targets]
        found: dict[Entry, float] = {
            (kind, "", place): 0.0 for kind in ("event", "censored") for place in range(len(times) + 1)
        }
        if self.consent != Consent.full or len(every) != 2 or any(isinstance(cells, list) for cells in every):
            return found
        when, happened = (np.asarray(cells, float) for cells in every)
        for kind, value in (("event", 1.0), ("censored", 0.0)):
            known = np.sort(when[(happened == value) & ~np.isnan(when)])
            for group in self._groups(known if len(known) >= self.least else known[:0]):
                found[kind, "", int(np.searchsorted(times, group.mean()))] += len(group)
        return found

    def _square(self, name: str, mean: float) -> float:
        """Σ (x − m)², by the column's own mean: how single numbers less a huge m are rounded would tell them."""
        if not len(known := self._known(name)):
            return 0.0
        beside = (own := float(known.mean())) - mean
        return math.fsum((known - own) ** 2) + len(known) * beside * beside

    def _bins(self, name: str, low: float, high: float) -> list[float]:
        """How many numbers each bin has, those of each of `_groups` all as their mean."""
        found = np.zeros(BINS + 2)
        for group in self._groups(np.sort(self._known(name))):
            found[np.searchsorted(edges(low, high), group.mean(), side="right")] += len(group)
        return [float(count) for count in found]

    def _groups(self, known: Numbers) -> list[Numbers]:
        """Sorted numbers in groups of as many neighbours as `least` or more.

        They are whole groups of `own_least`, so that the groups of two questions differ by no fewer.
        """
        size = self.own_least * math.ceil(self.least / self.own_least)
        return [group for group in np.split(known, range(size, len(known) - size + 1, size)) if len(group)]

    def _known(self, name: str) -> Numbers:
        """A column's numbers; none where the site does not tell of them, or has not enough."""
        cells = self._read(name)
        known = np.empty(0) if isinstance(cells, list) else cells[~np.isnan(cells)]
        return known if self.consent == Consent.full and len(known) >= self.least else np.empty(0)

    def _read(self, name: str) -> Numbers | list[str]:
        """A column's cells: numbers, NaN where one is empty; or texts, "" where one is."""
        if name not in self._cells:
            if name not in self.found.columns or name in self.question.drop:
                raise UserError(
                    f"{self.found.name} has no column {name[: wire.LONGEST_NAME]!r} of which it would tell"
                )
            self._cells[name] = self._parsed(name)
        return self._cells[name]

    def _parsed(self, name: str) -> Numbers | list[str]:
        if name not in self.question.categories and not tables.has_truth_values(self.found.x, name):
            try:
                return tables.number_cells(self.found.x, name, self.found.name)
            except tables.Commas as error:
                raise UserError(f"{error}; or say --category {name} if they are names") from None
            except tables.NotNumbers as error:
                texts = tables.text_cells(self.found.x, name, self.found.name)
                known = [text for text in texts if text]
                if 2 * sum(map(tables.like_number, known)) > len(known):
                    raise UserError(
                        f"{error}; most others are numbers, so correct the cell or empty it, or say --category "
                        f"{name} if they are names"
                    ) from None
                return texts
        return tables.text_cells(self.found.x, name, self.found.name)

    def _frequent(self, names: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(sorted(name for name, count in Counter(names).items() if count >= self.least))

    def _if_enough(self, count: int) -> int:
        return count if count >= self.least else 0


def _kind(known: Sequence[str]) -> Literal["category", "dates", "text", "empty"]:
    """What a column of text is, by the texts in it that are not empty."""
    if not known:
        return "empty"
    if all(DATE.match(text) for text in known):
        return "dates"
    different = set(known)
    longest = max(map(len, different))
    if longest > wire.LONGEST_NAME or len(different) > min(MOST_CATEGORIES, max(FEW, len(known) // 2)):
        return "text"
    return "category"


@dataclass
class Respondent:
    """Answers the messages of a survey as one site."""

    name: str
    load: Callable[[Question], Found]
    """The site's data. Raises `UserError`."""
    consent: Consent
    least: int
    """Fewest rows of which anything is told, whatever the server asks."""
    vault: Vault = field(default_factory=Vault)
    may_tell: Callable[[], None] = lambda: None
    """Raises `UserError` where the table has changed too little since it was told of."""

    def answer(self, message: Message) -> Message:
        """The reply; to the first message one that says why, where the site tells nothing.

        Raises `UserError` or `ValueError` for any other that it cannot answer.
        """
        request, number, run = survey_request(message)
        action = message.metadata.message_type
        if action == SHAPE:
            return Message(
                RecordDict({wire.CONFIG: self._shape(request), wire.METRICS: MetricRecord()}), reply_to=message
            )
        arrays = {
            name: wire.from_record(record) for name, record in wire.records(message.content, ArrayRecord).items()
        }
        settings: Any = dict(wire.records(message.content, ConfigRecord)[wire.CONFIG])
        received = Received(number, arrays, settings)
        participant = Participant(f"{run}/{self.name}", self.vault)
        found: Mapping[str, Tensors]
        if action in ACTIONS:
            found = participant.answer(action, received)
        elif action != SUMS or request.asked is None:
            raise ValueError(f"{action:.80} is no part of a survey")
        else:
            numbers = self.table(request.question).sums(request.asked)
            if (TERMS in arrays) != request.question.secure:
                raise UserError("the sums are asked for otherwise than the survey was announced")
            if request.question.secure:
                own = {SUMS: {SUMS: torch.from_numpy(limbs(numbers))}}
                found = participant.masked(received, own, RECORD, SUMS)
            else:
                found = {SUMS: {SUMS: torch.tensor(numbers, dtype=torch.float64)}}
        content = {name: wire.to_record(tensors) for name, tensors in found.items()}
        # Replies to `train` count samples; this is nobody's number of them.
        metrics = MetricRecord({wire.NUM_EXAMPLES: 1} if action in ACTIONS else {})
        return Message(RecordDict({**content, wire.METRICS: metrics}), reply_to=message)

    def table(self, question: Question) -> Table:
        """What is told, as a function of what is asked. Raises `UserError` where the site tells nothing at all."""
        if self.consent == Consent.none:
            raise UserError("this site takes part in no survey; `perennial join --survey full` does")
        key = question.model_dump_json()
        if key not in self._tables:
            self._tables.clear()
            found, least = self.load(question), max(self.least, question.least)
            if not found.columns:
                raise UserError(f"{found.name} is no table, and a survey is of tables")
            if len(found) < least:
                raise UserError(
                    f"{found.name} has fewer than {least} rows (--at-least), so nothing is told of them"
                )
            table = Table(found, question, self.consent, least, self.least)
            table.must_have_targets()
            self.may_tell()
            self._tables[key] = table
        return self._tables[key]

    @cached_property
    def _tables(self) -> dict[str, Table]:
        return {}

    def _shape(self, request: Request) -> ConfigRecord:
        try:
            shape = self.table(request.question).shape()
        except UserError as error:
            return ConfigRecord({wire.CLIENT: self.name, wire.REFUSED: error.told})
        return ConfigRecord({wire.CLIENT: self.name, TOLD: shape.model_dump_json(exclude_defaults=True)})


def survey_request(message: Message) -> tuple[Request, int, str]:
    """A message's question, its number and the survey's id. Raises `ValueError` for one that nobody here sends."""
    config = wire.records(message.content, ConfigRecord).get(wire.CONFIG, ConfigRecord())
    text, number, run = (config.get(key) for key in (SURVEY, wire.ROUND, wire.RUN))
    if (
        not isinstance(run, str)
        or not wire.RUN_ID.fullmatch(run)
        or type(number) is not int
        or not 0 <= number < 10
    ):
        raise ValueError("the survey has no id, or no number of a step")
    if not isinstance(text, str) or len(text) > MOST_LETTERS:
        raise ValueError("the survey's question is no text, or too long")
    try:
        return Request.model_validate_json(text), number, run
    except ValidationError as error:
        raise ValueError(f"the survey's question cannot be read: {sentence(error):.300}") from None


def is_survey(message: Message) -> bool:
    """Whether a message is one of a survey."""
    return SURVEY in wire.records(message.content, ConfigRecord).get(wire.CONFIG, ConfigRecord())


def no_numbers_as_names(found: Found, question: Question, own: OwnSite) -> None:
    """Raises `UserError` where numbers would be told as names, unless the site's owner has named the column."""
    names = Table(found, question).spellings().items()
    asked: dict[str, Iterable[str]] = {column: own for (what, column), own in names if what == "categories"}
    asked |= {
        name: tables.text_cells(found.x, name, found.name) for name in question.categories if name in found.columns
    }
    if not own.label_column and question.label_column != LABEL and not question.targets:
        asked[question.label_column] = found.labels
    if not own.environment_column and found.environments:
        asked[question.environment_column] = found.environments
    for name, cells in asked.items():
        if any(map(tables.like_number, cells)):
            raise UserError(
                f"{found.name} does not tell the numbers of {name} as names; `perennial join --survey full` does, "
                "and with `counts` it names its label-column and environment-column itself"
            )


def respond(message: Message, own: OwnSite | None, settings: Mapping[str, str]) -> Message:
    """Answer a message of a survey at a node with these settings. Raises as `Respondent.answer`."""
    if own is None:
        raise UserError("this site has a part of a scenario, and no table of its own")

    consent = Consent(settings.get("survey", Consent.none))

    def load(question: Question) -> Found:
        environment = own.environment_column or question.environment_column
        if question.targets:
            found = for_survey(own.data, question.targets, own.label_column, environment, own.dialect)
        else:
            found = read(own.data, own.label_column or question.label_column, environment, own.dialect)
        if consent == Consent.counts:
            no_numbers_as_names(found, question, own)
        return found

    least = int(settings.get("survey-least", LEAST))
    state = Path(settings["state-dir"])

    def may_tell() -> None:
        if consent == Consent.full:
            must_differ_enough(own.data, own.dialect, state, least)

    respondent = Respondent(own.name, load, consent, least, Vault(state), may_tell)
    reply = respondent.answer(message)
    if message.metadata.message_type == SHAPE:
        request, _, run = survey_request(message)
        refusal = wire.records(reply.content, ConfigRecord)[wire.CONFIG].get(wire.REFUSED)
        told = {Consent.counts: "names and counts", Consent.full: "names, counts and sums"}.get(consent)
        log(INFO, "perennial: survey %s: %s", run, refusal or f"{own.name} tells {told}, of {least} rows or more")
        if not refusal:
            table = respondent.table(request.question)
            for remark in spelt_alike({own.name: table.spellings()}):
                log(INFO, "perennial: survey %s: %s: %s", run, own.data.name, remark)
    return reply
