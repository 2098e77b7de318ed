"""How steps are taken: the run's optimizer against PyTorch's, kept between rounds, in stacks, over the wire."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from perennial.client.host import client_class
from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.local import LocalClient
from perennial.client.steps import clipped_norm
from perennial.client.trainer import Received
from perennial.common.config import load_config
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.local import Local
from perennial.common.models.torch_state import plain_torch
from perennial.common.training import Optimizer, Schedule, Training
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL
from perennial.server.run.folder import RunFolder
from perennial.server.run.loop import run_rounds, start
from perennial.testing.methods import assert_equal, files, run
from perennial.testing.tiny_federation import WireGrid, toy_config
from tests.helpers.tiny_runs import Quadratic, quadratic_site, taken_up, theta, toy_site

OPTIMIZERS: dict[str, tuple[Optimizer, dict[str, float], Any]] = {
    "plain": (Optimizer(), {}, lambda p: torch.optim.SGD(p, lr=0.01)),
    "momentum": (
        Optimizer(),
        {"momentum": 0.9, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": (
        Optimizer(nesterov=True),
        {"momentum": 0.9, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    "adam": (
        Optimizer(name="adam"),
        {"weight_decay": 0.1},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    ),
    "adamw": (
        Optimizer(name="adamw", betas=(0.8, 0.99), epsilon=1e-6),
        {"weight_decay": 0.1},
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-6),
    ),
}


def slow(*methods: str) -> list[Any]:
    """Methods that the short suite leaves out."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in methods]


def torchs(client: FedAvgClient | LocalClient, start: Tensors, optimizer: Any, rounds: int, steps: int) -> Tensors:
    """The model after steps of PyTorch's own optimizer on the client's mini-batches of some rounds."""
    params = {name: tensor.detach().clone().requires_grad_() for name, tensor in start.items()}
    made = optimizer(list(params.values()))
    for number in range(1, rounds + 1):
        for batch in client.batches(steps, number):
            made.zero_grad()
            client.loss(params, batch, Received(number))[0].backward()
            made.step()
    return {name: tensor.detach() for name, tensor in params.items()}


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_fifty_steps_are_pytorchs(which: str) -> None:
    settings, own, optimizer = OPTIMIZERS[which]
    site = replace(toy_site(), training=Training(optimizer=settings))
    client = FedAvgClient(site, FedAvg(local_steps=50, learning_rate=0.01, batch_size=8, **own), {})
    start = client.initial()
    found = client.answer("train", Received(1, {MODEL: start})).arrays[MODEL]
    expected = torchs(client, start, optimizer, 1, 50)
    assert found.keys() == expected.keys()
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
    assert not client.kept


class QuadraticLocal(Quadratic, LocalClient):
    """A personal model on a quadratic, in float64."""


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_a_kept_optimizer_goes_on_and_a_fresh_one_begins_anew(which: str) -> None:
    """Five rounds of ten steps on a personal model are fifty steps of one optimizer of PyTorch's; or five times
    ten of a new one."""
    settings, own, optimizer = OPTIMIZERS[which]
    hparams = Local(local_steps=10, learning_rate=0.01, batch_size=2, **own)
    centres = [[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0]]
    start, reached = theta(5.0, -3.0), {}
    for keep in (True, False):
        training = Training(optimizer=settings.model_copy(update={"keep": keep}))
        site = replace(quadratic_site(centres, [[1.0, 2.0]] * 3), training=training)
        kept: dict[str, Tensors] = {PERSONAL: start}
        for number in range(1, 6):
            client = QuadraticLocal(site, hparams, dict(kept))
            client.answer("train", Received(number, {MODEL: start}))
            kept = client.kept
        reached[keep] = kept[PERSONAL]["theta"]
        assert (len(kept) > 1) == (keep and which != "plain")
    once = torchs(client, start, optimizer, 5, 10)["theta"]
    torch.testing.assert_close(reached[True], once, rtol=1e-12, atol=1e-12)
    anew: Tensor = start["theta"]
    for number in range(1, 6):
        params = {"theta": anew.clone().requires_grad_()}
        made = optimizer(list(params.values()))
        for batch in client.batches(10, number):
            made.zero_grad()
            client.loss(params, batch, Received(number))[0].backward()
            made.step()
        anew = params["theta"].detach()
    torch.testing.assert_close(reached[False], anew, rtol=1e-12, atol=1e-12)


