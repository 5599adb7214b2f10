"""The accelerator's walk of a table and its dispatch of calls, with numbers in the place of tensors."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from cubin_runtime.attention.fast_path.operator_function import Binding, Paths, add_path, new_paths
from cubin_runtime.attention.fast_path.path import MISS, SLOT, TENSOR, BoundPlace, Size, accelerated_walk, walk_options
from cubin_runtime.attention.fast_path.table import Address, ArgumentTest, CallTable, Kind, Made, Product, TensorRow
from cubin_runtime.launch import accelerator
from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.modules import KernelRequest, ModuleCache
from cubin_runtime.launch.prepared import PreparedLaunches
from cubin_runtime.launch.senders import NOT_WRITTEN, senders_of
from cubin_runtime.launch.workspace import EagerClaim
from cubin_runtime.tensor import _DLTensor
from cubin_runtime.testing import StandIn
from tests.launch.examples import DIGEST, LAYOUT, SYMBOL, cubin, kernel_facts, needs, plan

pytestmark = pytest.mark.skipif(
    accelerator.accelerator() is None, reason="cubin_runtime_accelerator is not installed: pip install ./accelerator"
)
NAMES = ("out", "batch", "scale")
STREAM, PLACE, LEGACY_PLACE = 0x5007, (0x200, 16), (0x100, 16)
IN_PYTHON = "in Python"
DIMS = accelerator.MAX_DIMS


class ExchangeApi(ctypes.Structure):
    """DLPack's C exchange API, of which ``read`` alone is called."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("others", ctypes.c_void_p * 4),
        ("read", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_DLTensor))),
        ("stream", ctypes.c_void_p),
    )


SIZES = (ctypes.c_int64 * 1)(), (ctypes.c_int64 * 1)(1)


@ExchangeApi._fields_[3][1]
def read(number: int, tensor: Any) -> int:
    """Read a number as a tensor of bytes at that address; odd ones cannot be read."""
    SIZES[0][0] = number
    tensor[0] = _DLTensor(number - 4 if number else 0, 2, 0, 1, 1, 8, 1, *SIZES, 4 if number else 0)
    return -1 if number % 2 else 0


def capsule_of(api: ExchangeApi) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(api), b"dlpack_exchange_api", None)


API = ExchangeApi(1, 3, (ctypes.c_void_p * 4)(), read)
EXCHANGE = capsule_of(API)
FORM = accelerator.FORM.pack(id(int), 2, 0, 1, 1, 8, 1, -1, *[0] * (DIMS - 1), 1, *[0] * (DIMS - 1))
ADDRESS, PRODUCT = 0, 1


LEGACY, CONTEXT = object(), 0xC000  # the key of the legacy default stream's workspace


class Buffer:
    """A buffer of a workspace."""

    def __init__(self, of_legacy: bool = False) -> None:
        self.of_legacy, self.owner = of_legacy, object()


class Workspace:
    """One whose buffer a stream has claimed."""

    def __init__(self, place: Any, stream: int | None = STREAM, context: int | None = CONTEXT) -> None:
        self.context, self.buffer, self.same = context, Buffer(of_legacy=stream == 0), True
        query = (lambda: self.same) if stream else None
        self.claimed: EagerClaim | None = EagerClaim(place, self.buffer, self.buffer.owner, query, stream, context)


@dataclass
class Surroundings:
    """What a walk is made with: tensors are their addresses, odd ones are unlike the known."""

    mode: int = 0
    levels: dict[str, int] = field(default_factory=lambda: {"_current_level": -1})
    stream: int = STREAM
    held: dict[Any, Any] = field(
        default_factory=lambda: {STREAM: Workspace(PLACE), LEGACY: Workspace(LEGACY_PLACE, stream=0)}
    )

    def options(self, slots: int, tensors: Sequence[int]) -> dict[str, Any]:
        return {
            "slots": slots,
            "names": accelerator.NAMES,
            "unfit": NOT_WRITTEN,
            "tests": (),
            "forms": (EXCHANGE, lambda: self.mode, self.levels, bool, None),
            "tensors": tuple((slot, True, False, 15, 0) for slot in tensors),
            "result": None,
            "stream": (lambda device: self.stream + device, 0),
            "scratch": (self.held, LEGACY, CONTEXT),
        }


