import math
import re
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import user_models
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perennial.client.methods.ditto import DittoClient
from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.local import LocalClient
from perennial.client.steps import Working
from perennial.client.trainer import LocalTrainer, Metrics, Received, Reply, Site, in_pieces
from perennial.common import plugins
from perennial.common.data.examples import ClientData, Examples
from perennial.common.methods.ditto import Ditto
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.local import Local
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, NUM_EXAMPLES, PERSONAL

NET = network(model_settings({"name": "logistic"}), (4,), 3)
DEEP = network(model_settings({"name": "mlp", "hidden": [5]}), (4,), 3)


def examples(count: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator)
    return Examples(x, y, torch.arange(count))  # the environments number the samples


def site(train: int = 23, client: str = "client-0", seed: int = 0, net: Any = NET) -> Site:
    test = {"one": examples(7, 2), "two": examples(9, 3), "none": examples(0, 4)}
    return Site(client, ClientData(examples(train), examples(5, 1), test), net, seed)


def fedavg(where: Site | None = None, **hparams: Any) -> FedAvgClient:
    return FedAvgClient(where or site(), FedAvg(**hparams), {})


def start(net: Any = NET) -> Tensors:
    return dict(net.initial(7))


def received(round_: int = 1, **arrays: Tensors) -> Received:
    return Received(round_, {MODEL: start(), **arrays})


def assert_close(found: Tensors, expected: Tensors, **how: float) -> None:
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], **how or {"rtol": 1e-5, "atol": 1e-7})


# ---------------------------------------------------------------------- descend


def quadratic(params: Tensors, batch: Examples, _: Received) -> tuple[Tensor, Metrics]:
    value = sum((tensor.square().sum() / 2 for tensor in params.values()), torch.zeros(()))
    return value, {"risk": value}


def test_on_a_quadratic_each_step_shrinks_the_model_by_one_minus_the_learning_rate() -> None:
    client = fedavg(learning_rate=0.1, local_steps=3)
    reached, metrics = client.descend(start(), quadratic, received())
    assert_close(reached, {name: tensor * 0.9**3 for name, tensor in start().items()})
    first = float(sum(tensor.square().sum() / 2 for tensor in start().values()))
    assert metrics["risk"] == pytest.approx(first * (1 + 0.9**2 + 0.9**4) / 3)  # before each step


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    """Its sum would be another objective, by the size of the batch."""

    def each_samples(params: Tensors, batch: Examples, _: Received) -> tuple[Tensor, Metrics]:
        return F.cross_entropy(batch.x @ params["classifier.weight"].T, batch.y, reduction="none"), {}

    with pytest.raises(ValueError, match=r"loss: a tensor of shape \[5\] is not possible; it must be a scalar"):
        fedavg(batch_size=5).descend(start(), each_samples, received())


@pytest.mark.parametrize("wrong", [0.5, "a", torch.ones(2, 3)])
def test_a_metric_of_a_loss_that_is_no_scalar_tensor_is_named(wrong: Any) -> None:
    def loss(params: Tensors, batch: Examples, _: Received) -> tuple[Tensor, Metrics]:
        return quadratic(params, batch, _)[0], {"odd": wrong}

    words = "a tensor of shape [2, 3]" if isinstance(wrong, Tensor) else repr(wrong)
    client, model = fedavg(), Working(start(), NET.parameter_names)
    for make in (
        lambda: client.descend(start(), loss, received()),
        lambda: client.full_gradient(model, loss, received(), size=8),
    ):
        with pytest.raises(ValueError, match=re.escape(f"metric 'odd': {words} is not possible; it must be a s")):
            make()


def test_a_rate_of_its_own_takes_the_place_of_the_learning_rate() -> None:
    reached, _ = fedavg(learning_rate=0.1, local_steps=3).descend(start(), quadratic, received(), rate=0.5)
    assert_close(reached, {name: tensor * 0.5**3 for name, tensor in start().items()})


