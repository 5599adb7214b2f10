from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.artifacts.cubins.cubin import Architecture, Cubin, KernelFacts
from cubin_runtime.errors import AbiError, CorruptError, DriverError, FrozenError
from cubin_runtime.launch.driver import Driver
from cubin_runtime.launch.modules import KernelRequest, LoadCounts, LoadedKernel, ModuleCache
from cubin_runtime.launch.structs import Field, StructLayout
from cubin_runtime.testing import StandIn
from tests.launch.examples import DIGEST, LAYOUT, SYMBOL, cubin, kernel_facts, needs

IMAGE = b"cubin bytes"
OTHER = "cd" * 32


def read() -> bytes:
    return IMAGE


def unreadable() -> bytes:
    raise AssertionError("read() was called")


def cache_of(driver: Driver, made: Cubin | None = None) -> ModuleCache:
    """A cache whose cubins all have the facts of ``made``; ELF parsing has its own tests."""
    return ModuleCache(driver, parse=lambda _: made or cubin())


@pytest.fixture
def cache(driver: Driver, standin: StandIn, context: int) -> ModuleCache:
    standin.add_kernel(SYMBOL, (LAYOUT.size,), max_threads=512)
    return cache_of(driver)


def load(cache: ModuleCache, context: int, **changes: Any) -> LoadedKernel:
    given: dict[str, Any] = {"sha256": DIGEST, "symbol": SYMBOL, "read": read, "needs": needs(), **changes}
    stream = given.pop("stream", 0)
    return cache.kernel(KernelRequest(context, **given), stream=stream)


def test_the_first_request_loads(cache: ModuleCache, standin: StandIn, context: int) -> None:
    kernel = load(cache, context)
    assert standin.call("cuModuleLoadData") == {"image": "cubin", "context": hex(context)}
    assert (kernel.context, kernel.sha256, kernel.symbol) == (context, DIGEST, SYMBOL)
    assert (kernel.max_threads, kernel.facts, str(kernel.architecture)) == (384, kernel_facts(), "sm_90a")


def test_the_code_is_on_the_device_before_the_first_launch(cache: ModuleCache, standin: StandIn, context: int) -> None:
    load(cache, context)
    assert standin.call("cuFuncLoad") == {"symbol": SYMBOL}


def test_the_second_request_neither_reads_nor_loads(cache: ModuleCache, context: int) -> None:
    first = load(cache, context)
    assert load(cache, context, read=unreadable) is first
    assert cache.counts == LoadCounts(loads=1, hits=1)


def test_each_context_gets_its_own_module(cache: ModuleCache, driver: Driver, standin: StandIn, context: int) -> None:
    standin.with_devices(2)
    second = driver.primary_context(1)
    load(cache, context)
    load(cache, second)
    contexts = [call.seen["context"] for call in standin.calls("cuModuleLoadData")]
    assert contexts == [hex(context), hex(second)]
    assert driver.current_context() == context


def test_each_digest_gets_its_own_module(cache: ModuleCache, context: int) -> None:
    load(cache, context)
    load(cache, context, sha256=OTHER)
    assert cache.counts.loads == 2


def test_facts_are_parsed_once_a_digest(driver: Driver, standin: StandIn, context: int) -> None:
    standin.add_kernel(SYMBOL, (LAYOUT.size,))
    standin.with_devices(2)
    parsed: list[bytes] = []

    def parse(data: bytes) -> Cubin:
        parsed.append(data)
        return cubin()

    cache = ModuleCache(driver, parse)
    load(cache, context)
    load(cache, driver.primary_context(1))
    assert parsed == [IMAGE]


def test_real_bytes_are_parsed_by_default(driver: Driver, context: int) -> None:
    with pytest.raises(CorruptError):
        load(ModuleCache(driver), context)


def test_a_thread_without_a_context_may_load(cache: ModuleCache, driver: Driver, context: int) -> None:
    done: list[LoadedKernel] = []
    thread = threading.Thread(target=lambda: done.append(load(cache, context)))
    thread.start()
    thread.join()
    assert done[0].context == context


def test_threads_that_ask_at_once_load_once(cache: ModuleCache, context: int) -> None:
    barrier, done = threading.Barrier(8), []

    def work() -> None:
        barrier.wait()
        done.append(load(cache, context))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, done))) == 1
    assert cache.counts == LoadCounts(loads=1, hits=7)


def test_a_failed_load_is_never_cached(cache: ModuleCache, standin: StandIn, context: int) -> None:
    standin.fail("cuModuleLoadData", 2, times=1)
    with pytest.raises(DriverError, match="cuModuleLoadData returned 2"):
        load(cache, context)
    assert load(cache, context).symbol == SYMBOL
    assert cache.counts == LoadCounts(loads=1, failures=1)


