"""The blocks of docs/tracing.md, run on kernels that do nothing, and the reasons that it lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.attention_examples import Tensors
from tests.attention.stub_release import RELEASE_NAME, build_stub_release
from tests.docs.pages import PAGES, blocks_of

PAGE = "docs/tracing.md"


def test_the_blocks_run_in_their_order(
    standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, pins = build_stub_release(tmp_path / "stubs")
    config = Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    runtime = Runtime(config, driver=GraphDriver(standin.path), release=RELEASE_NAME)
    standin.accept_kernels(PAGED_DECODE_TMA.size)
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", runtime)
    monkeypatch.chdir(tmp_path)
    runtime.driver.set_current(runtime.driver.primary_context(0))
    tensors = ("q", "k_cache", "v_cache", "page_table", "seq_lens", "out")
    names = dict(zip(tensors, Tensors().positional, strict=False), max_seq_len=1024)
    blocks = blocks_of(PAGE)
    try:
        for block in blocks:
            exec(compile(block.text, PAGE, "exec"), names)
    finally:
        runtime.driver.set_current(None)
    assert [block.kind for block in blocks] == ["python"] * 2
    printed = capsys.readouterr().out
    assert printed.startswith("paged_decode_dense_bf16_bf16_bf16_")
    assert "{'batch': 4, 'pages': 100, 'columns': 16}" in printed


def test_it_names_every_operator_and_its_log() -> None:
    words = " ".join(PAGES[PAGE].split())
    for name in ("paged_decode", "mla_decode", "context_attention", "append_kv", "merge_states"):
        assert f"`{name}`" in words
    assert "`cubin_runtime.debug.tracing.recorder`" in words
