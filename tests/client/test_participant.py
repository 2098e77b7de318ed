"""A client in secure aggregation answers each stage once, in turn, and gives nobody both secrets of a client."""

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from perennial.client.secure_aggregation import OLD, Participant, Vault
from perennial.client.trainer import Received
from perennial.common.privacy.secure_aggregation import (
    ADVERTISE,
    COLLUDERS,
    DROPPED,
    KEYS,
    MASKED,
    SHARE,
    SHARES,
    SURVIVORS,
    TERMS,
    THRESHOLD,
    UNMASK,
)
from perennial.common.utils.tensors import Tensors
from perennial.common.wire import MODEL

NAMES = ["client-0", "client-1", "client-2"]
MODELS: Tensors = {"w": torch.tensor([0.5, -1.0])}
SEALED = {TERMS: {"weight": torch.tensor(2), "range": torch.tensor(8.0, dtype=torch.float64)}, MODEL: MODELS}


def received(arrays: Any = None, round_: int = 1, **settings: Any) -> Received:
    return Received(round_, arrays or {}, settings)


class Trio:
    """Three clients, as far as a stage; what the server would pass on is in `keys` and `sealed`."""

    def __init__(self, stage: str, vault: Vault | None = None) -> None:
        self.vault = vault or Vault()
        self.clients = {name: Participant(f"run/{name}", self.vault) for name in NAMES}
        self.keys = {n: c.answer(ADVERTISE, received())[KEYS][n] for n, c in self.clients.items()}
        if stage == ADVERTISE:
            return
        self.sealed = {n: c.answer(SHARE, self.share())[SHARES] for n, c in self.clients.items()}
        if stage == SHARE:
            return
        own = {MODEL: MODELS}
        self.vectors = {n: c.masked(self.train(n), own)[MASKED][MASKED] for n, c in self.clients.items()}

    def share(self, threshold: int = 2, colluders: int = 0, **changes: Any) -> Received:
        return received({KEYS: {**self.keys, **changes}}, **{THRESHOLD: threshold, COLLUDERS: colluders})

    def train(self, name: str, **changes: Any) -> Received:
        shares = {sender: sealed[name] for sender, sealed in self.sealed.items() if sender != name}
        return received({**SEALED, SHARES: {**shares, **changes}})


def ask(survivors: list[str], dropped: list[str], round_: int = 1) -> Received:
    return received(None, round_, **{SURVIVORS: survivors, DROPPED: dropped})