def test_bytes_that_cannot_be_read_are_asked_for_again(cache: ModuleCache, context: int) -> None:
    def missing() -> bytes:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        load(cache, context, read=missing)
    assert load(cache, context).symbol == SYMBOL


def test_a_frozen_cache_serves_what_it_has(cache: ModuleCache, context: int) -> None:
    first = load(cache, context)
    cache.freeze()
    assert cache.frozen
    assert load(cache, context, read=unreadable) is first


def test_a_frozen_cache_reads_and_loads_nothing_new(cache: ModuleCache, standin: StandIn, context: int) -> None:
    cache.freeze()
    with pytest.raises(FrozenError, match=r"'decode' .* on device 0 and the module cache is frozen: preload\(\)"):
        load(cache, context, read=unreadable)
    assert standin.calls("cuModuleLoadData") == []


def test_a_capturing_stream_refuses_a_load(cache: ModuleCache, driver: Driver, standin: StandIn, context: int) -> None:
    stream = driver.create_stream()
    driver.begin_capture(stream)
    with pytest.raises(FrozenError, match=r"a stream is capturing: preload\(\) it before"):
        load(cache, context, read=unreadable, stream=stream)
    assert standin.calls("cuModuleLoadData") == []


def test_a_blocking_stream_that_captures_refuses_a_load_for_any_stream(
    cache: ModuleCache, driver: Driver, context: int
) -> None:
    driver.begin_capture(driver.create_stream(blocking=True))
    with pytest.raises(FrozenError, match=r"preload\(\)"):
        load(cache, context, read=unreadable, stream=driver.create_stream())


def test_a_capturing_stream_gets_what_is_loaded(cache: ModuleCache, driver: Driver, context: int) -> None:
    first, stream = load(cache, context), driver.create_stream()
    driver.begin_capture(stream)
    assert load(cache, context, read=unreadable, stream=stream) is first


@pytest.mark.parametrize("code", [900, 908])
def test_a_capture_that_only_the_driver_knows_of_is_named_too(
    cache: ModuleCache, standin: StandIn, context: int, code: int
) -> None:
    standin.fail("cuModuleLoadData", code)
    with pytest.raises(FrozenError, match=r"loading met a capturing stream .*preload\(\)"):
        load(cache, context)


def test_preload_reports_kernels_loads_and_device_memory(cache: ModuleCache, context: int) -> None:
    requests = [KernelRequest(context, digest, SYMBOL, read, needs()) for digest in (DIGEST, OTHER, DIGEST)]
    report = cache.preload(requests)
    assert (len(report.kernels), report.loads, report.device_bytes) == (3, 2, 8192)
    assert report.seconds > 0


def test_closing_unloads_everything(cache: ModuleCache, standin: StandIn, context: int) -> None:
    load(cache, context)
    cache.close()
    assert standin.call("cuModuleUnload") == {"module": "0xd000"}
    load(cache, context)
    assert cache.counts.loads == 2


def test_shared_memory_is_opted_into_again_after_closing(cache: ModuleCache, standin: StandIn, context: int) -> None:
    load(cache, context, needs=needs(dynamic_shared_bytes=100000))
    cache.close()
    load(cache, context, needs=needs(dynamic_shared_bytes=100000))
    assert attributes_set(standin) == ["8:100000", "8:100000"]


def test_two_kernels_of_a_cubin_share_its_module(driver: Driver, standin: StandIn, context: int) -> None:
    second = replace(kernel_facts(), symbol="second")
    cache = cache_of(driver, replace(cubin(), kernels={SYMBOL: kernel_facts(), "second": second}))
    for symbol in (SYMBOL, "second"):
        standin.add_kernel(symbol, (LAYOUT.size,))
        load(cache, context, symbol=symbol)
    assert len(standin.calls("cuModuleLoadData")) == 1


