"""The references of the selection `split`, server half."""

from collections.abc import Iterable, Mapping

import torch
from flwr.app import ArrayRecord

from perennial.common.config import RunConfig
from perennial.common.methods.references import PARTS, SHARED, References, model_of, samples_of
from perennial.common.selection import record
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors, flattened
from perennial.common.wire import Scalar, from_record
from perennial.strategies.base import MethodStrategy
from perennial.strategies.exchange import AcceptedReply, Payload
from perennial.strategies.screening import Rejected


class ReferencesStrategy(MethodStrategy[References]):
    """`f_e ← Σ_u (n_{u,e} / Σ n_{·,e}) f_{u,e}` over the clients u that have samples of environment e.

    The global arrays stay as drawn, and every f_e starts from them; one that no client has samples of stays there.

    Under secure aggregation each client adds `n_{u,e} / n_u (f_{u,e} − f_e)` of every environment, and its shares
    `n_{u,e} / n_u`. The quotient of their means, weighted by n_u, is the same step, and nobody sees who has which.
    """

    robust = True

    def __init__(self, run: RunConfig, run_id: str) -> None:
        """Raises `UserError` for a mechanism that would divide noise by noise."""
        super().__init__(run, run_id)
        if run.privacy.mechanism not in ("none", "secagg"):
            raise UserError(
                f"privacy.mechanism: {run.privacy.mechanism!r} is not possible with method 'references', whose "
                "models are quotients of two sums; take 'secagg' or 'none'"
            )
        self.shared = run.privacy.mechanism == "secagg"
        self.environments = range(len(run.scenario.train_environments))
        self.trained: dict[str, Tensors] = {}
        """f_e by record name, once somebody has trained it."""

    def state_dict(self) -> dict[str, Tensors]:
        return self.trained

    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        self.trained = dict(state)

    def results(self, arrays: ArrayRecord) -> dict[str, Tensors]:
        """One file, `references`, with a record for each environment."""
        models = self.payload(from_record(arrays))
        return {"references": flattened({record(e): models[model_of(e)] for e in self.environments})}

    def payload(self, model: Tensors) -> Payload:
        return {name: self.trained.get(name, model) for name in map(model_of, self.environments)}

    def settings(self, server_round: int) -> dict[str, Scalar]:
        return {SHARED: True} if self.shared else {}

    def expect(self, model: Tensors) -> Payload:
        """Models only of the environments that a client has; or what it adds to those of all."""
        if not self.shared:
            return {}
        shares = {model_of(e): torch.zeros((), dtype=torch.float64) for e in self.environments}
        return {**self.payload(model), PARTS: shares}

    def optional(self) -> Payload:
        return {} if self.shared else self.payload(self.sent)

    def check(self, reply: AcceptedReply) -> None:
        self.samples(reply)

    def combined(self, server_round: int, replies: Iterable[AcceptedReply]) -> dict[str, Tensors]:
        """The mean of each environment's model, weighted by the samples of that environment."""
        means = {name: self.mean(start) for name, start in self.payload(self.sent).items()}
        for reply in replies:
            for name, count in self.samples(reply).items():
                means[name].add(reply[name], count)
        return {name: mean.result() for name, mean in means.items() if mean.weight}

    def update(self, model: Tensors, means: Mapping[str, Tensors]) -> Tensors:
        self.trained |= self.apart(means) if self.shared else means
        return {}

    def apart(self, means: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Each environment's model, from the means of what all clients add; none of one that nobody has."""
        found = {}
        for name, start in self.payload(self.sent).items():
            if (share := float(means[PARTS][name])) > 0:
                found[name] = {
                    key: (before.double() + (means[name][key].double() - before) / share).to(before.dtype)
                    for key, before in start.items()
                }
        return found

    def samples(self, reply: AcceptedReply) -> dict[str, int]:
        """Training samples of each environment whose model the reply has, by that record's name.

        Raises `Rejected` where they do not add up to the client's.
        """
        found: dict[str, int] = {}
        for environment in self.environments:
            if (name := model_of(environment)) in reply.arrays:
                count = reply.metrics.get(samples_of(environment))
                if type(count) is not int or count < 1:
                    raise Rejected(f"{samples_of(environment)} is {count!r:.40}, not a count of samples")
                found[name] = count
        if sum(found.values()) != reply.num_examples:
            raise Rejected(f"its environments have {sum(found.values())} samples, and it {reply.num_examples}")
        return found
