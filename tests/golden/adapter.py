"""The package as the golden launches drive it: all that this folder knows of its modules stands here.

A case names a function of the public interface and its arguments; it runs on the stand-in driver, with releases of
cubins without code, and what the driver received is compared.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import struct
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from cubin_runtime import Config
from cubin_runtime.artifacts.tables.metadata import HEADER_PATH
from cubin_runtime.artifacts.tables.metadata_columns import COLUMNS
from cubin_runtime.attention import (
    Runtime,
    TensorView,
    append_kv,
    context_attention,
    merge_states,
    mla_decode,
    paged_decode,
    plan_append_kv,
    plan_context_attention,
    plan_merge_states,
    plan_mla_decode,
    plan_paged_decode,
    plan_sparse_mla_decode,
    sparse_mla_decode,
)
from cubin_runtime.attention.fast_path.notes import Notes, note_made
from cubin_runtime.attention.operators.append_kv import APPEND_KV
from cubin_runtime.attention.operators.merge_states import MERGE_STATES
from cubin_runtime.compat import flashinfer
from cubin_runtime.errors import CubinRuntimeError
from cubin_runtime.kernels.abi import abi_layouts
from cubin_runtime.launch.plan import LaunchPlan
from cubin_runtime.launch.tensormap import TensorMapSpec
from cubin_runtime.launch.workspace import SemaphoreWorkspace, Workspace
from cubin_runtime.testing import GraphDriver, StandIn
from kernels_src.variants import VARIANTS
from tests.golden.cubins import cubin_of, write_release
from tests.golden.launches import Layout, differences, launch_of, values_of

NATIVE, PUBLISHED = "hopper-golden", "trtllm-golden"
ABIS = {NATIVE: "hopper-0.1.0", PUBLISHED: "trtllm-gen-0.6.13"}
PLANNERS = {
    "plan_paged_decode": plan_paged_decode,
    "plan_mla_decode": plan_mla_decode,
    "plan_append_kv": plan_append_kv,
    "plan_merge_states": plan_merge_states,
    "plan_context_attention": plan_context_attention,
    "plan_sparse_mla_decode": plan_sparse_mla_decode,
}
OPERATORS = {
    "paged_decode": paged_decode,
    "mla_decode": mla_decode,
    "append_kv": append_kv,
    "merge_states": merge_states,
    "context_attention": context_attention,
    "sparse_mla_decode": sparse_mla_decode,
}

# Operator -> names that arguments had when its launches were recorded -> their names.
FORMER = {operator.name: operator.former for operator in (APPEND_KV, MERGE_STATES)}

_KERNELS = Path(__file__).parents[1] / "data" / "trtllm_gen_kernels.json.xz"
_ALLOCATED, _MADE, _SEMAPHORES, _SCRATCH = 0x10 << 40, 0x20 << 40, 0x30 << 40, 0x31 << 40
_LARGE = 1 << 40
_MIB = 1 << 20


@dataclass(frozen=True)
class Device:
    """What a device says of itself; ``clusters`` of any kernel are active at once."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_per_multiprocessor: int
    l2: int
    clusters: int = 16


