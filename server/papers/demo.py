"""The demo: every claim of `reproduce/demo.toml`, measured on data that come with the libraries."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

from pydantic import Field, model_validator
from rich.table import Table
from rich.text import Text

from perennial.common.config import RunConfig
from perennial.common.data.scenarios import SCENARIOS
from perennial.common.methods import METHODS
from perennial.common.tasks import Measure, PredictionTask
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown
from perennial.server.papers.reproduce import DEMO, Part, assignments, columns_of, must_be_known, parsed
from perennial.server.study.batch import Outcome, Selected, Watch, readable, run_all, troubles_of
from perennial.server.study.compare import DECIMALS, Entry, Plan, entry_config, measures
from perennial.server.study.compare import mean as mean

ENOUGH = 2.0
"""Standard errors that a difference must exceed."""


Numbers = list[float | None]
"""One for each seed; None where a run has trouble."""


class Side(Part):
    """A method of a claim, and what it is run with."""

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    """Hyper-parameters, stronger than the claim's."""

    @model_validator(mode="after")
    def _fits(self) -> "Side":
        must_be_known("method", [self.name], METHODS)
        return self

    @property
    def title(self) -> str:
        """The name that papers print."""
        return METHODS[self.name].title

    @property
    def measured(self) -> str:
        """The model that counts, the headline one."""
        return METHODS[self.name].evaluates[-1]


class Claim(Part):
    """What a paper says of its method, as one number of two methods on one scenario."""

    claim: str
    scenario: str
    oracle: str = ""
    """A scenario without the shortcut, for what the reference attains there."""
    rounds: int = Field(ge=1)
    seeds: int = Field(ge=2)
    """How many: 0, 1, …"""
    column: str
    """What is compared, in the last round; more is better."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Run settings, and hyper-parameters for every method that has them."""
    method: Side
    reference: Side
    beside: tuple[str, ...] = ()
    """Methods that the figure also shows, at their defaults."""
    found: str
    """How the settings were found."""
    seen: bool = False
    """Whether that was, all or in part, while looking at test data."""

    @model_validator(mode="after")
    def _fits(self) -> "Claim":
        for name in (self.scenario, self.oracle or self.scenario):
            must_be_known("scenario", [name], SCENARIOS)
            known = [column for column in columns_of(SCENARIOS[name]) if column not in DECIMALS]
            must_be_known("column", [self.column], known)
        must_be_known("method", self.beside, METHODS)
        return self

    @property
    def task(self) -> PredictionTask:
        """What there is to predict."""
        return SCENARIOS[self.scenario].task

    @property
    def measure(self) -> Measure:
        """What the column has values of."""
        return next((own for own in self.task.others if own.title == self.column), self.task.headline)

    @property
    def sides(self) -> list[Side]:
        """Every method that is run on the scenario, the claim's own first."""
        return [self.method, self.reference, *(Side(name=name) for name in self.beside)]

    def config(
        self, side: Side, options: Mapping[str, Any], settings: Iterable[str] = (), scenario: str = ""
    ) -> RunConfig:
        """A run of one of the sides; `options` and `settings` are stronger. Raises `UserError`."""
        entries = tuple(Entry(own.title, own.name, own.settings) for own in self.sides)
        plan = Plan(
            entries=entries,
            scenario=scenario or self.scenario,
            seeds=self.seeds,
            rounds=self.rounds,
            settings=assignments(self.settings),
        )
        return entry_config(plan, entries[self.sides.index(side)], entries, options, settings)


