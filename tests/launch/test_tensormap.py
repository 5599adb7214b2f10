from __future__ import annotations

import threading
from typing import Any

import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.launch.driver import Driver, DriverCallError
from cubin_runtime.launch.tensormap import RULES, TensorMapCache, TensorMapError
from cubin_runtime.testing import StandIn
from tests.launch.tensormap_cases import ACCEPTED, BASE, BROKEN


@pytest.mark.parametrize("case", ACCEPTED)
def test_accepts(case: str) -> None:
    ACCEPTED[case].check()


@pytest.mark.parametrize("case", BROKEN)
def test_refuses_by_the_rule_broken(case: str) -> None:
    rule, spec = BROKEN[case]
    with pytest.raises(TensorMapError) as caught:
        spec.check()
    assert caught.value.rule == rule
    assert repr(rule) in str(caught.value)


def test_every_rule_of_the_driver_is_broken_once() -> None:
    assert {rule for rule, _ in BROKEN.values()} == set(RULES) - {"word", "shape"}


@pytest.mark.parametrize(
    "change",
    [{"dtype": "bf16"}, {"interleave": "64B"}, {"swizzle": "256B"}, {"l2_promotion": "32B"}, {"fill": "one"}],
)
def test_refuses_an_unknown_word(change: dict[str, str]) -> None:
    with pytest.raises(TensorMapError, match="expected one of") as caught:
        BASE._replace(**change).check()  # type: ignore[arg-type]
    assert caught.value.rule == "word"


@pytest.mark.parametrize(
    "change",
    [{"strides": (16,)}, {"strides": (16,) * 4}, {"box": (8,)}, {"element_strides": (1,) * 5}],
)
def test_refuses_arrays_of_another_length_than_the_rank(change: dict[str, Any]) -> None:
    with pytest.raises(TensorMapError) as caught:
        BASE._replace(**change).check()
    assert caught.value.rule == "shape"


def test_a_rule_error_is_a_usage_error() -> None:
    assert issubclass(TensorMapError, UsageError)


def test_encoding_hands_every_argument_to_the_driver(driver: Driver, standin: StandIn) -> None:
    spec = BASE._replace(element_strides=(1, 2, 3, 4), l2_promotion="256B", fill="nan", swizzle="64B")
    spec._replace(box=(32, 64, 1, 2)).encode(driver)
    assert standin.call("cuTensorMapEncodeTiled") == {
        "type": "9",
        "rank": "4",
        "address": "0x7f0000000000",
        "dims": "128,64,8,100",
        "strides": "2048,256,131072",
        "box": "32,64,1,2",
        "steps": "1,2,3,4",
        "interleave": "0",
        "swizzle": "2",
        "promotion": "3",
        "fill": "1",
    }


def test_the_driver_writes_128_bytes_at_an_aligned_place(driver: Driver) -> None:
    assert BASE.encode(driver) == (0x7F0000000000).to_bytes(8, "little") + b"\xee" * 120


def test_a_rank_one_descriptor_has_no_strides(driver: Driver, standin: StandIn) -> None:
    ACCEPTED["rank 1"].encode(driver)
    assert standin.call("cuTensorMapEncodeTiled")["strides"] == ""


def test_a_broken_rule_never_reaches_the_driver(driver: Driver, standin: StandIn) -> None:
    with pytest.raises(TensorMapError):
        BROKEN["box 257"][1].encode(driver)
    assert standin.calls("cuTensorMapEncodeTiled") == []


def test_the_driver_may_still_refuse(driver: Driver, standin: StandIn) -> None:
    standin.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(DriverCallError, match="cuTensorMapEncodeTiled returned 1"):
        BASE.encode(driver)


def test_a_moved_spec_differs_in_its_address_only() -> None:
    assert BASE._replace(address=0x100) == BASE._replace(address=0x100)


def test_an_encoder_gives_what_each_address_would_get(driver: Driver, standin: StandIn) -> None:
    encode = BASE.encoder(driver)
    found = [encode(address) for address in (0x1000, 0x2000, 0x1000)]
    calls = [call.seen for call in standin.calls("cuTensorMapEncodeTiled")]
    assert found == [BASE._replace(address=address).encode(driver) for address in (0x1000, 0x2000, 0x1000)]
    assert calls == [call.seen for call in standin.calls("cuTensorMapEncodeTiled")[3:]]


def test_an_encoder_of_a_broken_rule_is_refused_and_one_may_fail(driver: Driver, standin: StandIn) -> None:
    with pytest.raises(TensorMapError):
        BASE._replace(strides=(8, *BASE.strides[1:])).encoder(driver)
    encode = BASE.encoder(driver)
    standin.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(DriverCallError):
        encode(0x1000)


def test_the_cache_encodes_each_spec_once(driver: Driver, standin: StandIn) -> None:
    cache = TensorMapCache(driver)
    assert cache.encode(BASE) == cache.encode(BASE._replace())
    assert len(standin.calls("cuTensorMapEncodeTiled")) == 1


def test_the_cache_forgets_the_least_recently_used(driver: Driver, standin: StandIn) -> None:
    cache = TensorMapCache(driver, entries=2)
    for address in (0x100, 0x200, 0x100, 0x300, 0x100, 0x200):
        cache.encode(BASE._replace(address=address))
    seen = [call.seen["address"] for call in standin.calls("cuTensorMapEncodeTiled")]
    assert seen == ["0x100", "0x200", "0x300", "0x200"]
    assert len(cache) == 2


def test_the_cache_keeps_no_failure(driver: Driver, standin: StandIn) -> None:
    cache = TensorMapCache(driver)
    standin.fail("cuTensorMapEncodeTiled", 1, times=1)
    with pytest.raises(DriverCallError):
        cache.encode(BASE)
    assert len(cache.encode(BASE)) == 128


def test_the_cache_serves_threads(driver: Driver) -> None:
    cache = TensorMapCache(driver, entries=4)
    wrong: list[int] = []

    def work() -> None:
        for i in range(200):
            address = 0x100 * (i % 8 + 1)
            if cache.encode(BASE._replace(address=address))[:8] != address.to_bytes(8, "little"):
                wrong.append(address)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
