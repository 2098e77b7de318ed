"""FedSDR+FedAvg and FedSDR+pFedMe; what they share with FedSDR is tested in test_fedsdr.py."""

from typing import Any

import pytest
import torch
from scripted_clients import ScriptedGrid, content, one_round
from test_fedsdr import HEADS, HOW, NET, assert_close, assert_equal, cmnist_site, filled, floats, sent, values
from tiny_runs import toy_site

from perennial.client.methods.fedavg import FedAvgClient
from perennial.client.methods.fedsdr import FedSDRClient
from perennial.client.methods.fedsdr_fedavg import FedSDRFedAvgClient
from perennial.client.methods.fedsdr_pfedme import FedSDRPFedMeClient
from perennial.client.methods.pfedme import PFedMeClient
from perennial.client.trainer import Received
from perennial.common.config import load_config
from perennial.common.methods.fedavg import FedAvg
from perennial.common.methods.fedsdr import FedSDR
from perennial.common.methods.fedsdr_fedavg import FedSDRFedAvg
from perennial.common.methods.fedsdr_pfedme import FedSDRPFedMe
from perennial.common.methods.pfedme import PFedMe
from perennial.common.methods.shortcut import SHORTCUT
from perennial.common.models.network import network
from perennial.common.utils.errors import UserError
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL, PERSONAL, from_record, to_record
from perennial.strategies.methods.shortcut import ShortcutStrategy
from perennial.testing.tiny_federation import toy_config


def start(seed: int = 5) -> Tensors:
    return NET.initial(seed)


def averaging(**hparams: Any) -> FedSDRFedAvgClient:
    return FedSDRFedAvgClient(toy_site(), FedSDRFedAvg(**hparams), {PERSONAL: start(6)})


def proximal(**hparams: Any) -> FedSDRPFedMeClient:
    return FedSDRPFedMeClient(toy_site(), FedSDRPFedMe(**hparams), {PERSONAL: start(6)})


BOTH = pytest.mark.parametrize("make", [averaging, proximal])


@BOTH
def test_the_discovery_is_fedsdrs(make: Any) -> None:
    alone = FedSDRClient(toy_site(), FedSDR(**HOW), {}).train(Received(3, sent()))
    found = make(**HOW).train(Received(3, sent(model=start())))
    assert found.arrays.keys() == alone.arrays.keys() | {MODEL}
    for name in alone.arrays:
        assert_equal(found.arrays[name], alone.arrays[name])


@BOTH
def test_global_and_personal_model_are_evaluated(make: Any) -> None:
    client = make()
    models = client.models(Received(1, {MODEL: start()}))
    x = client.data.train.x
    assert list(models) == ["global", "personal"]
    assert torch.equal(models["global"](x), NET.predict(start(), x))
    assert torch.equal(models["personal"](x), NET.predict(start(6), x))
    client.kept.clear()  # before its first round, a client's personal model is the global one
    assert torch.equal(client.models(Received(1, {MODEL: start()}))["personal"](x), NET.predict(start(), x))


# ---------------------------------------------------------------------- FedSDR+FedAvg


def test_without_removal_the_averaged_model_is_fedavgs() -> None:
    """Bit for bit, and where the personal model was left does not matter."""
    client = averaging(removal=0, discovery=0, local_steps=5, personal_learning_rate=0.1, **HOW)
    fedavg = FedAvgClient(toy_site(), FedAvg(local_steps=5, learning_rate=0.1, **HOW), {})
    for number in (1, 2):
        reply = client.train(Received(number, sent(model=start(number))))
        assert_equal(reply.arrays[MODEL], fedavg.train(Received(number, {MODEL: start(number)})).arrays[MODEL])
        assert_equal(client.kept[PERSONAL], reply.arrays[MODEL])


def test_from_the_same_start_the_averaged_model_is_fedsdrs_personal_one() -> None:
    """With K = R."""
    how = {"local_steps": 4, "removal": 3.0, **HOW}
    alone = FedSDRClient(toy_site(), FedSDR(personal_steps=4, **how), {PERSONAL: start()})
    alone.train(Received(1, sent()))
    assert_equal(averaging(**how).train(Received(1, sent(model=start()))).arrays[MODEL], alone.kept[PERSONAL])


# ---------------------------------------------------------------------- FedSDR+pFedMe