def test_momentum_and_weight_decay_by_hand() -> None:
    """θ=1, gradient θ(1+0.5): v=1.5, θ=0.85; v=0.9·1.5+1.275=2.625, θ=0.5875."""
    client = fedavg(learning_rate=0.1, local_steps=2, momentum=0.9, weight_decay=0.5)
    ones = {name: torch.ones_like(tensor) for name, tensor in start().items()}
    reached, _ = client.descend(ones, quadratic, received())
    assert_close(reached, {name: torch.full_like(tensor, 0.5875) for name, tensor in ones.items()})


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("net", [NET, DEEP], ids=["logistic", "mlp"])
def test_descend_is_torchs_sgd_over_the_same_batches(momentum: float, weight_decay: float, net: Any) -> None:
    how = {"momentum": momentum, "weight_decay": weight_decay, "learning_rate": 0.2}
    client = fedavg(site(net=net), batch_size=5, local_steps=12, **how)
    reached, metrics = client.descend(start(net), client.loss, received(3))

    params = {name: tensor.clone().requires_grad_() for name, tensor in start(net).items()}
    optimizer = torch.optim.SGD(params.values(), lr=0.2, momentum=momentum, weight_decay=weight_decay)
    risks = []
    for batch in client.batches(12, 3):
        optimizer.zero_grad()
        hidden = batch.x
        if net is DEEP:
            hidden = F.relu(F.linear(hidden, params["featurizer.1.weight"], params["featurizer.1.bias"]))
        risk = F.cross_entropy(F.linear(hidden, params["classifier.weight"], params["classifier.bias"]), batch.y)
        risk.backward()
        optimizer.step()
        risks.append(risk.item())
    assert_close(reached, {name: tensor.detach() for name, tensor in params.items()})
    assert metrics == {"risk": pytest.approx(sum(risks) / 12)}


def test_the_named_tensors_alone_are_trained_over_the_mini_batches_of_the_purpose() -> None:
    client = fedavg(site(net=DEEP), local_steps=3, batch_size=8, momentum=0.5, weight_decay=0.1)
    names = DEEP.classifier_names
    reached, _ = client.descend(start(DEEP), client.loss, received(2), steps=4, names=names, purpose="head")
    params = {name: tensor.clone().requires_grad_(name in names) for name, tensor in start(DEEP).items()}
    optimizer = torch.optim.SGD([params[n] for n in names], lr=0.05, momentum=0.5, weight_decay=0.1)
    for batch in client.batches(4, 2, "head"):
        optimizer.zero_grad()
        F.cross_entropy(DEEP.predict(params, batch.x), batch.y).backward()
        optimizer.step()
    assert_close(reached, {name: tensor.detach() for name, tensor in params.items()})
    assert all(torch.equal(reached[name], start(DEEP)[name]) for name in DEEP.featurizer_names)


def test_what_was_received_is_left_as_it_was_and_the_result_needs_no_gradient() -> None:
    shared, kept = start(), start()
    client = DittoClient(site(), Ditto(momentum=0.9, weight_decay=0.1), {PERSONAL: kept})
    reply = client.train(Received(1, {MODEL: shared}))
    for tensors in (shared, kept):
        assert all(torch.equal(tensor, start()[name]) for name, tensor in tensors.items())
    for tensors in (shared, kept, reply.arrays[MODEL], client.kept[PERSONAL]):
        assert not any(tensor.requires_grad or tensor.grad_fn for tensor in tensors.values())
    assert client.kept[PERSONAL] is not kept  # that is how the host sees the change


def test_momentum_starts_afresh_in_every_descent() -> None:
    client = fedavg(momentum=0.9, local_steps=4)
    assert_close(client.train(received()).arrays[MODEL], client.train(received()).arrays[MODEL], rtol=0, atol=0)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("objective", [torch.sum, lambda total: total.square().sum()], ids=["expanded", "shared"])
def test_gradients_that_share_memory_are_each_stepped_once(
    objective: Callable[[Tensor], Tensor], weight_decay: float
) -> None:
    """Of a model that is a sum, θ = shared + own, autograd gives both parts one and the same gradient tensor."""

    def loss(params: Tensors, batch: Examples, received: Received) -> tuple[Tensor, Metrics]:
        return objective(params["shared"] + params["own"]), {}

    client = fedavg(learning_rate=0.1, local_steps=3, momentum=0.5, weight_decay=weight_decay)
    client.network = type("Two", (), {"parameter_names": ("shared", "own")})()
    reached, _ = client.descend({"shared": torch.ones(2), "own": torch.full((2,), 2.0)}, loss, received())

    params = {"shared": torch.ones(2, requires_grad=True), "own": torch.full((2,), 2.0, requires_grad=True)}
    optimizer = torch.optim.SGD(params.values(), lr=0.1, momentum=0.5, weight_decay=weight_decay)
    for _ in range(3):
        optimizer.zero_grad()
        objective(params["shared"] + params["own"]).backward()
        optimizer.step()
    assert_close(reached, {name: tensor.detach() for name, tensor in params.items()})


