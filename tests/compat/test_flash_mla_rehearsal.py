"""FlashMLA's sparse decode on torch tensors of the host, with launches computed there: outputs of caches with gaps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.attention import Runtime
from cubin_runtime.compat.flash_mla import flash_mla_with_kvcache
from cubin_runtime.testing import StandIn
from tests.attention.host_tensors import memory_of_host_tensors
from tests.gpu.rehearsed_sparse_mla import sparse_mla_rehearsal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
PAGES, ROW = 5, 656
HOLES = (-1, -(2**31), 2**31 - 1)


@pytest.fixture(autouse=True)
def runtime(cubin_standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """One for whose calls host tensors are on device 0, as the default."""
    cubin_standin.pose_as(9, 0)
    with sparse_mla_rehearsal(cubin_standin.path, tmp_path) as made:
        made.memory = memory_of_host_tensors(monkeypatch)
        monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", made)
        yield made


def rows_of_pages(page_size: int) -> Any:
    """Random rows, bytes ``[pages, page_size, 1, 656]`` without gaps."""
    shape = PAGES, page_size, 1
    latent = torch.randn(*shape, 512).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(*shape, 4).view(torch.uint8)
    rope = torch.randn(*shape, 64).to(torch.bfloat16).view(torch.uint8)
    return torch.cat([latent, scales, rope], dim=-1)


def with_gaps(rows: Any, gap: int) -> Any:
    """The same rows in pages with so many bytes of NaN behind each."""
    distance = rows.shape[1] * ROW + gap
    pages = torch.full((PAGES * distance,), 0xFF, dtype=torch.uint8).as_strided(rows.shape, (distance, ROW, ROW, 1))
    return pages.copy_(rows)


@pytest.mark.parametrize("page_size", [1, 48, 61, 64])
@pytest.mark.parametrize("gap", [16, ROW, 3 * ROW + 48])
def test_gaps_between_pages_change_no_output(page_size: int, gap: int) -> None:
    torch.manual_seed(page_size)
    rows, q = rows_of_pages(page_size), torch.randn(2, 2, 17, 576).to(torch.bfloat16)
    indices = torch.randint(0, PAGES * page_size, (2, 2, 70), dtype=torch.int32)
    indices[..., ::9] = torch.tensor((*HOLES, PAGES * page_size), dtype=torch.int32).repeat(2)
    options = {"is_fp8_kvcache": True, "indices": indices, "topk_length": torch.tensor([70, 33], dtype=torch.int32)}
    expected = flash_mla_with_kvcache(q, rows, None, None, 512, **options)
    results = flash_mla_with_kvcache(q, with_gaps(rows, gap), None, None, 512, **options)
    assert all(map(torch.equal, results, expected))
    assert torch.isfinite(expected[1]).all()
