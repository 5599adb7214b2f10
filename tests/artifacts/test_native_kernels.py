from __future__ import annotations

import json

import pytest

from cubin_runtime.artifacts.cubins.architecture import Architecture
from cubin_runtime.artifacts.tables.native_kernels import NativeKernel, NativeKernelsError, parse_native_kernels

ENTRY = {
    "name": "paged_decode_bf16_d128",
    "symbol": "paged_decode_bf16_d128",
    "file": "fmha/paged_decode_bf16_d128_sm_90a.cubin",
    "sm": "90a",
    "family": "fmha",
    "operation": "paged_decode",
    "traits": {"head_dim": 128, "dtype": "bf16", "lse": True},
    "struct": "PagedDecodeParams",
    "struct_bytes": 256,
    "struct_fingerprint": "1" * 64,
    "threads": 128,
    "dynamic_shared_bytes": 98304,
    "static_shared_bytes": 1024,
    "registers": 128,
    "spill_bytes": 0,
    "flags": ["-O3"],
    "sources_sha256": "2" * 64,
    "status": "measured",
}


def document(*entries: object, **top: object) -> bytes:
    return json.dumps({"schema": 1, "release": "hopper-0.1.0", "kernels": list(entries), **top}).encode()


def test_an_entry_becomes_a_row() -> None:
    assert parse_native_kernels(document(ENTRY)) == (NativeKernel(**{**ENTRY, "flags": ("-O3",)}),)


def test_the_target_is_a_value() -> None:
    assert parse_native_kernels(document(ENTRY))[0].architecture == Architecture(90, "a", declared=True)


def test_a_release_without_kernels_reads() -> None:
    assert parse_native_kernels(document()) == ()


@pytest.mark.parametrize("key", sorted(ENTRY))
def test_a_missing_key_is_named_with_file_and_entry(key: str) -> None:
    broken = {k: v for k, v in ENTRY.items() if k != key}
    with pytest.raises(NativeKernelsError, match=rf"^k\.json: kernels\[1\].*lacks {key}$"):
        parse_native_kernels(document(ENTRY, broken), "k.json")


@pytest.mark.parametrize("key", sorted(ENTRY))
def test_an_ill_typed_value_is_named_with_file_and_entry(key: str) -> None:
    with pytest.raises(NativeKernelsError, match=rf"^k\.json: kernels\[0\].*{key} is 'None', expected"):
        parse_native_kernels(document({**ENTRY, key: None}), "k.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("file", "../up.cubin"),
        ("file", "/absolute.cubin"),
        ("file", "a//b"),
        ("file", "a\\b"),
        ("sm", "sm_90a"),
        ("sm", "90b"),
        ("threads", 0),
        ("threads", 1025),
        ("registers", True),
        ("registers", -1),
        ("registers", 1.5),
        ("struct_fingerprint", "1" * 63),
        ("sources_sha256", "G" * 64),
        ("status", "fine"),
        ("traits", {"a": [1]}),
        ("flags", "-O3"),
        ("name", ""),
    ],
)
def test_a_value_outside_its_domain_is_named(key: str, value: object) -> None:
    with pytest.raises(NativeKernelsError, match=f"{key} is .*expected"):
        parse_native_kernels(document({**ENTRY, key: value}))


def test_an_unknown_key_is_named() -> None:
    with pytest.raises(NativeKernelsError, match="unknown key speed"):
        parse_native_kernels(document({**ENTRY, "speed": 1}))


def test_a_name_given_twice_names_both_entries() -> None:
    with pytest.raises(NativeKernelsError, match=r"kernels\[1\]: name .* is also kernels\[0\]"):
        parse_native_kernels(document(ENTRY, ENTRY))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"[" * 100000, "not JSON"),
        (b"[]", "list at the top"),
        (b"{}", "schema None, expected 1"),
        (document(schema=2), "schema 2, expected 1"),
        (document(schema=True), "schema True, expected 1"),
        (document(kernels={}), "kernels is dict"),
        (document(7), r"kernels\[0\]: int"),
        (b"\xff", "not JSON"),
    ],
)
def test_another_document_is_refused_by_what_it_is(data: bytes, message: str) -> None:
    with pytest.raises(NativeKernelsError, match=message):
        parse_native_kernels(data)
