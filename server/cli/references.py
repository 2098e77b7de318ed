"""What a run's numbers are held against: the constant predictor, and FedAvg with everything else the same."""

import json
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.config import RunConfig
from common.methods import method_class
from server.study.version import NO_NUMBER
from server.words import percent

REFERENCE = "fedavg"


def reference_lines(path: Path, config: RunConfig, summary: Mapping[str, Any]) -> list[str]:
    """A line for each reference on the scenario and seed of the run in `path`.

    FedAvg's numbers are those of the newest finished run beside this one that differs from it in the method alone;
    where there is none, the line has the command that makes it. The constant predictor's are in the summaries of
    local runs.
    """
    lines = []
    if constant := summary.get("constant"):
        lines.append(f"reference: a constant prediction has {_overall(constant)}")
    if config.method.name != REFERENCE:
        lines.append(f"reference: FedAvg {_fedavg(path, config)}")
    return lines


def _fedavg(path: Path, config: RunConfig) -> str:
    wanted = _others(config.model_dump(mode="json", exclude_none=True))
    usual = method_class(REFERENCE)(name=REFERENCE).model_dump(mode="json")
    found: dict[float, str] = {}
    for file in path.parent.glob("*/config.toml"):
        try:
            values = tomllib.loads(file.read_text(encoding="utf-8"))
            if values["method"]["name"] != REFERENCE or _others(values) != wanted:
                continue
            summary = json.loads(file.with_name("summary.json").read_bytes())
            if summary["rounds"] == config.rounds:
                own = [f"{key}={value}" for key, value in values["method"].items() if value != usual.get(key)]
                about = ", ".join([str(file.parent), *own])
                text = f"has {_overall(summary['models']['global']['final'])} ({about})"
                found[file.with_name("summary.json").stat().st_mtime] = text
        except (OSError, ValueError, KeyError, TypeError):  # damaged or unfinished, and not what is shown here
            continue
    command = ["perennial", "run", "--method", REFERENCE, "--config", str(path / "config.toml")]
    return found[max(found)] if found else f"is made by: {shlex.join(command)}"


def _others(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run and its reference must share."""
    return {key: value for key, value in values.items() if key not in {"method", *NO_NUMBER}}


def _overall(found: Mapping[str, Any]) -> str:
    return f"worst {percent(found['worst'])}, average {percent(found['average'])}"