def test_without_pull_the_copy_stays_and_the_personal_model_is_fedsdrs() -> None:
    """With K' = R K steps, bit for bit."""
    client = proximal(proximity=0, local_steps=3, personal_steps=4, **HOW)
    alone = FedSDRClient(toy_site(), FedSDR(personal_steps=12, local_steps=3, **HOW), {PERSONAL: start(6)})
    for number in (1, 2):
        reply = client.train(Received(number, sent(model=start())))
        alone.train(Received(number, sent()))
        assert_equal(reply.arrays[MODEL], start())
        assert_equal(client.kept[PERSONAL], alone.kept[PERSONAL])


def test_without_removal_it_is_pfedme() -> None:
    """With K = 1; pFedMe takes all K steps on the same mini-batch, and here each is on its own."""
    how = {"local_steps": 5, "personal_steps": 1, "proximity": 3.0, "learning_rate": 0.1, **HOW}
    pfedme = PFedMeClient(toy_site(), PFedMe(personal_learning_rate=0.2, **how), {PERSONAL: start(6)})
    client = proximal(removal=0, discovery=0, personal_learning_rate=0.2, **how)
    for number in (1, 2):
        reply = client.train(Received(number, sent(model=start(number))))
        assert_equal(reply.arrays[MODEL], pfedme.train(Received(number, {MODEL: start(number)})).arrays[MODEL])
        assert_equal(client.kept[PERSONAL], pfedme.kept[PERSONAL])


def test_the_steps_by_hand() -> None:
    """One step of f_u on the whole data, whose own part is FedSDR's step, then one of w."""
    how = {"local_steps": 1, "personal_steps": 1, "batch_size": 1000, "personal_learning_rate": 0.1}
    client = proximal(proximity=2.0, learning_rate=0.25, removal=3.0, **how)
    reply = client.train(Received(1, sent(model=start())))
    alone = FedSDRClient(toy_site(), FedSDR(removal=3.0, **how), {PERSONAL: start(6)})
    alone.train(Received(1, sent()))
    own, w = start(6), start()
    personal = {name: alone.kept[PERSONAL][name] - 0.1 * 2.0 * (own[name] - w[name]) for name in own}
    assert_close(client.kept[PERSONAL], personal)
    assert_close(reply.arrays[MODEL], {name: w[name] - 0.25 * 2.0 * (w[name] - personal[name]) for name in w})


def test_personal_steps_that_would_diverge_are_refused() -> None:
    with pytest.raises(UserError, match=r"personal_learning_rate: 0.2 is too large for proximity .* below 0.133"):
        toy_config("fedsdr-pfedme", "personal_learning_rate=0.2")
    toy_config("fedsdr-pfedme", "personal_learning_rate=0.13")


# ---------------------------------------------------------------------- the server halves


COMBINED = pytest.mark.parametrize("name", ["fedsdr-fedavg", "fedsdr-pfedme"])


@COMBINED
def test_the_global_model_is_the_unweighted_mean(name: str) -> None:
    strategy: ShortcutStrategy[Any] = ShortcutStrategy(toy_config(name), "run-1")

    def answer(client: str, _: Any) -> Any:
        c = int(client[-1])
        records = {MODEL: filled(c, start()), SHORTCUT: filled(2 * c, start())}
        return content({**records, HEADS[0]: strategy.heads[HEADS[0]]}, count=1 + 7 * c)

    grid = ScriptedGrid(strategy, answer)
    arrays = one_round(strategy, grid, to_record(start()))
    assert arrays is not None
    assert values(from_record(arrays)) == {1.5}
    assert values(strategy.shortcut) == {3}
    asked = grid.of("train")["client-1"]
    assert asked.keys() == {MODEL, SHORTCUT, *HEADS}
    assert_equal(asked[MODEL], start())


@COMBINED
def test_floats_of_a_message_on_cmnist(name: str) -> None:
    config = load_config(options={"method": name, "scenario": "cmnist"})
    net = network(config.model, config.scenario.input_shape, config.scenario.classes)
    down = {**ShortcutStrategy(config, "run-1").state_dict(), MODEL: net.initial(0)}
    assert floats(down) == 309_668
    quick = config.method.model_copy(update={"local_steps": 1})
    client: Any = (FedSDRFedAvgClient if name == "fedsdr-fedavg" else FedSDRPFedMeClient)(
        cmnist_site(net), quick, {}
    )
    assert floats(client.train(Received(1, down)).arrays) == 308_886
