"""A seeded sample of tests in which every test function has its share."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def sampled(items: Sequence[T], size: int, seed: int, group_of: Callable[[T], str]) -> list[T]:
    """``size`` of the items in their order: as many of every group as of any other, as far as it has them."""
    groups = defaultdict[str, list[int]](list)
    for place, item in enumerate(items):
        groups[group_of(item)].append(place)
    chosen = list[int]()
    left = size
    # The smallest groups first: what they do not fill is shared by the others.
    for number, (name, places) in enumerate(sorted(groups.items(), key=lambda group: (len(group[1]), group[0]))):
        share = min(len(places), left // (len(groups) - number))
        chosen += random.Random(f"{seed} {name}").sample(places, share)
        left -= share
    return [items[place] for place in sorted(chosen)]
