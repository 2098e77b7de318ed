"""Pairs of samples whose order in time is known, and how many of them risks put in that order (Harrell's C)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def pairs(times: Tensor, events: Tensor, risks: Tensor) -> tuple[int, float]:
    """How many pairs are comparable, and how many of these are concordant, with ties of the risk as one half.

    A pair is comparable if the event happened to the one with the shorter time, or at the same time to one of the
    two (Harrell et al. 1996). It is concordant if that one has the higher risk. `times` (n,), `events` (n,) bool,
    `risks` (n,), all finite. In n log² n steps and memory for n.
    """
    import torch

    order = risks.argsort(stable=True)
    for key in ((~events).long(), times):  # by time; at the same time events first, these from the lowest risk up
        order = order[key[order].argsort(stable=True)]
    times, events, ranks = times[order], events[order], torch.unique(risks, return_inverse=True)[1][order]
    instants = 2 * torch.unique_consecutive(times, return_inverse=True)[1] + events
    _, groups, sizes = torch.unique_consecutive(instants, return_inverse=True, return_counts=True)
    comparable = int((len(times) - sizes.cumsum(0)[groups])[events].sum())

    concordant = 0
    for bit in range(int(ranks.max()).bit_length() if len(ranks) else 0):
        # Two ranks are in the order of the first bit, from the top, in which they differ.
        place = (ranks >> bit + 1).argsort(stable=True)
        high = (ranks[place] >> bit & 1).bool()
        found = _before(ranks[place] >> bit + 1, high & events[place])
        concordant += int(found[~high].sum())
    place = ranks.argsort(stable=True)
    tied = int(_before(ranks[place], events[place]).sum())
    same = torch.unique((groups * len(ranks) + ranks)[events], return_counts=True)[1]
    tied -= int((same * (same - 1) // 2).sum())  # events at the same time are not comparable
    return comparable, concordant + tied / 2


def _before(groups: Tensor, marked: Tensor) -> Tensor:
    """For each place the number of marked ones before it in its group; a group's places follow each other."""
    import torch

    before = marked.cumsum(0) - marked.long()
    counts = torch.unique_consecutive(groups, return_counts=True)[1]
    return before - before[counts.cumsum(0) - counts].repeat_interleave(counts)
