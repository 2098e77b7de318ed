"""How well `split` chooses, on scenarios whose test environments we have: what it loses, and whether it harms.

Nothing here chooses on test data but the oracle, which is what the others are compared with.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from perennial.common.config import RunConfig, load_config
from perennial.common.utils.files import write_text
from perennial.common.utils.locks import locked_folder
from perennial.server.results.formatting import percent
from perennial.server.selection.split_rule import VERSION, Select
from perennial.server.study.batch import Outcome, Standing, Watch, read_lines, readable, run_all, troubles_of
from perennial.server.study.choose import SPLIT_SILENT, choose, no_references, with_references
from perennial.server.study.compare import mean, measures
from perennial.server.study.leave_one_out import LeftOut, leave_one_out
from perennial.server.study.sweep import trials

NAME = "selection"
FILE = f"{NAME}-rule-{VERSION}.jsonl"
"""Of the cases that are kept, one a line; `selection.jsonl` has those of the rule's first version."""
Key = tuple[str, str, int, int, int]
TITLE = "What the selection split loses to the test oracle, and whether it harms where there is no shortcut"
METHODS = ("fedsdr", "fedpin", "irm", "perinvfl", "groupdro", "fediir", "drfa", "f-fl-games", "fedavg")
ORACLE = "-oracle"
HEADINGS = {"held_out": "held-out", "left_out": "leave-one-out"}
COLOURED = ("cmnist", "cfmnist", "rc-mnist", "color-mnist-ilc")


@dataclass(frozen=True)
class Size:
    """What is run."""

    methods: tuple[str, ...] = METHODS
    scenarios: tuple[str, ...] = COLOURED
    """Each with its `-oracle` variant, which has no shortcut."""
    rounds: int = 60
    seeds: int = 3
    trials: int = 12


QUICK = Size(("fedsdr", "fedavg"), ("colored-digits",), rounds=20, seeds=1, trials=3)


@dataclass(frozen=True)
class Case:
    """A method on a scenario with one seed: the test worst of what each way of choosing chose, as fractions."""

    method: str
    scenario: str
    seed: int
    default: float
    held_out: float
    split: float
    """Held-out data's, where `split` does not speak."""
    oracle: float
    """Of the trial that is best on test data."""
    by: str
    sentence: str
    constant: float
    """Of the constant predictor, on the test data."""
    rounds: int
    trials: int
    left_out: float | None = None
    """By leaving one environment out, where that can judge."""
    why_not: str = ""
    """Why it cannot."""

    @property
    def key(self) -> Key:
        """What there is one case of."""
        return self.method, self.scenario, self.seed, self.rounds, self.trials

    @property
    def coloured(self) -> bool:
        """Whether there is a shortcut."""
        return not self.scenario.endswith(ORACLE)

    @property
    def whole(self) -> bool:
        """Whether leaving one environment out was tried, which is of interest where there is a shortcut."""
        return self.left_out is not None or bool(self.why_not) or not self.coloured

    @property
    def shut(self) -> bool:
        """Whether `split` does not speak. References alone decide that, so it holds for every method."""
        return self.sentence.startswith(SPLIT_SILENT)

    @property
    def choice(self) -> bool:
        """Whether any trial is better than a constant, so that there is something to choose."""
        return self.oracle > self.constant

    @property
    def regret(self) -> float:
        """What the oracle's choice is better by."""
        return self.oracle - self.split

    @property
    def harm(self) -> float:
        """What held-out data's choice is better by."""
        return self.held_out - self.split


def measure(
    size: Size,
    out: Path,
    jobs: int,
    watch: Watch,
    data_root: str | None = None,
    device: str | None = None,
    results: Path | None = None,
) -> tuple[list[Case], list[str]]:
    """Every case, scenario by scenario, and a sentence for each that has no trial to be judged.

    Without a shortcut `split` should not speak. Where the first method shows that it does not, every method's
    choice is held-out data's, and the others are not run.

    Runs that are there are not run again. With `results`, cases of this size that its file holds are not run, and
    each new one is kept there at once: so the study can go on without the runs, on another machine, and several
    processes can share it. Raises as `run_all` does, and `UserError` for a file that does not fit.
    """
    there = {case.key: case for case in read_lines(results / FILE, Case)} if results else {}
    cases, troubles = list[Case](), list[str]()
    for scenario, method in _pairs(size):
        keys = {seed: (method, scenario, seed, size.rounds, size.trials) for seed in range(size.seeds)}
        made = [case for key in keys.values() if (case := there.get(key)) and case.whole]
        cases += made
        done = {case.seed for case in made}
        done |= {
            case.seed for case in there.values() if case.scenario == scenario and case.shut and not case.coloured
        }
        missing = [seed for seed in keys if seed not in done]
        if not missing:
            continue
        options = {"method": method, "scenario": scenario, "rounds": size.rounds}
        options |= {"data_root": data_root, "device": device}
        tried = [trials(load_config(options={**options, "seed": seed}), size.trials) for seed in missing]
        every = [config for configs in tried for config in configs]
        watch(Standing(0, 0, 0, 0, doing=f"{method} on {scenario}: {len(every)} runs and their references"))
        configs, why_not = with_references(every, out, jobs, watch)
        if why_not and not any(
            map(no_references, every)
        ):  # the folder of a run of references is damaged, or it stopped
            troubles.append(f"{method} on {scenario}: {why_not}")
            continue
        outcomes = list(map(readable, run_all(configs, out, jobs, watch)))
        troubles += troubles_of(outcomes)
        left, leave_not = list[LeftOut | None](), ""
        if not scenario.endswith(ORACLE):
            left, leave_not = leave_one_out(every, out, jobs, watch)
        new = dict[Key, Case]()
        for number, seed in enumerate(missing):
            part = slice(number * size.trials, (number + 1) * size.trials)
            constant = _constant(every[0], seed)
            if case := judge(outcomes[part], scenario, seed, constant, why_not, left[part], leave_not):
                new[case.key] = case
            else:
                troubles.append(f"{method} on {scenario}, seed {seed}: no trial can be judged")
        there |= _kept_with(new, results) if results else new
        cases += new.values()
    return cases, troubles