KEPT = ("optimizer.name=adamw", "optimizer.keep=true", "weight_decay=0.01", "learning_rate=0.01")


@pytest.mark.parametrize("method", ["fedavg", "ditto"])
def test_kept_moments_are_resumed_to_the_bit(method: str, tmp_path: Path) -> None:
    folder = taken_up(toy_config(method, *KEPT, rounds=5, participation=0.5), tmp_path, after=3)
    whole = files(tmp_path / "whole")
    assert_equal(files(folder.path), whole)
    names = [name.rpartition("/")[2] for own in whole.values() for name in own if "optimizer-" in name]
    assert "steps" in names


@pytest.mark.parametrize(("first", "word"), [("sgd", "velocity.0"), ("adam", "steps")])
@pytest.mark.parametrize("method", ["fedavg", *slow("fedrep", "fedpin", "fedsdr")])
def test_a_stack_keeps_what_its_clients_keep(method: str, first: str, word: str, tmp_path: Path) -> None:
    settings = [f"optimizer.name={first}", "optimizer.keep=true", "local_steps=3"]
    settings += ["momentum=0.9"] if first == "sgd" else []
    for engine in ("loop", "stack"):
        run(toy_config(method, f"cohort_engine={engine}", *settings, rounds=3), tmp_path / engine)
    one, other = (files(tmp_path / engine) for engine in ("loop", "stack"))
    assert_equal(one, other, 1e-4)
    assert any(word in name for own in other.values() for name in own)


def test_a_model_whose_optimizer_lasts_needs_a_name_of_its_own() -> None:
    site = replace(toy_site(), training=Training(optimizer=Optimizer(keep=True)))
    client = FedAvgClient(site, FedAvg(momentum=0.9), {})
    client.optimizer()
    client.optimizer("")
    with pytest.raises(ValueError, match="two models take steps with the optimizer 'model'"):
        client.optimizer()