@pytest.mark.parametrize("size", [5, 23, 100])
def test_a_full_gradient_is_that_of_all_data_or_the_mean_of_its_mini_batches(size: int) -> None:
    """23 samples: four pieces of 5 and one of 3, or one piece."""
    client, model = fedavg(), Working(start(), NET.classifier_names)
    train = client.data.train

    def gradients(pieces: list[Examples]) -> list[list[Tensor]]:
        return [model.gradient(F.cross_entropy(NET.predict(model.tensors, p.x), p.y)) for p in pieces]

    found, metrics = client.full_gradient(model, client.loss, received(), size=size)
    (whole,) = gradients([train])
    torch.testing.assert_close(found, whole)
    risk = F.cross_entropy(NET.predict(start(), train.x), train.y)
    assert metrics == {"risk": pytest.approx(risk.item())}
    found, _ = client.full_gradient(model, client.loss, received(), size=size, equal_pieces=True)
    pieces = [train[index] for index in torch.split(torch.arange(23), size)]
    each = [torch.stack(parts).mean(dim=0) for parts in zip(*gradients(pieces), strict=True)]
    torch.testing.assert_close(found, each)


def test_a_moved_working_copy_is_one_step_on_and_leaves_its_origin() -> None:
    origin = Working(start(), NET.parameter_names)
    ones = [torch.ones_like(tensor) for tensor in origin.values]
    moved = origin.moved(ones, 0.5)
    moved.step(ones, 0.5)
    assert_close(moved.result(), {name: tensor - 1 for name, tensor in start().items()})
    assert all(not tensor.grad_fn and tensor.requires_grad for tensor in origin.tensors.values())
    assert_close(origin.result(), start(), rtol=0, atol=0)


def test_buffers_are_updated_in_a_copy() -> None:
    """BatchNorm writes its statistics in place; the received ones belong to all clients of the process."""
    settings = model_settings({"name": "resnet18", "small_input": True})
    net = network(settings, (1, 8, 8), 2)
    x = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    data = Examples(x, torch.arange(8) % 2, torch.zeros(8, dtype=torch.long))
    client = fedavg(Site("client-0", ClientData(data, data, {"one": data}), net, 0), local_steps=1, batch_size=8)
    before = net.initial(0)
    sent = {name: tensor.clone() for name, tensor in before.items()}
    reply = client.train(Received(1, {MODEL: sent}))
    assert all(torch.equal(sent[name], before[name]) for name in before)
    assert reply.arrays[MODEL].keys() == before.keys()
    assert all(int(reply.arrays[MODEL][n]) == 1 for n in net.buffer_names if n.endswith("num_batches_tracked"))
    client.evaluate(Received(1, {MODEL: sent}))
    assert all(torch.equal(sent[name], before[name]) for name in before)


# ---------------------------------------------------------------------- batches


def numbers(batches: Any) -> list[list[int]]:
    return [batch.environment.tolist() for batch in batches]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 20), st.integers(1, 25), st.integers(1, 12))