@pytest.mark.parametrize("where", ["memory", "files"])
def test_secrets_are_for_their_owner_and_gone_after_the_round(where: str, tmp_path: Path) -> None:
    vault = Vault(tmp_path if where == "files" else None)
    trio = Trio(MASKED, vault)
    if where == "files":
        paths = sorted(tmp_path.rglob("*.*"))
        assert [path.relative_to(tmp_path).as_posix() for path in paths] == [f"run/{n}/secagg.json" for n in NAMES]
        assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    for client in trio.clients.values():
        shares = client.answer(UNMASK, ask(NAMES[:2], NAMES[2:])) if client.client != NAMES[2] else {}
        assert shares.get(SHARES, {}).keys() <= set(NAMES)
    vault.forget(f"run/{NAMES[2]}")
    assert all(vault.read(f"run/{name}") == {} for name in NAMES)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_secrets_of_a_survey_that_broke_off_are_gone_with_the_next_a_day_later(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    Trio(MASKED, vault)
    old, other, _ = (tmp_path / "run" / name / "secagg.json" for name in NAMES)
    os.utime(old, (time.time() - OLD - 1,) * 2)
    Participant("another/client-0", vault).answer(ADVERTISE, received())
    assert (old.exists(), other.exists()) == (False, True)
    assert vault.read("another/client-0")


def test_what_lies_there_for_the_last_stage_is_shares_alone() -> None:
    """The keys and the seed are gone once the vector is masked."""
    trio = Trio(MASKED)
    known = trio.vault.read("run/client-0")
    assert known.keys() == {SHARES, THRESHOLD, "stage", "round"}


def test_two_vectors_of_one_update_have_nothing_in_common() -> None:
    one, other = Trio(MASKED).vectors, Trio(MASKED).vectors
    assert len({bytes(v.numpy().tobytes()) for v in [*one.values(), *other.values()]}) == 6


@pytest.mark.parametrize(
    ("stage", "action", "round_"),
    [
        ("nothing", SHARE, 1),
        ("nothing", UNMASK, 1),
        (ADVERTISE, UNMASK, 1),
        (ADVERTISE, SHARE, 2),
        (SHARE, SHARE, 1),
        (SHARE, UNMASK, 1),
        (MASKED, SHARE, 1),
        (MASKED, UNMASK, 2),
    ],
)
def test_a_stage_out_of_turn_is_refused(stage: str, action: str, round_: int) -> None:
    trio = Trio(ADVERTISE if stage == "nothing" else stage)
    client = trio.clients[NAMES[0]] if stage != "nothing" else Participant("run/client-9", trio.vault)
    request = {SHARE: trio.share(), UNMASK: ask(NAMES, [])}[action]
    with pytest.raises(ValueError, match="out of turn"):
        client.answer(action, Received(round_, request.arrays, request.settings))


def test_no_stage_is_answered_twice() -> None:
    """Two masked vectors of one seed would differ by the updates, two lists of survivors give both secrets."""
    trio = Trio(MASKED)
    client = trio.clients[NAMES[0]]
    with pytest.raises(ValueError, match="out of turn"):
        client.masked(trio.train(NAMES[0]), {MODEL: MODELS})
    client.answer(UNMASK, ask(NAMES, []))
    with pytest.raises(ValueError, match="out of turn"):
        client.answer(UNMASK, ask(NAMES[:2], NAMES[2:]))


@pytest.mark.parametrize(
    ("threshold", "changes", "word"),
    [
        (1, {}, "a threshold of 1 among 3 clients protects nobody"),
        (4, {}, "a threshold of 4 among 3 clients protects nobody"),
        (2, {"client-0": "client-1"}, "public keys"),
        (2, {"client-2": "client-1"}, "public keys"),
    ],
)
def test_a_list_of_keys_that_protects_nobody_is_refused(threshold: int, changes: Any, word: str) -> None:
    trio = Trio(ADVERTISE)
    keys = {name: trio.keys[other] for name, other in changes.items()}
    with pytest.raises(ValueError, match=word):
        trio.clients[NAMES[0]].answer(SHARE, trio.share(threshold, **keys))


def test_a_threshold_of_just_one_half_is_refused() -> None:
    """Each half of the clients could be asked for another of the two secrets."""
    trio = Trio(ADVERTISE)
    fourth = Participant("run/client-9", trio.vault).answer(ADVERTISE, received({}))[KEYS]["client-9"]
    with pytest.raises(ValueError, match="a threshold of 2 among 4 clients protects nobody"):
        trio.clients[NAMES[0]].answer(SHARE, trio.share(2, **{"client-9": fourth}))
    trio.clients[NAMES[0]].answer(SHARE, trio.share(3, **{"client-9": fourth}))


def test_a_threshold_that_leaves_one_honest_client_alone_is_refused() -> None:
    trio = Trio(ADVERTISE)
    sentence = "a threshold of 2 protects nobody if 1 clients work together with the server; 3 does"
    with pytest.raises(ValueError, match=sentence):
        trio.clients[NAMES[0]].answer(SHARE, trio.share(2, colluders=1))
    assert trio.clients[NAMES[0]].answer(SHARE, trio.share(3, colluders=1))


def test_shares_that_were_changed_or_are_for_others_are_refused() -> None:
    for what in ("changed", "anothers", "strangers"):
        trio = Trio(SHARE)
        good = trio.sealed["client-1"]["client-0"]
        bad = {
            "changed": {"client-1": good ^ 1},
            "anothers": {"client-1": trio.sealed["client-1"]["client-2"]},
            "strangers": {"client-7": good},
        }[what]
        with pytest.raises(ValueError, match="cannot be opened"):
            trio.clients["client-0"].masked(trio.train("client-0", **bad), {MODEL: MODELS})


def test_too_few_others_are_refused() -> None:
    trio = Trio(ADVERTISE)
    for name, client in trio.clients.items():
        client.answer(SHARE, trio.share(3))
        if name == NAMES[2]:
            with pytest.raises(ValueError, match="only 1 clients take part, and the threshold is 3"):
                client.masked(received({**SEALED, SHARES: {}}), {MODEL: MODELS})


@pytest.mark.parametrize(
    ("survivors", "dropped"),
    [
        (NAMES, NAMES[2:]),  # both secrets of one
        (NAMES[:2], []),
        (NAMES[1:], NAMES[:1]),  # itself among the dropped
        ([*NAMES[:2], "client-9"], NAMES[2:]),
        ([NAMES[0], NAMES[0]], NAMES[1:]),
    ],
)
def test_lists_that_do_not_fit_are_refused_and_cost_nothing(survivors: list[str], dropped: list[str]) -> None:
    trio = Trio(MASKED)
    client = trio.clients[NAMES[0]]
    with pytest.raises(ValueError, match="lists of survivors"):
        client.answer(UNMASK, ask(survivors, dropped))
    assert client.answer(UNMASK, ask(NAMES, []))[SHARES].keys() == set(NAMES)


def test_too_few_survivors_are_refused() -> None:
    trio = Trio(MASKED)
    with pytest.raises(ValueError, match="only 1 clients are left, and the threshold is 2"):
        trio.clients[NAMES[0]].answer(UNMASK, ask(NAMES[:1], NAMES[1:]))


def test_nothing_secret_is_in_an_error() -> None:
    trio = Trio(SHARE)
    known = trio.vault.read("run/client-0")
    request = trio.train("client-0", **{"client-1": trio.keys["client-1"]})
    with pytest.raises(ValueError, match="cannot be opened") as error:
        trio.clients["client-0"].masked(request, {MODEL: MODELS})
    assert not any(known[name] in str(error.value) for name in ("sealing", "masking", "seed", "own"))
    assert json.dumps(known)  # what is written is plain text