class OnePath:
    """A path that says when it is to walk its table in Python."""

    def __init__(self, walk: Any) -> None:
        self.walk = walk

    def __call__(self, arguments: Sequence[Any]) -> Any:
        return IN_PYTHON


def address(tensor: int, offset: int = 0) -> bytes:
    return accelerator.SOURCE.pack(ADDRESS, tensor, 0, offset, *[-1, 0.0] * accelerator.MAX_FACTORS)


def product(*factors: Any) -> bytes:
    pairs = [(factor, 0.0) if type(factor) is int else (-1, factor) for factor in factors]
    pairs += [(-1, 0.0)] * (accelerator.MAX_FACTORS - len(pairs))
    return accelerator.SOURCE.pack(PRODUCT, 0, len(factors), 0, *[item for pair in pairs for item in pair])


GROUPS = {  # options that come together
    "stream": ("current", "device"),
    "scratch": ("held", "own", "in"),
    "bound": ("halts", "claim"),
    "made": ("make", "made_of", "made_counts"),
    "by_size": ("by_size", "sizes"),
}


def encoded(options: dict[str, Any]) -> dict[str, Any]:
    """The options with their tables as bytes; a group that is None is left out."""
    for group, names in GROUPS.items():
        together = options.pop(group, None)
        options |= {} if together is None else zip(names, together, strict=True)
    tests = [(kind, slot, id(expected), low, high) for kind, slot, expected, low, high in options["tests"]]
    options["known"] = tuple(row[2] for row in options["tests"])
    options["tests"] = accelerator.packed(accelerator.TEST, tests)
    options["forms"] = (*options["forms"][:-1], FORM * len(options["tensors"]))
    options["tensors"] = accelerator.packed(accelerator.ROW, options["tensors"])
    if "sizes" in options:
        options["sizes"] = accelerator.packed(accelerator.SIZE, options["sizes"])
    return options


@pytest.fixture
def around() -> Surroundings:
    return Surroundings()


Prepare = Callable[..., PreparedLaunches]


@pytest.fixture
def prepare(driver: Driver, standin: StandIn, context: int) -> Prepare:
    standin.add_kernel(SYMBOL, (LAYOUT.size,))
    cache = ModuleCache(driver, parse=lambda _: cubin(facts=kernel_facts()))
    kernel = cache.kernel(KernelRequest(context, DIGEST, SYMBOL, lambda: b"", needs(dynamic_shared_bytes=200000)))

    def of(launches: int = 1) -> PreparedLaunches:
        plans = [plan(inputs={name: name for name in NAMES})] * launches
        return PreparedLaunches(plans, [kernel] * launches, driver, NAMES)

    return of


class Sender:
    """Sends calls by a walk, whose senders of the usual key there are."""

    def __init__(
        self, prepared: PreparedLaunches, around: Surroundings, writes: dict[int, Any], **options: Any
    ) -> None:
        """``writes`` are the sources of the values by their numbers."""
        module: Any = accelerator.accelerator()
        count = options.pop("slots", 2)
        self.senders = senders_of(prepared, set(writes))
        own = around.options(count, options.pop("of", (0,))) | options
        rows = tuple(b"".join(writes[number] for number in numbers) for numbers in self.senders.written)
        self.walk = module.Walk(senders=self.senders.by_key, writes=rows, failed=prepared.failed, **encoded(own))
        paths = new_paths(Binding([f"a{number}" for number in range(count)], {}, count))
        paths.entries = (OnePath(self.walk),)
        self.call = paths.send

    def know(self, *key: Any, values: Sequence[Any] = (0x40, 1, 1.0)) -> None:
        """Make the senders of a key, whose stream is the first of it."""
        self.senders._new(key, key[0] if key else 0x77, values)


