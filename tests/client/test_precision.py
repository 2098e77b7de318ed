"""What clients compute in: bfloat16 by autocast, TF32, and modules whose own weights are no float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perennial.client.methods.fedavg import FedAvgClient
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.models.torch_state import products
from perennial.common.utils.errors import UserError
from perennial.server.local import LocalRuntime
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.testing.methods import assert_equal, files, run
from perennial.testing.tiny_federation import Toy, WireGrid, toy_config
from tests.helpers.tiny_runs import taken_up


def nets() -> tuple[Any, Any]:
    toy = Toy()
    key = model_settings(toy.model), toy.input_shape, toy.classes, torch.device("cpu")
    return network(*key), network(*key, True)


def test_the_model_runs_in_bfloat16_and_all_around_it_is_float32() -> None:
    plain, half = nets()
    tensors = plain.initial(0)
    x = Toy().client_data(0, 0, None).train.x
    params = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    found, exact = half.predict(params, x, training=True), plain.predict(tensors, x)
    assert found.dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.02)
    found.square().mean().backward()
    assert {param.grad.dtype for param in params.values() if param.grad is not None} == {torch.float32}


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedpin", "fediir"))]
)
def test_a_run_in_bf16_trains_and_is_the_same_everywhere(method: str, tmp_path: Path) -> None:
    config = toy_config(method, "precision=bf16", "local_steps=3", rounds=4)
    folder = taken_up(config, tmp_path, after=2)
    wire, grid = RunFolder.create(tmp_path / "wire", config), WireGrid(config, tmp_path / "sites")
    run_rounds(config, wire, grid, start(config))
    assert wire.rows() == folder.rows()
    run(config.model_copy(update={"cohort_engine": "stack"}), tmp_path / "stack")
    assert_equal(files(tmp_path / "stack"), files(tmp_path / "whole"), 0.02)
    run(toy_config(method, "local_steps=3", rounds=4), tmp_path / "float32")
    one, other = files(tmp_path / "float32"), files(tmp_path / "whole")
    assert_equal(one, other, 0.1)
    assert any(not torch.equal(one[at][key], other[at][key]) for at in one for key in one[at])
    assert {tensor.dtype for own in other.values() for tensor in own.values() if tensor.is_floating_point()} <= {
        torch.float32,
        torch.float64,
    }


class Half(nn.Module):
    """A module whose weights are not float32."""

    def __init__(self, classes: int, kind: str = "bfloat16") -> None:
        super().__init__()
        self.head = nn.Linear(2, classes, dtype=getattr(torch, kind))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_module_of_half_precision_is_told_of_the_setting(kind: str, tmp_path: Path) -> None:
    config = toy_config("fedavg", f"model.name={__name__}:Half", f"model.kind={kind}", rounds=1)
    with pytest.raises(UserError) as error:
        LocalRuntime(config).run(RunFolder.create(tmp_path / "run", config))
    remedy = "let the module have float32 weights, and set precision=bf16 to compute in bfloat16"
    assert str(error.value).endswith(f"its 'head.weight' is of type {kind}; {remedy}")


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("engine", ["loop", "stack"])
def test_products_and_convolutions_have_the_same_precision(
    tf32: bool, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, usual = set(), FedAvgClient.train
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]

    def told(self: FedAvgClient, received: Any) -> Any:
        seen.update(kind.fp32_precision for kind in kinds)
        return usual(self, received)

    monkeypatch.setattr(FedAvgClient, "train", told)
    before = [kind.fp32_precision for kind in kinds]
    run(toy_config("fedavg", f"tf32={str(tf32).lower()}", f"cohort_engine={engine}", rounds=1), tmp_path / "run")
    assert seen == {"tf32" if tf32 else "ieee"}
    assert [kind.fp32_precision for kind in kinds] == before


def test_what_was_set_before_is_put_back_after_an_error() -> None:
    kinds = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = [kind.fp32_precision for kind in kinds]
    with pytest.raises(KeyError), products(tf32=True):
        raise KeyError
    assert [kind.fp32_precision for kind in kinds] == before
