"""A text classifier whose clinics train nothing but small matrices beside its weights (LoRA)."""

import json
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

import perennial

SIGNS = {"ill": ["fever", "cough", "pain"], "well": ["rested", "cheerful", "recovered"]}
FILLING = ["patient", "came", "today", "was", "seen", "by", "nurse", "and", "sent", "home", "later", "again"]
WORDS = ["north", "south", *SIGNS["ill"], *SIGNS["well"], *FILLING]
NETWORK = {"model.name": "text-transformer", "model.width": 16, "model.heads": 2}


def notes(seed: int, clinic: str, count: int = 120) -> tuple[list[list[int]], list[str]]:
    """Notes as lists of the words' numbers, of different lengths, and what each is of."""
    rng = np.random.default_rng(seed)
    texts, labels = [], []
    for _ in range(count):
        label = str(rng.choice(["ill", "well"]))
        words = [clinic, *rng.choice(SIGNS[label], 2), *rng.choice(FILLING, rng.integers(3, 8))]
        texts.append([WORDS.index(word) for word in rng.permutation(words)])
        labels.append(label)
    return texts, labels


def traffic(result: perennial.Result) -> int:
    """Bytes that a clinic sends in a round."""
    rows = map(json.loads, (result.folder / "metrics.jsonl").read_text().splitlines())
    return next(row["bytes_up"] for row in rows if row["kind"] == "round") // 2


def main(out: Path = Path("runs"), rounds: int = 10) -> tuple[int, int]:
    """A network from public notes, then two clinics that adapt it; a clinic's bytes of a round, in both."""
    public = perennial.from_arrays({"a": notes(1, "north"), "b": notes(2, "south")}, vocabulary=len(WORDS))
    settings = {**NETWORK, "learning_rate": 0.2, "local_steps": 10}
    first = perennial.run("fedavg", public, rounds=rounds, settings=settings, out=out / "public")
    weights = out / "weights.safetensors"
    save_file(first.model().state_dict(), weights)

    clinics = perennial.from_arrays(
        {"north": notes(3, "north"), "south": notes(4, "south")}, vocabulary=len(WORDS)
    )
    settings |= {"model.weights": str(weights), "model.lora": {"rank": 4, "layers": "query|value"}}
    adapted = perennial.run("ditto", clinics, rounds=rounds, settings=settings, out=out / "adapted")
    print(adapted)
    texts, labels = notes(5, "north", 5)
    print(
        "new notes in the north:",
        list(zip(adapted.predict(texts, "personal", client="north"), labels, strict=True)),
    )
    before, after = traffic(first), traffic(adapted)
    print(f"a clinic sends {before:,} bytes in a round with all weights, and {after:,} with LoRA")
    return before, after


if __name__ == "__main__":
    main()
