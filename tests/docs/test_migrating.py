"""The page on migrating: its conversion of page lists gives the table and lengths that FlashInfer's lists mean."""

from __future__ import annotations

import pytest

from tests.docs.pages import blocks_of

pytestmark = pytest.mark.torch


def test_lists_of_pages_become_a_table_and_lengths() -> None:
    torch = pytest.importorskip("torch")
    (text,) = [block.text for block in blocks_of("docs/migrating.md") if "def table_of" in block.text]
    names: dict[str, object] = {}
    exec(text, names)
    indptr = torch.tensor([0, 3, 4, 6], dtype=torch.int32)
    indices = torch.tensor([7, 5, 2, 9, 1, 4, 99], dtype=torch.int32)
    table, lens = names["table_of"](indptr, indices, torch.tensor([16, 1, 5]), 16)  # type: ignore[operator]
    assert table.tolist() == [[7, 5, 2], [9, 0, 0], [1, 4, 0]]
    assert (lens.tolist(), table.dtype, lens.dtype) == ([48, 1, 21], torch.int32, torch.int32)
