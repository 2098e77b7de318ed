"""One run: begun, continued, opened. `perennial run` and `perennial resume` call the same functions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from perennial.common.utils.errors import Stop, UserError
from perennial.common.utils.files import path_of
from perennial.server.run.progress import QUIET, Progress, RoundDone, Watched, Watcher

if TYPE_CHECKING:
    from perennial.common.config import RunConfig
    from perennial.common.data.scenario import Scenario
    from perennial.server.deployment.submission import Connection
    from perennial.server.in_memory import InMemory
    from perennial.server.local import LocalRuntime
    from perennial.server.results.result import Result
    from perennial.server.run.folder import Checkpoint, RunFolder
    from perennial.server.simulation import Simulation

    Link = AbstractContextManager[Connection | Simulation | None]

S = TypeVar("S")
Settings = Mapping[str, Any] | Iterable[str]
"""By name, as in `{"learning_rate": 0.1, "scenario.clients": 4}`, or as the command line's `key=value`."""
POOL = Path("runs/studies")
"""Where the runs of studies are, unless told otherwise; studies may share it."""
MOST = 10_000
"""Seeds, trials and runs at a time; whoever asks for more has mistyped."""
FIRST = "demo/fedsdr"
"""The recipe of a run without a method, scenario, recipe or file."""


def run(
    method: str | None = None,
    scenario: str | Scenario | InMemory | None = None,
    *,
    rounds: int | None = None,
    seed: int | None = None,
    settings: Settings = (),
    config: Path | str | None = None,
    recipe: str | None = None,
    runtime: str | None = None,
    device: str | None = None,
    data_root: Path | str | None = None,
    out: Path | str | None = None,
    watch: Watcher | None = None,
    track: str | None = None,
    superlink: str = "deployment",
    ca: Path | str | None = None,
    insecure: bool = False,
) -> Result:
    """Run a method on a scenario, into a new run folder; what came of it.

    Every argument means what the option of `perennial run` with its name means. `settings` are those of `--set`.
    `watch` is told of every round. Data in memory are written into `data_root`, or into the run folder.

    Raises `UserError` with one sentence for what the caller can put right, and `RunStopped` where too few clients
    answered; the last checkpoint then stands, and `resume` goes on from it.
    """
    from perennial.server.results.result import Result
    from perennial.server.run.trackers import require

    require(track)
    complete = configured(
        method,
        without_data(scenario),
        config=config,
        recipe=recipe,
        settings=settings,
        rounds=rounds,
        seed=seed,
        runtime=runtime,
        device=device,
        data_root=data_root,
    )
    path = vacant(complete, out)
    if root := save_in_memory(scenario, complete.data_root, path):
        complete = complete.model_copy(update={"data_root": root})
    begin(complete, path, connection(complete, path, superlink, ca, insecure), watched(watch), track)
    return Result(path)


def resume(
    folder: Path | str,
    *,
    watch: Watcher | None = None,
    superlink: str = "deployment",
    ca: Path | str | None = None,
    insecure: bool = False,
) -> Result:
    """Continue a run from its last checkpoint, as if it had never stopped. Raises as `run` does."""
    from perennial.server.results.result import Result

    opened = unfinished(folder)
    go_on(opened, connection(opened.config(), opened.path, superlink, ca, insecure), watched(watch))
    return Result(opened.path)


def load(folder: Path | str) -> Result:
    """What came of the run in a run folder. Raises `UserError` if it is none."""
    from perennial.server.results.result import Result

    return Result(path_of(folder, "folder"))


def plugin(module: str) -> None:
    """Take up a method, model or scenario of your own, as `--plugin` does: of the current folder, or installed.

    Raises `UserError`, also where the module's file has changed since this process took it up.
    """
    from perennial.common import plugins
    from perennial.server.run.input_files import must_be_as_imported, plug_in_digests

    plugins.plugin(module)
    must_be_as_imported(plug_in_digests([module]))


# ---------------------------------------------------------------------- the parts, for the command line


def configured(
    method: str | None = None,
    scenario: str | Scenario | None = None,
    *,
    config: Path | str | None = None,
    recipe: str | None = None,
    settings: Settings = (),
    say: Callable[[str], object] = lambda _: None,
    **options: Any,
) -> RunConfig:
    """The complete configuration of a run. `say` is told what has to be known of it. Raises `UserError`."""
    from perennial.common.config import load_config

    options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    if options.get("data_root") is not None:
        options["data_root"] = str(path_of(options["data_root"], "data_root"))
    texts = as_texts(settings)
    must_be_said_once(options, texts)
    if recipe is not None and not (isinstance(recipe, str) and recipe):
        raise UserError(f"recipe: {recipe!r:.100} is not possible; give a name, such as {FIRST!r}")
    chosen = {"config": config, "method": method, "scenario": scenario}
    given = [f"--{name} {value}" for name, value in chosen.items() if value is not None]
    if recipe is None and given:
        file = path_of(config, "config") if config is not None else None
        return _seen(load_config(file, {"method": method, "scenario": scenario, **options}, texts, say))
    if given:
        raise UserError(
            f"--recipe {recipe} is not possible with {given[0]}; it has a method and a scenario, and --set, "
            "--rounds and --seed change the rest"
        )
    from perennial.server.papers.recipes import recipe_config

    complete, caution = recipe_config(recipe or FIRST, options, texts)
    if caution:
        say(caution)
    return complete