class Claims(Part):
    """The whole file."""

    claims: tuple[Claim, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _each_once(self) -> "Claims":
        names = [claim.method.name for claim in self.claims]
        if len({*names}) < len(names):
            raise ValueError("a method has one claim, by which it is known on the command line")
        return self


def load_claims(file: Path = DEMO, only: Iterable[str] = (), option: str = "--only") -> list[Claim]:
    """The claims of the demo; of these methods alone where any are given, by the command line's `option`.

    Raises `UserError` for a method without a claim, and for a file that does not fit.
    """
    claims = parsed(file, Claims).claims
    by_method = {claim.method.name: claim for claim in claims}
    wanted = list(dict.fromkeys(only))
    if strange := [name for name in wanted if name not in by_method]:
        raise UserError(f"{option}: {unknown('claim', strange[0], by_method)}")
    return [by_method[name] for name in wanted or by_method]


def _column(found: Selected, column: str, task: PredictionTask) -> float | None:
    return {**found.values, **measures(found, (), task.headline, task.others)}.get(column)


@dataclass(frozen=True)
class Measured:
    """A method's runs for a claim, by seed."""

    side: Side
    outcomes: Sequence[Outcome]

    def numbers(self, column: str) -> Numbers:
        """A measure by seed, of the model that counts after the last round; None where a run has trouble."""
        finals = [outcome.selected("final") for outcome in self.outcomes]
        task = self.outcomes[0].config.predicts
        return [_column(found, column, task) if found else None for found in finals]


@dataclass(frozen=True)
class Finding:
    """A claim, and what was measured."""

    claim: Claim
    measured: Sequence[Measured]
    """Every method on the claim's scenario: its own, the reference, and those beside them."""
    oracle: Measured | None
    """The reference where there is no shortcut."""
    constant: Sequence[Selected]
    """The constant predictor by seed."""

    @property
    def differences(self) -> Numbers:
        """Method less reference, seed by seed."""
        pairs = zip(self.numbers["method"], self.numbers["reference"], strict=True)
        return [None if ours is None or theirs is None else ours - theirs for ours, theirs in pairs]

    @property
    def complete(self) -> bool:
        """Whether every seed has ended on both sides."""
        return None not in self.differences

    @property
    def difference(self) -> float | None:
        """Its mean over seeds."""
        return mean(self.differences)

    @property
    def error(self) -> float | None:
        """Standard error of that mean: s/√n with n − 1 in s; None for fewer than two seeds."""
        found = [difference for difference in self.differences if difference is not None]
        return stdev(found) / sqrt(len(found)) if len(found) > 1 else None

    @property
    def holds(self) -> bool:
        """Whether all seeds are there and the method is better by more than `ENOUGH` standard errors."""
        difference, error = self.difference, self.error
        return self.complete and difference is not None and error is not None and difference > ENOUGH * error

    @property
    def verdict(self) -> str:
        """In words."""
        return "holds" if self.holds else "does not hold" if self.complete else "failed"

    @property
    def numbers(self) -> dict[str, Numbers]:
        """The claim's column: of `method`, `reference`, `constant`, and `oracle` where it was run."""
        column = self.claim.column
        sides = {"method": self.measured[0], "reference": self.measured[1], "oracle": self.oracle}
        found = {name: own.numbers(column) for name, own in sides.items() if own}
        return {**found, "constant": [_column(one, column, self.claim.task) for one in self.constant]}

    @property
    def titles(self) -> dict[str, str]:
        """How people call them, in the order in which they are shown."""
        ours, theirs = self.claim.method.title, self.claim.reference.title
        titles = {"method": ours, "reference": theirs, "constant": "a constant"}
        return titles | ({"oracle": f"{theirs}, no shortcut"} if self.oracle else {})

    @property
    def troubles(self) -> list[str]:
        """A sentence for each run that is in no number, and for each client whose replies were left out."""
        every = [*self.measured, *([self.oracle] if self.oracle else [])]
        return troubles_of(one for own in every for one in own.outcomes)


def run_demo(claims: Sequence[Claim], out: Path, jobs: int, watch: Watch = lambda _: None) -> list[Finding]:
    """Run what is missing, and put the numbers together.

    Raises `UserError` for what the user can put right, `RunStopped` if a worker process dies.
    """
    runs = [
        [claim.config(side, {"seed": seed}, scenario=scenario) for seed in range(claim.seeds)]
        for claim in claims
        for side, scenario in _runs(claim)
    ]
    outcomes = map(readable, run_all([config for own in runs for config in own], out, jobs, watch))
    from perennial.server.study.constant import constant_predictor  # with PyTorch

    findings = []
    for claim in claims:
        measured = [Measured(side, list(islice(outcomes, claim.seeds))) for side, _ in _runs(claim)]
        constant = [constant_predictor(run.config, run.config.seed) for run in measured[0].outcomes]
        oracle = measured.pop() if claim.oracle else None
        findings.append(Finding(claim, measured, oracle, constant))
    return findings


def chance(seeds: int) -> float:
    """How often a claim would hold if both methods were the same: P(t > `ENOUGH`), n − 1 degrees of freedom."""
    from scipy.stats import t

    return float(t.sf(ENOUGH, seeds - 1))


# ---------------------------------------------------------------------- what people see


def seeds_line(findings: Iterable[Finding]) -> str:
    """What the verdicts rest on."""
    counts = sorted({finding.claim.seeds for finding in findings})
    cases = ", ".join(f"{100 * chance(count):.0f} of 100 with {count} seeds" for count in counts)
    return (
        f"holds: the difference is more than {ENOUGH:g} standard errors, seed by seed. These are few seeds: two "
        f"methods that are the same would pass in about {cases}."
    )


def demo_table(findings: Sequence[Finding]) -> Table:
    """A row for each claim."""
    table = Table(
        title="what the methods claim, measured here",
        caption="on test data after the last round, accuracies in %, mean over seeds; difference ± its standard "
        "error; no shortcut: the reference on data without it",
        show_lines=True,
    )
    table.add_column("claim", min_width=30, max_width=50)
    table.add_column("with", no_wrap=True)
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("difference", justify="right", no_wrap=True)
    for finding in findings:
        claim, titles = finding.claim, {**finding.titles}
        if finding.oracle:
            titles["oracle"] = "no shortcut"
        verdict = Text(finding.verdict, style="bold" if finding.holds else "bold yellow")
        table.add_row(
            Text(claim.claim).append(f"\n{claim.scenario}, {claim.column}", style="dim"),
            Text("\n".join(titles.values())),
            Text("\n".join(claim.measure.text(mean(finding.numbers[name])) for name in titles)),
            Text(difference_text(finding, "\n±") + "\n").append(verdict),
        )
    return table


def difference_text(finding: Finding, sign: str = " ± ") -> str:
    """In points of percent where the measure is a share, with its standard error."""
    measure = finding.claim.measure
    error = "" if finding.error is None else f"{sign}{measure.factor * finding.error:.2f}"
    return points(finding.difference, measure) + error


def points(difference: float | None, measure: Measure) -> str:
    """A difference, of a share in points of percent; a dash where there is none."""
    return "–" if difference is None else f"{measure.factor * difference:+.2f}"


def demo_json(findings: Iterable[Finding]) -> dict[str, Any]:
    """The same as plain data; accuracies as fractions, by seed where they are lists."""
    return {
        "claims": [
            {
                "method": claim.method.name,
                "claim": claim.claim,
                "scenario": claim.scenario,
                "rounds": claim.rounds,
                "seeds": list(range(claim.seeds)),
                "column": claim.column,
                "reference": claim.reference.name,
                "accuracy": {name: mean(values) for name, values in finding.numbers.items()},
                "accuracy_by_seed": finding.numbers,
                "difference": finding.difference,
                "standard_error": finding.error,
                "holds": finding.holds,
                "found": claim.found,
                "troubles": finding.troubles,
            }
            for finding in findings
            for claim in [finding.claim]
        ]
    }


# ---------------------------------------------------------------------- inside


def _runs(claim: Claim) -> list[tuple[Side, str]]:
    """What is run for a claim, and on which scenario; the reference without the shortcut last."""
    oracle = [(claim.reference, claim.oracle)] if claim.oracle else []
    return [(side, claim.scenario) for side in claim.sides] + oracle
