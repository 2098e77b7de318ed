"""Leave one site out: what each method does at a site that nobody trained at."""

import json
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from perennial import from_arrays
from perennial.common.config import RunConfig, load_config
from perennial.common.data.site_files import read
from perennial.common.models.network import network
from perennial.common.tasks import Classes
from perennial.common.tasks.classes import ACCURACY
from perennial.common.utils.errors import UserError
from perennial.common.utils.files import load_tensors
from perennial.common.utils.seeding import torch_generator
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.study.unseen_sites import (
    CONSTANT,
    LEVEL,
    RARE,
    Cell,
    leave_one_site_out,
    scores_table,
    sites_json,
    sites_table,
)

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


@pytest.mark.slow
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
        logits = network(others.model, (2,), 2).predict(model, x)
        right = int((logits.argmax(dim=1) == y).sum())
        cell = found[site, "fedavg"]
        margins = logits[:, 1] - logits[:, 0]
        pairs = torch.sign(margins[y == 1][:, None] - margins[y == 0]) / 2 + 0.5
        assert cell.auroc == pytest.approx(float(pairs.mean()), abs=0.05)  # of scores in bins
        assert cell.sensitivity == pytest.approx(float((margins[y == 1] > 0).double().mean()))
        assert cell.specificity == pytest.approx(float((margins[y == 0] < 0).double().mean()))
        assert cell.positive == "1"
        assert (cell.unseen, cell.samples) == (right / (40 + place), 40 + place)
        sums = {"correct": [right]}
        assert (cell.low, cell.high) == Classes(2).interval(40 + place, sums, LEVEL)
        assert cell.own is not None
        assert found[site, "ditto"].unseen is not None  # its common model
        assert found[site, "local"].unseen is None  # it has none
        assert found[site, "local"].own is not None
        zeros = int(sum((y == 0).tolist()))
        assert found[site, CONSTANT].unseen in (zeros / (40 + place), 1 - zeros / (40 + place))
    assert len(sites_json(cells)) == len(cells)
    assert sites_table(cells).row_count == len(SITES)
    table = scores_table(cells)
    assert table
    assert [column.header for column in table.columns] == ["site", "fedavg", "ditto"]
    assert table.row_count == len(SITES)
    assert scores_table([replace(cell, auroc=None) for cell in cells]) is None


@pytest.mark.slow
def test_a_site_adapts_to_a_few_samples_as_in_a_run_of_its_own(folder: Path, tmp_path: Path) -> None:
    methods = {name: config_of(name, folder) for name in ("ditto", "fedavg", "fedsdr-fedavg", "local")}
    cells, troubles = leave_one_site_out(methods, 1, tmp_path / "pool", 1, adapt=7)
    assert not troubles
    found = {(cell.site, cell.method): cell for cell in cells}
    for place, site in enumerate(SITES):
        for method in ("ditto", "local"):
            alone = methods[method].model_copy(update={"test_sites": (site,), "adapt": 7})
            summary = LocalRuntime(alone).run(RunFolder.create(tmp_path / f"{method}-{site}", alone))
            (accuracy,) = summary["models"]["personal"]["final"]["clients"][site].values()
            cell = found[site, method]
            assert (cell.adapted, cell.samples) == (pytest.approx(accuracy), 33 + place)
        assert found[site, "ditto"].unseen is not None
        assert found[site, "local"].unseen is None
        assert (found[site, "fedavg"].adapted, found[site, "fedavg"].samples) == (None, 33 + place)
        assert (found[site, "fedsdr-fedavg"].adapted, found[site, "fedsdr-fedavg"].samples) == (
            None,
            33 + place,
        )  # it cannot
        data = alone.scenario.client_data(place, 0, folder)
        y = torch.cat([data.train.y, data.validation.y])
        order = torch.randperm(len(y), generator=torch_generator(0, site, "adapt"))
        rest = torch.cat([y[order[7:]], *(part.y for part in data.test.values())])
        share = float((rest == torch.bincount(y[order[:7]]).argmax()).double().mean())
        assert found[site, CONSTANT].adapted == pytest.approx(share)
    assert "→" in "".join(str(cell) for column in sites_table(cells, 7).columns for cell in column.cells)
    with pytest.raises(UserError, match="adapt: 32 is not possible at east; it must be less than its 32 samples"):
        leave_one_site_out(methods, 1, tmp_path / "pool", 1, adapt=32)


