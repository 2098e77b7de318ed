"""What a run's numbers are held against: the constant predictor, and FedAvg with everything else the same."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perennial.common import plugins
from perennial.common.config import RunConfig, load_config, read
from perennial.common.methods import method_class
from perennial.common.utils.errors import UserError
from perennial.common.utils.parsing import from_json
from perennial.server.results.formatting import overall_text
from perennial.server.run.folder import RunFolder
from perennial.server.run.input_files import PLUG_IN, digests
from perennial.server.selection.summary import overall, worst_site
from perennial.server.study.run_names import NO_NUMBER

REFERENCE = "fedavg"


def reference_lines(path: Path, config: RunConfig, summary: Mapping[str, Any]) -> list[str]:
    """A line for each reference on the scenario and seed of the run in `path`, with what makes it.

    The constant predictor's numbers are in the summaries of local runs.
    """
    lines = []
    if constant := summary.get("constant"):
        about = f"{config.predicts.constant_is}; every local run has it"
        lines.append(f"reference: a constant prediction has {_overall(config, constant)} ({about})")
    if config.method.name == REFERENCE:
        return lines
    if found := fedavg_beside(path, config):
        made = RunFolder.open(found)
        usual = method_class(REFERENCE)(name=REFERENCE).model_dump(mode="json")
        values = made.config().method.model_dump(mode="json")
        other = "".join(f"{key}={value}, " for key, value in values.items() if value != usual.get(key))
        command = _command(config, "--config", str(found / "config.toml"))
        numbers = _overall(config, _final(config, made.summary()))
        return [*lines, f"reference: FedAvg has {numbers} ({other}made by: {command})"]
    command = _command(config, "--method", REFERENCE, "--config", str(path / "config.toml"))
    return [*lines, f"reference: FedAvg is made by: {command}"]


def fedavg_beside(path: Path, config: RunConfig) -> Path | None:
    """The newest finished run beside the one in `path` that differs from it in the method alone, being FedAvg.

    A run that had other tables, or other code of the plug-in that the scenario or the model is from, is none.
    """
    wanted = _others(config.model_dump(mode="json", exclude_none=True))
    shared = {f"{PLUG_IN}{name}" for name in plugins.of(type(config.scenario), type(config.model))}
    inputs = RunFolder(path).inputs() or digests(config)
    inputs = {name: own for name, own in inputs.items() if not name.startswith(PLUG_IN) or name in shared}
    found: dict[float, Path] = {}
    for file in path.parent.glob("*/config.toml"):
        try:
            values = read(file)
            if values["method"]["name"] != REFERENCE or _others(values) != wanted:
                continue
            if not inputs.items() <= RunFolder(file.parent).inputs().items():
                continue
            summary = from_json(file.with_name("summary.json").read_bytes())
            _overall(config, _final(config, summary))
            if summary["rounds"] == config.rounds:
                found[file.with_name("summary.json").stat().st_mtime] = file.parent
        except (OSError, ValueError, KeyError, TypeError, UserError):  # damaged or unfinished
            continue
    return found[max(found)] if found else None


def reference_config(path: Path) -> RunConfig:
    """The configuration of FedAvg's run that goes with the one in `path`."""
    return load_config(path / "config.toml", {"method": REFERENCE})


def _others(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run and its reference must share."""
    return {key: value for key, value in values.items() if key not in {"method", *NO_NUMBER}}


def _command(config: RunConfig, *arguments: str) -> str:
    """What makes a run; where a SuperLink is, no file of a run says."""
    where = " --superlink ADDRESS [--ca FILE]" if config.runtime == "deployment" else ""
    return shlex.join(["perennial", "run", *arguments]) + where


def _final(config: RunConfig, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What FedAvg's model has after the last round."""
    final = summary["models"]["global"]["final"]
    return {**final, "worst_site": worst_site(final["clients"], config.predicts.headline)}


def _overall(config: RunConfig, found: Mapping[str, Any]) -> str:
    """The rows of the run's table that hold for all."""
    names = overall(config.sites_with_data, config.scenario.test_environments)
    numbers = overall_text(names, found, config.predicts.headline)
    return f"{numbers} over all sites" if config.test_sites else numbers