def test_every_pass_covers_every_sample_once_and_steps_are_exact(count: int, size: int, steps: int) -> None:
    client = fedavg(site(count), batch_size=size)
    found = numbers(client.batches(steps, 1))
    per_pass = -(-count // size)
    assert len(found) == steps
    assert all(len(batch) == size for i, batch in enumerate(found) if (i + 1) % per_pass)
    for first in range(0, steps - per_pass + 1, per_pass):
        seen = [number for batch in found[first : first + per_pass] for number in batch]
        assert sorted(seen) == list(range(count))


def test_in_epochs_a_step_is_a_pass() -> None:
    client = fedavg(site(23), batch_size=5, local_unit="epoch")
    found = numbers(client.batches(3, 1))
    assert [len(batch) for batch in found] == [5, 5, 5, 5, 3] * 3
    assert found == numbers(fedavg(site(23), batch_size=5).batches(15, 1))
    assert found[:5] != found[5:10]  # shuffled anew


def test_a_stream_is_the_batches_of_some_samples_without_end() -> None:
    client = fedavg(site(23), batch_size=5)
    few = client.data.train[torch.tensor([3, 7, 11])]
    found = numbers(islice(client.stream(few, 1, "few"), 4))
    assert [sorted(batch) for batch in found] == [[3, 7, 11]] * 4
    whole = client.stream(client.data.train, 2, "batches")
    assert numbers(islice(whole, 9)) == numbers(client.batches(9, 2))


def test_batches_depend_on_seed_client_round_and_purpose_alone() -> None:
    def draw(client: str = "client-0", seed: int = 0, round_: int = 1, purpose: str = "batches") -> Any:
        torch.rand(1)  # whatever else was drawn before
        return numbers(fedavg(site(client=client, seed=seed), batch_size=4).batches(6, round_, purpose))

    assert draw() == draw()
    others = [draw(client="client-1"), draw(seed=1), draw(round_=2), draw(purpose="personal")]
    assert all(other != draw() for other in others)


def test_a_batch_is_samples_with_their_own_labels() -> None:
    client = fedavg(batch_size=6)
    train = client.data.train
    for batch in client.batches(4, 1):
        assert torch.equal(batch.x, train.x[batch.environment])
        assert torch.equal(batch.y, train.y[batch.environment])


# ---------------------------------------------------------------------- the methods


def test_ditto_without_proximity_is_local_training() -> None:
    """From the same start and over the same batches, in every round."""
    how = {"local_steps": 5, "momentum": 0.5, "weight_decay": 0.01, "batch_size": 6}
    ditto = DittoClient(site(), Ditto(proximity=0, personal_steps=5, **how), {PERSONAL: start()})
    local = LocalClient(site(), Local(**how), {PERSONAL: start()})
    for round_ in (1, 2, 3):
        ditto.train(Received(round_, {MODEL: {n: t + 1 for n, t in start().items()}}))
        local.train(Received(round_))
        assert_close(ditto.kept[PERSONAL], local.kept[PERSONAL], rtol=0, atol=0)


def test_ditto_with_a_huge_proximity_stays_at_the_global_model() -> None:
    far = {name: tensor + 3 for name, tensor in start().items()}
    # The step towards the anchor is learning_rate * proximity = 1 of the way.
    ditto = DittoClient(site(), Ditto(proximity=1e4, learning_rate=1e-4), {PERSONAL: far})
    shared = received()
    ditto.train(shared)
    for name, tensor in ditto.kept[PERSONAL].items():
        assert (tensor - shared[MODEL][name]).abs().max() < 1e-3
        assert not torch.equal(tensor, shared[MODEL][name])


def test_dittos_personal_steps_are_the_papers_update() -> None:
    ditto = DittoClient(site(), Ditto(proximity=0.7, personal_steps=4, learning_rate=0.1, batch_size=8), {})
    shared = received(2)
    own = {name: tensor + 0.1 for name, tensor in start().items()}
    ditto.kept[PERSONAL] = own
    ditto.train(shared)
    v = {name: tensor.clone() for name, tensor in own.items()}
    for batch in ditto.batches(4, 2):
        gradient = torch.func.grad(lambda p, b=batch: F.cross_entropy(NET.predict(p, b.x), b.y))(v)
        v = {name: v[name] - 0.1 * (gradient[name] + 0.7 * (v[name] - shared[MODEL][name])) for name in v}
    assert_close(ditto.kept[PERSONAL], v)


def test_dittos_global_model_is_fedavgs() -> None:
    ditto = DittoClient(site(), Ditto(), {}).train(received())
    plain = FedAvgClient(site(), FedAvg(), {}).train(received())
    assert_close(ditto.arrays[MODEL], plain.arrays[MODEL], rtol=0, atol=0)
    assert ditto.metrics == plain.metrics
    assert plain.metrics[NUM_EXAMPLES] == 23


@pytest.mark.parametrize(
    ("make", "begins_at"),
    [
        (lambda: LocalClient(site(seed=5), Local(), {}), lambda: NET.initial(5)),
        (lambda: DittoClient(site(seed=5), Ditto(), {}), start),
    ],
)
def test_before_its_first_round_a_personal_model_is_the_common_one(
    make: Callable[[], LocalTrainer[Any]], begins_at: Callable[[], Tensors]
) -> None:
    client = make()
    arrays = {} if isinstance(client, LocalClient) else {MODEL: start()}
    assert_close(client.personal(Received(1, arrays)), begins_at(), rtol=0, atol=0)


# ---------------------------------------------------------------------- evaluation


def test_evaluation_counts_by_model_split_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {name: tensor - 1 for name, tensor in start().items()}
    client = DittoClient(site(), Ditto(), {PERSONAL: own})
    whole: Reply = client.evaluate(received())
    assert whole.settings == {"validation": ["validation"], "test": ["one", "two", "none"]}
    assert whole.metrics["global/test/count"] == [7, 9, 0]
    for model, tensors in (("global", start()), ("personal", own)):
        assert whole.metrics[f"{model}/validation/count"] == [5]
        for split, parts in (("validation", [client.data.validation]), ("test", list(client.data.test.values()))):
            logits = [F.linear(p.x, tensors["classifier.weight"], tensors["classifier.bias"]) for p in parts]
            pairs = list(zip(logits, parts, strict=True))
            right = [int((out.argmax(1) == part.y).sum()) for out, part in pairs]
            losses = [float(F.cross_entropy(out, part.y, reduction="sum")) for out, part in pairs]
            assert whole.metrics[f"{model}/{split}/correct"] == right
            assert whole.metrics[f"{model}/{split}/loss"] == pytest.approx(losses, rel=1e-5)
    # In pieces it is the same.
    monkeypatch.setattr("perennial.client.trainer.EVALUATION_BATCH", 2)
    pieces = client.evaluate(received())
    assert pieces.metrics["global/test/correct"] == whole.metrics["global/test/correct"]
    assert pieces.metrics["personal/test/loss"] == pytest.approx(whole.metrics["personal/test/loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "stack", "sizes"),
    [((600, 1), 0, [256, 256, 88]), ((3, 600, 1), 3, [256, 256, 88]), ((40, 250, 1), 40, [102, 102, 46])],
)
def test_pieces_fit_a_processor_s_cache_and_a_stack_s_samples_count_together(
    shape: tuple[int, ...], stack: int, sizes: list[int]
) -> None:
    seen: list[int] = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[-2])
        return 2 * x

    x = torch.arange(float(math.prod(shape))).reshape(shape)
    assert torch.equal(in_pieces(doubled, x, stack), 2 * x)
    assert seen == sizes


@pytest.mark.parametrize(
    ("model", "shape", "device", "size"),
    [
        ({"name": "mlp", "hidden": (8,)}, (2,), "cpu", 256),
        ({"name": "mlp", "hidden": (8,)}, (2,), "meta", 4096),
        ({"name": "cnn-groupnorm"}, (3, 32, 32), "meta", 2**30 // 999_944),
        ({"name": "mlp", "hidden": (8,), "norm": "batch"}, (2,), "meta", 256),
        ({"name": "user_models:Named"}, (2,), "meta", 256),
    ],
)
def test_a_gpu_takes_larger_pieces_of_a_model_that_has_no_statistics(
    model: dict[str, Any], shape: tuple[int, ...], device: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ "meta" stands for a GPU; the bytes are those of a sample and of all layers' outputs for it."""
    monkeypatch.setenv(plugins.VARIABLE, user_models.__file__)
    net = network(model_settings(model), shape, 2, device)
    none = Examples(torch.zeros(0, *shape), *2 * [torch.zeros(0, dtype=torch.int64)])
    data = ClientData(none, none, {})
    assert FedAvgClient(Site("client-0", data, net, 0), FedAvg(), {}).piece == size
    assert FedAvgClient(Site("", data, net, 0, ("client-0", "client-1")), FedAvg(), {}).piece == 256


def test_an_action_is_the_method_of_that_name() -> None:
    class Two(LocalTrainer[FedAvg]):
        def train_gradient(self, received: Received) -> Reply:
            return Reply(metrics={"round": received.round})

    client = Two(site(), FedAvg(), {})
    assert client.answer("train.gradient", Received(4)).metrics == {"round": 4}
    assert NUM_EXAMPLES in client.answer("train", received()).metrics
    with pytest.raises(AttributeError):
        client.answer("train.nothing", received())
