"""Small launches for compute-sanitizer: every decode kernel of the device, options spread over them; merged partials;
appends and merges; context attention; sparse MLA decode.

Run: ``tools/gpu_run.sh memcheck``; arguments are the families of kernels, all by default. Prints the number of cases.
All of them run, so that the tool sees them; wrong results, or a decode kernel that did not run, are errors at the end.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cubin_runtime import Config
from cubin_runtime.artifacts.tables.native_kernels import NativeKernel
from cubin_runtime.attention import Runtime
from cubin_runtime.errors import UsageError
from cubin_runtime.kernels.native.decode.grids import SEGMENTS, DecodeShape
from cubin_runtime.kernels.native.decode.select import select_decode
from cubin_runtime.kernels.native.mla.select import MlaShape, select_mla_decode
from cubin_runtime.kernels.native.reduction.plan import OperationLaunch
from cubin_runtime.kernels.native.reduction.select import choose_kernel
from cubin_runtime.launch.driver import DeviceFacts
from cubin_runtime.launch.prepared import PreparedLaunches
from cubin_runtime.testing.device import DeviceArrays
from tests.gpu.decode_cases import DecodeCase
from tests.gpu.decode_device import OPERATION, on_device, only_grids
from tests.gpu.decode_random import WINDOWS, random_case
from tests.gpu.mla_cases import MlaCase
from tests.gpu.mla_device import is_portable, kernels_for, mla_kernels, mla_on_device
from tests.gpu.mla_random import random_mla_case
from tests.gpu.reduction_cases import CASES, assert_lse, assert_merged, lse_case, lse_of, make_partials, run_reduction
from tests.gpu.sanitizer_context import context_all
from tests.gpu.sanitizer_copying import copying_all
from tests.gpu.sanitizer_sparse_mla import sparse_mla_all

BUILT = Path(__file__).resolve().parents[2] / "build" / "artifacts"
FAMILIES = ("decode", "mla", "reduction", "copying", "context", "sparse_mla")
MOST_CASES = 190
MLA_CASES = 62
MOST_TRIES = 60  # to find cases that take a kernel
LSES = ((3, 5), (33, 64))
# Tiles shared by CTAs with a ragged end, empty requests, fewer keys than queries, a length of one.
LENGTHS = ((700,), (0, 65, 129), (300, 3, 0, 17), (1, 400))
MASKS = ("none", "tree", "any", "chain", "tree")
# Of so many segments, partials pass through shared memory before they are folded.
MANY_SEGMENTS = (
    DecodeCase((7000,), 7000, kv_heads=1, batch_invariant=True),
    DecodeCase((9000,), 9000, kv_heads=1, head_dim=64, kv_dtype="e4m3", q_dtype="bf16", batch_invariant=True),
)


def spread_cases(traits: Mapping[str, object], count: int, first: int = 0) -> list[DecodeCase]:
    """Cases for one kernel; options that matter to memory alternate with ``first``, the rest are drawn."""
    return [_spread(traits, first + i) for i in range(count)]


def _spread(traits: Mapping[str, object], index: int) -> DecodeCase:
    rows, q_dtypes = int(str(traits["rows"])), str(traits["q_dtypes"]).split(",")
    rng = np.random.default_rng((20, index))
    lengths = LENGTHS[index % len(LENGTHS)]
    # One part of a tile, a whole one, or several, by turns. A group has 32 heads at most: many rows need query tokens.
    q_len = (1, 4, 7, 2, 16)[index % 5] if rows <= 64 else (4, 7, 16)[index % 3]
    group = max(1, min(32, (3 * rows // 4, rows, 2 * rows + 1)[index % 3] // q_len))
    case = random_case(
        rng,
        kv_dtype=traits["dtype"],
        q_dtype=q_dtypes[index % len(q_dtypes)],
        head_dim=traits["head_dim"],
        rows=rows,
        q_len=q_len,
        group=group,
        kv_heads=1 + index % 2,
        mask=MASKS[index % len(MASKS)],
        sinks=index % 2 == 0,
        window_left=WINDOWS[index % len(WINDOWS)],
        # Of more rows, it takes only those kernels that give the bits of prefill.
        batch_invariant=traits["arithmetic"] == SEGMENTS or (rows <= 64 and (index % 3 == 0 or index % 6 == 1)),
        pdl=index % 7 == 0,
        clusters=index % 2 == 0,
        whole_pages=index % 4 < 2 and index % 5 == 0,  # of a near bound
    )
    ragged = index % 3 == 1
    q_lens = tuple((q_len, 0, 1, q_len)[i % 4] for i in range(len(lengths)))
    return replace(
        case,
        lengths=lengths,
        # The bound decides the kernel: for a far one that of more rows, which reads keys once.
        max_seq_len=max(lengths) + (0, 64, 1 << 15, 1 << 17)[index % 4],
        q_lens=q_lens if ragged else None,
        max_q_len=16 if ragged else None,
        spare_tokens=index % 2 if ragged else 0,
    )


def cases_of(kernels: list[NativeKernel], device: DeviceFacts) -> list[DecodeCase]:
    """As many cases that take each kernel as the whole may have, options going on from kernel to kernel."""
    each = (MOST_CASES - MLA_CASES - len(CASES) - len(LSES) - len(MANY_SEGMENTS)) // len(kernels)
    assert each, f"{len(kernels)} kernels, more than {MOST_CASES} cases hold"
    found = list(MANY_SEGMENTS)
    for kernel in kernels:
        tried = spread_cases(kernel.traits, MOST_TRIES, len(found))
        found += [case for case in tried if _takes(kernel, case, kernels, device)][:each]
    return found


def _takes(kernel: NativeKernel, case: DecodeCase, kernels: list[NativeKernel], device: DeviceFacts) -> bool:
    shape = DecodeShape(
        case.kv_dtype,
        case.head_dim,
        case.group,
        case.kv_heads,
        len(case.lengths),
        q_dtype=case.q_dtype,
        q_len=case.q_bound,
        tokens=case.tokens,
        ragged=case.q_lens is not None,
        max_seq_len=case.max_seq_len,
        window_left=case.window_left,
        batch_invariant=case.batch_invariant,
    )
    # As when it runs: of the kernels that it asks for.
    asked = [one for one in kernels if one.traits["rows"] == case.rows]
    with only_grids(case.clusters):
        try:
            return kernel in [selection.kernel for selection in select_decode(asked, shape, device)]
        except UsageError:
            return False


def decode_kernels_of(runtime: Runtime, operation: str = OPERATION) -> list[NativeKernel]:
    """The decode kernels, or those of another operation, that were built for this very device."""
    major, minor = runtime.driver.device(0).capability
    kernels = runtime.native_release().kernels
    return [k for k in kernels if k.operation == operation and k.sm.rstrip("af") == f"{major}{minor}"]


def mla_cases_of(kernels: list[NativeKernel], device: DeviceFacts) -> list[MlaCase]:
    """As many MLA cases that take each kernel as they may have together, options going on from kernel to kernel."""
    each = MLA_CASES // max(1, len(kernels))
    assert each or not kernels, f"{len(kernels)} MLA kernels, more than {MLA_CASES} cases hold"
    found: list[MlaCase] = []
    for kernel in kernels:
        tried = [_mla_spread(kernel, len(found) + i) for i in range(MOST_TRIES)]
        found += [case for case in tried if _mla_takes(kernel, case, kernels, device)][:each]
    return found


def _mla_takes(kernel: NativeKernel, case: MlaCase, kernels: list[NativeKernel], device: DeviceFacts) -> bool:
    shape = MlaShape(
        case.kv_dtype,
        case.latent,
        case.heads,
        len(case.lengths),
        rope=case.rope,
        q_dtype=case.q_dtype,
        q_len=case.q_bound,
        ragged=case.q_lens is not None,
        max_seq_len=case.max_seq_len,
        batch_invariant=case.batch_invariant,
        separate_values=case.separate_values,
    )
    return select_mla_decode(kernels_for(case, kernels), shape, device).kernel == kernel


def _mla_spread(kernel: NativeKernel, index: int) -> MlaCase:
    rng, traits = np.random.default_rng((21, index)), kernel.traits
    lengths = LENGTHS[index % len(LENGTHS)]
    # Part of a row tile, whole ones, several and a part, by turns.
    few = int(str(traits["rows"])) < 64
    shapes = ((5, 1), (16, 1), (3, 5)) if few else ((37, 1), (64, 2), (128, 1), (16, 7), (100, 3), (8, 16))
    heads, q_len = shapes[(index // 2 if few else index) % len(shapes)]
    case = random_mla_case(
        rng,
        {str(traits["dtype"]): str(traits["q_dtypes"]).split(",")},
        latent=int(str(traits["latent"])),
        rope=int(str(traits["rope"])),
        heads=heads,
        q_len=q_len,
        mask=MASKS[index % len(MASKS)],
        sinks=index % 2 == 0,
        batch_invariant=index % 3 == 0,
        pdl=index % 7 == 0,
        portable=is_portable(kernel),
        separate_values=bool(traits.get("separate_values")),
    )
    ragged = index % 4 == 1
    q_lens = tuple((q_len, 0, 1, q_len)[i % 4] for i in range(len(lengths)))
    return replace(
        case,
        lengths=lengths,
        max_seq_len=max(lengths) + index % 2 * 64,
        q_lens=q_lens if ragged else None,
        max_q_len=16 if ragged else None,
        spare_tokens=index % 2 if ragged else 0,
    )


class WrongResults:
    """Gathers the assertions that fail, so that the cases after them run too."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def __enter__(self) -> WrongResults:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: object) -> bool:
        if kind is not AssertionError:
            return False
        self.words.append(str(value).partition("\n")[0])
        return True


