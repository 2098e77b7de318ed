"""Which mechanism goes with which method, and what differential privacy promises, in numbers."""

import json
import re
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
from flwr.supercore.differential_privacy import compute_adaptive_noise_params
from scipy.stats import norm

from perennial.common.config import load_config, parse_task
from perennial.common.methods import METHODS
from perennial.common.privacy.mechanisms import MECHANISMS, AdaptiveClipping, FixedClipping, NoMechanism, epsilon
from perennial.common.utils.errors import UserError

PAGE = (Path(__file__).parents[3] / "docs" / "privacy.md").read_text(encoding="utf-8")
MODEL = {"method": "fedavg", "model": {"name": "mlp", "norm": "none"}}


def test_there_is_none_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert load_config().privacy == NoMechanism()
    config = load_config(
        options=MODEL, settings=["privacy.mechanism=adaptive", "privacy.quantile=0.3", "privacy.delta=1e-6"]
    )
    assert config.privacy == AdaptiveClipping(quantile=0.3, delta=1e-6)
    assert load_config(options={**MODEL, "privacy": {"mechanism": "fixed"}}).privacy == FixedClipping()
    (tmp_path / "config.toml").write_text(config.toml())
    assert load_config(tmp_path / "config.toml") == config
    assert config.task() == load_config(options=MODEL).task()  # all of it happens at the server
    assert parse_task(config.task()).method == config.method


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["privacy.mechanism=dp"], "unknown privacy.mechanism 'dp' (there are: adaptive, fixed, none, secagg)"),
        (["privacy.noise_multiplier=2"], "privacy.noise_multiplier needs a privacy.mechanism"),
        (["privacy.mechanism=none", "privacy.noise_multiplier=2"], "noise_multiplier: there is no such setting"),
        (["privacy.mechanism=fixed", "privacy.quantile=0.5"], "privacy.quantile: there is no such setting"),
        (["privacy.mechanism=fixed", "privacy.clipping_norm=0"], "privacy.clipping_norm: 0 is not possible"),
        (
            ["privacy.mechanism=adaptive", "privacy.noise_multiplier=1e-30"],
            "privacy.noise_multiplier: 1e-30 is not possible; take 1e-09 or more, or 0, which promises nothing",
        ),
        (["privacy=fixed"], "privacy.mechanism"),
        (
            ["privacy.mechanism=fixed", "model.norm=batch"],
            "privacy.mechanism: 'fixed' is not possible with BatchNorm, whose running variances and counters",
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(settings: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)) as error:
        load_config(options=MODEL, settings=settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_table_in_the_docs_is_what_is_possible(name: str) -> None:
    row = re.search(rf"^\| `{name}` \| (.*?) \|", PAGE, re.MULTILINE)
    assert row, "docs/privacy.md does not list it"
    for mechanism in MECHANISMS.keys() - {"none"}:
        options = {**MODEL, "method": name, "privacy": {"mechanism": mechanism}}
        if row[1] == "yes":
            assert load_config(options=options).privacy.mechanism == mechanism
        else:
            assert row[1] == "no"
            with pytest.raises(UserError, match=f"'{mechanism}' is not possible with method '{name}' as set here"):
                load_config(options=options)


@pytest.mark.parametrize("mechanism", sorted(MECHANISMS.keys() - {"none"}))
def test_every_setting_is_documented(mechanism: str) -> None:
    for key, facts in MECHANISMS[mechanism].model_json_schema()["properties"].items():
        assert f"| `{key}` |" in PAGE
        assert key == "mechanism" or (facts["description"] and facts["source"] and "default" in facts)


def test_settings_of_a_method_can_make_it_impossible() -> None:
    options = {**MODEL, "method": "groupdro", "privacy": {"mechanism": "fixed"}}
    assert load_config(options=options).privacy == FixedClipping()
    with pytest.raises(UserError, match="not possible with method 'groupdro' as set here"):
        load_config(options=options, settings=["preset=code"])


def test_clients_that_keep_their_batch_norm_may_have_one() -> None:
    options = {"method": "fedbn", "model": {"name": "mlp", "norm": "batch"}, "privacy": {"mechanism": "fixed"}}
    assert load_config(options=options).privacy == FixedClipping()


@pytest.mark.parametrize(("multiplier", "releases"), [(2.0, 8), (1.0, 60), (0.02, 8), (30.0, 1), (1.0, 10**6)])
def test_epsilon_is_where_the_gaussian_mechanism_has_this_delta(multiplier: float, releases: int) -> None:
    """δ is what the likelier of two unit-variance Gaussians, μ apart, has beyond e^ε of the other: an integral."""
    found, mu = epsilon(multiplier, releases, 1e-5), releases**0.5 / multiplier
    x = np.linspace(-15, mu + 15, 2_000_001)
    one, other = norm.logpdf(x, mu), norm.logpdf(x)
    beyond = np.where(one > found + other, np.exp(one) - np.exp(np.minimum(found + other, one)), 0.0)
    assert np.trapezoid(beyond, x) == pytest.approx(1e-5, rel=1e-3)
    rho = mu**2 / 2
    assert found < rho + 2 * (rho * log(1e5)) ** 0.5, "that of zero-concentrated privacy"


def test_epsilon_is_that_of_googles_accountant_over_a_grid() -> None:
    """`tests/data/dp-accounting.json`: its PLD accountant rounds up, by steps of 10⁻⁴ in the loss."""
    kept = json.loads((Path(__file__).parents[2] / "data" / "dp-accounting.json").read_text())
    assert len(kept["rows"]) == 48
    for multiplier, releases, delta, theirs in kept["rows"]:
        ours = epsilon(multiplier, releases, delta)
        assert ours == pytest.approx(theirs, rel=2e-4, abs=2e-4), (multiplier, releases, delta)
    assert epsilon(1.0, 60, 1e-5) < 65.42404047319576, "of RdpAccountant"


def test_so_much_noise_that_delta_is_enough() -> None:
    assert epsilon(1e3, 1, 0.1) == 0
    assert FixedClipping(noise_multiplier=1).report(60)["epsilon"] == epsilon(1.0, 60, 1e-5)
    assert FixedClipping(noise_multiplier=0).report(8)["epsilon"] is None
    assert NoMechanism().report(8) == {}


@pytest.mark.parametrize(("z", "clients", "deviation"), [(1.0, 8, 1.0), (0.3, 8, 0.4), (1.0, 200, 10.0)])
def test_the_noise_of_adaptive_clipping_is_divided_as_in_flower(z: float, clients: int, deviation: float) -> None:
    multiplier, found = AdaptiveClipping(noise_multiplier=z).noise(clients)
    assert found == deviation
    assert (found, multiplier) == pytest.approx(compute_adaptive_noise_params(z, clients, deviation))
    assert z < multiplier < 1.16 * z
    # One client changes the sum of updates by at most C and the count, in which an absent one is ½, by ½.
    assert (1 / multiplier) ** 2 + (0.5 / found) ** 2 == pytest.approx(1 / z**2)
    assert AdaptiveClipping(noise_multiplier=0).noise(clients) == (0, 0)


def test_the_clipping_norm_follows_the_share_of_unclipped_updates() -> None:
    """Too few updates left unclipped: the norm grows (Andrew et al. 2021, Algorithm 1)."""
    clipping = AdaptiveClipping(quantile=0.5, rate=0.2)
    assert clipping.followed(1.0, 0.0) == pytest.approx(exp(0.1))
    assert clipping.followed(2.0, 1.0) == pytest.approx(2 * exp(-0.1))
    assert clipping.followed(2.0, 0.5) == 2.0
    assert clipping.followed(2.0, 1e9) == clipping.followed(2.0, 1.0)  # noise alone
    assert clipping.followed(2.0, -1e9) == clipping.followed(2.0, 0.0)
    assert FixedClipping().followed(2.0, 1.0) == 2.0
