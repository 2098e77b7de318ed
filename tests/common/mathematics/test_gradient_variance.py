import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from perennial.common.data.examples import Examples
from perennial.common.mathematics.gradient_variance import gradient_sums, head_sums, spread, variance
from perennial.common.models.network import network
from perennial.common.models.settings import model_settings
from perennial.common.tasks import Classes


def samples(count: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)


def one_by_one(layer: torch.nn.Linear, features: Tensor, labels: Tensor) -> Tensor:
    """Each sample's own gradient (n, d) by autograd: of the cross-entropy, in its binary form for one output."""

    gradients = []
    for h, y in zip(features, labels, strict=True):
        z = layer(h)
        loss = F.binary_cross_entropy_with_logits(z[0], y.to(z.dtype)) if len(z) == 1 else F.cross_entropy(z, y)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(layer.parameters()))]))
    return torch.stack(gradients)


@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_the_closed_form_is_the_variance_of_per_sample_gradients(outputs: int) -> None:
    features, labels = samples(40, 7, max(2, outputs))
    layer = torch.nn.Linear(7, outputs).double()
    logits = layer(features).detach()
    if outputs == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    first, second = gradient_sums(features, Classes(max(2, outputs)).residuals(logits, labels)[:, -outputs:])
    gradients = one_by_one(layer, features, labels)
    torch.testing.assert_close(first, gradients.sum(dim=0))
    torch.testing.assert_close(second, gradients.square().sum(dim=0))
    found = variance(first, second, 40)
    torch.testing.assert_close(found, gradients.var(dim=0, correction=0), rtol=1e-6, atol=1e-12)
    assert (found >= -1e-9).all()


def test_sums_of_pieces_add_up_and_one_sample_has_no_variance() -> None:
    features, labels = samples(11, 3, 2)
    logits = features @ samples(2, 3, 2)[0].T
    residuals = Classes(2).residuals(logits, labels)
    whole = gradient_sums(features, residuals)
    pieces = [gradient_sums(features[part], residuals[part]) for part in (slice(0, 4), slice(4, 11))]
    for place in range(2):
        torch.testing.assert_close(whole[place], pieces[0][place] + pieces[1][place])
    alone = gradient_sums(features[:1], residuals[:1])
    torch.testing.assert_close(variance(*alone, 1), torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-15)


def test_a_client_without_one_of_the_classes_has_a_variance() -> None:
    features, _ = samples(9, 3, 3)
    labels = torch.ones(9, dtype=torch.long)
    layer = torch.nn.Linear(3, 3).double()
    found = variance(*gradient_sums(features, Classes(3).residuals(layer(features).detach(), labels)), 9)
    gradients = one_by_one(layer, features, labels)
    torch.testing.assert_close(found, gradients.var(dim=0, correction=0))


def test_the_spread() -> None:
    """Of (0, 0), (3, 0) and (0, 6) around (1, 2): squared distances 5, 8 and 17."""
    assert float(spread(torch.tensor([[0.0, 0], [3, 0], [0, 6]]))) == pytest.approx(10)
    assert float(spread(torch.tensor([[4.0, 2], [4, 2]]))) == 0
    assert float(spread(torch.tensor([[4.0, 2]]))) == 0


def test_a_models_sums_depend_on_its_featurizer_and_its_single_logit_is_the_papers() -> None:
    net = network(model_settings({"name": "mlp", "hidden": [5], "one_logit": True}), (3,), 2)
    model = {name: tensor.requires_grad_() for name, tensor in net.initial(0).items()}
    assert model["classifier.weight"].shape == (1, 5)
    x, labels = samples(20, 3, 2)
    part = Examples(x.float(), labels, torch.zeros_like(labels))
    found = variance(*head_sums(net, Classes(2), model, part), 20)
    layer = torch.nn.Linear(5, 1)
    layer.load_state_dict({key: model[f"classifier.{key}"].detach() for key in ("weight", "bias")})
    gradients = one_by_one(layer, net.features(model, part.x).detach(), labels)
    torch.testing.assert_close(found.detach(), gradients.var(dim=0, correction=0), rtol=1e-4, atol=1e-7)
    for name, gradient in zip(model, torch.autograd.grad(found.sum(), list(model.values())), strict=True):
        assert gradient.abs().max() > 0, name