def _seen(config: RunConfig) -> RunConfig:
    """A single run that would be evaluated once, at its end, is evaluated in every round, or there is no curve.

    Where nothing else is said of it. A run behind a privacy mechanism tells no more than it did.
    """
    said = {"evaluate_every", "patience"} & config.model_fields_set
    if said or config.rounds > config.evaluate_every or config.privacy.mechanism != "none":
        return config
    return config.model_copy(update={"evaluate_every": max(1, config.rounds // 20)})


def must_be_said_once(options: Mapping[str, Any], settings: Iterable[str]) -> None:
    """Raises `UserError` for an option, other than a seed of 0, that a setting gives as well."""
    for setting in settings:
        if options.get(key := setting.partition("=")[0].strip()):
            raise UserError(f"{key}: {options[key]} is given, and {setting!r:.100} as a setting; give it once")


def as_texts(settings: Settings) -> tuple[str, ...]:
    """Settings as the command line has them, `key=value`. Raises `UserError` for a value of no such kind."""
    if not isinstance(settings, Mapping):
        if isinstance(settings, str) or not isinstance(settings, Iterable):
            raise UserError(f"settings: {settings!r:.100} is not possible; give a dict, or a list of key=value")
        texts = tuple(settings)
        if odd := [text for text in texts if not isinstance(text, str)]:
            raise UserError(
                f"settings: {odd[0]!r:.100} is not possible in a list; write key=value, or give a dict"
            )
        return texts
    found = []
    for key, value in settings.items():
        plain = value.tolist() if hasattr(value, "tolist") else value  # NumPy's numbers and arrays
        try:
            if plain is None or (isinstance(plain, Mapping) and "." not in key):
                raise TypeError
            if isinstance(plain, Mapping):  # of one level, as TOML has it on a line
                parts = ", ".join(f"{name} = {json.dumps(value)}" for name, value in plain.items())
            found.append(f"{key}={f'{{{parts}}}' if isinstance(plain, Mapping) else json.dumps(plain)}")
        except TypeError:
            wanted = "write a number, a text, True or False, or a list of these"
            raise UserError(f"settings: {key} = {value!r:.100} is not possible; {wanted}") from None
    return tuple(found)


def vacant(config: RunConfig, out: Path | str | None) -> Path:
    """Where a new run goes. Raises `UserError` if the folder holds a run or is in use."""
    from perennial.server.run.folder import RunFolder, default_out

    path = path_of(default_out(config) if out is None else out, "out")
    if out is None:  # another run may have begun in the same second
        more = (path.with_name(f"{path.name}-{number}") for number in count(2))
        path = next(own for own in chain([path], more) if not own.exists())
    RunFolder(path).must_be_free()
    RunFolder(path).must_be_empty()
    return path


def unfinished(folder: Path | str) -> RunFolder:
    """A run folder with rounds to come. Raises `UserError`."""
    from perennial.server.run.folder import RunFolder, understood

    opened = RunFolder.open(path_of(folder, "folder"))
    rounds = opened.config().rounds
    with understood(opened.path):  # at another desk there are no checkpoints
        there = (opened.path / "summary.json").exists()
        done = max([opened.summary()["rounds"], *opened.checkpoints()]) if there else 0
    if done >= rounds:
        command = shlex.join(["perennial", "show", "run", str(folder)])
        raise UserError(f"{folder} has ended: all {rounds} rounds are done ({command})")
    return opened


def connection(
    config: RunConfig, path: Path, superlink: str, ca: Path | str | None = None, insecure: bool = False
) -> Link:
    """To the SuperLink that a run needs, a simulation's or a deployment's; to none in the local runtime."""
    if config.runtime == "deployment":
        from perennial.server.deployment.submission import connected

        return connected(superlink, path_of(ca, "ca") if ca is not None else None, insecure)
    if config.runtime == "simulation":
        from perennial.server.simulation import Simulation

        return nullcontext(Simulation(path / "flower"))
    return nullcontext()


def begin(config: RunConfig, path: Path, link: Link, watch: Watched = QUIET, track: str | None = None) -> None:
    """Carry out a whole run in a new folder. Raises as `run` does."""
    from perennial.common.models.settings import Pretrained
    from perennial.server.run.folder import RunFolder
    from perennial.server.run.trackers import tracking

    if config.runtime != "local":
        with tracking(track, path, config, watch.round) as watcher:
            _follow(config, path, link, watcher)
        return
    with _here(config, watch) as here:
        if isinstance(config.model, Pretrained) and config.model.starts_from_weights:
            from perennial.server.run.loop import start

            start(config)  # weights that do not fit are told before anything is written
        with RunFolder(path).held():
            made = RunFolder.create(path, config)
            watch.round(Progress(0, config.rounds, {}, {}))
            with tracking(track, path, config, watch.round) as watcher:
                _add_constant(here, made, here.run(made, watch=watcher))


def go_on(
    folder: RunFolder, link: Link, watch: Watched = QUIET, say: Callable[[str], object] = lambda _: None
) -> None:
    """Carry out the rest of a run. Raises as `run` does; `say` is told what has changed since it began."""
    from perennial.server.run.folder import taken_over

    config, path = folder.config(), folder.path
    if config.runtime != "local":
        from perennial.server.deployment.submission import place_of

        folder.must_be_free()
        if place_of(path) == path.resolve():  # else the checkpoints are where the run is
            # Cut as the ServerApp will cut it: whoever follows must not read what it takes away.
            folder.cut_log(_origin(folder, config, say).log_bytes)
        _follow(config, path, link, watch.round, resume=True)
        return
    from perennial.common.models.torch_state import plain_torch

    with folder.held() as died:
        if died:
            say(taken_over(died, path))
        with plain_torch(threads=1):  # the checkpoint's tensors, too
            checkpoint = _origin(folder, config, say)
            with _here(config, watch) as here:
                folder.cut_log(checkpoint.log_bytes)
                (path / "error.txt").unlink(missing_ok=True)  # of its end before, in a study
                watch.round(Progress(checkpoint.round, config.rounds, {}, {}))
                _add_constant(here, folder, here.run(folder, checkpoint, watch.round))


def watched(watch: Watcher | None) -> Watched:
    """A caller's own watcher, which is told of rounds alone."""
    return Watched(round=watch) if watch else QUIET


def without_data(scenario: S | InMemory) -> S | Scenario:
    """A scenario as configurations know it. Raises `UserError` for what is none."""
    from perennial.common.data.scenario import Scenario
    from perennial.server.in_memory import InMemory

    if isinstance(scenario, InMemory):
        return scenario.scenario
    if scenario is None or isinstance(scenario, str | Scenario):
        return scenario
    raise UserError(
        f"scenario: give a name, or what perennial.from_arrays makes of your data, not {type(scenario).__name__}"
    )


def save_in_memory(scenario: object, data_root: Path | str | None, otherwise: Path | str) -> str | None:
    """The data root, into which data in memory are written; into `otherwise` where it is None."""
    from perennial.server.in_memory import InMemory

    if isinstance(scenario, InMemory):
        return scenario.save(data_root or otherwise)
    return str(data_root) if data_root else None


# ---------------------------------------------------------------------- inside


@contextmanager
def _here(config: RunConfig, watch: Watched) -> Iterator[LocalRuntime]:
    """The run's clients in this process, whose PyTorch is theirs alone and put back.

    Raises `UserError` when the device or the data set is not there.
    """
    from perennial.common.models.torch_state import plain_torch
    from perennial.server.local import LocalRuntime  # with PyTorch and Flower, in a few seconds

    made = {"generated": "generating the data", "own": "reading the sites' data"}
    watch.doing(made.get(config.scenario.dataset, f"reading {config.scenario.dataset}"))
    with plain_torch(threads=1):
        yield LocalRuntime(config)


def _origin(folder: RunFolder, config: RunConfig, say: Callable[[str], object]) -> Checkpoint:
    """From where a run goes on; what was changed in its configuration is said."""
    from perennial.server.selection.summary import changed_line

    origin = folder.origin(config)
    if changed := folder.changes(origin, config):
        say(changed_line(origin.round + 1, changed))
    return origin


def _follow(config: RunConfig, path: Path, link: Link, watch: Watcher, resume: bool = False) -> None:
    from pydantic import TypeAdapter

    from perennial.server.deployment.submission import place_of
    from perennial.server.run.folder import RunFolder, understood

    read = TypeAdapter(RoundDone).validate_python
    with link as connected:
        assert connected  # only the local runtime has none
        if path.is_dir():
            for word in ("error.txt", "summary.json"):  # of an end before; whoever follows would take it for this
                (path / word).unlink(missing_ok=True)
        since: list[dict[str, Any]] = []
        for row in connected.execute(config, path, resume):
            since.append(row)
            with understood(path):  # which another machine may have written
                if row["kind"] != "round":
                    continue
                progress = Progress(**vars(read({**row, "rounds": config.rounds})), rows=since)
            since = []
            try:
                watch(progress)
            except Stop as stop:
                if place_of(path) != path.resolve():
                    raise UserError(
                        "watch: this run is on another machine, where Stop cannot end it; "
                        f"`perennial stop {path.name}` does, without a summary"
                    ) from None
                RunFolder(path).ask_to_stop(str(stop))


def _add_constant(here: LocalRuntime, folder: RunFolder, summary: dict[str, Any]) -> None:
    """Write the constant predictor's accuracies into the summary; the data are in this process."""
    from perennial.server.selection.summary import worst_site
    from perennial.server.study.constant import constant_summary

    found = constant_summary(here.data(), here.config.predicts)
    if found["worst"] is not None:  # there are test data
        constant = {
            "worst_site": worst_site(found["clients"]),
            "worst": found["worst"],
            "average": found["average"],
        }
        folder.write_summary({**summary, "constant": constant})