DEVICES = {
    "A100": Device("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164 << 10, 40 * _MIB),
    "A40": Device("NVIDIA A40", (8, 6), 84, 100 << 10, 6 * _MIB),
    "L40S": Device("NVIDIA L40S", (8, 9), 142, 100 << 10, 96 * _MIB),
    "H100": Device("NVIDIA H100 80GB HBM3", (9, 0), 132, 228 << 10, 50 * _MIB),
    "H100 PCIe": Device("NVIDIA H100 PCIe", (9, 0), 114, 228 << 10, 50 * _MIB),
    "H200": Device("NVIDIA H200", (9, 0), 132, 228 << 10, 60 * _MIB),
    "GH200": Device("NVIDIA GH200 480GB", (9, 0), 132, 228 << 10, 60 * _MIB),
    "B200": Device("NVIDIA B200", (10, 0), 148, 228 << 10, 126 * _MIB),
    "B200 few clusters": Device("NVIDIA B200", (10, 0), 148, 228 << 10, 126 * _MIB, 2),
    "B300": Device("NVIDIA B300", (10, 3), 148, 228 << 10, 126 * _MIB, 37),
    "RTX": Device("NVIDIA RTX PRO 6000", (12, 0), 188, 100 << 10, 128 * _MIB),
    "GB10": Device("NVIDIA GB10", (12, 1), 48, 100 << 10, 24 * _MIB),
}


class TorchLike:
    """A view that looks like a CUDA tensor of torch, as far as operators ask."""

    def __init__(self, view: TensorView) -> None:
        self.view = view
        self.dtype, self.shape = f"torch.{view.dtype}", view.shape
        self.device = SimpleNamespace(type="cuda", index=view.device)

    def stride(self) -> tuple[int, ...]:
        return self.view.strides

    def get_device(self) -> int:
        return self.view.device

    def data_ptr(self) -> int:
        return self.view.pointer


class Memory:
    """The framework in the operators' eyes: tensors at addresses that are the same in every run."""

    def __init__(self, stream: int) -> None:
        self._stream, self._number = stream, count()
        self._masked = 0  # query tokens of the mask that was read last

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str | None) -> TensorView:
        own = dtype or str(like.dtype).removeprefix("torch.")
        make = partial(self._made, own, shape)
        return note_made(make(), make)

    def zeros(self, like: Any, shape: tuple[int, ...], dtype: str) -> TensorView:
        return self.empty(like, shape, dtype)

    def scaled(self, tensor: Any, factor: float) -> TensorView:
        return self.empty(tensor, tuple(tensor.shape), None)

    def product(self, first: Any, second: Any) -> TensorView:
        return self.empty(first, (1,), None)

    def check_scalable(self, name: str, tensor: Any) -> None:
        pass

    def scale_in_place(self, tensor: Any, factor: float) -> None:
        pass  # no launch of ours

    def _made(self, dtype: str, shape: tuple[int, ...], *_: Any) -> TensorView:
        return TensorView.contiguous(_MADE + (next(self._number) << 33), dtype, shape)

    def to_host(self, tensor: TensorView) -> tuple[int, ...]:
        """Causal masks, of requests of 16 tokens where their shape does not say how many; and the sums of these."""
        if len(tensor.shape) == 1:
            return tuple(min(16 * request, self._masked) for request in range(tensor.shape[0]))
        self._masked = prod(tensor.shape[:-1])
        rows = [(2 << row % (tensor.shape[1] if len(tensor.shape) == 3 else 16)) - 1 for row in range(self._masked)]
        return tuple(word for row in rows for word in (row, 0)[: tensor.shape[-1]])

    def current_stream(self, like: Any) -> int:
        return self._stream

    def stream_query(self, device: int) -> int:
        return self._stream


# Kernel to its threads and bytes of dynamic shared memory.
Sizes = Mapping[str, Sequence[int]]
ANY_SIZES: Sizes = defaultdict(lambda: (1024, 115712))  # threads and bytes of dynamic shared memory