def test_a_wrong_architecture_is_refused_before_the_driver_sees_it(
    driver: Driver, standin: StandIn, context: int
) -> None:
    with pytest.raises(AbiError, match="built for sm_100a"):
        load(cache_of(driver, cubin("100a")), context)
    assert standin.calls("cuModuleLoadData") == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"threads": 512}, "a block of 512 threads; according to its ELF, at most 384"),
        ({"fingerprint": "0" * 64}, "fingerprint"),
        ({"layout": StructLayout.declare("S", [Field("a", "int32")]), "fingerprint": None}, "S has 4 bytes"),
        ({"dynamic_shared_bytes": 300000}, "300000 bytes"),
    ],
)
def test_every_part_of_the_gate_stands_in_front_of_the_load(
    cache: ModuleCache, standin: StandIn, context: int, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(AbiError, match=text):
        load(cache, context, needs=needs(**changes))
    assert standin.calls("cuModuleLoadData") == []


def test_the_gate_runs_again_for_other_needs(cache: ModuleCache, context: int) -> None:
    load(cache, context)
    with pytest.raises(AbiError, match="512 threads"):
        load(cache, context, needs=needs(threads=512))


def test_the_gate_runs_again_for_another_declared_architecture(cache: ModuleCache, context: int) -> None:
    load(cache, context, needs=needs(declared=Architecture.parse("90a")))
    with pytest.raises(AbiError, match="the cubin says sm_90a, its metadata declares sm_90"):
        load(cache, context, needs=needs(declared=Architecture.parse("90")))


def test_a_kernel_loaded_for_portable_clusters_is_opened_for_larger_ones(
    cache: ModuleCache, standin: StandIn, context: int
) -> None:
    assert not load(cache, context).nonportable_cluster
    assert load(cache, context, needs=needs(nonportable_cluster=True)).nonportable_cluster
    assert attributes_set(standin) == ["14:1"]


def undeclared_threads() -> KernelFacts:
    return kernel_facts(max_threads=None)


def test_without_a_limit_in_the_elf_the_driver_is_asked(cache: ModuleCache, driver: Driver, context: int) -> None:
    cache = cache_of(driver, cubin(facts=undeclared_threads()))
    assert load(cache, context, needs=needs(threads=512)).max_threads == 512


def test_the_limit_of_the_driver_is_held(cache: ModuleCache, driver: Driver, context: int) -> None:
    cache = cache_of(driver, cubin(facts=undeclared_threads()))
    with pytest.raises(AbiError, match="a block of 513 threads; according to the driver, at most 512"):
        load(cache, context, needs=needs(threads=513))


def test_the_driver_confirms_the_size_of_the_parameter(cache: ModuleCache, context: int) -> None:
    assert load(cache, context).parameters_checked


def test_a_size_that_the_driver_contradicts_is_refused(driver: Driver, standin: StandIn, context: int) -> None:
    standin.add_kernel(SYMBOL, (LAYOUT.size + 64,))
    with pytest.raises(AbiError, match=f"according to the driver, the kernel takes one of {LAYOUT.size + 64} bytes"):
        load(cache_of(driver), context)


def test_an_older_driver_cannot_confirm_the_size(
    cache: ModuleCache, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "has", lambda *_: False)
    assert not load(cache, context).parameters_checked


def attributes_set(standin: StandIn) -> list[str]:
    return [call.seen["attribute"] + ":" + call.seen["value"] for call in standin.calls("cuFuncSetAttribute")]


def test_shared_memory_is_opted_into_once_a_function(cache: ModuleCache, standin: StandIn, context: int) -> None:
    for nbytes in (100000, 200000, 150000):
        load(cache, context, needs=needs(dynamic_shared_bytes=nbytes))
    assert attributes_set(standin) == ["8:100000", "8:200000"]


def test_little_shared_memory_needs_no_opt_in(cache: ModuleCache, standin: StandIn, context: int) -> None:
    load(cache, context, needs=needs(dynamic_shared_bytes=48 * 1024))
    assert attributes_set(standin) == []


def test_static_shared_memory_counts_towards_the_opt_in(
    cache: ModuleCache, driver: Driver, standin: StandIn, context: int
) -> None:
    cache = cache_of(driver, cubin(facts=kernel_facts(static=1024)))
    load(cache, context, needs=needs(dynamic_shared_bytes=48 * 1024))
    assert attributes_set(standin) == ["8:49152"]


def test_a_non_portable_cluster_is_opted_into(cache: ModuleCache, standin: StandIn, context: int) -> None:
    load(cache, context, needs=needs(nonportable_cluster=True))
    assert attributes_set(standin) == ["14:1"]


def test_a_real_cubin_is_gated_by_its_own_elf(driver: Driver, standin: StandIn, context: int) -> None:
    image = (Path(__file__).parents[1] / "fixtures" / "facts_sm_90a.cubin").read_bytes()
    standin.pose_as(10, 0)
    symbol = next(iter(_facts(image).kernels))
    with pytest.raises(AbiError, match=r"built for sm_90a, device 0 .* is 10.0"):
        ModuleCache(driver).kernel(KernelRequest(context, DIGEST, symbol, lambda: image, needs(fingerprint=None)))


def _facts(image: bytes) -> Cubin:
    from cubin_runtime.artifacts.cubins.cubin import parse_cubin

    return parse_cubin(image)
