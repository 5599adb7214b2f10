"""The accelerator's step: a whole call, from tensors to launches, with numbers in the place of tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from examples import DIGEST, LAYOUT, SYMBOL, cubin, kernel_facts, needs, plan

from cubin_runtime.launch import accelerator
from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.modules import ModuleCache
from cubin_runtime.launch.prepared import PreparedLaunches
from cubin_runtime.launch.run_source import Expressions
from cubin_runtime.testing import StandIn

pytestmark = pytest.mark.skipif(
    accelerator.accelerator() is None, reason="cubin_runtime_accelerator is not installed: pip install ./accelerator"
)
NAMES = ("out", "batch", "scale")
STREAM = 0x5007


class Legacy:
    """A buffer of the legacy default stream, as a workspace has it."""

    of_legacy = True
    place = (0x100, 16)


class Place:
    """What a step is made with: tensors are their addresses, odd ones are unlike the known."""

    def __init__(self) -> None:
        self.mode = 0
        self.levels = {"_current_level": -1}
        self.stream = STREAM
        self.legacy = Legacy()
        self.places: dict[int, Any] = {STREAM: (0x200, 16)}

    def options(self) -> dict[str, Any]:
        return {
            "forms": (lambda: self.mode, self.levels, lambda *tensors: not any(tensor % 2 for tensor in tensors)),
            "data_ptr": int,
            "stream": (lambda device: self.stream + device, 0),
            "scratch": (self.legacy, lambda stream: self.places.get(stream)),
        }


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def senders(driver: Driver, standin: StandIn, context: int) -> Callable[..., Any]:
    standin.add_kernel(SYMBOL, (LAYOUT.size,))
    cache = ModuleCache(driver, parse=lambda _: cubin(facts=kernel_facts()))
    kernel = cache.kernel(context, DIGEST, SYMBOL, lambda: b"", needs(dynamic_shared_bytes=200000))

    def of(written: set[int], launches: int = 1) -> Any:
        plans = [plan(inputs={name: name for name in NAMES})] * launches
        prepared = PreparedLaunches(plans, [kernel] * launches, driver, NAMES)
        expressions = Expressions(values=NAMES, written=written, key="()", stream="0", elsewhere="pass")
        return prepared.sending(expressions).senders

    return of


def sent(standin: StandIn) -> list[tuple[str, Any, Any, Any]]:
    """Stream and values of each launch that was not refused."""
    found = []
    for call in standin.calls("cuLaunchKernelEx"):
        if "failed" in call.seen:
            continue
        values = LAYOUT.unpack(bytes.fromhex(call.seen["parameter0"]))
        found.append((call.seen["stream"], *(values[name] for name in NAMES)))
    return found


def test_a_step_reads_addresses_and_numbers(senders: Any, standin: StandIn, place: Place) -> None:
    own = senders({0, 1, 2})
    call, behind = own.step(addresses=[None, (False, 15, 0)], sources={0: (1, 4)}, **place.options())
    assert behind == [1, 2]
    assert call(2, 32, 5, 0.5) is False  # no sender of that key yet: Python's lines make it
    own.of((STREAM, (0x200, 16)), STREAM, (None, None, None))
    assert call(2, 32, 5, 0.5) is True
    assert call(2, 48, -6, 1) is True
    assert sent(standin) == [(hex(STREAM), 36, 5, 0.5), (hex(STREAM), 52, -6, 1.0)]


@pytest.mark.parametrize(
    ("tensors", "what"), [((3, 32), "its form"), ((2, 40), "its alignment"), ((2, 0), "no address"), ((2, 33), "form")]
)
def test_tensors_unlike_the_known_ones_are_refused(
    senders: Any, standin: StandIn, place: Place, tensors: tuple[int, int], what: str
) -> None:
    own = senders({0})
    call, _ = own.step(addresses=[None, (False, 15, 0)], sources={0: (1, 0)}, **place.options())
    own.of((STREAM, (0x200, 16)), STREAM, (None, 1, 1.0))
    assert call(2, 16) is True
    assert call(*tensors) is None, what
    place.mode = 1
    assert call(2, 16) is None
    place.mode, place.levels["_current_level"] = 0, 0
    assert call(2, 16) is None, "a tensor may have a tangent"
    place.levels.clear()
    assert call(2, 16) is None, "nothing is known of tangents"
    assert len(sent(standin)) == 1


def test_senders_are_found_by_stream_addresses_and_scratch(senders: Any, standin: StandIn, place: Place) -> None:
    own = senders({1})
    call, _ = own.step(addresses=[(True, 0, 0), (True, 0, 0)], sources={}, **place.options())
    expected = []
    for number in range(600):  # more than the step remembers, so that they displace one another
        place.stream, place.places = 0x5000 + number % 3, {0x5000 + number % 3: (0x200 + number % 5, 16)}
        first, second = 1024 + 2 * (number % 7), 2048 + 2 * number
        key = (place.stream, first, second, place.places[place.stream])
        own.of(key, place.stream, (number, None, 1.0))
    for again in range(2):
        for number in range(600):
            place.stream, place.places = 0x5000 + number % 3, {0x5000 + number % 3: (0x200 + number % 5, 16)}
            assert call(1024 + 2 * (number % 7), 2048 + 2 * number, again) is True
            expected.append((hex(place.stream), number, again, 1.0))
    assert sent(standin) == expected
    place.places = {place.stream: (0x999, 16)}
    assert call(1024, 2048, 1) is False


def test_the_legacy_stream_has_its_own_scratch(senders: Any, standin: StandIn, place: Place) -> None:
    own = senders({0})
    call, _ = own.step(addresses=[(False, 15, 0)], sources={0: (0, 0)}, **place.options())
    own.of((0, (0x100, 16)), 0, (None, 1, 1.0))
    place.stream = 0
    assert call(16) is True
    place.legacy.of_legacy = False  # taken by another stream
    assert call(16) is False
    place.stream = 7  # one without scratch
    assert call(16) is False
    assert len(sent(standin)) == 1


def test_a_tensor_is_made_behind_all_refusals(senders: Any, standin: StandIn, place: Place) -> None:
    made = []

    def make(*sources: int) -> int:
        made.append(sources)
        return 4096

    own = senders({0, 1})
    options = place.options()
    call, _ = own.step(addresses=[None, None], sources={0: (2, 0)}, made=(make, (1, 0)), **options)
    assert (call(3, 4, 1), call(2, 4, 1), made) == (None, False, [])
    own.of((STREAM, (0x200, 16)), STREAM, (None, None, 1.0))
    assert call(2, 4, 1) == 4096
    assert made == [(4, 2)]
    assert sent(standin) == [(hex(STREAM), 4096, 1, 1.0)]


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 1.5, "a", None])
def test_a_number_that_does_not_fit_is_left_to_python(
    senders: Any, standin: StandIn, place: Place, number: Any
) -> None:
    own = senders({1})
    call, _ = own.step(addresses=[None], sources={}, **place.options())
    own.of((STREAM, (0x200, 16)), STREAM, (1, None, 1.0))
    assert call(2, number) is False
    assert sent(standin) == []


def test_what_the_driver_refuses_is_left_to_python(senders: Any, standin: StandIn, place: Place) -> None:
    own = senders({1})
    call, _ = own.step(addresses=[None], sources={}, **place.options())
    own.of((STREAM, (0x200, 16)), STREAM, (1, None, 1.0))
    standin.fail("cuLaunchKernelEx", 700)
    assert call(2, 1) is False


@pytest.mark.parametrize("code", [1, 201, 700])
def test_a_launch_refused_behind_others_raises_and_none_is_sent_again(
    senders: Any, standin: StandIn, place: Place, code: int
) -> None:
    own = senders({1}, launches=3)
    call, _ = own.step(addresses=[None], sources={}, **place.options())
    own.of((STREAM, (0x200, 16)), STREAM, (1, None, 1.0))
    standin.fail("cuLaunchKernelEx", code, skip=1, times=1)
    with pytest.raises(DriverCallError, match=f"cuLaunchKernelEx returned {code} "):
        call(2, 7)
    assert [batch for _, _, batch, _ in sent(standin)] == [7]
    assert call(2, 8) is True
    assert [batch for _, _, batch, _ in sent(standin)] == [7, 8, 8, 8]


def test_errors_of_what_it_calls_come_out(senders: Any, place: Place) -> None:
    own = senders({0})
    for change in ("forms", "data_ptr", "stream"):
        options = place.options()
        broken: Any = lambda *_: 1 // 0  # noqa: E731
        options |= {change: {"forms": (broken, {}, broken), "data_ptr": broken, "stream": (broken, 0)}[change]}
        call, _ = own.step(addresses=[(False, 15, 0)], sources={0: (0, 0)}, **options)
        with pytest.raises(ZeroDivisionError):
            call(16)
    with pytest.raises(TypeError, match="2 arguments, expected 1"):
        call(16, 16)


def test_what_it_cannot_hold_is_not_taken(senders: Any, place: Place) -> None:
    own = senders({1})
    assert own.step(addresses=[None] * 33, sources={}, **place.options()) is None
    assert own.step(addresses=[(True, 0, 0)] * 5, sources={}, **place.options()) is None


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": (None,) * 33},
        {"addresses": ((True, 0, 0),) * 5},
        {"writes": (((2, 0),),)},
        {"writes": (((-1, 0),),)},
        {"writes": (((1, 0),),)},  # of a tensor whose address is not read
        {"writes": (((0, 0),) * 65,)},
        {"writes": ((),) * 5},
        {"made": (int, (2,))},
        {"made": (int, (-1,))},
        {"stream": None},
    ],
)
def test_steps_that_would_read_elsewhere_cannot_be_made(change: dict[str, Any]) -> None:
    module: Any = accelerator.accelerator()
    given: dict[str, Any] = {"modes": int, "levels": {}, "check": int, "data_ptr": int, "failed": int}
    given |= {"addresses": ((False, 15, 0), None), "senders": {}}
    given |= {"writes": (((0, 0),),), "numbers": 0, "stream": (int, 0), "scratch": (None, int), "made": None}
    module.Step(**given)
    with pytest.raises(ValueError, match="not what was expected"):
        module.Step(**given | change)


def test_a_step_in_a_cycle_is_collected(senders: Any, place: Place) -> None:
    class Holder:
        step: Any

    holder, own = Holder(), senders({0})
    options = place.options() | {"data_ptr": lambda tensor, holder=holder: int(tensor)}
    holder.step, _ = own.step(addresses=[(False, 15, 0)], sources={0: (0, 0)}, **options)
    own.of((STREAM, (0x200, 16)), STREAM, (None, 1, 1.0))
    assert holder.step(16) is True
    gone = weakref.ref(holder)
    del holder, options
    gc.collect()
    assert gone() is None


def test_calls_leave_no_references_behind(senders: Any, place: Place) -> None:
    own = senders({0})
    call, _ = own.step(addresses=[(False, 15, 0)], sources={0: (0, 0)}, **place.options())
    own.of((STREAM, (0x200, 16)), STREAM, (None, 1, 1.0))
    blocks = []
    for _ in range(3):
        for tensor in range(1 << 20, (1 << 20) + 3200, 16):
            assert call(tensor) is True
            assert call(tensor + 1) is None
        gc.collect()
        blocks.append(len(gc.get_objects()))
    assert blocks[1] == blocks[2]
