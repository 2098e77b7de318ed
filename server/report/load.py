"""Run folders as they are read for a report. What cannot be read is named and skipped."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isfinite, nan
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from perennial.common.config import RunConfig
from perennial.common.tasks import Measure, PredictionTask
from perennial.common.tasks.base import Summed
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import sentence
from perennial.server.run.folder import RunFolder
from perennial.server.selection.summary import Evaluation, Row, by_part, parts, summarise
from perennial.server.study.batch import Selected
from perennial.server.study.run_names import NO_NUMBER, name_without_code


@dataclass(frozen=True)
class Curve:
    """A model over the rounds in which it was evaluated."""

    rounds: Sequence[int]
    sent: Sequence[float]
    """Bytes of all training exchanges so far, both ways, all clients."""
    value: Sequence[float]
    held_out: Sequence[float]
    loss: Sequence[float]
    last: Mapping[str, Mapping[str, Summed]]
    """After the last of the rounds, the task's sums over test samples by client and environment."""


@dataclass(frozen=True)
class Run:
    """A run folder that could be read."""

    path: Path
    config: RunConfig
    settings: Mapping[str, str]
    """All that the result depends on but the seed: settings by dotted names, digests of files of one's own."""
    models: Mapping[str, Mapping[str, Selected]]
    """By model and selection; of a run with `test_sites` each model twice, over these and over the others."""
    curves: Mapping[str, Curve]
    clusters: Mapping[int, Mapping[str, int]]
    seconds: float
    down: float
    up: float
    left_out: int
    versions: str
    code: str
    """The version of the code in the name that a study gave the folder; empty: it has another name."""
    unfinished: str = ""
    """How far it is; empty: it has ended. It is a line of its own, beside those of other seeds."""


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Run folders, or what is left of them, at or below the given folders. Raises `UserError` if one has none."""
    found: dict[Path, None] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder")
        below = list(_runs_below(folder))
        if not below:
            raise UserError(f"{folder} holds no run folder (one has a config.toml and a metrics.jsonl)")
        found |= dict.fromkeys(below)
    return list(found)


def _runs_below(folder: Path) -> Iterable[Path]:
    # Other things have a config.toml too, and a damaged run may have lost one of its files.
    log, config, summary = (folder / name for name in ("metrics.jsonl", "config.toml", "summary.json"))
    if log.is_file() or (config.is_file() and summary.is_file()):
        yield folder
        return
    for below in sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()):
        yield from _runs_below(below)


def load_runs(paths: Iterable[Path], oracle: bool = False) -> tuple[list[Run], list[str]]:
    """The runs that can be read, and a sentence for each that cannot, or that says again what another one says.

    What a study makes beside them, such as the references of `split`, is there if nothing else is.
    """
    runs: dict[tuple[object, ...], Run] = {}
    skipped = []
    for path in paths:
        try:
            run = load(path, oracle)
        except UserError as error:
            skipped.append(str(error) if str(path) in str(error) else f"{path}: {error}")
            continue
        # Twice the same seed is no second seed: it would make the standard deviation smaller than it is. The newer
        # one counts: code of ours that has changed since is in no configuration.
        key = (run.config.seed, *run.settings.items())
        other = runs.setdefault(key, run)
        if other is not run:
            older, runs[key] = sorted((run, other), key=_written)
            skipped.append(f"{older.path} has the configuration and the seed of {runs[key].path}, which counts")
    named = sorted((key for key, run in runs.items() if run.code), key=lambda key: _written(runs[key]))
    newest = {key[1:]: runs[key] for key in named}  # whatever the seed
    for key, run in list(runs.items()):
        if run.code and run.code != (by := newest[key[1:]]).code:
            skipped.append(f"{run.path} was made by other code than {by.path}, which is newer; no mean has both")
            del runs[key]
    methods = [run for run in runs.values() if run.config.method.listed]
    return methods or list(runs.values()), skipped


def _written(run: Run) -> float:
    return (run.path / ("metrics.jsonl" if run.unfinished else "summary.json")).stat().st_mtime


def load(path: Path, oracle: bool = False) -> Run:
    """A run from its folder. Raises `UserError` if it is damaged, unfinished or of another version."""
    folder = RunFolder.open(path)
    config, (summary, rows, unfinished) = folder.config(), folder.so_far()
    try:
        run = _run(path, config, summary, rows, oracle)
        if not unfinished:
            return run
        so_far = f"after {summary['rounds']} of {config.rounds} rounds"
        return replace(run, unfinished=so_far, settings={**run.settings, "so far": so_far})
    except ValidationError as error:
        raise UserError(f"its summary.json is damaged or of another version ({sentence(error)})") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"its files are damaged or of another version ({type(error).__name__}: {error})") from None


def _run(path: Path, config: RunConfig, summary: dict[str, Any], rows: list[Row], oracle: bool) -> Run:
    known = {"method": config.method.name, "scenario": config.scenario.name, "seed": config.seed}
    for name, value in known.items():
        if summary[name] != value:
            raise ValueError(f"summary.json says {name} {summary[name]!r}, config.toml {value!r}")
    trained = [row for row in rows if row["kind"] == "round"]
    if [row["round"] for row in trained] != list(range(1, summary["rounds"] + 1)):
        raise ValueError(f"metrics.jsonl does not hold the {summary['rounds']} rounds of summary.json")
    found = summary["models"]
    if oracle:
        again = summarise(config, rows, seconds=0.0, oracle=True)["models"]
        found = {
            model: {**chosen, "oracle": again[model]["oracle"]} if "oracle" in again[model] else chosen
            for model, chosen in found.items()
        }
    apart = by_part(config, {model: found[model] for model in config.method.evaluates}, rows)
    sent = list(accumulate(float(row["bytes_down"] + row["bytes_up"]) for row in trained))
    task = config.predicts
    return Run(
        path=path,
        config=config,
        settings={name: value for name, value in config.flat().items() if name not in {*NO_NUMBER, "seed"}}
        | {name: digest[:8] for name, digest in RunFolder(path).inputs().items()},
        models={
            _named(model, part): {
                selection: _selected(facts, config.predicts.headline) for selection, facts in own.items()
            }
            for part, models in apart.items()
            for model, own in models.items()
        },
        curves={
            _named(model, part): _curve(model, [row for row in rows if row.get("client") in clients], sent, task)
            for part, clients in parts(config).items()
            for model in config.method.evaluates
        },
        clusters={
            int(row["round"]): {str(client): int(cluster) for client, cluster in row["labels"].items()}
            for row in rows
            if row["kind"] == "clusters"
        },
        seconds=float(summary["wall_seconds"]),
        down=float(summary["bytes_per_client_and_round"]["down"]),
        up=float(summary["bytes_per_client_and_round"]["up"]),
        left_out=sum(int(entry["replies"]) for entry in summary["left_out"].values()),
        versions=", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items()),
        code=path.name.removeprefix(own) if path.name.startswith(own := f"{name_without_code(config)}-") else "",
    )


def _named(model: str, part: str) -> str:
    return f"{model}, {part}" if part else model


def _selected(facts: Any, measure: Measure) -> Selected:
    """Raises `ValidationError`, and `ValueError` for a value that the measure cannot have."""
    found = Selected.model_validate(facts)
    numbers = {name: getattr(found, name) for name in ("worst", "average", "pooled", "validation")}
    for name, value in (*numbers.items(), *found.values.items()):
        if value is not None and not (0 <= value <= 1 if measure.percent else isfinite(value)):
            right = "from 0 to 1" if measure.percent else "finite"
            raise ValueError(f"the {measure.title} {name} is {value:g}, and must be {right}")
    return found


def _curve(model: str, rows: Iterable[Row], sent: Sequence[float], task: PredictionTask) -> Curve:
    by_round: dict[int, list[Row]] = {}
    for row in rows:
        if row["kind"] == "evaluation" and row["model"] == model:
            by_round.setdefault(row["round"], []).append(row)
    evaluations = [Evaluation(own, task) for own in by_round.values()]
    summaries = [own.summary() for own in evaluations]
    value, held_out, loss = (
        [nan if (value := found[name]) is None else float(value) for found in summaries]
        for name in ("average", "validation", "loss")
    )
    last = evaluations[-1].sums if evaluations else {}
    for own in last.values():
        for summed in own.values():
            task.must_add_up(*summed)
    return Curve(list(by_round), [sent[number - 1] for number in by_round], value, held_out, loss, last)
