import pytest
import torch
from torch.func import grad, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, linear

from perennial.common.models.architectures import FeatureNorm
from perennial.common.models.network import Network, network
from perennial.common.models.settings import MODELS, model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import SampleShape, made_up
from perennial.common.utils.tensors import Tensors, part

# The smallest input that shows each model's layers, for the tests that any model must pass.
SMALL = {
    "logistic": (2, 8, 8), "mlp": (2, 8, 8), "cnn-small": (3, 16, 16), "cnn-large": (1, 16, 16),
    "convnet": (1, 8, 8), "cnn-groupnorm": (3, 16, 16), "resnet18": (2, 32, 32),
    "embedding-bag": SampleShape((7,), 30, padded=True), "text-transformer": SampleShape((7,), 30, padded=True),
}  # fmt: skip


def net(name: str, shape: tuple[int, ...], classes: int, **fields: object) -> Network:
    return network(model_settings({"name": name, **fields}), shape, classes)


def numbers(model: Network, names: tuple[str, ...]) -> int:
    tensors = model.initial(0)
    return sum(tensors[name].numel() for name in names)


def samples(shape: tuple[int, ...], count: int = 3) -> torch.Tensor:
    if isinstance(shape, SampleShape):
        return made_up(shape, count)
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(1))


# Parameters in all and in the classifier, as they follow from the layers.
@pytest.mark.parametrize(
    ("name", "fields", "shape", "classes", "parameters", "head"),
    [
        ("logistic", {}, (1, 28, 28), 10, 7_850, 7_850),
        ("mlp", {}, (2, 14, 14), 2, 154_052, 782),
        ("mlp", {"hidden": [390, 390]}, (2, 14, 14), 2, 306_542, 782),
        ("mlp", {"hidden": [390, 390], "one_logit": True}, (2, 14, 14), 2, 306_151, 391),
        ("mlp", {"hidden": [128]}, (1, 28, 28), 10, 101_770, 1_290),
        (
            *("mlp", {"hidden": [1024, 1024, 512], "linear_features": True, "one_logit": True}),
            *((1399,), 2, 3_008_513, 513),
        ),
        ("mlp", {"hidden": [390, 390], "head_layers": 2}, (2, 28, 28), 2, 765_182, 765_182),
        ("mlp", {"hidden": [390, 390, 390], "head_layers": 2}, (2, 28, 28), 2, 611_910 + 305_762, 305_762),
        ("cnn-small", {}, (3, 32, 32), 10, 52_202, 1_210),
        ("cnn-large", {}, (3, 32, 32), 10, 878_538, 5_130),
        ("convnet", {}, (1, 28, 28), 10, 371_850, 1_290),
        ("cnn-groupnorm", {}, (3, 16, 16), 10, 241_674, 1_290),
        ("cnn-groupnorm", {}, (3, 32, 32), 10, 290_826, 1_290),
        ("resnet18", {}, (3, 64, 64), 2, 11_177_538, 1_026),
        ("resnet18", {"norm": "group"}, (3, 64, 64), 1, 11_177_025, 513),
        ("resnet18", {"head_hidden": 256}, (3, 64, 64), 5, 11_309_125, 132_613),
        ("resnet18", {"small_input": True}, (3, 32, 32), 2, 11_177_538 - 3 * 64 * (49 - 9), 1_026),
    ],
)
def test_parameter_counts_are_the_papers(
    name: str, fields: dict[str, object], shape: tuple[int, ...], classes: int, parameters: int, head: int
) -> None:
    model = net(name, shape, classes, **fields)
    assert numbers(model, model.parameter_names) == parameters
    assert numbers(model, model.classifier_names) == head
    assert model.featurizer_names + model.classifier_names == model.parameter_names


