"""What protects a client's data beyond staying at the client: settings, and what differential privacy promises."""

from collections.abc import Mapping
from math import exp, expm1, log, sqrt
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from perennial.common.methods.base import Method
from perennial.common.models.settings import ModelSettings
from perennial.common.utils.errors import UserError
from perennial.common.utils.knobs import knob
from perennial.common.utils.suggestions import unknown


class Privacy(BaseModel):
    """Base of all mechanisms."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mechanism: str

    def misfit(self, method: Method, model: ModelSettings, cohort: int) -> str:
        """Why this cannot protect a run that asks `cohort` clients in a round: the field, the value, what would be
        right. Empty where it can."""
        if not method.summed():
            return (
                f"mechanism: {self.mechanism!r} is not possible with method {method.name!r} as set here, whose "
                "server needs more than sums over clients; docs/privacy.md lists the methods with which it is"
            )
        if model.moving_statistics and not method.keeps_batch_norm:
            return self.no_batch_norm(model)
        return ""

    def no_batch_norm(self, model: ModelSettings) -> str:
        """Why this cannot protect a run of a model with BatchNorm layers that change."""
        return (
            f"mechanism: {self.mechanism!r} is not possible with BatchNorm, whose running variances and "
            f"counters travel with model {model.name!r}; take a model without it, or method 'fedbn'"
        )

    def no_counts(self, clients: int) -> str:
        """What it is that cannot do with the counts for `split` of so many clients. Empty where all can."""
        return ""

    def report(self, releases: int) -> dict[str, Any]:
        """What the summary of a run says that sent out this many models made from the clients' updates."""
        return {}


class NoMechanism(Privacy):
    """A method as it is."""

    mechanism: Literal["none"] = "none"

    def misfit(self, method: Method, model: ModelSettings, cohort: int) -> str:
        return ""


LEAST_NOISE = 1e-9
"""Of a noise multiplier that is not 0. Far below, no computation's digits hold ε, which is beyond 10^17 here."""


class Clipping(Privacy):
    """Client-level differential privacy: the server clips updates and adds noise to their mean."""

    clipping_norm: float = knob(
        1.0,
        "Euclidean norm to which a client's update is scaled down; under `adaptive` that of the first round",
        symbol="C, S",
        source="McMahan et al. 2018, FlatClip; Andrew et al. 2021",
        gt=0,
        le=1e6,
    )
    noise_multiplier: float = knob(
        1.0,
        "standard deviation of the noise on the sum of the updates, in units of the clipping norm; 0: no noise "
        "and no guarantee",
        symbol="z",
        source="McMahan et al. 2018",
        ge=0,
        le=1e3,
    )
    delta: float = knob(
        1e-5,
        "the δ for which ε is reported; to be well below 1 / the number of clients",
        symbol="δ",
        source="Dwork and Roth 2014, §2.3",
        gt=0,
        lt=1,
    )

    def noise(self, clients: int, mechanisms: int = 1) -> tuple[float, float]:
        """Of the mean over so many clients: the noise multiplier of the updates' sum, and the standard deviation
        of the noise on the count of unclipped updates. Where a round has several noised sums, all together cost
        what z says with `z √mechanisms` on each."""
        return self.noise_multiplier * sqrt(mechanisms), 0.0

    def followed(self, norm: float, unclipped: float) -> float:
        """The next clipping norm, from this one and the noised share of unclipped updates."""
        return norm

    def misfit(self, method: Method, model: ModelSettings, cohort: int) -> str:
        if 0 < self.noise_multiplier < LEAST_NOISE:
            return (
                f"noise_multiplier: {self.noise_multiplier:g} is not possible; take {LEAST_NOISE:g} or more, or "
                "0, which promises nothing"
            )
        return super().misfit(method, model, cohort)

    def no_counts(self, clients: int) -> str:
        return f"privacy.mechanism={self.mechanism}, since the counts would have no noise"

    def report(self, releases: int) -> dict[str, Any]:
        return {
            "mechanism": self.mechanism,
            "noise_multiplier": self.noise_multiplier,
            "releases": releases,
            "delta": self.delta,
            "epsilon": epsilon(self.noise_multiplier, releases, self.delta) if self.noise_multiplier else None,
        }


class FixedClipping(Clipping):
    """The clipping norm stays as set."""

    mechanism: Literal["fixed"] = "fixed"


