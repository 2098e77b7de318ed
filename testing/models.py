"""What every model must keep: two parts that make the whole, weights by their seed alone, and it learns.

Each test takes the name of a model as `model`; its settings are the defaults.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy

from perennial.common.models.architectures import build
from perennial.common.models.network import Network
from perennial.common.models.settings import ModelSettings, model_settings
from perennial.common.utils.errors import UserError
from perennial.common.utils.samples import SampleShape, made_up

SHAPES = ((3, 32, 32), (1, 28, 28), (3, 64, 64), (3, 224, 224), SampleShape((9,), 20, padded=True), (16,))
CLASSES = 3


def net(model: str) -> Network:
    """The model for samples of the first of `SHAPES` that it takes. Raises `UserError` where it takes none."""
    settings = model_settings({"name": model})
    for shape in SHAPES[:-1]:
        try:
            return Network(settings, shape, CLASSES, "cpu")
        except UserError:
            continue
    return Network(settings, SHAPES[-1], CLASSES, "cpu")


def samples(net: Network, count: int = 6) -> torch.Tensor:
    return made_up(net.input_shape, count)


def test_settings_survive_json(model: str) -> None:
    settings = model_settings({"name": model})
    assert model_settings(type(settings).model_validate_json(settings.model_dump_json()).model_dump()) == settings
    assert isinstance(settings, ModelSettings)
    assert hash(settings) == hash(model_settings({"name": model}))


@pytest.mark.parametrize("training", [False, True])
def test_functional_calls_equal_the_module(model: str, training: bool) -> None:
    own = net(model)
    x = samples(own)
    module = build(own.settings, own.input_shape, CLASSES).train(training)
    tensors = own.initial(4)
    module.load_state_dict(tensors)
    with own.drawing(0):
        logits = own.predict(tensors, x, training)
    with own.drawing(0):
        expected = module(x)
    with own.drawing(0):
        z = own.features(own.initial(4), x, training)
        parted = own.classify(own.initial(4), z, training)
    assert logits.shape == (len(x), CLASSES)
    assert z.ndim == 2
    assert own.width == z.shape[1]
    assert own.classifier_names
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)
    torch.testing.assert_close(parted, logits, rtol=0, atol=0)


def test_what_it_says_of_a_sample_does_not_depend_on_those_beside_it(model: str) -> None:
    """In evaluation: else what a service answers one depends on what others ask."""
    own = net(model)
    x, tensors = samples(own), own.initial(4)
    alone = torch.cat([own.predict(tensors, one) for one in torch.split(x, 1)])
    torch.testing.assert_close(alone, own.predict(tensors, x), rtol=1e-3, atol=1e-4)


def test_initial_weights_depend_on_their_key_alone(model: str) -> None:
    own = net(model)
    first = own.initial(7)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = own.initial(7)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(first) == list(again)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(tensor.requires_grad for tensor in first.values())
    other = own.initial(8)
    assert any(not torch.equal(other[name], first[name]) for name in own.classifier_names)


def test_a_few_steps_lower_the_risk(model: str) -> None:
    own = net(model)
    x, y = samples(own), torch.arange(6) % CLASSES
    tensors, risks = own.initial(0), []
    for _ in range(10):
        leaves = {name: tensors[name].detach().requires_grad_() for name in own.parameter_names}
        risk = cross_entropy(own.predict({**tensors, **leaves}, x, training=True), y)
        gradients = torch.autograd.grad(risk, list(leaves.values()))
        risks.append(risk.item())
        steps = zip(leaves.items(), gradients, strict=True)
        tensors = {**tensors, **{name: (leaf - 0.01 * gradient).detach() for (name, leaf), gradient in steps}}
    assert risks[-1] < risks[0]
