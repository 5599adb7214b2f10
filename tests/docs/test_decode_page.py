"""The blocks of docs/decode.md, run on kernels that do nothing; tests/gpu runs those of all pages on a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cubin_runtime import Config
from cubin_runtime.attention import Runtime
from cubin_runtime.kernels.native.decode.params import PAGED_DECODE_TMA
from cubin_runtime.testing import GraphDriver, StandIn
from tests.attention.attention_examples import Tensors
from tests.attention.stub_release import RELEASE_NAME, build_stub_release
from tests.docs.pages import BLOCKS


@pytest.fixture
def runtime(standin: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    tree, pins = build_stub_release(tmp_path / "stubs")
    config = Config(store=tmp_path / "store", sources=(str(tree),), pin_files=(pins,), offline=True)
    made = Runtime(config, driver=GraphDriver(standin.path), release=RELEASE_NAME)
    standin.accept_kernels(PAGED_DECODE_TMA.size)
    made.driver.set_current(made.driver.primary_context(0))
    monkeypatch.setattr("cubin_runtime.attention.runtime.default.runtime", made)
    yield made
    made.driver.set_current(None)


def test_the_blocks_run_in_their_order(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    names = dict(
        zip(("q", "k_cache", "v_cache", "page_table", "seq_lens", "out"), Tensors().positional, strict=False),
        max_seq_len=1024,
        stream=0,
    )
    for block in BLOCKS:
        if (block.page, block.kind) == ("docs/decode.md", "python"):
            exec(compile(block.text, block.page, "exec"), names)
    assert runtime.stats().launches == 2
    assert runtime.modules.frozen
    assert "FieldRow(" in capsys.readouterr().out