def sent(standin: StandIn) -> list[tuple[str, Any, Any, Any]]:
    """Stream and values of each launch that was not refused."""
    launches = []
    for call in standin.calls("cuLaunchKernelEx"):
        if "failed" not in call.seen:
            values = LAYOUT.unpack(bytes.fromhex(call.seen["parameter0"]))
            launches.append((call.seen["stream"], *(values[name] for name in NAMES)))
    return launches


def test_addresses_and_products_are_written(prepare: Prepare, standin: StandIn, around: Surroundings) -> None:
    writes = {0: address(0, 4), 1: product(1), 2: product(2, 0.25, 2)}
    own = Sender(prepare(), around, writes, slots=3)
    assert own.call(32, 5, 0.5) == IN_PYTHON  # no sender of that key yet: Python makes it
    own.know(STREAM, PLACE)
    assert own.call(32, 5, 0.5) is None
    assert own.call(a1=-6, a0=48, a2=3) is None
    assert sent(standin) == [(hex(STREAM), 36, 5, 0.0625), (hex(STREAM), 52, -6, 2.25)]


@pytest.mark.parametrize(("tensor", "what"), [(33, "its form"), (40, "its alignment"), (0, "no address")])
def test_tensors_unlike_the_known_ones_are_refused(
    prepare: Prepare, standin: StandIn, around: Surroundings, tensor: int, what: str
) -> None:
    own = Sender(prepare(), around, {0: address(0)}, slots=1)
    own.know(STREAM, PLACE)
    assert own.call(16) is None
    assert own.call(tensor) is MISS, what
    around.mode = 1
    assert own.call(16) is MISS
    around.mode, around.levels["_current_level"] = 0, 0
    assert own.call(16) is MISS, "a tensor may have a tangent"
    around.levels.clear()
    assert own.call(16) is MISS, "nothing is known of tangents"
    assert len(sent(standin)) == 1


@pytest.mark.parametrize("field", range(7 + 2 * DIMS))
def test_every_part_of_a_form_is_compared(field: int) -> None:
    module: Any = accelerator.accelerator()
    form = list(accelerator.FORM.unpack(module.form(EXCHANGE, 16)))
    assert form == list(accelerator.FORM.unpack(FORM))[:7] + [16] + [0] * (DIMS - 1) + [1] + [0] * (DIMS - 1)
    assert module.alike(EXCHANGE, bool, accelerator.FORM.pack(*form))(16)
    form[field] = id(float) if field == 0 else form[field] + 1
    is_of_a_dimension = field < 7 or field in (7, 7 + DIMS)
    assert module.alike(EXCHANGE, bool, accelerator.FORM.pack(*form))(16) is not is_of_a_dimension


def test_forms_that_cannot_be_read_are_refused(around: Surroundings) -> None:
    module: Any = accelerator.accelerator()
    alike = module.alike(EXCHANGE, bool, FORM * 2)
    assert alike(16, 32)
    assert not any(alike(*others) for others in [(16,), (16, 32, 48), (16, 33), (16, 32.0)])
    later = ExchangeApi(2, 0, (ctypes.c_void_p * 4)(), read)
    assert module.readable(EXCHANGE)
    assert not any(map(module.readable, [None, object(), capsule_of(later)]))
    with pytest.raises(ValueError, match=r"DLPack 2\.0, expected 1"):
        module.form(capsule_of(later), 16)
    options = encoded(around.options(1, (0,)))
    wrong: dict[str, Any] = {"2 forms of 1 tensors": (EXCHANGE, FORM * 2), "no exchange API": (None, FORM)}
    for message, (exchange, rows) in wrong.items():
        with pytest.raises(ValueError, match=message):
            module.Walk(senders={}, writes=(), failed=None, **options | {"forms": (exchange, bool, {}, bool, rows)})


