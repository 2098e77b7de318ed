"""A plug-in's method on all three runtimes, and a site that does not have it."""

from pathlib import Path

import pytest
import torch
from faulty_deployment import until
from plugin_packages import METHOD, unloaded, write
from safetensors.torch import load_file

from perennial.common import plugins
from perennial.common.config import RunConfig, load_config
from perennial.server.deployment.testbed import deployment
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.simulation import Simulation

pytestmark = [pytest.mark.runtimes, pytest.mark.parity]


def config(runtime: str, *settings: str) -> RunConfig:
    options = {"method": "my-prox", "scenario": "colored-digits", "rounds": 2, "runtime": runtime}
    few = ["scenario.clients=2", "evaluate_every=2", *settings]
    return load_config(options={**options, "plugins": ["my_method"]}, settings=few)


def assert_equal(one: Path, other: Path) -> None:
    left, right = (load_file(path / "models" / "global.safetensors") for path in (one, other))
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=0, atol=1e-6)
    ours, theirs = RunFolder(one).summary(), RunFolder(other).summary()
    assert ours["models"] == theirs["models"]
    assert theirs["left_out"] == {}


def test_a_plug_in_is_the_same_everywhere_and_a_site_without_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(plugins.VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "my_method", METHOD)
    with unloaded():
        local = config("local")
        LocalRuntime(local).run(RunFolder.create(tmp_path / "local", local))
        list(Simulation(tmp_path).execute(config("simulation"), tmp_path / "simulation"))
        assert_equal(tmp_path / "local", tmp_path / "simulation")
        with deployment(tmp_path / "deployment", clients=2) as site:
            list(site.connection.execute(config("deployment"), tmp_path / "deployed"))
            assert_equal(tmp_path / "local", tmp_path / "deployed")
            without = [part.replace("site-1", "site-2") for part in site.commands["supernode-1"]]
            site.commands["supernode-2"] = ["env", f"{plugins.VARIABLE}=", *without]
            site.start("supernode-2")
            log = site.folder / "supernode-2.log"
            until(lambda: "SuperNode ID" in log.read_text())
            list(site.connection.execute(config("deployment"), tmp_path / "one"))
    left = RunFolder(tmp_path / "one").summary()["left_out"]
    said = [facts["last"] for facts in left.values()]
    assert any(
        "plug-in 'my_method' is not installed here; install the package that has it" in word for word in said
    )
    assert RunFolder(tmp_path / "one").summary()["rounds"] == 2
