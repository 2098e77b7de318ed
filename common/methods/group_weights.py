"""What GroupDRO and PerInvFL have in common: hyper-parameters, the name of a record."""

from perennial.common.methods.base import ONE_MODEL, Sum
from perennial.common.methods.stateful import StatefulTraining
from perennial.common.utils.knobs import between, knob

GROUP = "group"
"""The record of the clients' weights (down) and risks (up); where the server may see sums alone, of what a client
finds its weight with (down), and of its weight before and after the round (up)."""
MASS = "mass"
"""The record that a client then keeps: ln of its part of the weights, before normalisation."""
GROUP_SUMS = (*ONE_MODEL, Sum("train", GROUP, bounded=True))
HEAVIEST = 8.0
"""The largest `N q_i` under differential privacy. What a client adds to the sum of weights is bounded by it."""


class GroupTraining(StatefulTraining):
    """What methods have in common whose shared model is federated GroupDRO's."""

    group_rate: float = knob(
        0.01,
        "step size of the clients' weights: q_i grows by the factor exp(η_q · risk_i) in a round",
        symbol="η_q",
        source="Sagawa et al. 2020, their code",
        ge=0,
        le=100,
        search=between(1e-3, 1.0, log=True),
    )
    literal_weights: bool = knob(
        False,
        "weigh a client's loss by q_i itself, N times smaller steps than FedAvg's, and not by N q_i",
        source="ours; true: PerInvFL §4.1",
    )