class Session:
    """Runs cases: a runtime for each device, all on one stand-in driver."""

    def __init__(self, standin: StandIn, folder: Path, layouts: Mapping[str, Layout], sizes: Sizes) -> None:
        """``layouts`` are the structs and ``sizes`` the kernels, both by name, as they were recorded."""
        self._standin, self._folder, self._layouts = standin, folder, layouts
        self._runtimes: dict[tuple[str, bool], Runtime] = {}
        self._structs: dict[str, str] = {}
        standin.reset()
        standin.write_whole_descriptors()
        rows = native_rows(sizes)
        for row in rows:
            standin.add_kernel(row["symbol"], (row["struct_bytes"],), row["threads"])
            self._structs[row["symbol"]] = row["struct"]
        standin.accept_kernels(layouts["KernelParams"][0])
        self._pins = write_release(folder, NATIVE, ABIS[NATIVE], native_files(sizes))
        driver = GraphDriver(standin.path)
        driver.set_current(driver.primary_context())
        self._streams = (0, driver.create_stream())
        driver.set_current(None)

    def run(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What the driver received at each step of a case, or the kind of the refusal."""
        published = case["call"].startswith("trtllm") and DEVICES[case["on"]].capability[0] == 10
        if case.get("fresh"):
            self._runtimes.pop((case["on"], published), None)
        runtime = self._runtime(case["on"], published)
        runtime.memory = Memory(self._streams[case.get("stream", 0)])
        self._standin.make_up_memory(_ALLOCATED)
        sent: list[list[dict[str, Any]]] = []
        unplanned: list[str] = []
        again = ""
        with warnings.catch_warnings(), _default_runtime(runtime):
            warnings.simplefilter("ignore")
            try:
                send = self._sender(case, runtime)
                for changes in case["steps"]:
                    self._standin.clear_log()
                    plans = send(_arguments(case, changes))
                    sent.append([self._launch(call.seen) for call in self._standin.calls("cuLaunchKernelEx")])
                    if not changes:
                        planned = [self._planned(plan, runtime) for plan in plans]
                        unplanned += _unplanned(planned, sent[-1])
                again = self._again(case, send, sent[-1])
            except CubinRuntimeError as error:
                return {"refused": type(error).__name__}
            finally:
                runtime.driver.set_current(None)
        return {"sent": sent, **({"unplanned": unplanned} if unplanned else {}), **({"again": again} if again else {})}

    def _again(
        self, case: Mapping[str, Any], send: Callable[[dict[str, Any]], object], sent: list[dict[str, Any]]
    ) -> str:
        """What is wrong with sending the last step once more, which a fast path does where one can be made."""
        self._standin.clear_log()
        with _counted_full_paths() as full_paths:
            send(_arguments(case, case["steps"][-1]))
        came = [self._launch(call.seen) for call in self._standin.calls("cuLaunchKernelEx")]
        if bool(full_paths) == _is_repeatable(case):
            return f"takes the {'full' if full_paths else 'fast'} path"
        return "" if _without_made(came) == _without_made(sent) else "is not the same"

    def _sender(self, case: Mapping[str, Any], runtime: Runtime) -> Callable[[dict[str, Any]], Sequence[LaunchPlan]]:
        """What sends a step by its arguments, and gives the plans that it was sent by where they can be seen."""
        name, stream = case["call"], self._streams[case.get("stream", 0)]

        def operate(step: dict[str, Any]) -> Sequence[LaunchPlan]:
            OPERATORS[name](**step, workspace=self._workspace(case, runtime), stream=stream, runtime=runtime)
            return ()

        def answer(step: dict[str, Any]) -> Sequence[LaunchPlan]:
            getattr(flashinfer, name)(**step)
            return ()

        if name in OPERATORS:
            return operate
        if name not in PLANNERS:
            return answer
        first = _arguments(case, {})
        plan = PLANNERS[name](**first, runtime=runtime)

        def run(step: dict[str, Any]) -> Sequence[LaunchPlan]:
            given = {key: value for key, value in step.items() if _is_tensor(value) or value != first[key]}
            plan.run(**given, workspace=self._workspace(case, runtime) or plan.prepare(stream), stream=stream)
            return plan.launch_plans()

        return run

    def _workspace(self, case: Mapping[str, Any], runtime: Runtime) -> Workspace | SemaphoreWorkspace | None:
        kind = case.get("workspace")
        if kind == "two buffers":
            return SemaphoreWorkspace((_SEMAPHORES, _LARGE), (_SCRATCH, _LARGE))
        return Workspace(runtime.driver, runtime.driver.primary_context(), _SCRATCH, _LARGE) if kind else None

    def _launch(self, seen: Mapping[str, str]) -> dict[str, Any]:
        return launch_of(seen, self._layouts[self._structs.get(seen["symbol"], "KernelParams")])

    def _planned(self, plan: LaunchPlan, runtime: Runtime) -> dict[str, Any]:
        """A planned launch in the form of one that was sent."""
        encoded = {
            name: runtime.descriptors.encode(value) if isinstance(value, TensorMapSpec) else value
            for name, value in plan.values.items()
        }
        words = {4: "cluster", 5: "policy", 6: "pdl"}
        return {
            "kernel": plan.symbol,
            "grid": list(plan.grid),
            "block": list(plan.block),
            "shared": plan.shared_bytes,
            "attributes": [
                f"{words[number]}={','.join(str(word) for (word,) in struct.iter_unpack('<I', value))}"
                for number, value in plan.attributes.entries()
            ],
            "values": values_of(plan.layout.pack(encoded), self._layouts[plan.layout.name]),
        }

    def _runtime(self, device: str, published: bool) -> Runtime:
        """The runtime of a device, which the stand-in is from now on."""
        self._standin.describe(*astuple(DEVICES[device]))
        if published and not (self._folder / f"{PUBLISHED}.zip").exists():
            self._pins += write_release(self._folder, PUBLISHED, ABIS[PUBLISHED], published_files())
        made = self._runtimes.get((device, published))
        if made is None:
            pins = self._folder / f"pins-{published}.toml"
            pins.write_text(self._pins)
            sources = tuple(str(path) for path in self._folder.glob("*.zip"))
            config = Config(store=self._folder / "store", sources=sources, pin_files=(pins,), offline=True)
            made = Runtime(config, driver=GraphDriver(self._standin.path), release=NATIVE, trtllm_release=PUBLISHED)
            # New memory has the address that was recorded, whichever plans of earlier cases are gone by now.
            made.driver.waiting_for = lambda *_: None  # type: ignore[method-assign]
            self._runtimes[device, published] = made
        return made


def native_rows(sizes: Sizes = ANY_SIZES) -> list[dict[str, Any]]:
    """``kernels.json`` of the project's kernels without building them; symbols tell the SM too."""
    layouts = abi_layouts(ABIS[NATIVE])
    return [
        {
            "name": variant.name,
            "symbol": variant.name,
            "file": variant.file,
            "sm": variant.sm,
            "family": variant.family,
            "operation": variant.operation,
            "traits": dict(variant.traits),
            "struct": variant.struct,
            "struct_bytes": layouts[variant.struct].size,
            "struct_fingerprint": layouts[variant.struct].fingerprint,
            "threads": sizes[variant.name][0],
            "dynamic_shared_bytes": sizes[variant.name][1],
            "static_shared_bytes": 0,
            "registers": 128,
            "spill_bytes": 0,
            "flags": [],
            "sources_sha256": "0" * 64,
            "status": variant.status,
        }
        for variant in VARIANTS
    ]


def native_files(sizes: Sizes = ANY_SIZES) -> dict[str, bytes]:
    """The release of ``native_rows``, its cubins without code."""
    rows = native_rows(sizes)
    files = {row["file"]: _cubin_of(row) for row in rows}
    return {**files, "kernels.json": json.dumps({"schema": 1, "release": NATIVE, "kernels": rows}).encode()}


def layouts_now() -> dict[str, Layout]:
    """The parameter structs of both releases, to be recorded."""
    structs = {**abi_layouts(ABIS[NATIVE]), **abi_layouts(ABIS[PUBLISHED])}
    return {
        name: (layout.size, [(field.name, field.type, field.offset, field.size) for field in layout.fields])
        for name, layout in structs.items()
    }


def _cubin_of(row: Mapping[str, Any]) -> bytes:
    return cubin_of(row["symbol"], int(row["sm"].rstrip("af")), row["struct_bytes"], row["threads"])


def published_files(keeps: Callable[[Mapping[str, Any]], bool] = lambda row: True) -> dict[str, bytes]:
    """The trtllm-gen kernels that planning chooses from, by their real traits, as far as ``keeps`` keeps them."""
    columns = json.loads(lzma.decompress(_KERNELS.read_bytes()))
    size = abi_layouts(ABIS[PUBLISHED])["KernelParams"].size
    rows, files = [], {}
    for cells in zip(*columns.values(), strict=True):
        row = dict(zip(columns, cells, strict=True))
        if not keeps(row):
            continue
        data = cubin_of(row["symbol"], int(row["sm"].rstrip("f")), size, row["threads"])
        files[f"{row['symbol']}.cubin"] = data
        row["sha256"] = hashlib.sha256(data).hexdigest()
        rows.append("{" + ", ".join(_cell(column.kind, row[column.field]) for column in COLUMNS) + "},\n")
    declared = "".join(f"int {column.name};\n" for column in COLUMNS)
    header = f"struct Info\n{{\n{declared}}};\nstatic const Info sInfos[] = {{\n{''.join(rows)}}};\n"
    return {**files, HEADER_PATH: header.encode()}


def _cell(kind: str, value: Any) -> str:
    if kind == "dtype":
        return f"DATA_TYPE_{value.upper()}"
    if kind == "sm":
        return f"kSM_{value}"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _arguments(case: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of one step: those of the case, except for its changes, by their names of today."""
    former, recorded = FORMER.get(case["call"].removeprefix("plan_"), {}), {**case["with"], **changes}
    return {former.get(name, name): _argument(value, bool(case.get("torch"))) for name, value in recorded.items()}


def _argument(value: Any, torch: bool) -> Any:
    """A value of JSON as an argument: objects are tensors, or an FP4 output of two; lists are tuples."""
    if isinstance(value, list):
        return tuple(_argument(item, torch) for item in value)
    if not isinstance(value, dict):
        return value
    if "fp4" in value:
        data, scales = _argument(value["fp4"], torch), _argument(value["scale"], torch)
        return flashinfer.FP4Tensor(data, scales, value["first"])
    view = TensorView(value["at"], value["dtype"], tuple(value["shape"]), tuple(value["strides"]))
    return TorchLike(view) if torch else view


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (TensorView, TorchLike))


def _unplanned(planned: list[dict[str, Any]], sent: list[dict[str, Any]]) -> Iterator[str]:
    """Where launches differ from their plans, except for the addresses that come with a step."""
    for plan, launch in zip(planned, sent, strict=len(planned) > 0):
        values = {name: value for name, value in launch["values"].items() if name in plan["values"]}
        for name, value in values.items():
            if isinstance(value, dict) and "address" in value:
                values[name] = {**value, "address": plan["values"][name]["address"]}
        yield from differences({**launch, "values": values, "stream": 0}, {**plan, "stream": 0}, "launch_plans()")


def _is_repeatable(case: Mapping[str, Any]) -> bool:
    """Whether a fast path can be made of a call: what it has is told from all else, and all memory is its own.

    A class that only looks like torch's is not, nor are FP4 outputs, a workspace that names no context, and semaphores
    that are too few, which the runtime replaces.
    """
    is_told = not case.get("torch") and "fp4" not in json.dumps([case["with"], case["steps"]])
    replaced = case["with"].get("semaphores", {}).get("shape") == [128]
    return is_told and case.get("workspace") != "two buffers" and not replaced


@contextmanager
def _counted_full_paths() -> Iterator[list[None]]:
    """A list with an entry for each call that takes the full path."""
    counted: list[None] = []

    def counting() -> Notes:
        counted.append(None)
        return Notes()

    with patch(f"{Notes.__module__.removesuffix('notes')}operator_function.Notes", counting):
        yield counted


def _without_made(launches: list[dict[str, Any]]) -> str:
    """Launches without the addresses of made tensors, which are others each time."""
    is_made = range(_MADE, _SEMAPHORES)
    return re.sub(r"\d+", lambda number: "made" if int(number[0]) in is_made else number[0], json.dumps(launches))


@contextmanager
def _default_runtime(runtime: Runtime) -> Iterator[None]:
    with patch("cubin_runtime.attention.runtime.default.runtime", runtime):
        yield