TESTS: list[tuple[tuple[Any, ...], list[Any], list[Any]]] = [
    ((Kind.EQUAL, 1, None, 0, 0), [None], [0, False, ""]),
    ((Kind.EQUAL, 1, True, 0, 0), [True], [1, 1.0, None]),
    ((Kind.EQUAL, 1, "NHD", 0, 0), ["NHD", "".join(["N", "HD"])], ["HND", None, b"NHD"]),
    ((Kind.EQUAL, 1, 70000, 0, 0), [70000, 7 * 10**4], [70000.0, 70001, True, None]),
    ((Kind.EQUAL, 1, 0.5, 0, 0), [0.5, 1 / 2], [0.25, 1, None]),
    ((Kind.EQUAL, 1, 0.0, 0, 0), [0.0], [-0.0, 0, False]),
    ((Kind.OF_TYPE, 1, int, 0, 0), [0, 1 << 70], [True, 0.0]),
    ((Kind.INTEGER, 1, None, 3, 5), [3, 5], [2, 6, 1 << 70, -(1 << 70), 4.0, True, None]),
    ((Kind.INTEGER, 1, None, 3, (1 << 63) - 1), [3, (1 << 63) - 1], [2, 1 << 63]),
    (
        (Kind.SCALE, 1, None, 0, 0),
        [1.0, -(2.0**127), 5e-324],
        [0.0, -0.0, 2.0**128, float("nan"), float("inf"), 1, "1"],
    ),
    ((Kind.SEQUENCE, 1, tuple, 2, 0), [(1, 2)], [[1, 2], (1,), (1, 2, 3), None]),
    ((Kind.SEQUENCE, 1, list, 1, 0), [[1]], [(1,), []]),
]


@pytest.mark.parametrize(("test", "alike", "unlike"), TESTS, ids=[f"{row[0][0].name} {row[0][2]}" for row in TESTS])
def test_arguments_are_tested_as_in_python(
    prepare: Prepare, standin: StandIn, around: Surroundings, test: Any, alike: list[Any], unlike: list[Any]
) -> None:
    own = Sender(prepare(), around, {0: address(0)}, tests=(test,))
    own.know(STREAM, PLACE)
    for value in alike:
        assert own.call(16, value) is None
        assert ArgumentTest(*test).holds([16, value])
    for value in unlike:
        assert own.call(16, value) is MISS
        assert not ArgumentTest(*test).holds([16, value])
    assert len(sent(standin)) == len(alike)


def test_elements_of_sequences_become_slots(prepare: Prepare, standin: StandIn, around: Surroundings) -> None:
    tests = ((Kind.SEQUENCE, 1, tuple, 2, 0), (Kind.SEQUENCE, 2, list, 1, 0), (Kind.EQUAL, 4, 7, 0, 0))
    own = Sender(prepare(), around, {0: address(0), 1: product(5)}, slots=3, of=(3,), tests=tests, result=(0, 5))
    own.know(STREAM, PLACE)
    assert own.call("first", (32, 7), [9]) == ("first", 9)
    assert own.call("first", (32, 8), [9]) is MISS
    assert sent(standin) == [(hex(STREAM), 32, 9, 1.0)]


def test_senders_are_found_by_stream_scratch_and_addresses(
    prepare: Prepare, standin: StandIn, around: Surroundings
) -> None:
    keyed = ((0, True, True, 0, 0), (1, True, True, 0, 0))
    own = Sender(prepare(), around, {1: product(2)}, slots=3, tensors=keyed)
    expected = []
    workspaces = {(s, p): Workspace((0x200 + p, 16), 0x5000 + s) for s in range(3) for p in range(5)}

    def turn(number: int) -> tuple[int, int]:
        around.stream = 0x5000 + number % 3
        around.held[around.stream] = workspaces[number % 3, number % 5]
        return 1024 + 2 * (number % 7), 2048 + 2 * number

    for number in range(600):  # more than the walk remembers, so that they displace one another
        addresses = turn(number)
        own.know(around.stream, (0x200 + number % 5, 16), *addresses, values=(number, None, 1.0))
    for again in range(2):
        for number in range(600):
            assert own.call(*turn(number), again) is None
            expected.append((hex(around.stream), number, again, 1.0))
    assert sent(standin) == expected
    around.held[around.stream] = Workspace((0x999, 16), around.stream)
    assert own.call(1024, 2048, 1) == IN_PYTHON


