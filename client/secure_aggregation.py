"""A client's part in secure aggregation: keys, shares of its secrets, a masked update, shares of the others'."""

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from perennial.client.state import own_folder
from perennial.client.trainer import Received
from perennial.common.flower.secret_sharing import create_shares
from perennial.common.methods.base import ONE_MODEL, Sum
from perennial.common.privacy.secure_aggregation import (
    ADVERTISE,
    COLLUDERS,
    DROPPED,
    KEY_BYTES,
    KEYS,
    MASKED,
    NONCE_BYTES,
    SHARE,
    SHARE_BYTES,
    SHARES,
    SURVIVORS,
    TERMS,
    THRESHOLD,
    UNMASK,
    as_bytes,
    as_tensor,
    mask,
    pair_mask,
    public,
    shared_key,
    summands,
    vector,
)
from perennial.common.utils.files import PRIVATE, write_text
from perennial.common.utils.tensors import Tensors

OLD = 86_400.0
"""Seconds after which nobody waits for what a client remembers."""


class Vault:
    """What clients remember from stage to stage, by place: in memory, or in files that only their owner reads."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._texts: dict[str, str] = {}

    def read(self, place: str) -> dict[str, Any]:
        """What was written last; empty if nothing was."""
        text = self._texts.get(place, "{}")
        if self.folder and (path := self._path(place)).exists():
            text = path.read_text(encoding="utf-8")
        found: dict[str, Any] = json.loads(text)
        return found

    def write(self, place: str, values: Mapping[str, Any]) -> None:
        """Keep this and nothing else."""
        if not self.folder:
            self._texts[place] = json.dumps(values)
            return
        path = self._path(place)
        own_folder(path.parent)
        write_text(path, json.dumps(values), PRIVATE)

    def forget_old(self) -> None:
        """Keep nothing of runs and surveys that broke off: who waits for a stage does not wait for a day."""
        for path in self.folder.glob("*/*/secagg.json") if self.folder else ():
            if time.time() - path.stat().st_mtime > OLD:
                path.unlink(missing_ok=True)

    def forget(self, place: str) -> None:
        """Keep nothing."""
        self._texts.pop(place, None)
        if self.folder:
            self._path(place).unlink(missing_ok=True)

    def _path(self, place: str) -> Path:
        assert self.folder
        return self.folder / place / "secagg.json"


class Participant:
    """One client in the four stages of a round (Bonawitz et al. 2017, Figure 4, without signatures).

    A stage that is asked for out of turn, or twice, is an error: two answers would give away what one does not.
    """

    def __init__(self, place: str, vault: Vault) -> None:
        """`place` is RUN/CLIENT."""
        self.place, self.vault = place, vault
        self.client = place.rpartition("/")[2]

    def answer(self, action: str, received: Received) -> dict[str, Tensors]:
        """The records of the answer to a stage other than `train`."""
        stages: dict[str, Callable[[Received], dict[str, Tensors]]] = {
            ADVERTISE: self.advertise,
            SHARE: self.share,
            UNMASK: self.unmask,
        }
        return stages[action](received)

    def advertise(self, received: Received) -> dict[str, Tensors]:
        """The public halves of two new pairs of keys, for sealing and for masking."""
        self.vault.forget_old()
        sealing, masking = secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
        self._remember(ADVERTISE, received, {"sealing": sealing.hex(), "masking": masking.hex()})
        return {KEYS: {self.client: as_tensor(public(sealing) + public(masking))}}

    def share(self, received: Received) -> dict[str, Tensors]:
        """Shares of a new seed b_u and of the masking key, sealed for each of the others."""
        known = self._recall(ADVERTISE, received)
        keys = {client: as_bytes(key) for client, key in received[KEYS].items()}
        threshold, colluders = (int(received.settings[name]) for name in (THRESHOLD, COLLUDERS))  # type: ignore[arg-type]
        sealing, masking = bytes.fromhex(known["sealing"]), bytes.fromhex(known["masking"])
        if keys.get(self.client) != public(sealing) + public(masking) or len(set(keys.values())) < len(keys):
            raise ValueError("the list of public keys is not right")
        if not len(keys) / 2 < threshold <= len(keys):
            raise ValueError(f"a threshold of {threshold} among {len(keys)} clients protects nobody")
        if threshold < colluders + 2:  # of so many survivors, two are honest, and hide in each other's masks
            raise ValueError(
                f"a threshold of {threshold} protects nobody if {colluders} clients work together with the "
                f"server; {colluders + 2} does"
            )
        seed = secrets.token_bytes(KEY_BYTES)
        of_both = (create_shares(secret, threshold, len(keys)) for secret in (seed, masking))
        shares = {client: one + other for client, one, other in zip(keys, *of_both, strict=True)}
        sealed: Tensors = {}
        for other in keys.keys() - {self.client}:
            nonce, label = secrets.token_bytes(NONCE_BYTES), _label(received, self.client, other)
            sealed[other] = as_tensor(nonce + _channel(sealing, keys[other]).encrypt(nonce, shares[other], label))
        known |= {"seed": seed.hex(), "own": shares[self.client].hex(), THRESHOLD: threshold}
        known[KEYS] = {client: key.hex() for client, key in keys.items()}
        self._remember(SHARE, received, known)
        return {SHARES: sealed}

    def masked(
        self,
        received: Received,
        own: Mapping[str, Tensors],
        sums: Sequence[Sum] = ONE_MODEL,
        exchange: str = "train",
    ) -> dict[str, Tensors]:
        """`w_u q_u + PRG(b_u) + Σ_{v > u} PRG(s_uv) − Σ_{v < u} PRG(s_uv)` over the v whose shares have come.

        q_u is the quantised vector of the `sums` of this exchange in the client's `own` records, w_u the weight.
        Raises `ValueError` for an update out of range.
        """
        known = self._recall(SHARE, received)
        sealing, masking, seed = (bytes.fromhex(known[name]) for name in ("sealing", "masking", "seed"))
        keys = {client: bytes.fromhex(key) for client, key in known[KEYS].items()}
        shares = {self.client: known["own"]}
        for sender, tensor in received[SHARES].items():
            data, label = as_bytes(tensor), _label(received, sender, self.client)
            try:
                opened = _channel(sealing, keys[sender]).decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], label)
            except (InvalidTag, KeyError):
                raise ValueError(f"the shares of {sender} cannot be opened") from None
            shares[sender] = opened.hex()
        if len(shares) < known[THRESHOLD]:
            raise ValueError(f"only {len(shares)} clients take part, and the threshold is {known[THRESHOLD]}")
        terms = received[TERMS]
        like = {**received.arrays, **own}
        parts = [
            part
            for part in summands(sums, exchange, like, received.arrays)
            if part.owners or part.record in own  # but what was only received, and nobody sends
        ]
        words = vector(parts, own, int(terms["weight"]), float(terms["range"]))
        words += mask(seed, len(words))
        for other in received[SHARES]:
            words += pair_mask(masking, keys[other][KEY_BYTES:], self.client, other, len(words))
        self._remember(MASKED, received, {SHARES: shares, THRESHOLD: known[THRESHOLD]})
        return {MASKED: {MASKED: as_tensor(words.tobytes())}}

    def unmask(self, received: Received) -> dict[str, Tensors]:
        """Of each client a share of one of its secrets, never of both; then all is forgotten.

        It is the seed's of those whose vectors have arrived, and the masking key's of the others.
        """
        known = self._recall(MASKED, received)
        survivors: list[str] = list(received.settings[SURVIVORS])  # type: ignore[arg-type]
        dropped: list[str] = list(received.settings[DROPPED])  # type: ignore[arg-type]
        shares = {client: bytes.fromhex(share) for client, share in known[SHARES].items()}
        if sorted([*survivors, *dropped]) != sorted(shares) or self.client not in survivors:
            raise ValueError("the lists of survivors and of dropped clients are not right")
        if len(survivors) < known[THRESHOLD]:
            raise ValueError(f"only {len(survivors)} clients are left, and the threshold is {known[THRESHOLD]}")
        self.vault.forget(self.place)
        seeds = {client: as_tensor(shares[client][:SHARE_BYTES]) for client in survivors}
        keys = {client: as_tensor(shares[client][SHARE_BYTES:]) for client in dropped}
        return {SHARES: {**seeds, **keys}}

    # ------------------------------------------------------------------ inside

    def _remember(self, stage: str, received: Received, values: Mapping[str, Any]) -> None:
        self.vault.write(self.place, {**values, "stage": stage, "round": received.round})

    def _recall(self, stage: str, received: Received) -> dict[str, Any]:
        known = self.vault.read(self.place)
        if (known.get("stage"), known.get("round")) != (stage, received.round):
            raise ValueError("this stage of secure aggregation is out of turn")
        return known


def _channel(sealing: bytes, other: bytes) -> ChaCha20Poly1305:
    """Between the owner of a sealing key and that of two public keys."""
    return ChaCha20Poly1305(shared_key(sealing, other[:KEY_BYTES], "seal"))


def _label(received: Received, sender: str, receiver: str) -> bytes:
    """What a sealed message is for, so that it is good for nothing else."""
    return json.dumps([received.round, sender, receiver]).encode()