def test_the_interval_is_that_of_resampled_answers() -> None:
    answers = np.repeat([1, 0], [30, 20])
    drawn = np.random.default_rng(0).choice(answers, (20_000, 50)).mean(axis=1)
    assert Classes(2).interval(50, {"correct": [30]}, 0.95) == pytest.approx(
        tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.021
    )


def test_two_sites_are_too_few(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs three sites or more, and own-data has east, north"):
        leave_one_site_out({"FedAvg": config_of("fedavg", folder, SITES[:2])}, 1, tmp_path, 1)


def test_arrays_with_tests_of_their_own_do_not_ask_a_site_about_its_samples(tmp_path: Path) -> None:
    clients = {site: (np.eye(6) + place, [0, 1] * 3) for place, site in enumerate(SITES)}
    made = from_arrays(clients, {"new": (np.eye(6), [0, 1] * 3)})
    options = {"method": "fedavg", "scenario": made.scenario, "rounds": 1, "data_root": made.save(tmp_path)}
    with pytest.raises(UserError, match="arrays that are tested with new, not with each site's own samples; make"):
        leave_one_site_out({"FedAvg": load_config(options=options)}, 1, tmp_path, 1)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
def test_the_command_takes_the_file_that_describe_writes(folder: Path, tmp_path: Path) -> None:
    file, pool = tmp_path / "run.toml", tmp_path / "pool"
    assert call("describe", folder, "--out", file).exit_code == 0
    file.write_text("rounds = 1\nparticipation = 1.0\n\n" + file.read_text() + "\n[model]\nhidden = [3]\n")
    study = ("--config", file, "--data-root", folder, "--jobs", "1", "--out", pool, "--json")
    asked = ("compare", "--leave-one-site-out", "--methods", "ditto", "--seeds", "1", *study)
    sites = call(*asked)
    assert sites.exit_code == 0, sites.output
    cells = json.loads(sites.stdout)
    assert {(cell["site"], cell["method"]) for cell in cells} == {
        (site, method) for site in SITES for method in ("Ditto", "FedAvg", "Local", CONSTANT)
    }
    page = tmp_path / "page.html"
    for _ in range(2):  # over the page of the first time
        again = call(*asked, "--report", page)
        assert (again.exit_code, json.loads(again.stdout)) == (0, cells), again.output
        text = page.read_text()
        shown = sites_table([Cell(**{**cell, "measure": ACCURACY}) for cell in cells])
        assert all(f">{cell}</t" in text for column in shown.columns for cell in column.cells)
        assert f"<p>{RARE}</p>" in unescape(text)
    configs = [RunFolder(path.parent).config() for path in pool.glob("*/config.toml")]
    assert {(config.rounds, config.model.hidden) for config in configs} == {(1, (3,))}  # type: ignore[attr-defined]
    trials = call("sweep", "fedavg", "--trials", "2", *study)
    assert trials.exit_code == 0, trials.output
    assert len(json.loads(trials.stdout)) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((), "scenario: name one, or a configuration file that has one, one of the two"),
        (("--scenario", "rc-digits", "--config", "x.toml"), "one of the two"),
        (("--scenario", "rc-digits", "--leave-one-site-out", "--trials", "2"), "not possible with --trials"),
        (("--scenario", "rc-digits", "--leave-one-site-out", "--trial-rounds", "2"), "not possible with --trials"),
        (("--scenario", "rc-digits", "--leave-one-site-out", "--select", "held-out"), "--trial-rounds, --select"),
        (("--scenario", "rc-digits", "--leave-one-site-out", "--prune"), "--select, --prune"),
        (
            ("--scenario", "rc-digits", "--set", "references=x"),
            "references: 'x' is not possible here; those of each",
        ),
        (("--scenario", "rc-digits", "--leave-one-site-out", "--methods", "f-fl-games"), "whose ensemble"),
        (("--scenario", "rc-digits", "--adapt", "3"), "--adapt 3 is for --leave-one-site-out"),
    ],
)
def test_what_cannot_be_asked(options: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    result = call("compare", "--methods", "fedavg", *options, "--jobs", "1", "--out", tmp_path)
    assert result.exit_code == 2
    assert sentence in result.stderr