@pytest.mark.parametrize("stream", [0, STREAM])
def test_scratch_is_used_while_its_claim_holds(
    prepare: Prepare, standin: StandIn, around: Surroundings, stream: int
) -> None:
    place, key = (PLACE, STREAM) if stream else (LEGACY_PLACE, LEGACY)
    own = Sender(prepare(), around, {0: address(0)}, slots=1)
    own.know(stream, place)
    around.stream = stream
    assert own.call(16) is None
    workspace = around.held.pop(key)
    assert own.call(16) is None, "the claim of the call before still holds"
    workspace.buffer.of_legacy = workspace.same = False  # taken by another stream
    assert own.call(16) == IN_PYTHON, "nobody has any"
    of_another_stream, unclaimed = Workspace(place, stream=9), Workspace(place, stream)
    of_another_stream.buffer.of_legacy, unclaimed.claimed = True, None
    for other in (workspace, Workspace(place, stream, context=0xD000), of_another_stream, unclaimed):
        around.held[key] = other
        assert own.call(16) == IN_PYTHON
    around.held[key] = Workspace(place, stream)
    assert own.call(16) is None, "the stream has claimed another buffer"
    assert len(sent(standin)) == 3


def test_scratch_whose_claim_is_replaced_meanwhile_is_not_lost(prepare: Prepare, around: Surroundings) -> None:
    own = Sender(prepare(), around, {0: address(0)}, slots=1)
    own.know(STREAM, PLACE)
    workspace = around.held[STREAM]

    def same_stream() -> bool:
        workspace.claimed = None
        gc.collect()
        return True

    workspace.claimed = workspace.claimed._replace(same_stream=same_stream)
    assert own.call(16) is None


def test_a_call_that_names_its_stream_is_left_to_python(prepare: Prepare, around: Surroundings) -> None:
    own = Sender(prepare(), around, {0: address(0)}, stream_slot=1)
    own.know(STREAM, PLACE)
    assert own.call(16, None) is None
    assert own.call(16, STREAM) == IN_PYTHON


def test_a_call_may_name_its_workspace(prepare: Prepare, standin: StandIn, around: Surroundings) -> None:
    tests = ((Kind.OF_TYPE, 1, Workspace, 0, 0),)
    own = Sender(prepare(), around, {0: address(0)}, tests=tests, scratch=None, workspace_slot=1, **{"in": CONTEXT})
    own.know(STREAM, PLACE)
    of_any = Workspace(PLACE, stream=None)
    of_any.claimed = EagerClaim(PLACE, context=CONTEXT)
    assert own.call(16, Workspace(PLACE)) is None
    assert own.call(16, of_any) is None
    assert own.call(16, Workspace(PLACE, context=0xD000)) == IN_PYTHON
    assert own.call(16, None) is MISS
    around.stream = 7
    assert own.call(16, Workspace(PLACE)) == IN_PYTHON
    assert len(sent(standin)) == 2


def test_sizes_choose_the_launches(prepare: Prepare, standin: StandIn, around: Surroundings) -> None:
    tests = ((Kind.INTEGER, 2, None, 0, 9),)
    small, large = (Sender(prepare(), around, {0: address(0), 1: product(2)}, slots=3, tests=tests) for _ in range(2))
    small.know(STREAM, PLACE, values=(None, None, 1.0))
    large.know(STREAM, PLACE, values=(None, None, 2.0))
    sizes = ((0, 1), (1, 0), (2, 5))  # an argument, of a tensor, a constant
    walks = {(3, 16, 5): small.walk, (4, 16, 5): large.walk}
    own = Sender(prepare(), around, {}, slots=3, by_size=(walks, sizes))
    assert [own.call(16, size, 6) for size in (3, 4, 5)] == [None, None, IN_PYTHON]
    assert own.call(32, 3, 6) == IN_PYTHON
    assert own.call(16, 3, 10) == IN_PYTHON, "its plan has another bound"
    assert own.call(17, 3, 6) is MISS
    assert sent(standin) == [(hex(STREAM), 16, 6, 1.0), (hex(STREAM), 16, 6, 2.0)]