def mla_all(runtime: Runtime, rng: np.random.Generator, wrong: WrongResults) -> tuple[int, set[str]]:
    """Every MLA case; their number and the names of the kernels that ran."""
    kernels = mla_kernels(runtime)
    wanted = mla_cases_of(kernels, runtime.driver.device(0))
    used: set[str] = set()
    for one in wanted:
        with mla_on_device(runtime, one, rng, guard=0) as case:
            workspace = case.dirty_workspace()
            case.run(workspace=workspace)
            with wrong:
                case.assert_right()
            case.plan.check(workspace)
            used.update(kernel.name for kernel in case.kernels)
    missing = {kernel.name for kernel in kernels} - used
    with wrong:
        assert not missing, f"MLA kernels that did not run: {', '.join(sorted(missing))}"
    return len(wanted), used


def decode_all(runtime: Runtime, rng: np.random.Generator, wrong: WrongResults) -> tuple[int, set[str]]:
    """Every decode case; their number and the names of the kernels that ran."""
    wanted = cases_of(decode_kernels_of(runtime), runtime.driver.device(0))
    used: set[str] = set()
    for one in wanted:
        with on_device(runtime, one, rng, guard=0) as case:
            workspace = case.dirty_workspace()
            case.run(workspace=workspace)
            with wrong:
                case.assert_right()
            case.plan.check(workspace)
            used |= {kernel.name for kernel in case.kernels}
    missing = {kernel.name for kernel in decode_kernels_of(runtime)} - used
    with wrong:
        assert not missing, f"decode kernels that did not run: {', '.join(sorted(missing))}"
    return len(wanted), used


