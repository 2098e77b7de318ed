"""Train on arrays in memory, and use a personal model."""

import numpy as np
import torch

import perennial


def patients(seed: int, agreement: float, count: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Measurements (count, 6) and diagnoses (count,). The last column agrees with the diagnosis that often."""
    rng = np.random.default_rng(seed)
    ill = rng.integers(0, 2, count)
    signs = rng.normal(size=(count, 5)) + 0.6 * ill[:, None]
    code = np.where(rng.random(count) < agreement, ill, 1 - ill)
    return np.column_stack([signs, 2 * code]), np.array(["well", "ill"])[ill]


def clinic(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A clinic's arrays: x, y, and from which of its two sources each patient is."""
    (x1, y1), (x2, y2) = patients(seed, agreement=0.95), patients(seed + 100, agreement=0.8)
    sources = ["register", "ward"]
    return np.concatenate([x1, x2]), np.concatenate([y1, y2]), np.repeat(sources, [len(y1), len(y2)])


def main() -> None:
    """Two methods on the same data, and a personal model."""
    scenario = perennial.from_arrays(
        {"north": clinic(1), "east": clinic(2), "west": clinic(3)},
        test={"new clinic": patients(7, agreement=0.5), "code turned round": patients(8, agreement=0.1)},
    )
    for method in ("fedavg", "perinvfl"):
        result = perennial.run(method, scenario, rounds=20, out=f"runs/{method}")
        print(result)
        for row in result.accuracy:
            if row["selection"] == "final":
                print(f"  {row['model']:8}  {row['environment']:18}  {100 * row['accuracy']:.1f} %")

    model = result.model("personal", client="north")  # an ordinary torch.nn.Module
    x, _ = patients(9, agreement=0.5, count=5)
    names = result.config.scenario.class_names
    answers = model(torch.tensor(x, dtype=torch.float32)).argmax(dim=1)
    print("five new patients in the north:", ", ".join(names[number] for number in answers))


if __name__ == "__main__":
    main()