def test_only_batch_norm_has_buffers() -> None:
    model = net("resnet18", (3, 64, 64), 2)
    tensors = model.initial(0)
    floats = [name for name in model.buffer_names if tensors[name].is_floating_point()]
    assert sum(tensors[name].numel() for name in floats) == 9_600
    assert sum(tensors[name].numel() for name in model.buffer_names if name not in floats) == 20
    assert set(tensors) == {*model.parameter_names, *model.buffer_names}
    assert set(part(tensors, "classifier")) == set(model.classifier_names)
    assert set(part(tensors, "featurizer")) == {*model.featurizer_names, *model.buffer_names}
    assert net("resnet18", (3, 64, 64), 2, norm="group").buffer_names == ()


def test_batch_norm_layers_have_their_parameters_and_buffers() -> None:
    mlp = net("mlp", (6,), 2, hidden=[5, 4], head_layers=1, norm="batch")
    tensors = mlp.initial(0)
    own = {name: tensors[name] for name in mlp.batch_norm_names}
    assert {name.rpartition(".")[2] for name in own} == {
        "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip
    assert sum(tensor.numel() for tensor in own.values()) == (4 * 5 + 1) + (4 * 4 + 1)
    assert set(mlp.buffer_names) < set(own)
    assert numbers(mlp, mlp.classifier_names) == (5 * 4 + 4) + (4 + 4) + (4 * 2 + 2)
    # Whatever the inputs, what goes into an activation has mean 0 in training.
    linear = net("mlp", (6,), 2, hidden=[5], linear_features=True, norm="batch")
    z = linear.features(linear.initial(0), 3 + samples((6,), 50), training=True)
    torch.testing.assert_close(z.mean(dim=0), torch.zeros(5), rtol=0, atol=1e-5)
    for model in (
        mlp,
        net("resnet18", (2, 32, 32), 3),
        net("resnet18", (2, 32, 32), 3, norm="group"),
        net("mlp", (6,), 2),
    ):
        assert bool(model.batch_norm_names) == model.settings.batch_norm


def test_every_model_has_a_small_input() -> None:
    assert set(SMALL) == set(MODELS)


@pytest.mark.parametrize("small_input", [False, True])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet_options_run(norm: str, small_input: bool) -> None:
    model = net("resnet18", (1, 16, 16), 4, norm=norm, small_input=small_input, head_hidden=8)
    assert model.predict(model.initial(0), samples((1, 16, 16))).shape == (3, 4)


def test_mlp_parts_follow_the_options() -> None:
    x = samples((6,), 50)
    linear = net("mlp", (6,), 2, hidden=[5, 4], linear_features=True)
    assert (linear.features(linear.initial(0), x) < 0).any()
    rectified = net("mlp", (6,), 2, hidden=[5, 4])
    torch.testing.assert_close(
        rectified.features(rectified.initial(0), x), linear.features(linear.initial(0), x).relu()
    )
    # FL Games keeps the hidden layers in the classifier; the function of the whole is the same.
    games = net("mlp", (6,), 2, hidden=[5, 4], head_layers=2, activation="elu")
    whole = net("mlp", (6,), 2, hidden=[5, 4], activation="elu")
    assert games.featurizer_names == ()
    torch.testing.assert_close(games.features({}, x), x)
    torch.testing.assert_close(games.predict(games.initial(0), x), whole.predict(whole.initial(0), x))


def test_xavier_bounds_the_weights_and_zeroes_the_biases() -> None:
    model = net("mlp", (392,), 2, init="xavier")
    tensors = model.initial(0)
    bound = (6 / (392 + 390)) ** 0.5
    first = tensors["featurizer.1.weight"].abs().max()
    assert 0.99 * bound < first <= bound
    assert all(tensors[name].count_nonzero() == 0 for name in model.parameter_names if name.endswith("bias"))


@pytest.mark.slow
def test_batch_norm_updates_the_given_buffers_and_only_in_training() -> None:
    model, x = net("resnet18", (2, 32, 32), 3), samples((2, 32, 32))
    fresh, given, other = model.initial(0), model.initial(0), model.initial(0)

    def changed(tensors: Tensors) -> set[str]:
        return {name for name in tensors if not torch.equal(tensors[name], fresh[name])}

    model.predict(given, x)
    assert changed(given) == set()
    model.predict(given, x, training=True)
    assert changed(given) == set(model.buffer_names)
    assert changed(other) == set()
    model.features(other, x, training=True)
    assert all(torch.equal(other[name], given[name]) for name in fresh)
    before = {name: tensor.clone() for name, tensor in given.items()}
    model.predict(given, x)  # back in evaluation mode
    assert all(torch.equal(given[name], before[name]) for name in given)


@pytest.mark.parametrize("name", ["mlp", "resnet18"])
def test_initial_depends_on_its_key_alone(name: str) -> None:
    model = Network(model_settings({"name": name}), (2, 32, 32), 3, "cpu")
    first = model.initial(7)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = model.initial(7)
    Network(model_settings({"name": name}), (2, 32, 32), 3, "cpu")
    assert torch.equal(torch.get_rng_state(), state)
    assert list(first) == list(again)
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not any(tensor.requires_grad for tensor in first.values())
    weight = "classifier.weight"
    for other in (model.initial(8), model.initial(7, "client-1"), model.initial(7, "client-2")):
        assert not torch.equal(other[weight], first[weight])
    assert torch.equal(model.initial(7, "client-1")[weight], model.initial(7, "client-1")[weight])
    again[weight].zero_()  # a caller's tensors are its own
    assert torch.equal(model.initial(7)[weight], first[weight])


@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn-small", "convnet", "cnn-groupnorm"])
def test_vmap_over_a_cohort_equals_the_loop(name: str) -> None:
    model = net(name, SMALL[name], 3)
    cohort = [model.initial(seed) for seed in range(3)]
    stacked = {name: torch.stack([tensors[name] for tensors in cohort]) for name in cohort[0]}
    x = torch.stack([samples(SMALL[name], 4) + client for client in range(3)])
    y = torch.arange(12).reshape(3, 4) % 3

    def risk(tensors: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model.predict(tensors, x), y)

    mapped = vmap(grad(risk))(stacked, x, y)
    for client, tensors in enumerate(cohort):
        leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        gradients = torch.autograd.grad(risk(leaves, x[client], y[client]), list(leaves.values()))
        for name, expected in zip(leaves, gradients, strict=True):
            torch.testing.assert_close(mapped[name][client], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["logistic", "mlp", "cnn-small", "convnet", "cnn-groupnorm", "resnet18"])
def test_double_backward_is_the_derivative_of_the_gradient_norm(name: str) -> None:
    model, x = net(name, SMALL[name], 3), samples(SMALL[name]).double()
    y = torch.tensor([0, 1, 2])
    start = {k: t.double() if t.is_floating_point() else t for k, t in model.initial(0).items()}

    def half_squared_norm(shift: float) -> tuple[torch.Tensor, torch.Tensor]:
        leaves = {name: start[name].clone().requires_grad_() for name in model.parameter_names}
        with torch.no_grad():
            leaves["classifier.bias"][0] += shift
        risk = cross_entropy(model.predict(start | leaves, x), y)
        gradients = torch.autograd.grad(risk, list(leaves.values()), create_graph=True)
        value = sum((g.square().sum() for g in gradients), torch.zeros(())) / 2
        return value, torch.autograd.grad(value, leaves["classifier.bias"])[0][0]

    _, slope = half_squared_norm(0.0)
    step = 1e-5
    numeric = (half_squared_norm(step)[0] - half_squared_norm(-step)[0]) / (2 * step)
    torch.testing.assert_close(slope, numeric, rtol=1e-5, atol=1e-8)


def test_calls_need_their_part_only_and_name_what_is_missing() -> None:
    model, x = net("mlp", (6,), 2), samples((6,))
    tensors = model.initial(0)
    head = {name: tensors[name] for name in model.classifier_names}
    z = model.features(tensors | {"unrelated": x}, x)
    torch.testing.assert_close(model.classify(head, z), model.predict(tensors, x))
    with pytest.raises(KeyError, match=r"featurizer\.1\.weight"):
        model.predict(head, x)


def test_equal_settings_share_one_network() -> None:
    first = network(model_settings({"name": "mlp", "hidden": [9]}), (4,), 2)
    assert network(model_settings({"name": "mlp", "hidden": (9,)}), (4,), 2) is first
    assert network(model_settings({"name": "mlp", "hidden": (8,)}), (4,), 2) is not first


def test_one_logit_is_binary_cross_entropy() -> None:
    model = net("mlp", (3,), 2, hidden=[4], one_logit=True)
    tensors, x, labels = model.initial(0), samples((3,)), torch.tensor([0, 1, 1])
    logits = model.predict(tensors, x)
    assert logits.shape == (3, 2)
    assert not logits[:, 0].any()
    z = linear(model.features(tensors, x), tensors["classifier.weight"], tensors["classifier.bias"])[:, 0]
    expected = binary_cross_entropy_with_logits(z, labels.float())
    torch.testing.assert_close(cross_entropy(logits, labels), expected)
    with pytest.raises(
        UserError, match=r"model\.one_logit is for two classes, but here there are 3; leave it out"
    ):
        net("mlp", (3,), 3, hidden=[4], one_logit=True)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "a model needs a name (there are: cnn-groupnorm, cnn-large,"),
        ({"name": "reznet18"}, "unknown model 'reznet18'; did you mean 'resnet18'? (there are: cnn-"),
        ({"name": ["mlp"]}, "unknown model \"['mlp']\"; "),
        ({"name": "mlp", "hiden": [4]}, "model.hiden: there is no such setting; did you mean 'hidden'?"),
        ({"name": "logistic", "zzz": 1}, "model.zzz: there is no such setting"),
        (
            {"name": "mlp", "activation": "gelu"},
            "model.activation: 'gelu' is not possible; input should be 'relu' or 'elu'",
        ),
        ({"name": "mlp", "hidden": [4, 0]}, "model.hidden.1: 0 is not possible; input should be greater than 0"),
        (
            {"name": "mlp", "hidden": [4], "head_layers": 2},
            "model.head_layers = 2, but hidden has 1 layer(s)",
        ),
        (
            {"name": "mlp", "head_layers": 1, "linear_features": True},
            "model.linear_features needs a hidden layer that head_layers leaves to the featurizer",
        ),
        ({"name": "resnet18", "head_hidden": -1}, "model.head_hidden: -1 is not possible; input should be"),
    ],
)
def test_wrong_settings_are_told_in_one_sentence(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        model_settings(values)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "least"), [("cnn-small", 16), ("cnn-large", 16), ("cnn-groupnorm", 14), ("convnet", 1)]
)
def test_the_smallest_image_runs_and_a_smaller_one_is_told(name: str, least: int) -> None:
    model = net(name, (2, least, least), 3)
    assert model.predict(model.initial(0), samples((2, least, least))).shape == (3, 3)
    if least > 1:
        sentence = f"model '{name}' needs images of at least {least}x{least} pixels, but these have 8x8"
        with pytest.raises(UserError, match=sentence):
            net(name, (2, 8, 8), 3)


@pytest.mark.parametrize("name", ["cnn-small", "cnn-large", "convnet", "cnn-groupnorm", "resnet18"])
def test_a_flat_vector_is_no_image(name: str) -> None:
    with pytest.raises(UserError, match=rf"model '{name}' needs images .* a sample here has shape 392"):
        net(name, (392,), 3)


def test_the_mode_is_switched_only_when_it_changes() -> None:
    model, x = Network(model_settings({"name": "mlp"}), (6,), 2, "cpu"), samples((6,))
    tensors, modes = model.initial(0), []
    switch = model._model.train

    def counted(mode: bool = True) -> torch.nn.Module:
        modes.append(mode)
        return switch(mode)

    model._model.train = counted  # type: ignore[method-assign]
    for training in (False, False, True, True, False):
        model.predict(tensors, x, training)
    assert modes == [False, True, False]


def test_a_mini_batch_of_one_sample_has_no_variance_of_its_own() -> None:
    """docs/models.md."""
    x, norm = samples((4,), 1), FeatureNorm(4)
    torch.testing.assert_close(norm.train()(x), norm.eval()(x))
    assert norm.num_batches_tracked == 0
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        torch.nn.BatchNorm1d(4)(x)
