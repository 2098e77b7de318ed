"""The name of a run's folder in a study: what its numbers depend on, and nothing else."""

import json
from functools import cache
from hashlib import sha256
from pathlib import Path

from perennial.common import plugins
from perennial.common.config import RunConfig
from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import Method
from perennial.common.models.settings import ModelSettings
from perennial.common.training import Schedule, Training
from perennial.common.utils.version import PACKAGE
from perennial.server.run.input_files import named_in, own_digests

ROOT = PACKAGE.parent
NO_NUMBER = {
    *("runtime", "device", "data_root", "deadline", "wait", "nodes", "checkpoint_every", "references"),
    *("plugins", "client_cpus", "client_gpus", "ray_address"),
}
"""Settings of a run that say where and how patiently it runs. `evaluate_every` is none of them: it decides
between which rounds `validation` chooses; nor are `quorum`, `largest` and `most_examples`: they decide which runs
stop, and on which replies a model rests. Where `references` lie is none; that there are some is in the name. What
`plugins` hold is in the version of the code."""
OF_OTHER_TARGETS = {
    "target",
    "loss",
    "target_mean",
    "target_scale",
    "target_least",
    "target_most",
    "times",
    "censoring",
}
"""Settings of own data that say something where the targets are no classes."""
LATER_PARTS: tuple[tuple[str, str, object], ...] = (
    *(("scenario", "vocabulary", 0), ("scenario", "padded", False), ("scenario", "group", {})),
    *(("scenario", name, "") for name in ("text_column", "tokenizer", "tokenizer_digest", "separator")),
    *(("scenario", "image_column", ""), ("scenario", "image_shape", [])),
    *(("scenario", name, "") for name in ("decimal", "encoding")),
    *(("model", "lora", None), ("method", "personal", "classifier")),
)
"""Settings of parts of a configuration that older runs had without saying so, and what they had."""
RULES = {"perennial.server.selection.split_rule"}
"""Modules that only choose between results: studies read the counts anew."""


def run_name(config: RunConfig) -> str:
    """`METHOD-SCENARIO-sSEED-CONFIGURATION-CODE`, two digests; the latter is also of `own_digests`."""
    method = config.method
    code = code_version(type(method), type(config.scenario), method.server(), type(config.model))
    if own := own_digests(config):
        code = sha256(" ".join([code, *own.values()]).encode()).hexdigest()[:8]
    return f"{name_without_code(config)}-{code}"


def name_without_code(config: RunConfig) -> str:
    """The part of a run's name that stays the same from version to version of the code."""
    scenario = config.scenario.name.replace(":", "-")
    return f"{config.method.name}-{scenario}-s{config.seed}-{config_digest(config)}"


def config_digest(config: RunConfig) -> str:
    """12 hex digits that change with every setting but those of `NO_NUMBER`.

    A `cohort_engine` other than the loop, which older runs had without saying so, changes the last bits.
    """
    engine = "" if config.cohort_engine == "loop" else config.cohort_engine
    rule = config.aggregation.model_dump(mode="json") if config.aggregation.rule != "mean" else {}
    stepless = config.server_optimizer.name == "none"
    later = {  # settings that older runs had without saying so: runs without have no such key
        "references": bool(config.references),
        "left_out": config.left_out,
        "test_sites": config.test_sites,
        "cohort_engine": engine,
        "aggregation": rule,
        "evaluate_clients": config.evaluates_some and config.evaluate_clients,
        "server_optimizer": {} if stepless else config.server_optimizer.model_dump(mode="json"),
        "patience": config.patience,
        "server_schedule": {} if config.server_schedule == Schedule() else config.server_schedule.model_dump(),
        "scores": "" if config.scores == "auto" else config.scores,
    }
    values = config.model_dump(mode="json", exclude=NO_NUMBER | later.keys() | Training.model_fields.keys())
    if values["scenario"].get("target") == "classes":  # so are these of own data
        values["scenario"] = {key: own for key, own in values["scenario"].items() if key not in OF_OTHER_TARGETS}
    for part, key, usual in LATER_PARTS:
        if values[part].get(key) == usual:
            values[part].pop(key, None)
    later |= config.chosen()
    values |= {name: value for name, value in later.items() if value}
    return sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


@cache
def code_version(
    method: type[Method],
    scenario: type[Scenario],
    server: str = "base",
    model: type[ModelSettings] = ModelSettings,
) -> str:
    """8 hex digits over the sources that a run of the method on the scenario imports, plug-ins among them.

    Other methods and other scenarios are not among them, so that work on one does not ask for another one's runs
    again; neither is what only shows or compares results. `server` is the method's shared server half.
    """
    rooms = (
        f"strategies.methods.{method.module()}",
        f"strategies.methods.{server}",
        f"client.methods.{method.module()}",
    )
    halves = [f"perennial.{room}" for room in rooms]
    halves += [f"{plugin}.{file}" for plugin in plugins.of(method) for file in ("client", "server")]
    parts = (kind.__module__ for kind in (method, scenario, model))
    files = imported("perennial.server.local", *parts, *plugins.of(method, scenario, model), *halves)
    digest = sha256()
    for name in sorted(files.keys() - RULES):
        digest.update(name.encode() + b"\0" + files[name].read_bytes() + b"\0")
    return digest.hexdigest()[:8]


def imported(*modules: str) -> dict[str, Path]:
    """The project's modules and those of plug-ins that these import, themselves included, and their files."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if name in found or path is None:
            continue
        found[name] = path
        waiting += named_in(path, name)
    return found


def _source(module: str) -> Path | None:
    parts = module.split(".")
    for root in [ROOT] if parts[0] == PACKAGE.name else plugins.roots(parts[0]):
        base = root.joinpath(*parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None
