"""Own data in a comparison: a row for each site in the tables."""

from pathlib import Path

import pytest
from rich.console import Console
from tables import SITES, hospitals
from typer.testing import CliRunner

from perennial import studies
from perennial.server.cli.main import app
from perennial.server.study.compare import CONSTANT, comparison_tables
from perennial.server.study.runs import Selected


def test_every_site_is_in_the_comparison(tmp_path: Path) -> None:
    hospitals(tmp_path / "hospitals")
    described = [
        "describe",
        str(tmp_path / "hospitals"),
        "--impute",
        "median",
        "--out",
        str(tmp_path / "run.toml"),
    ]
    assert CliRunner().invoke(app, described).exit_code == 0
    found = studies.compare(
        ["fedavg"],
        None,
        config=tmp_path / "run.toml",
        data_root=tmp_path / "hospitals",
        rounds=1,
        seeds=1,
        settings=["local_steps=1"],
        out=tmp_path / "pool",
        device="cpu",
    )
    assert tuple(found.sites) == SITES
    for row in found.rows:
        assert tuple(row.sites) == SITES
        # Every site has the one environment, so the mean over sites is that over clients.
        assert sum(own.mean for own in row.sites.values()) / 4 == pytest.approx(row.measures["average"].mean)
        assert min(own.mean for own in row.sites.values()) == pytest.approx(row.measures["worst client"].mean)
    assert {row.label for row in found.rows} == {"FedAvg", "Local", CONSTANT}
    *_, table = comparison_tables(found)
    console = Console(width=120, record=True)
    console.print(table)
    text = console.export_text()
    assert all(site in text for site in SITES)
    assert f"{100 * found.rows[0].sites['va'].mean:.2f}" in text


def test_a_site_without_test_samples_has_no_accuracy() -> None:
    facts = {"round": 1, "accuracy": {"a": 0.5}, "worst": 0.5, "average": 0.5, "pooled": 0.5, "validation": None}
    one = Selected.model_validate({**facts, "clients": {"x": {"a": 0.25, "b": 0.75}, "y": {}}})
    assert (one.site("x"), one.site("y"), one.site("z")) == (0.5, None, None)