@pytest.mark.parametrize("of_legacy", [False, True])
def test_a_bound_step_is_sent_while_its_buffer_is_its_own(
    prepare: Prepare, standin: StandIn, around: Surroundings, of_legacy: bool
) -> None:
    halts: list[str] = []
    buffer, same = Buffer(of_legacy), [True]
    claim = EagerClaim(PLACE, buffer, buffer.owner, None if of_legacy else lambda: same[0])
    bound = {"stream": None, "scratch": None, "bound": (halts, claim)}
    own = Sender(prepare(), around, {0: address(0)}, slots=1, **bound)
    own.know()
    assert own.call(16) is None
    halts.append("closed")
    assert own.call(16) == IN_PYTHON
    halts.clear()
    if of_legacy:
        buffer.of_legacy = False
    else:
        same[0] = False
    assert own.call(16) == IN_PYTHON
    same[0], buffer.owner = True, object()
    assert own.call(16) == IN_PYTHON
    assert sent(standin) == [("0x77", 16, 1, 1.0)]


def test_a_tensor_is_made_behind_all_refusals(prepare: Prepare, standin: StandIn, around: Surroundings) -> None:
    made = []

    def make(*sources: int) -> int:
        made.append(sources)
        return 4096

    writes = {0: address(2), 1: product(2)}
    rows = ((0, False, False, 0, 0), (1, False, False, 0, 0))
    own = Sender(prepare(), around, writes, slots=3, tensors=rows, made=(make, (1, 0), True), result=3)
    assert (own.call(3, 4, 1), own.call(2, 4, 1), made) == (MISS, IN_PYTHON, [])
    own.know(STREAM, PLACE, values=(None, None, 1.0))
    assert own.call(2, 4, 1) == 4096
    assert made == [(4, 2)]
    assert sent(standin) == [(hex(STREAM), 4096, 1, 1.0)]


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 1.5, "a", None])
def test_a_number_that_does_not_fit_is_left_to_python(
    prepare: Prepare, standin: StandIn, around: Surroundings, number: Any
) -> None:
    own = Sender(prepare(), around, {1: product(1)})
    own.know(STREAM, PLACE)
    assert own.call(16, number) == IN_PYTHON
    assert sent(standin) == []


@pytest.mark.parametrize("number", [1e30, "a", None])
def test_a_product_that_does_not_fit_is_left_to_python(
    prepare: Prepare, standin: StandIn, around: Surroundings, number: Any
) -> None:
    own = Sender(prepare(), around, {2: product(1, 1e30)})
    own.know(STREAM, PLACE)
    assert own.call(16, number) == IN_PYTHON
    assert sent(standin) == []


def test_what_the_driver_refuses_is_left_to_python(prepare: Prepare, standin: StandIn, around: Surroundings) -> None:
    own = Sender(prepare(), around, {1: product(1)})
    own.know(STREAM, PLACE)
    standin.fail("cuLaunchKernelEx", 700)
    assert own.call(16, 1) == IN_PYTHON


@pytest.mark.parametrize("code", [1, 201, 700])
def test_a_launch_refused_behind_others_raises_and_none_is_sent_again(
    prepare: Prepare, standin: StandIn, around: Surroundings, code: int
) -> None:
    own = Sender(prepare(3), around, {1: product(1)})
    own.know(STREAM, PLACE)
    standin.fail("cuLaunchKernelEx", code, skip=1, times=1)
    with pytest.raises(DriverCallError, match=f"cuLaunchKernelEx returned {code} "):
        own.call(16, 7)
    assert [batch for _, _, batch, _ in sent(standin)] == [7]
    assert own.call(16, 8) is None
    assert [batch for _, _, batch, _ in sent(standin)] == [7, 8, 8, 8]


