from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from cubin_runtime.attention.backends import BackendError, find_backend, resolve_backend
from cubin_runtime.errors import UsageError
from cubin_runtime.launch.driver import DeviceFacts
from tests.attention.attention_examples import H200


def device(major: int, minor: int) -> DeviceFacts:
    return replace(H200, name="some GPU", capability=(major, minor))


@pytest.mark.parametrize("operator", ["paged_decode", "mla_decode"])
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_measured_device_is_taken_without_a_warning(operator: str, backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend(operator, backend, device(9, 0)) == "native"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (10, 3), (12, 0), (12, 1)])
def test_auto_never_takes_what_was_only_built(capability: tuple[int, int]) -> None:
    with pytest.raises(BackendError, match="backend 'native' has kernels for it that have never been run"):
        resolve_backend("paged_decode", "auto", device(*capability))


def test_what_was_only_built_is_taken_by_name_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="built for some GPU .*8.0.* but never run"):
        assert resolve_backend("paged_decode", "native", device(8, 0)) == "native"


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_device_without_kernels_gets_the_list_of_those_with(backend: str) -> None:
    with pytest.raises(BackendError, match=r"capability 7.5.*no backend supports it .*measured on 9.0, built for 8.0"):
        resolve_backend("paged_decode", backend, device(7, 5))


def test_the_former_name_of_the_native_backend_is_taken_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="^backend='hopper' is now called 'native'; .* refuses the old name$"):
        assert resolve_backend("paged_decode", "hopper", device(9, 0)) == "native"


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(UsageError, match="backend='xqa': expected auto or one of native"):
        resolve_backend("paged_decode", "xqa", device(9, 0))


OPERATORS = (
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_ragged_attention_deepseek",
)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_published_kernels_are_taken_where_they_are_for(operator: str, capability: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend(operator, "auto", device(*capability)) == "trtllm-gen"


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_elsewhere_published_kernels_are_refused(operator: str, capability: tuple[int, int]) -> None:
    with pytest.raises(BackendError, match=r"no backend supports it \(trtllm-gen: published for 10.0, 10.3\)"):
        resolve_backend(operator, "trtllm-gen", device(*capability))


@pytest.mark.parametrize("operator", OPERATORS[2:])
def test_context_operators_take_native_kernels_on_hopper(operator: str) -> None:
    assert resolve_backend(operator, "auto", device(9, 0)) == "native"


def test_the_refusal_says_what_there_is_on_the_device() -> None:
    there_is = (
        r"; there is context_attention \(backend 'native'\), trtllm_ragged_attention_deepseek \(backend 'native'\)$"
    )
    with pytest.raises(BackendError, match=there_is):
        resolve_backend("trtllm_batch_context_with_kv_cache", "trtllm-gen", device(9, 0))


OURS = (
    *("xqa", "xqa_batch_decode_with_kv_cache", OPERATORS[0]),
    *("xqa_mla", "xqa_batch_decode_with_kv_cache_mla", OPERATORS[1]),
)


@pytest.mark.parametrize("operator", OURS)
@pytest.mark.parametrize("backend", ["auto", "xqa"])
def test_decoding_is_ours_where_it_was_measured(operator: str, backend: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve_backend(operator, backend, device(9, 0)) == "xqa"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_auto_takes_no_decoding_that_was_only_built(capability: tuple[int, int]) -> None:
    with pytest.raises(BackendError, match="backend 'xqa' has kernels for it that have never been run"):
        resolve_backend(OPERATORS[0], "auto", device(*capability))


def test_decoding_on_a_published_device_is_ours_by_name_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="backend 'xqa' was built for some GPU .*10.0.* but never run"):
        assert resolve_backend(OPERATORS[0], "xqa", device(10, 0)) == "xqa"


def test_finding_a_backend_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_backend(OPERATORS[0], "xqa", device(10, 0)) == "xqa"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (11, 0)])
def test_mla_elsewhere_is_told_where_it_runs(capability: tuple[int, int]) -> None:
    words = (
        r"no backend supports it \(xqa: measured on 9\.0, built for 12\.0, 12\.1; "
        r"trtllm-gen: published for 10\.0, 10\.3\)"
    )
    with pytest.raises(BackendError, match=words):
        resolve_backend(OPERATORS[1], "auto", device(*capability))


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_auto_follows_flashinfer_to_the_mla_kernels_that_were_only_built(capability: tuple[int, int]) -> None:
    with pytest.warns(UserWarning, match="backend 'xqa' was built for some GPU .* but never run there"):
        assert resolve_backend(OPERATORS[1], "auto", device(*capability)) == "xqa"


@pytest.mark.parametrize("capability", [(12, 0), (12, 1)])
def test_our_own_mla_follows_nobody(capability: tuple[int, int]) -> None:
    with pytest.raises(BackendError, match="backend 'native' has kernels for it that have never been run"):
        resolve_backend("mla_decode", "auto", device(*capability))


def test_mla_on_hopper_is_not_for_the_published_kernels() -> None:
    with pytest.raises(BackendError, match=r"\(trtllm-gen: published for 10\.0, 10\.3\)"):
        resolve_backend(OPERATORS[1], "trtllm-gen", device(9, 0))


@pytest.mark.parametrize(
    ("operator", "other"),
    [("paged_decode", OPERATORS[0]), ("mla_decode", OPERATORS[1]), ("xqa", OPERATORS[0])],
)
def test_the_refusal_names_functions_of_the_same_kind_alone(operator: str, other: str) -> None:
    words = rf"; there is {other} \(backend 'trtllm-gen'\) in cubin_runtime.compat.flashinfer(;|$)"
    with pytest.raises(BackendError, match=words):
        resolve_backend(operator, "auto", device(10, 0))
