import torch

from perennial.common.data.examples import Examples


def test_samples_are_chosen_by_number_by_mini_batches_and_by_condition() -> None:
    count = torch.arange(10)
    examples = Examples(count[:, None] * torch.ones(3), count, count % 3)
    several = torch.tensor([[4, 4, 0], [9, 1, 2]])
    for index in (several[0], several, count % 3 == 1, torch.zeros(0, dtype=torch.int64), slice(2, 5)):
        found = examples[index]
        for part, whole in zip(
            (found.x, found.y, found.environment), (examples.x, examples.y, count % 3), strict=True
        ):
            assert torch.equal(part, whole[index])
