"""The Python of the documentation's pages, run page by page from top to bottom."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.attention.runtime import NATIVE_RELEASE
from tests.docs.pages import BLOCKS, pages_with

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.gpu

BATCH, DRAFTS, COLUMNS, BOUND = 3, 4, 4, 256
# It fetches NVIDIA's release, and needs no GPU: tests/release runs it.
PAGES = [page for page in pages_with("python") if page != "docs/reference/artifacts.md"]


@pytest.fixture
def default_runtime(runtime_config: Config, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A default runtime of the page's own, which it may freeze."""
    made = Runtime(runtime_config)
    made.library.fetch(made.library.pins.get(NATIVE_RELEASE))
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", made)
    yield made
    torch.cuda.synchronize()


@pytest.fixture
def libraries(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page uses of other libraries: an empty FlashInfer if none is installed, a small model of transformers."""
    if page == "docs/migrating.md":
        pytest.importorskip("flashinfer", reason="FlashInfer is not installed, and the page calls it first")
    if page == "docs/flashinfer.md" and find_spec("flashinfer") is None:
        monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    if page == "docs/transformers.md":
        transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
        if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
            pytest.skip("transformers 5.23 and later refuse continuous batching with other implementations")
        from tests.integrations.small_models import made

        def load(*_: Any, **__: Any) -> Any:
            return made("llama", "cuda", torch.bfloat16)

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)


def names_of(page: str) -> dict[str, Any]:
    """What the blocks of a page call things: tensors of three requests, with one query token or four drafts each."""
    torch.manual_seed(0)
    pages = BATCH * COLUMNS
    on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    decode = {
        "q": torch.randn(BATCH, 32, 128, **on),
        "draft_q": torch.randn(BATCH, DRAFTS, 32, 128, **on),
        "packed_q": torch.randn(6, 32, 128, **on),
        "q_starts": torch.tensor([0, 4, 4, 6], device="cuda", dtype=torch.int32),
        "k_cache": torch.randn(pages, 64, 4, 128, **on),
        "v_cache": torch.randn(pages, 64, 4, 128, **on),
        "kv_cache": torch.randn(pages, 64, 576, **on),
        "mla_q": torch.randn(BATCH, 1, 16, 576, **on),
        "page_table": torch.randperm(pages, device="cuda").to(torch.int32).view(BATCH, COLUMNS),
        "topk_slots": torch.randint(64 * pages, (BATCH, 1, 2048), device="cuda", dtype=torch.int32),
        "seq_lens": torch.tensor([200, 64, 17], device="cuda", dtype=torch.int32),
    }
    queries = torch.randn(BATCH, 16, 576, **on) if page == "docs/mla.md" else decode["q"]
    out = torch.zeros(BATCH, 16, 512, **on) if page == "docs/mla.md" else torch.zeros_like(queries)
    on_append: dict[str, Any] = {
        "k": torch.randn(6, 4, 128, **on),
        "v": torch.randn(6, 4, 128, **on),
        "ckv": torch.randn(6, 512, **on),
        "k_pe": torch.randn(6, 64, **on),
        "cache": decode["kv_cache"],
        "offsets": decode["q_starts"],
        "parts": torch.randn(6, 2, 32, 128, **on),
        "part_lses": torch.randn(6, 2, 32, device="cuda"),
        **{name: torch.randn(6, 32, 128, **on) for name in ("one", "other")},
        **{name: torch.randn(6, 32, device="cuda") for name in ("one_lse", "other_lse")},
        "lse": torch.empty(6, 32, device="cuda"),
        "mask": torch.ones(6, device="cuda", dtype=torch.bool),
    }
    if page == "docs/append.md":
        decode |= on_append
    if page == "docs/prefill.md":
        sums = torch.tensor([0, 40, 40, 70], device="cuda", dtype=torch.int32)
        queries = torch.randn(70, 32, 128, **on)
        out = torch.zeros_like(queries)
        even = {name: torch.randn(BATCH, 24, heads, 128, **on) for name, heads in (("even_q", 32), ("even_k", 4))}
        # As many keys as the page's bound.
        ragged = {name: torch.randn(8192, 4, 128, **on) for name in ("k", "v")}
        table = decode["page_table"].repeat(1, 8192 // BOUND)
        decode |= {**even, "even_v": even["even_k"] * 2, **ragged, "q_sums": sums, "kv_sums": sums, "page_table": table}
    if page == "docs/sparse_mla.md":
        rows = 64 * 40  # more than the page's lists have entries
        queries = torch.randn(BATCH, 16, 576, **on)
        decode |= {"index_q": torch.randn(BATCH, 64, **on), "index_k": torch.randn(rows, 64, **on)}
        decode |= {"positions": torch.arange(rows, device="cuda"), "kv_cache": torch.randn(40, 64, 576, **on)}
        decode["fp8_cache"] = torch.zeros(40, 64, 1, 656, device="cuda", dtype=torch.uint8)
    torch.cuda.synchronize()
    others = {"batch": BATCH, "max_seq_len": BOUND, "stream": torch.cuda.Stream()}
    return {**decode, "q": queries, "out": out, **others}


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str, default_runtime: Runtime) -> None:
    if page == "docs/trtllm_gen.md" and torch.cuda.get_device_capability() not in ((10, 0), (10, 3)):
        pytest.skip("trtllm-gen kernels are for compute capability 10.0 and 10.3")
    names = names_of(page)
    for block in BLOCKS:
        if (block.page, block.kind) == (page, "python"):
            exec(compile(block.text, page, "exec"), names)
    torch.cuda.synchronize()
    made = [value for name, value in names.items() if name == "out" or name.startswith("outputs")]
    tensors = [tensor for value in made for tensor in (value if isinstance(value, list) else [value])]
    assert all(bool(tensor.isfinite().all()) for tensor in tensors)