@pytest.mark.parametrize("part", ["modes", "grad mode", "stream", "scratch"])
def test_errors_of_what_it_calls_come_out(prepare: Prepare, around: Surroundings, part: str) -> None:
    broken: Any = lambda *_: 1 // 0  # noqa: E731
    broken_scratch = {STREAM: Workspace(PLACE)}
    broken_scratch[STREAM].claimed = around.held[STREAM].claimed._replace(same_stream=broken)
    options: dict[str, dict[str, Any]] = {
        "modes": {"forms": (EXCHANGE, broken, around.levels, bool, None)},
        "grad mode": {"forms": (EXCHANGE, bool, around.levels, broken, None)},
        "stream": {"stream": (broken, 0)},
        "scratch": {"scratch": (broken_scratch, LEGACY, CONTEXT)},
    }
    own = Sender(prepare(), around, {0: address(0)}, slots=1, **options[part])
    with pytest.raises(ZeroDivisionError):
        own.call(16)


def walk_of(sizes: Sequence[Size] | None = None, **changes: Any) -> Any:
    """The walk of a table of two arguments and one tensor, with some of it changed, or the one that goes by sizes."""
    rows = {
        "tests": (ArgumentTest(Kind.INTEGER, 1, None, 0, 9),),
        "tensors": (TensorRow(0, int),),
        "values": (Address(0, 0), Product((1, 0.5))),
        "makes": (),
        "result": None,
    }
    forms: Any = SimpleNamespace(accelerated=(EXCHANGE, bool, {}, bool, None))
    table = CallTable(forms=forms, compared=(), **{**rows, **changes})
    place = BoundPlace(0, EagerClaim(None), [])
    return accelerated_walk(walk_options(table, 2, place, (), sizes), place, by_size=None if sizes is None else {})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tests": (ArgumentTest(Kind.SCALE, 2),)}, "slot 2 of 2"),
        ({"tests": (ArgumentTest(Kind.SCALE, -1),)}, "slot -1 of 2"),
        ({"tests": (ArgumentTest(Kind.SEQUENCE, 1, list, 2), ArgumentTest(Kind.SCALE, 4))}, "slot 4 of 4"),
        ({"tensors": (TensorRow(2, int),)}, "slot 2 of 2"),
        ({"values": (Address(1, 0),)}, "tensor 1 of 1"),
        ({"values": (Address(-1, 0),)}, "tensor -1 of 1"),
        ({"values": (Product((0.5, 2)),)}, "slot 2 of 2"),
        ({"makes": (Made(int, (2,), None),)}, "tensor 2 of 2"),
        ({"result": 2}, "slot 2 of 2"),
        ({"result": (0, -1)}, "slot -1 of 2"),
        ({"sizes": (Size(SLOT, 2),)}, "slot 2 of 2"),
        ({"sizes": (Size(TENSOR, 1),)}, "tensor 1 of 1"),
    ],
)
def test_walks_that_would_read_elsewhere_cannot_be_made(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"a table of calls names {named}"):
        walk_of(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"tests": (ArgumentTest(Kind.SEQUENCE, 1, list, 96),)},
        {"tensors": (TensorRow(0, int),) * 33},
        {"values": (Product((1,) * 9),)},
    ],
)
def test_tables_that_are_too_large_are_walked_in_python(change: dict[str, Any]) -> None:
    assert walk_of(**change) is None


