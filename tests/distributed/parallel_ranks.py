"""Runs a function in several processes that form a gloo group, and collects what each rank returns."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 300


def _run(rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    try:
        result = function(rank, *arguments)
        Path(folder, f"{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on each rank, in order; it is one of a module, and JSON comes back.

    Raises:
        AssertionError: a rank failed or did not end.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=_run, args=(rank, world, folder, function, arguments)) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(SECONDS)
        codes = [process.exitcode for process in ranks]
        for process in ranks:
            if process.exitcode is None:
                process.kill()
        assert codes == [0] * world, f"exit codes of the ranks: {codes}"
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
