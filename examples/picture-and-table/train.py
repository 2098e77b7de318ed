"""Samples that are a picture and a row of a table: the network takes both by their names."""

import os
from pathlib import Path
from typing import Any

import numpy as np

import perennial

HERE = Path(__file__).parent


def patients(seed: int, count: int = 150) -> tuple[dict[str, Any], np.ndarray]:
    """Pictures of 8x8 pixels, rows of three numbers, and the diagnosis, of which each of them tells a part."""
    rng = np.random.default_rng(seed)
    spot, fever = rng.integers(0, 2, count), rng.integers(0, 2, count)
    image = rng.integers(0, 80, (count, 1, 8, 8))
    image[:, :, 2:5, 2:5] += 150 * spot[:, None, None, None]
    table = rng.normal(size=(count, 3))
    table[:, 0] += 3 * fever
    return {"image": image.astype(np.uint8), "table": table}, np.array(["well", "watch", "ill"])[spot + fever]


def main(out: Path = Path("runs"), rounds: int = 10) -> float:
    """Two clinics train the network of both_net.py; the share of new patients that it is right about."""
    os.environ["PERENNIAL_PLUGINS"] = str(HERE / "both_net.py")  # where it is, for whoever starts elsewhere
    clinics = perennial.from_arrays({"north": patients(1), "south": patients(2)}, {"new clinic": patients(3)})
    settings = {"model.name": "both_net:Both", "learning_rate": 0.2, "local_steps": 20}
    result = perennial.run("fedavg", clinics, rounds=rounds, settings=settings, out=out / "fedavg")
    print(result)
    x, y = patients(4)
    right = float((result.predict(x) == y).mean())
    print(f"of {len(y)} new patients it is right about {100 * right:.0f} %")
    return right


if __name__ == "__main__":
    main()