class AdaptiveClipping(Clipping):
    """The clipping norm follows a quantile of the updates' norms (Andrew et al. 2021)."""

    mechanism: Literal["adaptive"] = "adaptive"
    quantile: float = knob(
        0.5,
        "share of the clients whose updates are to be left unclipped",
        symbol="γ",
        source="Andrew et al. 2021",
        gt=0,
        lt=1,
    )
    rate: float = knob(
        0.2, "step size of the clipping norm's logarithm", symbol="η_C", source="Andrew et al. 2021", gt=0, le=10
    )

    def noise(self, clients: int, mechanisms: int = 1) -> tuple[float, float]:
        """z_Δ and σ_b, which together protect as z alone: `z^-2 = z_Δ^-2 + (2 σ_b)^-2` (Theorem 1).

        σ_b is a twentieth of the clients, as in the paper, but at least z, so that z_Δ is at most 1.16 z.
        """
        if not (z := self.noise_multiplier * sqrt(mechanisms)):
            return 0.0, 0.0
        deviation = max(clients / 20, z)
        return (z**-2 - (2 * deviation) ** -2) ** -0.5, deviation

    def followed(self, norm: float, unclipped: float) -> float:
        """`C ← C exp(−η_C (b − γ))` (Algorithm 1), with b held in [0, 1] where noise takes it out."""
        return norm * exp(-self.rate * (min(max(unclipped, 0.0), 1.0) - self.quantile))


class SecureAggregation(Privacy):
    """The server sees the sum of the clients' updates and no single one."""

    mechanism: Literal["secagg"] = "secagg"
    threshold: float = knob(
        0.6,
        "fraction of those asked that must stay to the end of a round",
        symbol="t / n",
        source="Bonawitz et al. 2017, §4: more than a half",
        gt=0.5,
        le=1,
    )
    colluders: int = knob(
        1,
        "clients that may work together with the server without learning a single update of another; two more "
        "than these must stay to the end of a round",
        symbol="c",
        source="Bonawitz et al. 2017, §6; docs/privacy.md proves c + 2",
        ge=0,
        le=10_000,
    )
    range: float = knob(
        8.0,
        "largest change of a parameter in a round, which is sent in steps of range / 2^23; a client whose update "
        "is larger is left out",
        source="Flower's clipping_range",
        gt=0,
        le=1e6,
    )

    def misfit(self, method: Method, model: ModelSettings, cohort: int) -> str:
        if cohort < 3:
            return f"mechanism: 'secagg' is not possible with {cohort} clients in a round; it takes at least 3"
        if cohort < self.colluders + 2:
            return (
                f"colluders: {self.colluders} is not possible with {cohort} clients a round, two of whom must be "
                f"honest; at most {cohort - 2} is"
            )
        return super().misfit(method, model, cohort)

    def no_counts(self, clients: int) -> str:
        if clients < (least := max(3, self.colluders + 2)):
            return f"privacy.mechanism=secagg and evaluate_clients={clients}; at least {least} must count together"
        return ""


MECHANISMS: dict[str, type[Privacy]] = {
    str(kind.model_fields["mechanism"].default): kind
    for kind in (NoMechanism, FixedClipping, AdaptiveClipping, SecureAggregation)
}


def mechanism_class(values: Mapping[str, Any]) -> type[Privacy]:
    """The settings class of a table such as `{"mechanism": "fixed"}`. Raises `UserError` for an unknown one."""
    if values and "mechanism" not in values:
        names = ", ".join(MECHANISMS)
        raise UserError(f"privacy.{next(iter(values))} needs a privacy.mechanism (there are: {names})")
    name = values.get("mechanism", "none")
    if not isinstance(name, str) or name not in MECHANISMS:
        raise UserError(unknown("privacy.mechanism", name, MECHANISMS))
    return MECHANISMS[name]


def epsilon(noise_multiplier: float, releases: int, delta: float) -> float:
    """The least ε of (ε, δ)-differential privacy of this many Gaussian mechanisms of one noise multiplier z.

    Together they are one of multiplier `z / √releases = 1 / μ`, which has this ε where
    `δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)` (Balle and Wang 2018, Theorem 8; Dong et al. 2022, Corollary 3.3). That
    is below zero-concentrated privacy's `ρ + 2 √(ρ ln(1/δ))`, `ρ = μ²/2` (Bun and Steinke 2016, Lemma 1.7).
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    mu = sqrt(releases) / noise_multiplier
    bound = mu**2 / 2 + 2 * sqrt(mu**2 / 2 * log(1 / delta))

    def excess(at: float) -> float:
        """ln of the δ at this ε, less that of the δ wanted."""
        above, below = log_ndtr(mu / 2 - at / mu), at + log_ndtr(-mu / 2 - at / mu)
        return float(above + log(max(-expm1(min(below - above, 0.0)), 1e-300)) - log(delta))

    return 0.0 if excess(0.0) <= 0 else float(brentq(excess, 0.0, bound, xtol=1e-9))
