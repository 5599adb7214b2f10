"""What the benchmarks of engines note of layers with lists."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from engine import listed, listed_plugin  # noqa: E402

pytestmark = pytest.mark.torch


class Layer:
    """Layers that give what they are told to."""

    scale = 0.25

    def __init__(self, out: Any) -> None:
        self.out = out

    def attend(self, q: Any, kv_cache: Any, indices: Any) -> Any:
        """One token of two heads."""
        return self.out


def case(slots: list[int]) -> tuple[Any, Any, Any]:
    """Queries, a cache of which rows 4 to 7 repeat rows 0 to 3, and a list."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(4, 576, generator=generator).bfloat16()
    q = torch.randn(1, 2, 576, generator=generator).bfloat16()
    return q, torch.cat((rows, rows)).view(2, 4, 576), torch.tensor([slots], dtype=torch.int32)


def exact(q: Any, kv_cache: Any, indices: Any) -> Any:
    keys = kv_cache.view(-1, 576)[indices[0][indices[0] >= 0].long()].float()
    return torch.softmax(q[0].float() @ keys.T * Layer.scale, -1)[None] @ keys[:, :512]


def test_the_error_of_a_layer_is_that_over_its_list() -> None:
    given = case([2, -1, 0])
    with listed.listed_layers(Layer) as counted:
        Layer(exact(*given)).attend(*given)
        Layer(exact(*given) * 1.5).attend(*given)
    assert (counted["calls"], counted["tokens"], counted["tokens_with_full_lists"]) == (2, 2, 0)
    assert counted["relative_error"] == pytest.approx(0.5, abs=1e-4)


def test_equal_rows_elsewhere_are_the_same_list() -> None:
    out = torch.ones(1, 2, 512, dtype=torch.bfloat16)
    first, second = Layer(out), Layer(2 * out)
    with listed.listed_bits(Layer) as counted:
        first.attend(*case([2, -1, 0]))
        first.attend(*case([6, -1, 4]))
        second.attend(*case([6, -1, 0]))
    assert counted == {"rows": 3, "repeated": 2, "attention": 1, "repeated_by_layer": [1, 1]}


@pytest.mark.parametrize("slots", [[0, -1, 2], [2, 0, -1], [2, 1, 0]])
def test_another_order_and_other_holes_are_another_list(slots: list[int]) -> None:
    out = torch.ones(1, 2, 512, dtype=torch.bfloat16)
    with listed.listed_bits(Layer) as counted:
        Layer(out).attend(*case([2, -1, 0]))
        Layer(out).attend(*case(slots))
    assert counted["repeated"] == 0


def test_a_process_of_sglang_finds_the_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SGLANG_PLUGINS", "cubin_runtime")
    monkeypatch.setenv(listed_plugin.RESULT, "")
    result = listed_plugin.install(tmp_path)
    (found,) = (point for each in distributions(path=sys.path[:1]) for point in each.entry_points)
    assert (found.group, found.name, found.load()) == ("sglang.srt.plugins", "engine_listed", listed_plugin.register)
    assert result.parent == tmp_path


def test_the_plug_in_writes_what_it_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cubin_runtime.attention.operators import sparse_mla_decode as operator

    q, kv_cache, indices = case([2, -1, 0])
    monkeypatch.setenv(listed_plugin.RESULT, str(tmp_path / "counted.json"))
    monkeypatch.setattr(operator, "sparse_mla_decode", lambda *_, **__: None)
    listed_plugin.register()
    out = exact(q, kv_cache, indices)
    operator.sparse_mla_decode(q, kv_cache, indices, softmax_scale=Layer.scale, out=out, workspace=SimpleNamespace())
    assert '"tokens": 1,' in (tmp_path / "counted.json").read_text()


class PeerLayer:
    """Layers of FlashMLA in vLLM, which call one method for each kind of cache."""

    scale = Layer.scale

    def _bf16_flash_mla_kernel(self, q: Any, kv_cache: Any, indices: Any, lengths: Any = None) -> Any:
        return exact(q, kv_cache, indices)

    def _fp8_flash_mla_kernel(
        self, *, q: Any, kv_c_and_k_pe_cache: Any, topk_indices: Any, kernel_metadata: Any
    ) -> Any:
        return 1.5 * exact(q[0], kv_c_and_k_pe_cache, topk_indices[0])[None], None


def test_the_errors_of_layers_of_flash_mla() -> None:
    q, kv_cache, indices = case([2, -1, 0])
    with listed.flash_mla_layers(PeerLayer) as counted:
        PeerLayer()._bf16_flash_mla_kernel(q, kv_cache, indices, None)
        PeerLayer()._fp8_flash_mla_kernel(
            q=q[None], kv_c_and_k_pe_cache=kv_cache, topk_indices=indices[None], kernel_metadata=None
        )
    assert (counted["calls"], counted["tokens"]) == (2, 2)
    assert counted["relative_error"] == pytest.approx(0.5, abs=1e-4)
    assert counted["mean_relative_error"] == pytest.approx(0.25, abs=1e-4)
