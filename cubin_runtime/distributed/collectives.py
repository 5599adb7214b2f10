"""The collective operations of ``torch.distributed`` that are used here, under the names that a torch version has."""

from __future__ import annotations

from typing import Any


def world_and_rank(group: Any) -> tuple[int, int]:
    """The ranks of a process group (None: the default one), and this process's number in it."""
    import torch.distributed as dist

    return dist.get_world_size(group), dist.get_rank(group)


def all_gather(received: Any, sent: Any, group: Any) -> None:
    """Rank r's ``sent`` becomes part r of everybody's ``received``."""
    import torch.distributed as dist

    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent, group=group)


def reduce_scatter(received: Any, sent: Any, group: Any) -> None:
    """The sum of all ranks' part r of ``sent`` becomes rank r's ``received``."""
    import torch.distributed as dist

    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(received, sent, group=group)


def all_to_all(received: Any, sent: Any, group: Any) -> None:
    """Part r of rank p's ``sent`` becomes part p of rank r's ``received``."""
    import torch.distributed as dist

    dist.all_to_all_single(received, sent, group=group)