def _kept_with(new: dict[Key, Case], results: Path) -> dict[Key, Case]:
    """Add cases to the file of a folder; all that it then has, those that other processes added meanwhile, too."""
    results.mkdir(parents=True, exist_ok=True)
    with locked_folder(results):
        every = {case.key: case for case in read_lines(results / FILE, Case)} | new
        write_text(results / FILE, "".join(f"{json.dumps(asdict(case))}\n" for case in every.values()))
    return every


def _pairs(size: Size) -> Iterator[tuple[str, str]]:
    for scenario in size.scenarios:
        for method in size.methods:
            yield scenario, method
        for method in reversed(size.methods):  # FedAvg, the last, is the cheapest to ask whether split speaks
            yield scenario + ORACLE, method


def judge(
    outcomes: Sequence[Outcome],
    scenario: str,
    seed: int,
    constant: float,
    why_not: str = "",
    left: Sequence[LeftOut | None] = (),
    leave_not: str = "",
) -> Case | None:
    """One case from its trials, and what leaving one environment out said of them; None where none can be judged.

    `why_not`: why there are no references; `leave_not`: why no environment was left out.
    """
    split, held_out = choose(outcomes, Select.by_split, why_not), choose(outcomes, Select.held_out)
    leaving = choose(outcomes, Select.leave_one_out, leave_not, left)
    finals = {number: own.selected("final") for number, own in enumerate(outcomes)}
    worst = {number: own.worst for number, own in finals.items() if own and own.worst is not None}
    if split.trial is None or held_out.trial is None or 0 not in worst:
        return None
    config = outcomes[0].config
    return Case(
        config.method.name,
        scenario,
        seed,
        default=worst[0],
        held_out=worst[held_out.trial],
        split=worst[split.trial],
        oracle=max(worst.values()),
        by=split.by.value,
        sentence=split.sentence,
        constant=constant,
        rounds=config.rounds,
        trials=len(outcomes),
        left_out=worst[leaving.trial] if leaving.trial is not None and leaving.left_out else None,
        why_not=leaving.sentence,
    )


def _constant(config: RunConfig, seed: int) -> float:
    from perennial.server.study.constant import constant_predictor  # with PyTorch

    return measures(constant_predictor(config, seed))["worst"]


def regret_table(cases: Sequence[Case]) -> Table:
    """Scenarios with a shortcut: what `split` loses to the oracle."""
    coloured = [case for case in cases if case.coloured]
    table = _table("Regret", ("default", "held_out", "left_out", "split", "oracle", "regret"), coloured)
    choices = [case.regret for case in coloured if case.choice]
    table.caption = (
        "test worst in % of the trial chosen, after the last round, mean over seeds; oracle: chosen on test data; "
        "leave-one-out: –, where no environment can be left out; regret where some trial is better than a "
        f"constant: {percent(mean(choices))} in the mean over {len(choices)} cases"
    )
    return table


def harm_table(cases: Sequence[Case]) -> Table:
    """Scenarios without one: what `split` loses to held-out selection."""
    others = [case for case in cases if not case.coloured]
    table = _table("No harm", ("default", "held_out", "split", "oracle", "harm"), others)
    for scenario in dict.fromkeys(case.scenario for case in others):
        if seeds := {case.seed for case in others if case.scenario == scenario and case.shut}:
            table.add_row(scenario, "all others", "–", "–", "–", "–", "0.00", f"0 of {len(seeds)}")
    largest = percent(max((case.harm for case in others), default=None))
    table.caption = (
        f"as above; harm: held-out less split; the largest of a single seed is {largest}; where split does not "
        "speak for one method it does for none, and the choice is held-out data's: all others were not run"
    )
    return table


def regret_figure(cases: Sequence[Case]) -> str:
    """Scenarios with a shortcut: what was chosen against what test data would choose, as a whole SVG file."""
    from perennial.server.results.figures import points_figure  # matplotlib takes its time

    coloured = [case for case in cases if case.coloured]
    chosen = {"held-out": "held_out", "leave-one-out": "left_out", "split": "split"}
    points = {
        f"chosen by {way}": [
            (100 * case.oracle, 100 * value) for case in coloured if (value := getattr(case, name)) is not None
        ]
        for way, name in chosen.items()
    }
    constant = 100 * fmean(case.constant for case in coloured) if coloured else 50.0
    axes = "worst test environment of the best trial (%)", "of the trial chosen (%)"
    return points_figure(points, *axes, constant, "a constant predictor")


def regret_json(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Every case as plain data, fractions instead of percent."""
    return [
        {**asdict(case), "regret": case.regret, "harm": case.harm, "something to choose": case.choice}
        for case in cases
    ]


def _table(title: str, ways: Sequence[str], cases: Sequence[Case]) -> Table:
    table = Table("scenario", "method", title=title)
    for way in (*ways, "split spoke"):
        table.add_column(HEADINGS.get(way, way), justify="right")
    for scenario, method in dict.fromkeys((case.scenario, case.method) for case in cases):
        own = [case for case in cases if (case.scenario, case.method) == (scenario, method)]
        cells = [percent(mean(getattr(case, way) for case in own)) for way in ways]
        spoke = sum(case.by == Select.by_split for case in own)
        table.add_row(scenario, method, *cells, f"{spoke} of {len(own)}")
    return table
