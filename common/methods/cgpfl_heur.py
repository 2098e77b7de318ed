"""CGPFL-Heur: hyper-parameters."""

from typing import Any, Literal

from pydantic import field_validator

from perennial.common.methods.cgpfl import ContextTraining
from perennial.common.utils.knobs import choice, knob


class CGPFLHeur(ContextTraining):
    """CGPFL that chooses the number of contexts itself."""

    title = "CGPFL-Heur"
    summary = "CGPFL that chooses the number of contexts after the first round, from a generalisation bound"
    source = "Tang et al. 2022 (IJCAI); Tang 2025 §3.7"

    name: Literal["cgpfl-heur"] = "cgpfl-heur"
    contexts: int = knob(
        0,
        "most contexts that are tried; 0 for half of the clients, and never more than that",
        symbol="K_max",
        source="Tang 2025 §3.8.3",
        ge=0,
        le=10_000,
        search=choice(0),
    )
    mu: float | Literal["auto", "lambda"] = knob(
        "auto",
        "weight of the clustering cost against √K: a number; auto for the one with which both have the same range "
        "over K; lambda for λ + L/2 with an estimate of the risks' smoothness L",
        symbol="μ",
        source="ours; not given in Tang 2025",
    )
    heur_rounds: int = knob(
        1,
        "first rounds after which the number of contexts is chosen anew; then it stays",
        symbol="H",
        source="Tang 2025 §3.7",
        ge=1,
        le=1_000,
        search=choice(1),
    )

    @field_validator("mu", mode="before")
    @classmethod
    def _check_mu(cls, value: Any) -> Any:
        if value in ("auto", "lambda") or (isinstance(value, (int, float)) and 0 <= value <= 1e12):
            return value
        raise ValueError("give a number from 0 to 1e12, auto or lambda")
