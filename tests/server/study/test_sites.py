"""Leave one site out: what each method does at a site that nobody trained at."""

from pathlib import Path

import numpy as np
import pytest
import torch

from perennial.common.config import RunConfig, load_config
from perennial.common.data.own import read
from perennial.common.errors import UserError
from perennial.common.files import load_tensors
from perennial.common.models import network
from perennial.server.folder import RunFolder
from perennial.server.local import LocalRuntime
from perennial.server.study.sites import CONSTANT, interval, leave_one_site_out, sites_json, sites_table

SITES = ("east", "north", "west")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place, site in enumerate(SITES):
        rows = "".join(f"{n % 7 + place},{n % 5},{int(n % 7 > 3 - place)}\n" for n in range(40 + place))
        (tmp_path / f"{site}.csv").write_text(f"x1,x2,label\n{rows}")
    return tmp_path


def config_of(method: str, folder: Path, sites: tuple[str, ...] = SITES) -> RunConfig:
    scenario = {"name": "own-data", "sites": list(sites)}
    options = {"method": method, "scenario": scenario, "rounds": 2, "data_root": str(folder)}
    return load_config(options=options, settings=["local_steps=2"])


def test_the_accuracy_is_that_of_the_model_of_the_other_sites(folder: Path, tmp_path: Path) -> None:
    methods = {name: config_of(name, folder) for name in ("fedavg", "ditto", "local")}
    cells, troubles = leave_one_site_out(methods, 1, tmp_path / "pool", 1)
    assert not troubles
    assert [cell.site for cell in cells] == [site for site in SITES for _ in range(4)]
    found = {(cell.site, cell.method): cell for cell in cells}
    for place, site in enumerate(SITES):
        others = config_of("fedavg", folder, tuple(name for name in SITES if name != site))
        run = RunFolder.create(tmp_path / f"without-{site}", others)
        LocalRuntime(others).run(run)
        model = load_tensors(run.path / "models" / "global.safetensors")
        samples = read(folder / f"{site}.csv")
        x, y = samples.tensor((2,), ("x1", "x2")), torch.tensor([int(label) for label in samples.labels])
        right = int((network(others.model, (2,), 2).predict(model, x).argmax(dim=1) == y).sum())
        cell = found[site, "fedavg"]
        assert (cell.unseen, cell.samples) == (right / (40 + place), 40 + place)
        assert (cell.low, cell.high) == interval(right / (40 + place), 40 + place)
        assert cell.own is not None
        assert found[site, "ditto"].unseen is not None  # its common model
        assert found[site, "local"].unseen is None  # it has none
        assert found[site, "local"].own is not None
        zeros = int(sum((y == 0).tolist()))
        assert found[site, CONSTANT].unseen in (zeros / (40 + place), 1 - zeros / (40 + place))
    assert len(sites_json(cells)) == len(cells)
    assert sites_table(cells).row_count == len(SITES)


def test_the_interval_is_that_of_resampled_answers() -> None:
    answers = np.repeat([1, 0], [30, 20])
    drawn = np.random.default_rng(0).choice(answers, (20_000, 50)).mean(axis=1)
    assert interval(0.6, 50) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.021)


def test_two_sites_are_too_few(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs three sites or more, and own-data has east, north"):
        leave_one_site_out({"FedAvg": config_of("fedavg", folder, SITES[:2])}, 1, tmp_path, 1)