@pytest.mark.parametrize("accelerated", [False, True])
def test_calls_are_bound_as_python_binds_them(monkeypatch: pytest.MonkeyPatch, accelerated: bool) -> None:
    if not accelerated:
        monkeypatch.setattr("cubin_runtime.attention.fast_path.operator_function.accelerator", lambda: None)

    def operator(a: int, b: int, c: int = 3, *, d: int, e: int = 5) -> None: ...

    class Same:
        walk = None

        def __call__(self, arguments: Sequence[Any]) -> Any:
            return list(arguments)

    paths = new_paths(Binding.of(operator))
    add_path(paths, Same(), 4)
    calls: list[tuple[tuple[int, ...], dict[str, int], Any]] = [
        ((1, 2), {"d": 4}, [1, 2, 3, 4, 5]),
        ((1,), {"d": 4, "b": 2, "c": 7, "e": 6}, [1, 2, 7, 4, 6]),
        ((), {"".join(["", "a"]): 1, "b": 2, "d": 4}, [1, 2, 3, 4, 5]),
        ((1, 2), {}, MISS),
        ((1, 2, 3, 4), {"d": 1}, MISS),
        ((1, 2), {"d": 1, "a": 1}, MISS),
        ((1,), {"d": 1}, MISS),
        ((1, 2), {"d": 1, "f": 1}, MISS),
        ((1, 2), {"d": 1, **{f"x{number}": number for number in range(200)}}, MISS),
        ((1,) * 200, {"d": 1}, MISS),
    ]
    for arguments, options, result in calls:
        assert paths.send(*arguments, **options) == result
        assert paths.call(arguments, options) == result


@pytest.mark.parametrize(("names", "defaults"), [(["a"] * 97, (1,) * 97), (["a"], ()), (["a"], (1, 2))])
def test_paths_refuse_parameters_that_they_have_no_room_for(names: list[str], defaults: tuple[int, ...]) -> None:
    module: Any = accelerator.accelerator()
    with pytest.raises(ValueError, match="too many names, or another number of defaults"):
        module.Paths(names=tuple(names), defaults=defaults, missing=MISS, first=0, by_position=1, miss=MISS)


@pytest.mark.parametrize("accelerated", [False, True])
def test_paths_are_asked_in_turn_and_the_last_used_is_first(monkeypatch: pytest.MonkeyPatch, accelerated: bool) -> None:
    if not accelerated:
        monkeypatch.setattr("cubin_runtime.attention.fast_path.operator_function.accelerator", lambda: None)

    class Of:
        walk = None

        def __init__(self, known: int) -> None:
            self.known = known

        def __call__(self, arguments: Sequence[Any]) -> Any:
            return MISS if arguments[0] != self.known else f"path {self.known}"

    paths: Paths = new_paths(Binding(["a"], {}, 1), lambda a: f"otherwise {a}")
    assert paths.send(1) == "otherwise 1"
    for number in range(4):
        add_path(paths, Of(number), 3)
    assert [path.known for path in paths.entries] == [3, 2, 1]  # type: ignore[attr-defined]
    assert [paths.send(number) for number in (2, 0, 1)] == ["path 2", "otherwise 0", "path 1"]
    assert [path.known for path in paths.entries] == [1, 2, 3]  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        paths.send(1, 2)


def test_a_walk_in_a_cycle_is_collected(prepare: Prepare, around: Surroundings) -> None:
    class Holder:
        own: Sender

    holder = Holder()
    holder.own = Sender(prepare(), around, {0: address(0)}, slots=1, stream=(lambda device, holder=holder: STREAM, 0))
    holder.own.know(STREAM, PLACE)
    assert holder.own.call(16) is None
    gone = weakref.ref(holder)
    del holder
    gc.collect()
    assert gone() is None


def test_calls_leave_no_references_behind(prepare: Prepare, around: Surroundings) -> None:
    own = Sender(prepare(), around, {0: address(0)}, tests=((Kind.SEQUENCE, 1, tuple, 1, 0),), result=(0, 2))
    own.know(STREAM, PLACE)
    blocks = []
    for _ in range(3):
        for tensor in range(1 << 20, (1 << 20) + 3200, 16):
            assert own.call(tensor, (object(),)) is not MISS
            assert own.call(tensor + 1, (1,)) is MISS
        gc.collect()
        blocks.append(len(gc.get_objects()))
    assert blocks[1] == blocks[2]