@pytest.mark.parametrize(
    ("method", "settings", "sentence"),
    [
        (
            "perinvfl",
            ["optimizer.name=adam"],
            "optimizer.name: 'adam' is not possible with method 'perinvfl', w",
        ),
        (
            "pfedme",
            ["optimizer.keep=true"],
            "optimizer.keep: true is not possible with method 'pfedme', whose",
        ),
        (
            "fedsgd",
            ["optimizer.name=adam"],
            "optimizer.name: 'adam' is not possible with method 'fedsgd', wh",
        ),
        ("fedavg", ["optimizer.nesterov=true"], "optimizer.nesterov: true needs a momentum above 0"),
        ("fedavg", ["optimizer=adam", "momentum=0.9"], "momentum: 0.9 is for sgd; adam has optimizer.betas"),
        ("fedavg", ["optimizer=adam", "optimizer.nesterov=true"], "optimizer.nesterov: true is for sgd, and"),
        ("fedavg", ["optimizer.betas=[0.9, 1.0]"], "optimizer.betas: [0.9, 1.0] is not possible; both must be"),
        (
            "fedavg",
            ["optimizer=rmsprop"],
            "optimizer.name: 'rmsprop' is not possible; input should be 'sgd', ",
        ),
        ("fedavg", ["optimizer.beta=3"], "optimizer.beta: there is no such setting; did you mean 'betas'?"),
        ("fedsgd", ["optimizer.momentum=0.9"], "optimizer.momentum: the method fedsgd has no momentum; leave it"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(method: str, settings: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        load_config(options={"method": method}, settings=settings)
    assert str(error.value).startswith(sentence)


def test_rate_momentum_and_decay_may_be_said_with_the_optimizer(tmp_path: Path) -> None:
    """They are the method's; of both places in a file, what they say must be the same."""
    set_ = load_config(settings=["optimizer=adamw", "optimizer.lr=0.01", "optimizer.weight_decay=0.1"])
    file = tmp_path / "run.toml"
    file.write_text('[optimizer]\nname = "adamw"\nlr = 0.01\nweight_decay = 0.1\n')
    assert load_config(file) == set_
    assert (set_.method.learning_rate, set_.method.weight_decay) == (0.01, 0.1)  # type: ignore[attr-defined]
    file.write_text('[method]\nname = "fedavg"\nmomentum = 0.5\n[optimizer]\nmomentum = 0.9\n')
    with pytest.raises(UserError, match=r"optimizer.momentum: 0.9 is not possible beside method.momentum=0.5"):
        load_config(file)


def test_the_step_size_of_adam_is_pytorchs_unless_it_is_given(tmp_path: Path) -> None:
    def rate(*settings: str) -> float:
        config = load_config(options={"method": "fedavg"}, settings=settings)
        (tmp_path / "again.toml").write_text(config.toml())
        assert load_config(tmp_path / "again.toml") == config
        return float(config.method.learning_rate)  # type: ignore[attr-defined]

    assert rate() == FedAvg().learning_rate
    assert rate("optimizer=adam") == 1e-3
    assert rate("optimizer=adamw", "learning_rate=0.02") == 0.02


@pytest.mark.parametrize("which", OPTIMIZERS)
def test_a_scheduled_rate_over_rounds_is_pytorchs(which: str) -> None:
    """With kept state, weight decay and a warm-up: a chain of PyTorch's schedulers, one step a round."""
    settings, own, optimizer = OPTIMIZERS[which]
    schedule = Schedule(name="cosine", warm_up=2, rounds=8)
    training = Training(optimizer=settings.model_copy(update={"keep": True}), schedule=schedule)
    site = replace(quadratic_site([[1.0, -2.0], [3.0, 0.5], [-1.0, 4.0]]), training=training)
    hparams = Local(local_steps=4, learning_rate=0.01, batch_size=2, **own)
    start = theta(5.0, -3.0)
    kept: dict[str, Tensors] = {PERSONAL: start}
    params = [start["theta"].clone().requires_grad_()]
    made = optimizer(params)
    rise = torch.optim.lr_scheduler.LambdaLR(made, lambda done: min(1.0, (done + 1) / 3))
    for number in range(1, 7):
        if number == 3:
            fall = torch.optim.lr_scheduler.CosineAnnealingLR(made, 6)
        client = QuadraticLocal(site, hparams, dict(kept))
        for batch in client.batches(4, number):
            made.zero_grad()
            client.loss({"theta": params[0]}, batch, Received(number))[0].backward()
            made.step()
        client.answer("train", Received(number, {MODEL: start}))
        kept = client.kept
        (rise if number < 3 else fall).step()
    torch.testing.assert_close(kept[PERSONAL]["theta"], params[0].detach(), rtol=1e-12, atol=1e-12)


ALL = ("optimizer.name=adamw", "optimizer.keep=true", "weight_decay=0.01", "learning_rate=0.01", "schedule=cosine")


@pytest.mark.parametrize("method", ["fedavg", *slow("apfl", "fedpin", "fedsdr")])
def test_parity_and_resume_with_all_of_it(method: str, tmp_path: Path) -> None:
    """Local, over the wire, as a stack, and taken up again."""
    habits = ("schedule.warm_up=1", "local_steps=3", "clip_norm=0.5", "label_smoothing=0.1")
    refused = type(toy_config(method).method).refuses
    habits = tuple(own for own in habits if own.partition("=")[0] not in refused)
    config = toy_config(method, *ALL, *habits, rounds=4)
    folder = taken_up(config, tmp_path, after=2)
    wire, grid = RunFolder.create(tmp_path / "wire", config), WireGrid(config, tmp_path / "sites")
    with plain_torch(threads=1):
        run_rounds(config, wire, grid, start(config))
    assert wire.rows() == folder.rows()
    half = client_class(type(config.method))
    if "train" in vars(half).get("stacks", ()):
        run(config.model_copy(update={"cohort_engine": "stack"}), tmp_path / "stack")
        assert_equal(files(tmp_path / "stack"), files(tmp_path / "whole"), 1e-4)
    rates = [row["client"] for row in folder.rows() if row["kind"] == "rate"]
    assert rates == pytest.approx([0.005, 0.01, 0.0075, 0.0025])


def test_a_visitor_adapts_with_the_usual_rate() -> None:
    schedule = Schedule(name="exponential", decay=0.5)
    site = replace(toy_site(), training=Training(schedule=schedule), role="adapts")
    client = FedAvgClient(site, FedAvg(), {})
    client.answer("train", Received(5, {MODEL: client.initial()}))
    assert client.rate_factor == 1.0


@pytest.mark.parametrize("most", [0.01, 1.0, 1e3])
def test_a_gradients_norm_is_cut_as_pytorch_does(most: float) -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = [torch.randn(shape, generator=generator) for shape in ((4, 3), (3,), ())]
    params = [torch.zeros_like(part).requires_grad_() for part in gradient]
    for param, part in zip(params, gradient, strict=True):
        param.grad = part.clone()
    torch.nn.utils.clip_grad_norm_(params, most)
    for found, param in zip(clipped_norm(gradient, most), params, strict=True):
        torch.testing.assert_close(found, param.grad, rtol=1e-6, atol=0)


def test_in_a_stack_each_clients_norm_is_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    clients = [[torch.randn(4, 3, generator=generator), torch.randn(3, generator=generator)] for _ in range(3)]
    stacked = [torch.stack(parts) for parts in zip(*clients, strict=True)]
    found = clipped_norm(stacked, 1.5, stack=True)
    for place, own in enumerate(clients):
        for part, expected in zip(found, clipped_norm(own, 1.5), strict=True):
            torch.testing.assert_close(part[place], expected)


def trained(training: Training, **hparams: Any) -> Tensors:
    client = FedAvgClient(replace(toy_site(), training=training), FedAvg(**hparams), {})
    return client.answer("train", Received(1, {MODEL: client.initial()})).arrays[MODEL]


def test_the_gradient_is_cut_before_weight_decay() -> None:
    """One step: `θ − η (cut(g) + weight_decay · θ)`."""
    client = FedAvgClient(toy_site(), FedAvg(local_steps=1, batch_size=40), {})
    start = client.initial()
    params = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    client.loss(params, client.data.train, Received(1))[0].backward()
    found = trained(Training(clip_value=0.01), local_steps=1, batch_size=40, learning_rate=0.5, weight_decay=0.1)
    for name, param in params.items():
        assert param.grad is not None
        expected = start[name] - 0.5 * (param.grad.clamp(-0.01, 0.01) + 0.1 * start[name])
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", [{}, {"clip_norm": 0.05}])
def test_accumulated_mini_batches_are_a_large_one(cut: dict[str, float]) -> None:
    """Four of ten samples of forty are a pass over all; so are their steps."""
    few = trained(Training(accumulate=4, **cut), local_steps=3, batch_size=10, momentum=0.9, weight_decay=0.01)
    large = trained(Training(**cut), local_steps=3, batch_size=40, momentum=0.9, weight_decay=0.01)
    for name in large:
        torch.testing.assert_close(few[name], large[name], rtol=1e-4, atol=1e-6)
    passes = trained(Training(accumulate=4), local_steps=3, batch_size=10, local_unit="epoch")
    steps = trained(Training(accumulate=4), local_steps=3, batch_size=10)
    assert_equal(passes, steps)


def test_labels_are_smoothed_in_training_and_not_in_evaluation() -> None:
    client = FedAvgClient(replace(toy_site(), training=Training(label_smoothing=0.2)), FedAvg(), {})
    logits, labels = torch.tensor([[2.0, -1.0], [0.5, 0.5]]), torch.tensor([0, 1])
    shares = torch.tensor([[0.9, 0.1], [0.1, 0.9]])
    expected = -(shares * logits.log_softmax(dim=1)).sum(dim=1)
    torch.testing.assert_close(client.criterion(logits, labels), expected.mean())
    plain = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(client.losses(logits, labels), plain)


def test_smoothing_is_for_classes_and_there_is_one_way_to_cut() -> None:
    with pytest.raises(UserError, match="clip_norm: it is not possible beside clip_value=1; take one"):
        load_config(options={"method": "fedavg"}, settings=["clip_norm=1", "clip_value=1"])
    with pytest.raises(UserError, match=r"label_smoothing: 0.1 is not possible with method 'irm', whose penalty"):
        load_config(options={"method": "irm"}, settings=["label_smoothing=0.1"])
