"""What the server makes of the clients' tensors where it takes their mean: the rule, and what it withstands."""

from math import ceil
from typing import Literal

from pydantic import BaseModel, ConfigDict

from perennial.common.methods.base import Method
from perennial.common.privacy.mechanisms import Privacy
from perennial.common.utils.knobs import knob

Rule = Literal["mean", "median", "trimmed-mean", "multi-krum", "geometric-median", "centred-clipping"]
Before = Literal["nothing", "nearest-neighbours", "bucketing"]


class Aggregation(BaseModel):
    """The rule in place of every mean over clients, for a round of which some clients are hostile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: Rule = knob("mean", "what stands for the mean over clients; all but `mean` count every client the same")
    hostile: int = knob(
        1,
        "hostile clients among those of a round, which the rule is to withstand; without effect with `mean`",
        symbol="f",
        source="Yin et al. 2018; Blanchard et al. 2017",
        ge=0,
        le=10_000,
    )
    before: Before = knob(
        "nothing",
        "what each client's tensors become before the rule: the mean of the nearest n − f (nearest-neighbour "
        "mixing), or that of a random bucket",
        source="Allouah et al. 2023, NNM; Karimireddy et al. 2022, bucketing",
    )
    bucket: int = knob(2, "clients in a bucket", symbol="s", source="Karimireddy et al. 2022", ge=1, le=10_000)
    iterations: int = knob(
        10,
        "steps of geometric median and centred clipping",
        symbol="T; L",
        source="Pillutla et al. 2022; Karimireddy et al. 2021",
        ge=1,
        le=1000,
    )
    smoothing: float = knob(
        1e-6,
        "least distance that a step of the geometric median divides by",
        symbol="ν",
        source="Pillutla et al. 2022, Algorithm 1",
        gt=0,
        le=1e6,
    )
    radius: float = knob(
        0.0,
        "norm to which centred clipping cuts a client's distance from the centre; 0: the median of the distances",
        symbol="τ",
        source="Karimireddy et al. 2021, §5; the median is ours",
        ge=0,
        le=1e6,
    )

    def rows(self, clients: int) -> int:
        """How many vectors the rule sees of so many clients."""
        return ceil(clients / self.bucket) if self.before == "bucketing" else clients

    def borne(self, clients: int) -> int:
        """The most hostile ones among so many clients with which the rule still keeps near the others.

        Multi-Krum needs 2 f + 2 < n (Blanchard et al. 2017, Proposition 4.2), all others 2 f < n. A bucket with
        one hostile client in it is hostile. Nearest-neighbour mixing needs no more than the others do.
        """
        rows = self.rows(clients)
        most = {"mean": 0, "multi-krum": (rows - 3) // 2}.get(self.rule, (rows - 1) // 2)
        return max(0, most)

    def misfit(self, method: Method, privacy: Privacy, cohort: int) -> str:
        """Why this cannot be: the field, the value, what would be right. Empty where it can."""
        if self.rule == "mean":
            if self.before != "nothing":
                return f"before: {self.before!r} is not possible with rule 'mean', which it would not change"
            return ""
        if why := method.no_rule():
            return f"rule: {self.rule!r} is not possible with method {method.name!r}, {why}; take 'mean'"
        if privacy.mechanism != "none":
            secure = privacy.mechanism == "secagg"
            why = "under which the server sees the sum alone" if secure else "whose noise is for a mean"
            return (
                f"rule: {self.rule!r} is not possible with privacy.mechanism={privacy.mechanism!r}, {why}; take "
                "'mean', or privacy.mechanism='none'"
            )
        if self.hostile > (most := self.borne(cohort)):
            before = f" after bucketing by {self.bucket}" if self.before == "bucketing" else ""
            return (
                f"hostile: {self.hostile} is not possible with rule {self.rule!r}{before} and {cohort} clients a "
                f"round, of whom it withstands {most or 'none'}"
                + (f"; take at most {most}" if most else "; take hostile=0 or more clients")
            )
        return ""
