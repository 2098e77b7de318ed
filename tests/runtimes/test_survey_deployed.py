"""Sites join with tables of their own and are surveyed; the rehearsal of the same files writes the same file."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from messy_tables import SITES, hospitals
from safetensors.torch import load_file
from test_sites import Site
from typer.testing import CliRunner, Result

from perennial.common.flower.processes import environment, free_port, program
from perennial.server.cli.main import app
from perennial.server.deployment.certs import make
from perennial.server.deployment.submission import await_port
from perennial.server.deployment.testbed import deployment
from perennial.server.run.folder import RunFolder

PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"
SECRET = 'require = "secagg"\n'
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


@dataclass
class Secure:
    """A SuperLink with TLS that lets in registered sites alone, as in docs/deployment.md."""

    folder: Path
    fleet: int
    options: tuple[object, ...]
    """Of commands that ask it."""


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Secure]:
    certs, fleet, control = tmp_path / "certs", free_port(), free_port()
    make(certs, SITES, [], days=1)
    tls = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
    command = [
        program("flower-superlink"), "--enable-supernode-auth",
        *(f"--ssl-{flag}={certs / name}" for flag, name in tls.items()),
        "--fleet-api-address", f"127.0.0.1:{fleet}", "--control-api-address", f"127.0.0.1:{control}",
        "--serverappio-api-address", f"127.0.0.1:{free_port()}",
    ]  # fmt: skip
    with (tmp_path / "superlink.log").open("w") as log:
        link = subprocess.Popen(command, env=environment(), stdout=log, stderr=log, start_new_session=True)
    options = ("--superlink", f"127.0.0.1:{control}", "--ca", certs / "ca.crt")
    try:
        await_port(control, link, tmp_path / "superlink.log")
        registered = call("register", certs / "sites", *options)
        assert registered.exit_code == 0, registered.output
        yield Secure(tmp_path, fleet, options)
    finally:
        os.killpg(link.pid, signal.SIGKILL)
        link.wait()


def test_over_tls_with_each_site_s_own_scale_and_a_policy(secure: Secure) -> None:
    """The policy requires secure aggregation: without it, the site is left out with a sentence."""
    folder, keys = secure.folder, secure.folder / "certs"
    hospitals(folder / "all data")
    (folder / "policy.toml").write_text(SECRET)
    joined: dict[str, Site] = {}
    told = ("survey", *secure.options, "--impute", "median", "--quantiles", "--class-weights", "balanced")
    try:
        for name in SITES:
            own = ("--ca", keys / "ca.crt", "--key", keys / "sites" / name, "--survey", "full")
            policy = ("--policy", folder / "policy.toml") if name == "va" else ()
            joined[name] = Site(name, folder, secure.fleet, *map(str, (*own, *policy)))
        for site in joined.values():
            site.says("waiting for a run")
        plain = call(*told, "--scope", "site", "-o", folder / "plain")
        assert plain.exit_code == 0, plain.output
        sentence = "this site's policy does not allow a survey without secure aggregation; it requires 'secagg'"
        assert f"left out va: {sentence}" in plain.stderr
        joined["va"].says(f"this site takes no part in the survey: {sentence}")
        hidden = call(*told, "--secure-aggregation", "-o", folder / "hidden")
        assert hidden.exit_code == 0, hidden.output
        assert "left out" not in hidden.stderr
    finally:
        for site in joined.values():
            site.process.send_signal(signal.SIGTERM)
        for site in joined.values():
            site.process.wait(60)
    rehearse = ("describe", folder / "all data", *told[len(secure.options) + 1 :])
    assert call(*rehearse, "-o", folder / "rehearsed").exit_code == 0
    assert (folder / "hidden").read_text() == (folder / "rehearsed").read_text()
    (folder / "all data" / "va.csv").unlink()
    assert call(*rehearse, "--scope", "site", "-o", folder / "rehearsed without").exit_code == 0
    text = (folder / "plain").read_text()
    assert text == (folder / "rehearsed without").read_text()
    assert all(
        word in text for word in ("# quantiles of age: 5 % ", "class_weights = [", "[scenario.own_columns.")
    )


def test_survey_and_rehearsal_write_the_same_file(control: int, tmp_path: Path) -> None:
    (tmp_path / "all data" / "quiet.csv").unlink()  # only the rehearsal looks into the folder
    assert (
        call("describe", tmp_path / "all data", "--impute", "median", "-o", tmp_path / "rehearsed").exit_code == 0
    )
    (command,) = re.findall(r"^perennial (survey .+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert " --ca certs/ca.crt " in command  # as for the federation of the pages; this one has no TLS
    words = command.replace(" --ca certs/ca.crt", "").replace(":9093", f":{control}").split()[:-1]  # nor the file
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

    # And the run takes the file as it is; one site trains nothing, and makes a personal model of a few rows.
    run = ("run", "--config", tmp_path / "surveyed", "--method", "ditto", "--rounds", "2", "--device", "cpu",
           "--set", "local_steps=2", "--set", "test_sites=['va']", "--set", "adapt=12")  # fmt: skip
    there = call(*run, "--runtime", "deployment", *link, "--out", tmp_path / "there")
    assert there.exit_code == 0, there.output
    here = call(*run, "--data-root", tmp_path / "all data", "--out", tmp_path / "here")
    assert here.exit_code == 0, here.output
    one, other = (load_file(tmp_path / run / "models" / "global.safetensors") for run in ("there", "here"))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-6)
    rows, others = (RunFolder(tmp_path / run).rows() for run in ("there", "here"))
    for kind in ("evaluation", "score"):
        assert [row for row in rows if row["kind"] == kind] == [row for row in others if row["kind"] == kind]
    at_va = {
        row["model"]: sum(row["count"]) for row in rows if row.get("client") == "va" and row.get("split") == "test"
    }
    assert at_va == {"global": 28, "personal": 28}