def reduce_all(runtime: Runtime, rng: np.random.Generator) -> set[str]:
    """Every reduction case and two LSEs; the names of the kernels that ran."""
    driver, own, arrays = runtime.driver, runtime.native_release(), DeviceArrays(runtime.driver, guard=0)
    context = driver.primary_context(0)
    driver.set_current(context)
    major, minor = driver.device(0).capability
    used = set()

    def launch(after: OperationLaunch) -> None:
        kernel = choose_kernel(own.kernels, after.operation, after.traits, major * 10 + minor)
        plan = after.launch_plan(kernel, own.file_of(kernel))
        PreparedLaunches([plan], [runtime.load(kernel, context)], driver).run(0)
        used.add(kernel.name)

    def download(address: int, array: np.ndarray) -> None:
        driver.synchronize(0)
        driver.copy_to_host(array, address)

    for wanted in CASES.values():
        partials = make_partials(wanted, rng)
        assert_merged(wanted, partials, run_reduction(wanted, partials, arrays.upload, launch, download))
    for rows in LSES:
        statistics, want = lse_case(rows, rng)
        lse = np.empty(rows, dtype=np.float32)
        at = arrays.empty(lse.nbytes)
        launch(lse_of(rows, (rows[1], 1), arrays.upload(statistics), at))
        download(at, lse)
        assert_lse(lse, want)
    arrays.close()
    return used


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases of some families, or all, on device 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", default=FAMILIES, help=", ".join(FAMILIES))
    families = parser.parse_args(arguments).families
    for unknown in set(families) - set(FAMILIES):
        parser.error(f"{unknown!r} is no family; expected {', '.join(FAMILIES)}")
    sources = tuple(os.environ.get("CUBIN_RUNTIME_SOURCES", str(BUILT)).split())
    with tempfile.TemporaryDirectory() as store:
        runtime = Runtime(Config(store=Path(store), sources=sources, offline=True))
        rng, wrong = np.random.default_rng(20), WrongResults()
        count, used = 0, set[str]()
        for family, run_all in (("decode", decode_all), ("mla", mla_all)):
            if family in families:
                cases, kernels = run_all(runtime, rng, wrong)
                count, used = count + cases, used | kernels
        if "reduction" in families:
            count, used = count + len(CASES) + len(LSES), used | reduce_all(runtime, rng)
        if "copying" in families and decode_kernels_of(runtime, "append_kv"):
            used |= copying_all(runtime)
        if "context" in families and decode_kernels_of(runtime, "context_attention"):
            used |= context_all(runtime)
        if "sparse_mla" in families and decode_kernels_of(runtime, "sparse_mla_decode"):
            used |= sparse_mla_all(runtime, rng)
        runtime.modules.close()
    print(f"{count} cases over {', '.join(sorted(used))}")
    assert not wrong.words, "; ".join(wrong.words)


if __name__ == "__main__":
    main()
