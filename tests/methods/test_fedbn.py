"""FedBN: what stays, what travels, and that without BatchNorm it is FedAvg."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import toy_site
from typer.testing import CliRunner

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.fedbn import FedBNClient
from perennial.client.trainer import Received, Site
from perennial.common.config import load_config
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.fedbn import NORMS, FedBN
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL
from perennial.server.cli.main import app
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.testing.tiny_federation import toy_config

NET = network(model_settings({"name": "mlp", "hidden": (8,), "norm": "batch"}), (2,), 2)
SITE = Site("client-0", toy_site().data, NET, 0)
OWN = {f"featurizer.2.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}


def shared(seed: int = 0) -> Tensors:
    return {name: tensor for name, tensor in NET.initial(seed).items() if name not in OWN}


def run(path: Path, method: str, *settings: str, rounds: int = 3) -> tuple[RunFolder, LocalRuntime]:
    config = toy_config(method, *settings, rounds=rounds)
    here, folder = LocalRuntime(config), RunFolder.create(path, config)
    here.run(folder)
    return folder, here


def test_batch_norm_never_travels(tmp_path: Path) -> None:
    """Neither weights nor statistics, from the first round on."""
    assert set(NET.batch_norm_names) == OWN
    folder, here = run(tmp_path / "ours", "fedbn", "model.norm=batch")
    floats = sum(tensor.numel() for tensor in shared().values())
    rows = [row for row in folder.rows() if row["kind"] == "round"]
    assert all(row["bytes_down"] == row["bytes_up"] == 4 * 4 * floats for row in rows)
    assert load_file(folder.path / "models" / "global.safetensors").keys() == shared().keys()
    kept = {place: versions[-1].kept for place, versions in here.states.items()}
    assert len(kept) == 4
    assert all(records.keys() == {NORMS} and records[NORMS].keys() == OWN for records in kept.values())
    means = [records[NORMS]["featurizer.2.running_mean"] for records in kept.values()]
    assert not any(torch.equal(means[0], other) for other in means[1:])


def test_a_round_goes_on_from_the_clients_own_layers_under_the_shared_model() -> None:
    hparams: dict[str, Any] = {"local_steps": 4, "batch_size": 16, "momentum": 0.5}
    client = FedBNClient(SITE, FedBN(**hparams), {})
    first = client.train(Received(1, {MODEL: shared(0)}))
    assert first.arrays[MODEL].keys() == shared().keys()
    norms = client.kept[NORMS]
    second = client.train(Received(2, {MODEL: shared(5)}))

    plain = FedAvgClient(SITE, FedAvg(**hparams), {})
    theirs = plain.train(Received(2, {MODEL: {**shared(5), **norms}})).arrays[MODEL]
    for name, tensor in theirs.items():
        ours = client.kept[NORMS] if name in OWN else second.arrays[MODEL]
        assert torch.equal(ours[name], tensor)
    assert client.kept[NORMS]["featurizer.2.num_batches_tracked"].item() == 8


def test_it_is_evaluated_with_its_own_statistics() -> None:
    client = FedBNClient(SITE, FedBN(), {})
    x = SITE.data.validation.x
    before = client.models(Received(1, {MODEL: shared(3)}))["personal"](x)
    assert torch.equal(before, NET.predict({**NET.initial(0), **shared(3)}, x))  # not yet trained: the start's
    client.train(Received(1, {MODEL: shared(0)}))
    after = client.models(Received(1, {MODEL: shared(3)}))["personal"](x)
    assert torch.equal(after, NET.predict({**client.kept[NORMS], **shared(3)}, x))
    assert not torch.equal(before, after)


def test_without_batch_norm_it_is_fedavg_bit_for_bit(tmp_path: Path) -> None:
    settings = ["participation=0.5", "momentum=0.5", "weight_decay=0.01"]
    ours, here = run(tmp_path / "ours", "fedbn", *settings)
    theirs, _ = run(tmp_path / "theirs", "fedavg", *settings)
    left, right = (load_file(folder.path / "models" / "global.safetensors") for folder in (ours, theirs))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert not any(version.kept for versions in here.states.values() for version in versions)
    evaluations = [
        [(row["count"], row["correct"], row["loss"]) for row in folder.rows() if row["kind"] == "evaluation"]
        for folder in (ours, theirs)
    ]
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize(
    ("settings", "warned"),
    [([], True), (["model.norm=batch"], False), (["model.name=resnet18"], False), (["model.name=convnet"], True)],
)
def test_a_model_without_batch_norm_is_a_caution(settings: list[str], warned: bool) -> None:
    config = load_config(options={"method": "fedbn", "scenario": {"name": "toy"}}, settings=settings)
    assert ("so this is FedAvg" in config.method.model_caution(config.model)) == warned


def test_the_caution_is_printed_with_the_results(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "run", "fedbn", rounds=1)
    shown = CliRunner().invoke(app, ["show", "run", str(folder.path)])
    assert shown.exit_code == 0
    assert "caution: model 'mlp' as set here has no BatchNorm layers" in " ".join(shown.output.split())


def test_a_mini_batch_of_one_sample_gets_the_running_statistics(tmp_path: Path) -> None:
    """Such as the last of a pass over 40 samples by 13; in a stack, too. The statistics do not move."""
    tensors = {**NET.initial(0), "featurizer.2.running_mean": torch.arange(8.0)}
    x = torch.tensor([[0.5, -2.0]])
    trained = {name: tensor.clone() for name, tensor in tensors.items()}
    assert torch.equal(NET.predict(trained, x, training=True), NET.predict(tensors, x))
    assert all(torch.equal(trained[name], tensor) for name, tensor in tensors.items())
    settings = ("model.norm=batch", "batch_size=13", "local_unit=epoch", "local_steps=1")
    folders = [
        run(tmp_path / engine, "fedbn", *settings, f"cohort_engine={engine}")[0] for engine in ("loop", "stack")
    ]
    for folder in folders:
        assert not folder.summary()["left_out"]
    one, other = (load_file(folder.path / "models" / "global.safetensors") for folder in folders)
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor)
