"""What a run logs, passed on to TensorBoard, MLflow or Weights & Biases as it goes: local, optional, imported when
asked for."""

import importlib
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from perennial.common.config import RunConfig
from perennial.common.utils.errors import UserError
from perennial.common.utils.suggestions import unknown
from perennial.server.run.folder import RunFolder
from perennial.server.run.progress import Progress, Watcher
from perennial.server.selection.summary import Evaluation, Row, overall_of

Write = Callable[[int, Mapping[str, float]], None]
"""Takes a round and its numbers by name."""


TRACKERS = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
"""Each one's module."""


def require(kind: str | None) -> Any:
    """The module that `--track` asks for. Raises `UserError` if it is not installed."""
    if kind is None:
        return None
    if kind not in TRACKERS:
        raise UserError(f"track: {unknown('tracker', kind, TRACKERS)}")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves this machine unasked
    try:
        return importlib.import_module(TRACKERS[kind])
    except ImportError as error:
        raise UserError(
            f"--track {kind} needs the extra perennial[{kind}], which is not installed ({error}); "
            f"in the project's folder: uv sync --inexact --extra {kind}"
        ) from None


@contextmanager
def tracking(kind: str | None, path: Path, config: RunConfig, watch: Watcher) -> Iterator[Watcher]:
    """A watcher that also passes on what the run folder's log has gained; without a kind just `watch`.

    It reads the log, so it is the same on every runtime. Raises `UserError` if the tracker cannot start.
    """
    if kind is None:
        yield watch
        return
    module = require(kind)
    writer = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}[kind]
    with ExitStack() as stack:
        try:
            write = stack.enter_context(writer(module, path, config))
        except Exception as error:  # a place that cannot be written, a server that does not answer
            raise UserError(f"--track {kind} cannot start ({_line(error)})") from None
        follow = _follower(RunFolder(path), write, config)

        def both(progress: Progress) -> None:
            follow()
            watch(progress)

        yield both
        follow()  # on Flower's runtimes the last evaluation may have come after the last round was told


def scalars(rows: Iterable[Row], config: RunConfig) -> Iterator[tuple[int, dict[str, float]]]:
    """What trackers draw: training, traffic and clients left out of a round; the headline measure if it was
    evaluated."""
    sites, task = config.sites_with_data, config.predicts
    evaluations: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if row["kind"] == "round":
            trained = {f"train/{name}": value for name, value in row["metrics"].items() if "/" not in name}
            traffic = {f"bytes/{way}": row[f"bytes_{way}"] for way in ("down", "up")}
            yield row["round"], {**trained, **traffic, "clients/left out": len(row["left_out"])}
        elif row["kind"] == "evaluation":
            evaluations.setdefault((row["round"], row["model"]), []).append(row)
    for (number, model), own in evaluations.items():
        found = Evaluation(own, task).summary()
        values = found[task.headline.name]
        named = {**overall_of(found, sites, values, task.headline), "held-out": found["validation"]}
        named |= {f"test {environment}": value for environment, value in values.items()}
        yield number, {f"{model}/{name}": value for name, value in named.items() if value is not None}


# ---------------------------------------------------------------------- inside


def _follower(folder: RunFolder, write: Write, config: RunConfig) -> Callable[[], None]:
    offset, waiting, working = 0, list[Row](), True

    def follow() -> None:
        nonlocal offset, waiting, working
        rows, offset = folder.rows_after(offset)
        waiting += rows
        # The evaluations of a round lie between its row and that of their traffic: never half of them.
        ends = [index for index, row in enumerate(waiting, 1) if row["kind"] in ("round", "evaluation-traffic")]
        whole, waiting = waiting[: max(ends, default=0)], waiting[max(ends, default=0) :]
        try:
            for number, values in scalars(whole, config) if working else ():
                write(number, values)
        except Exception as error:  # whatever ails a tracker, the run is worth more
            working = False
            print(f"tracking has stopped, the run goes on: {_line(error)}", file=sys.stderr, flush=True)

    return follow


@contextmanager
def _tensorboard(module: Any, path: Path, config: RunConfig) -> Iterator[Write]:
    """Events in the run folder; `tensorboard --logdir runs` shows all runs."""
    with module.SummaryWriter(log_dir=str(path / "tensorboard")) as writer:
        writer.add_text("config", f"```toml\n{config.toml()}\n```")

        def write(number: int, values: Mapping[str, float]) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, number)

        yield write


@contextmanager
def _mlflow(module: Any, path: Path, config: RunConfig) -> Iterator[Write]:
    """A run in MLflow's own default place (`mlflow.db` here, or MLFLOW_TRACKING_URI); `mlflow ui` shows it."""
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    client, entities, scenario = module.MlflowClient(), module.entities, config.scenario.name
    experiment = client.get_experiment_by_name(scenario)
    place = experiment.experiment_id if experiment else client.create_experiment(scenario)
    run = client.create_run(place, run_name=path.name, tags={"run folder": str(path.resolve())}).info.run_id
    client.log_batch(run, params=[entities.Param(name, value) for name, value in config.flat().items()])

    def write(number: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        # MLflow has no `=` in names, and environments do.
        clean = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in values.items()}
        client.log_batch(run, [entities.Metric(name, value, now, number) for name, value in clean.items()])

    try:
        yield write
    except BaseException:
        client.set_terminated(run, "FAILED")
        raise
    client.set_terminated(run)


@contextmanager
def _wandb(module: Any, path: Path, config: RunConfig) -> Iterator[Write]:
    """A run of Weights & Biases in the run folder, offline; `wandb sync` sends it, if you want that."""
    run = module.init(
        project=config.scenario.name,
        name=path.name,
        dir=str(path),
        config=config.flat(),
        mode="offline",
        settings=module.Settings(silent=True),
    )

    def write(number: int, values: Mapping[str, float]) -> None:
        run.log(dict(values), step=number)

    try:
        yield write
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
