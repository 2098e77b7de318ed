"""PerInvFL: hyper-parameters."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from perennial.common.data.scenario import Scenario
from perennial.common.methods.base import FIRST, ONE_MODEL, Sum
from perennial.common.methods.group_weights import GROUP_SUMS, MASS, GroupTraining
from perennial.common.methods.personal_invariant import PersonalInvariantTraining
from perennial.common.utils.knobs import between, knob


class PerInvFL(PersonalInvariantTraining, GroupTraining):
    """A personal model held by an invariance loss of its own and near a global invariant one."""

    keeps = PersonalInvariantTraining.keeps | {"auxiliary", MASS}
    sends = frozenset({("personal", FIRST)})

    CODE: ClassVar[Mapping[str, Any]] = PersonalInvariantTraining.CODE

    title = "PerInvFL"
    summary = "a global invariant model, and a personal one with an invariance loss of its own, held near it"
    source = "Tang et al., Exploiting Personalized Invariance for Better OOD Generalization in FL"
    evaluates = ("global", "personal")
    sums = ONE_MODEL

    name: Literal["perinvfl"] = "perinvfl"
    invariance: Literal["irm", "groupdro"] = knob(
        "irm",
        "the invariance loss of both models; groupdro with preset paper only",
        source="PerInvFL §4.1; all its results are of irm",
    )
    personal_penalty: float = knob(
        1e4,
        "weight of the personal model's IRM penalty after `anneal_rounds`; preset paper only",
        symbol="λ (local)",
        source="PerInvFL Eq 4 has one λ for both levels",
        ge=0,
        le=1e12,
        search=between(1e2, 1e5, log=True),
    )
    contrast: float = knob(
        1.0,
        "weight of the contrastive term that drives the features from a local model's; preset code only",
        symbol="λ_c",
        source="PerInvFL's public code",
        ge=0,
        le=1e4,
        search=between(1e-2, 10.0, log=True),
    )

    def server(self) -> str:
        return "groupdro" if self.invariance == "groupdro" else "uniform"

    def misfit(self, scenario: Scenario) -> str:
        if self.preset == "code" and self.invariance == "groupdro":
            return "invariance: groupdro is not in the authors' code; take irm or preset=paper"
        return super().misfit(scenario)

    def summed(self) -> tuple[Sum, ...]:
        return GROUP_SUMS if self.invariance == "groupdro" else ONE_MODEL

    def cannot_adapt(self) -> str:
        if self.invariance == "groupdro":
            return "whose invariance=groupdro has weights that come with requests to train alone; take irm"
        return super().cannot_adapt()

    def caution(self, scenario: Scenario) -> str:
        if self.preset == "code":
            return (
                "preset=code has neither the personal penalty nor the proximal term of the paper, and reaches the "
                "paper's tables with a predictor near chance; compare it with the constant predictor"
            )
        if getattr(scenario, "environments_per_client", 1) == 1:
            return (
                "each client has one training environment here, where the personal invariance loss has the minima "
                "of the plain risk but for the pull to the shared model: it cannot tell a cause from a shortcut "
                "(docs/methods/perinvfl.md)"
            )
        return ""
