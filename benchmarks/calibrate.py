"""Calibrate the choice of a decode's launch on a GPU, or show how well constants predict what was measured.

Run ``python benchmarks/calibrate.py measure --out DIR`` on a machine with a GPU, torch, and our kernels: it times every
launch that a row's bounds could choose, in a sequence of layers in one CUDA graph, where each layer has a cache of its
own, and writes DIR/launch_choice_GPU.json after each row. Every output is compared with that of the first launch.
``python benchmarks/calibrate.py chosen --out DIR`` times what is chosen for each of a row's bounds.
``python benchmarks/calibrate.py fit FILE`` needs no GPU: it prints the constants of ``kernel_costs.py`` that fit half
of the rows, and how far predictions are off on the other half.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from calibration.rows import Row, rows

EXPERIMENTS = Path(__file__).resolve().parents[1] / "build" / "experiments"
# A round of a launch takes at least this long in total, with fewer rounds where launches are long.
_ROUNDS, _LONG_US, _LONG_ROUNDS = 5, 60.0, 3
_SECONDS_BETWEEN_WRITES = 5.0


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("measure", "chosen"):
        measured = verbs.add_parser(verb)
        measured.add_argument("--out", type=Path, required=True)
        measured.add_argument("--only", default="", help="rows whose names contain this")
        measured.add_argument("--seconds", type=float, default=270, help="stop after so long (%(default)s)")
        measured.add_argument("--label", default="", help="appended to the file's name")
        measured.add_argument("--experiment", default="", help="kernels of ``kernels_src.experiment`` of this name")
        measured.add_argument("--part", default="0/1", help="i/n: every n-th row, from the i-th on (%(default)s)")
    fitted = verbs.add_parser("fit")
    fitted.add_argument("file", type=Path)
    return parser.parse_args(arguments)


def measure_row(row: Row, runtime: Any, stream: Any, tried: Sequence[tuple[dict[str, object], int, Any]]) -> Any:
    """The time of each launch: its record, the bound that it is planned for, and what plans are forced to take."""
    import torch
    from calibration.measuring import Layers, captured, forced, medians_us, no_garbage_collection

    layers = Layers(row, max(bound for _, bound, _ in tried))
    results, graphs, first, kept = [], [], None, []
    with no_garbage_collection():
        for record, bound, selection in tried:
            with forced(selection) if selection is not None else nullcontext():
                plan = layers.plan(bound, runtime)
            run = layers.run(plan, stream)
            layers.out.fill_(float("nan"))
            torch.cuda.synchronize()
            graphs.append(captured(run, stream))
            kept.append((plan, run))
            run(0)
            torch.cuda.synchronize()
            out = layers.out.float()
            first = out.clone() if first is None else first
            difference = float((out - first).abs().max())
            launched = record or _record_of(plan)
            results.append({**launched, "bound": bound, "difference": round(difference, 5)})
        rounds = _ROUNDS if row.read_bytes < _LONG_US * 4e6 else _LONG_ROUNDS
        times = medians_us(graphs, stream, rounds)
        torch.cuda.synchronize()
        graphs.clear()
        kept.clear()
    return [{**result, "us": us} for result, us in zip(results, times, strict=True)]


def _record_of(plan: Any) -> dict[str, object]:
    (selection,) = plan.selections
    names = ("ctas", "cta_group_size", "cluster_size", "slack_tiles")
    launch = {name: getattr(selection, name) for name in names if hasattr(selection, name)}
    return {"kernel": selection.kernel.name, **launch}


def measured(asked: argparse.Namespace, tried_of: Callable[[Row, Any], list[tuple[Any, int, Any]]]) -> None:
    """Write the times of every row's launches, after each row."""
    import torch
    from gpu_environment import gpu_environment

    begin = written = time.perf_counter()
    asked.out.mkdir(parents=True, exist_ok=True)
    store = Path(os.environ.get("CUBIN_RUNTIME_CACHE", asked.out / "store"))
    runtime = _runtime(store, asked.experiment)
    stream = torch.cuda.Stream()
    torch.manual_seed(0)
    gpu = torch.cuda.get_device_name().split()[1].lower()
    path = asked.out / f"launch_{'choice' if asked.verb == 'measure' else 'bounds'}_{gpu}{asked.label}.json"
    release = runtime.native_release().pin.manifest_sha256
    result: dict[str, Any] = {"schema": 1, "release": release, "environment": gpu_environment(), "rows": []}
    first, step = map(int, asked.part.split("/"))
    for row in list(rows())[first::step]:
        if asked.only not in row.name:
            continue
        if time.perf_counter() - begin > asked.seconds:
            print("out of time before", row.name)
            break
        try:
            launches = measure_row(row, runtime, stream, tried_of(row, runtime))
        except Exception as error:  # the other rows count too
            print(row.name, repr(error)[:300], flush=True)
            continue
        result["rows"].append({**row.record(), "launches": launches})
        if time.perf_counter() - written > _SECONDS_BETWEEN_WRITES:
            path.write_text(json.dumps(result))
            written = time.perf_counter()
        fastest, slowest = (f(launches, key=lambda each: each["us"]) for f in (min, max))
        worst = max(each["difference"] for each in launches)
        text = f"{row.name}: {fastest['us']} to {slowest['us']} us of {len(launches)}, difference {worst}"
        print(f"{time.perf_counter() - begin:.0f} s", text, flush=True)
    result["seconds"] = round(time.perf_counter() - begin)
    path.write_text(json.dumps(result))


def _runtime(store: Path, experiment: str) -> Any:
    from gpu_environment import built_sources

    from cubin_runtime import Config
    from cubin_runtime.attention import Runtime
    from cubin_runtime.attention.runtime import NATIVE_RELEASE

    if not experiment:
        return Runtime(Config(store=store, sources=built_sources(), offline=True))
    sources, pins = (*built_sources(), str(EXPERIMENTS)), (EXPERIMENTS / "pins.toml",)
    config = Config(store=store, sources=sources, pin_files=pins, offline=True)
    return Runtime(config, release=f"{NATIVE_RELEASE}-{experiment}")


def every_launch(row: Row, runtime: Any) -> list[tuple[Any, int, Any]]:
    """Each launch that any bound could choose, planned for the loosest of the usual bounds."""
    from calibration.candidates import launches

    bound = max(4096, row.longest)
    found = launches(runtime.native_release().kernels, row, runtime.driver.device(0))
    return [(launch.record(), bound, launch.selection(mla=not row.kv_heads)) for launch in found]


def every_bound(row: Row, _runtime: Any) -> list[tuple[Any, int, Any]]:
    """What is chosen for each bound."""
    return [(None, bound, None) for bound in row.bounds]


def main() -> None:
    asked = options()
    if asked.verb == "fit":
        from calibration.fitting import report
        from gpu_environment import built_sources

        from cubin_runtime.artifacts.tables.native_kernels import parse_native_kernels

        (kernels,) = (path for source in built_sources() for path in Path(source).glob("*/kernels.json"))
        report(json.loads(asked.file.read_text()), parse_native_kernels(kernels.read_bytes()))
        return
    measured(asked, every_launch if asked.verb == "measure" else every_bound)


if __name__ == "__main__":
    main()
