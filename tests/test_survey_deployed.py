"""Sites join with tables of their own and are surveyed; the rehearsal of the same files writes the same file."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tables import SITES, hospitals
from test_sites import Site
from typer.testing import CliRunner, Result

from perennial.server.cli.main import app
from perennial.server.deployment.testbed import deployment

PAGE = Path(__file__).parents[1] / "docs" / "own-data.md"
pytestmark = [pytest.mark.runtimes, pytest.mark.parity]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def control(tmp_path: Path) -> Iterator[int]:
    """The port of a SuperLink that four sites have joined which take part in surveys, and one that does not."""
    hospitals(tmp_path / "all data")
    refusing = (tmp_path / "all data" / "va.csv").read_text()
    (tmp_path / "all data" / "quiet.csv").write_text(refusing)
    with deployment(tmp_path / "server", clients=0) as server:
        joined = {name: Site(name, tmp_path, server.fleet_port, "--survey", "full") for name in SITES}
        joined["quiet"] = Site("quiet", tmp_path, server.fleet_port)
        try:
            for site in joined.values():
                site.says("waiting for a run")
            yield server.control_port
        finally:
            for site in joined.values():
                if site.process.poll() is None:
                    site.process.send_signal(signal.SIGTERM)
            for site in joined.values():
                site.process.wait(60)


def test_survey_and_rehearsal_write_the_same_file(control: int, tmp_path: Path) -> None:
    (tmp_path / "all data" / "quiet.csv").unlink()  # only the rehearsal looks into the folder
    assert (
        call("describe", tmp_path / "all data", "--impute", "median", "-o", tmp_path / "rehearsed").exit_code == 0
    )
    (command,) = re.findall(r"^perennial (survey .+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    words = command.replace(":9093", f":{control}").split()[:-1]  # without the name of the file
    link = ("--superlink", f"127.0.0.1:{control}")
    for name, more in (("surveyed", ()), ("secure", ("--secure-aggregation",))):
        result = call(*words, tmp_path / name, *more)
        assert result.exit_code == 0, result.output
        assert "left out quiet: this site takes part in no survey" in result.stderr
        assert ("cleveland: 40 rows" in result.stderr) == (name == "surveyed")
        assert (tmp_path / name).read_text() == (tmp_path / "rehearsed").read_text()

    # What is wrong is one sentence, and a user's to put right.
    wrong = call("survey", *link, "--site", "va", "--drop", "weight")
    assert (wrong.exit_code, "--drop: unknown column 'weight'" in wrong.stderr) == (2, True)

    # And the run takes the file as it is.
    run = ("run", "--config", tmp_path / "surveyed", "--method", "fedavg", "--rounds", "2", "--device", "cpu",
           "--set", "local_steps=2")  # fmt: skip
    there = call(*run, "--runtime", "deployment", *link, "--out", tmp_path / "there")
    assert there.exit_code == 0, there.output
    here = call(*run, "--data-root", tmp_path / "all data", "--out", tmp_path / "here")
    assert here.exit_code == 0, here.output
    one, other = (load_file(tmp_path / run / "models" / "global.safetensors") for run in ("there", "here"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-6)
