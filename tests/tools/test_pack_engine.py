"""Which machine code of an engine's libraries is packed: fat binaries of a few made-up entries."""

from __future__ import annotations

import pytest

from tools import pack_engine
from tools.pack_engine import CONTAINER, CUBIN, ENGINES, ENTRY, MAGIC

KERNEL = "_ZN5flash20CollectiveMainloopFwdSm90ILi2E{shape}ENS_{dtype}fNS_4arch4Sm90E"
HEAD = 64  # bytes of an entry before its code


def entry(code: bytes, architecture: int = 90) -> bytes:
    begin = ENTRY.pack(CUBIN, 1, HEAD, len(code)).ljust(28, b"\0") + architecture.to_bytes(4, "little")
    return begin.ljust(HEAD, b"\0") + code


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return CONTAINER.pack(int.from_bytes(MAGIC, "little"), 1, CONTAINER.size, len(body)) + body


@pytest.mark.parametrize(
    ("shape", "dtype", "kept"),
    [
        ("IJNS7_ILi128EEESA_SA_EEELi128", "10bfloat16_tE", True),
        ("IJNS7_ILi128EEESA_NS7_ILi192EEEEEELi128", "10bfloat16_tE", True),
        ("IJNS7_ILi64EEESA_SA_EEELi512", "10bfloat16_tE", True),
        ("IJNS7_ILi64EEESA_SA_EEELi512", "6half_tE", False),
        ("IJNS7_ILi128EEENS7_ILi96EEENS7_ILi64EEEEEELi256", "10bfloat16_tE", False),
        ("IJNS7_ILi128EEENS7_ILi96EEENS7_ILi192EEEEEELi192", "10bfloat16_tE", False),
    ],
)
def test_code_of_flash_attention_stays_by_head_dimension_and_dtype(shape: str, dtype: str, kept: bool) -> None:
    code = KERNEL.format(shape=shape, dtype=dtype).encode()
    packed = pack_engine.pruned(b"host" + container(entry(code)), ENGINES["vllm"], attention=True)
    assert (code in packed) is kept
    assert len(packed) == 4 + CONTAINER.size + HEAD + len(code)


def test_code_for_other_gpus_is_zeroed_in_place() -> None:
    library = container(entry(b"new", 100), entry(b"ours")) + container(entry(b"a", 80), entry(b"b"), entry(b"c", 120))
    packed = pack_engine.pruned(library, ENGINES["vllm"], attention=False)
    assert packed == library.replace(b"new", bytes(3)).replace(b"a", b"\0").replace(b"b", b"\0").replace(b"c", b"\0")
