"""SGLang's sparse MLA backend on our operator: its real base class, metadata, pool and layers on a recording driver.

Skipped where SGLang's Python files are not importable; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations.sglang_steps import NAME, batch, server_flags  # noqa: E402  (first: it imports SGLang)
from tests.integrations.sglang_mla_steps import BF16, FP8, HEADS, LATENT, MAX_LEN, PAGE, REQUESTS, ROPE  # noqa: E402
from tests.integrations.sglang_mla_steps import layer_of, runner as mla_runner  # noqa: E402

# isort: on
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.layers.attention import dsa_backend  # noqa: E402
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: E402
from sglang.srt.layers.attention.dsa import utils as dsa_utils  # noqa: E402
from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.models.deepseek_common import utils as model_utils  # noqa: E402
from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry  # noqa: E402

from cubin_runtime.attention import Runtime  # noqa: E402
from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.launch_records import sparse_mla_launches  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]
WIDTH, DRAFTS = 128, 2
SPARSE = "cubin_runtime.integrations.sglang.sparse_mla_backend"


class Flags(SimpleNamespace):
    """Arguments of the server; those that no test sets are off, whatever group they are in."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self if name in ("kernel", "deterministic", "features", "overlap") else None


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> Flags:
    """What SGLang's server sets from its arguments, on one rank with a Hopper GPU."""
    server_flags(monkeypatch)
    made = Flags(dsa_prefill_backend="flashmla_sparse", dsa_decode_backend="flashmla_kv", disaggregation_mode="null")
    made.dsa_topk_backend, made.dsa_triton_union, made.speculative_num_draft_tokens = "sgl-kernel", 0, 0
    ranks = Flags(attn_tp_size=1, attn_dcp_size=1, attn_dcp_rank=0, attn_cp_size=1, dcp_enabled=False)
    getters = ("get_server_args", "get_exec", "get_spec", "get_disagg", "get_schedule", "get_parallel", "get_memory")
    for module in (runtime_context, dsa_backend, dsa_utils, memory_pool, *_topk_modules()):
        for name in getters:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, (lambda: ranks) if name == "get_parallel" else lambda: made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setenv("SGLANG_OPT_USE_TOPK_V2", "0")  # a kernel of the indexer, which SGLang compiles
    core = list(model_utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS)
    monkeypatch.setattr(model_utils, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", core)
    return made


def _topk_modules() -> list[Any]:
    names = ("sglang.srt.layers.attention.dsa.dsa_topk_backend", "sglang.srt.mem_cache.kv_cache_configurator")
    return [sys.modules[name] for name in names if name in sys.modules]


def pool_of(packed: bool = True, width: int | None = None) -> Any:
    return memory_pool.DSATokenToKVPool(
        size=(REQUESTS + 1) * MAX_LEN,
        page_size=PAGE,
        kv_lora_rank=LATENT,
        dtype=FP8 if packed else BF16,
        qk_rope_head_dim=ROPE,
        layer_num=2,
        device="cpu",
        index_head_dim=128,
        enable_memory_saver=False,
        kv_cache_dim=width or (656 if packed else 576),
    )


def model_of(heads: int = HEADS, latent: int = LATENT, **changed: Any) -> Any:
    sizes = {"num_attention_heads": heads, "kv_lora_rank": latent, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": 128}
    config = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": WIDTH, "index_head_dim": 128, **changed}
    return SimpleNamespace(context_len=MAX_LEN, hf_config=SimpleNamespace(**config), **sizes)


def runner(packed: bool = True, **changed: Any) -> Any:
    given = {
        "token_to_kv_pool": pool_of(packed),
        "model_config": model_of(),
        "server_args": dsa_utils.get_server_args() if hasattr(dsa_utils, "get_server_args") else None,
        "device": "cpu",
        "hisparse_coordinator": None,
        "kv_cache_dtype": FP8 if packed else BF16,
        "is_draft_worker": False,
        "max_running_requests": REQUESTS,
    }
    given["server_args"] = runtime_context.get_server_args()
    return mla_runner(**{**given, **changed})


def backend(packed: bool = True, **changed: Any) -> Any:
    return ATTENTION_BACKENDS[NAME](runner(packed, **changed))


def forward(made: Any, step: Any, lists: Any, **given: Any) -> Any:
    """The output of a layer's forward pass, as SGLang's layers call it."""
    tokens = len(step.input_ids)
    q, q_rope = (torch.zeros(tokens, HEADS, columns, dtype=BF16) for columns in (LATENT, ROPE))
    k, k_rope = (torch.ones(tokens, 1, columns, dtype=BF16) for columns in (LATENT, ROPE))
    given = {"save_kv_cache": False, "q_rope": q_rope, "k_rope": k_rope, "topk_indices": lists, **given}
    return made.forward(q, k, k, layer_of(), step, **given)


def last(standin: StandIn) -> dict[str, Any]:
    return sparse_mla_launches(standin)[-1]


def lists_of(tokens: int) -> Any:
    """Slots as SGLang's fused top-k writes them, with holes behind them."""
    lists = torch.arange(tokens * WIDTH, dtype=torch.int32).view(tokens, WIDTH)
    return lists.masked_fill(torch.arange(WIDTH) >= 40, -1)


@pytest.mark.parametrize("packed", [True, False])
def test_decodes_attend_to_the_rows_that_the_indexer_chose(standin: StandIn, packed: bool) -> None:
    made, step, lists = backend(packed), batch(ForwardMode.DECODE, [1, 2], [40, 130]), lists_of(2)
    made.init_forward_metadata(step)
    out = forward(made, step, lists)
    sent = last(standin)
    assert (out.shape, out.dtype, sent["out"]) == ((2, HEADS * LATENT), BF16, out.data_ptr())
    assert (sent["batch"], sent["heads"], sent["width"], sent["indices"]) == (2, HEADS, WIDTH, lists.data_ptr())
    pool = made.token_to_kv_pool
    assert (sent["kv_cache"], sent["rows"]) == (pool.get_key_buffer(1).data_ptr(), pool.size + PAGE)
    assert sent["row_bytes"] == (656 if packed else 1152)
    assert sent["softmax_scale"] == pytest.approx(192**-0.5)


def test_a_step_has_the_indexer_s_metadata_and_nothing_of_flashmla() -> None:
    made, step = backend(), batch(ForwardMode.DECODE, [1, 2], [40, 130])
    made.init_forward_metadata(step)
    metadata = made.get_indexer_metadata(1, step)
    assert metadata.get_seqlens_int32().tolist() == [40, 130]
    assert metadata.get_page_table_64().shape[0] == 2
    assert made.forward_metadata.flashmla_metadata is None


def test_positions_in_a_request_become_slots_where_top_k_is_not_fused() -> None:
    made, step = backend(), batch(ForwardMode.DECODE, [1, 2], [40, 130])
    made.use_fused_topk = False
    made.init_forward_metadata(step)
    lists = torch.full((2, WIDTH), -1, dtype=torch.int32)
    lists[0, :2], lists[1, 5] = torch.tensor([0, 39], dtype=torch.int32), 129
    slots, table = made._slots(lists, 2), made.req_to_token_pool.req_to_token
    assert (slots.dtype, slots[0, :3].tolist()) == (torch.int32, [table[1, 0], table[1, 39], -1])
    assert (slots[1, 5], slots[1, 0]) == (table[2, 129], -1)


def test_query_tokens_that_pad_a_step_have_no_rows() -> None:
    slots, lists = backend()._slots(lists_of(1), 2), lists_of(1)
    assert torch.equal(slots[:1], lists)
    assert (slots[1:] == -1).all()


def test_a_captured_step_reads_the_lists_that_are_there(standin: StandIn) -> None:
    made, step, lists = backend(), batch(ForwardMode.DECODE, [0, 0], [1, 1]), lists_of(2)
    made.init_cuda_graph_state(4, 4)
    made.init_forward_metadata_out_graph(step, in_capture=True)
    made.init_forward_metadata_in_graph(step)
    forward(made, step, lists)
    assert (last(standin)["indices"], made.forward_metadata.flashmla_metadata) == (lists.data_ptr(), None)


def test_new_rows_are_written_by_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    made, step, written = backend(), batch(ForwardMode.DECODE, [1, 2], [40, 130]), list[Any]()
    monkeypatch.setattr(made.token_to_kv_pool, "set_mla_kv_buffer", lambda *given: written.append(given))
    made.init_forward_metadata(step)
    forward(made, step, lists_of(2), save_kv_cache=True)
    ((_, slots, k, k_rope),) = written
    assert (slots is step.out_cache_loc, k.shape[-1], k_rope.shape[-1]) == (True, LATENT, ROPE)


def test_sinks_reach_the_kernel(standin: StandIn) -> None:
    made, step, sinks = backend(), batch(ForwardMode.DECODE, [1], [40]), torch.zeros(HEADS)
    made.init_forward_metadata(step)
    forward(made, step, lists_of(1), attn_sink=sinks)
    assert last(standin)["sinks"] == sinks.data_ptr()


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2], ids=lambda mode: mode.name)
def test_draft_tokens_have_lists_of_their_own(standin: StandIn, mode: Any) -> None:
    made, step = backend(), batch(mode, [1, 2], [40, 130], [DRAFTS] * 2)
    forward(made, step, lists_of(4))
    assert (last(standin)["batch"], last(standin)["width"]) == (4, WIDTH)


def test_prompts_are_sglang_s_own(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    made, step, seen = backend(), batch(ForwardMode.EXTEND, [1], [20], [20]), list[Any]()
    monkeypatch.setattr(
        dsa_backend.DeepseekSparseAttnBackend, "forward_extend", lambda *given, **named: seen.append((given, named))
    )
    lists = lists_of(20)
    forward(made, step, lists)
    ((_, named),) = seen
    assert named["topk_indices"] is lists
    assert not sparse_mla_launches(standin)


def asked(layer: Any, step: Any, made: Any) -> tuple[str, bool]:
    """How a layer of SGLang's runs a step on a backend, and whether it then passes latent and rope columns apart."""
    layer.current_attention_backend = NAME
    with forward_context(ForwardContext(attn_backend=made)):
        method = AttentionBackendRegistry.get_handler(NAME)(layer, step)
    return method.name, layer.current_attention_backend in model_utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS


@pytest.mark.parametrize("dense_first", [False, True])
def test_layers_with_lists_and_without_run_beside_one_another(dense_first: bool) -> None:
    def dense() -> Any:
        return ATTENTION_BACKENDS[NAME](mla_runner())

    without = dense() if dense_first else None
    of_lists, without = backend(), without or dense()
    methods = []
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE):
        step = SimpleNamespace(forward_mode=mode)
        of_lists.use_mha = mode is ForwardMode.EXTEND
        methods.append(asked(SimpleNamespace(use_dsa=True), step, of_lists))
        methods.append(asked(SimpleNamespace(use_dsa=False), step, without))
    assert methods == [("MHA_ONE_SHOT", True), ("MHA_CHUNKED_KV", False), ("MLA", True), ("MLA", False)]
    names = model_utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"token_to_kv_pool": SimpleNamespace()}, "token_to_kv_pool: a SimpleNamespace with rows of None"),
        ({"hisparse_coordinator": object()}, "enable_hisparse"),
        ({"server_args": Flags(enable_hierarchical_cache=True)}, "enable_hierarchical_cache"),
        ({"server_args": Flags(disaggregation_mode="decode")}, "disaggregation_mode"),
        ({"server_args": Flags(dcp_size=2)}, "dcp_size=2"),
        ({"dtype": torch.float16}, "dtype: torch.float16"),
        ({"model_config": model_of(heads=130)}, "130 heads"),
        ({"model_config": model_of(latent=256)}, "kv_lora_rank=256"),
    ],
)
def test_runners_that_are_refused_at_start(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        backend(**changed)


def test_kernels_are_loaded_at_start(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", SPARSE):
        backend(model_config=model_of(heads=48))
    assert "layers of sparse MLA with 512 + 64 columns, 48 heads, rows of 656 bytes run on" in caplog.text


def test_steps_of_any_size_load_and_allocate_nothing(hopper: Runtime, standin: StandIn) -> None:
    made = backend()
    loads, allocations = hopper.stats().loads, len(standin.calls("cuMemAlloc"))
    assert loads > 0
    assert allocations > 0
    for requests in range(1, REQUESTS + 1):
        forward(made, batch(ForwardMode.DECODE, list(range(requests)), [40] * requests), lists_of(requests))
    assert hopper.stats().loads == loads
    assert len(standin.calls("cuMemAlloc")) == allocations


@pytest.mark.skipif(not hasattr(dsa_backend, "get_dsa_index_kpool"), reason="lists of single rows alone")
def test_lists_of_groups_of_rows_are_refused_at_start() -> None:
    with pytest.raises(UsageError, match="index_kpool=2"):
        backend(model_config=model_of(index_kpool=2))


def test_rows_of_plain_e4m3_are_refused_at_start() -> None:
    with pytest.raises(UsageError, match=r"rows of 576 torch.float8_e4m3fn, expected"):
        backend(token_to_kv_pool=pool_of(width=576))


def test_what_else_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(f"{SPARSE}.is_dsa_enable_prefill_cp", lambda: True)
        with pytest.raises(UsageError, match="enable_prefill_cp"):
            backend()
    with monkeypatch.context() as changed:
        changed.setattr(f"{SPARSE}.drafts_branch", lambda: True)
        with pytest.raises(UsageError, match="speculative_algorithm=NGRAM"):
            backend()
    monkeypatch.setattr(f"{SPARSE}.is_deterministic", lambda: True)
    with pytest.raises(UsageError, match="enable_deterministic_inference"):
        backend()


@pytest.mark.parametrize(
    ("given", "named"),
    [({"cos_sin_cache": 1}, "cos_sin_cache"), ({"topk_indices": None}, "topk_indices"), ({"q_rope": None}, "q_rope")],
)
def test_calls_that_are_refused(given: dict[str, Any], named: str) -> None:
    made, step = backend(), batch(ForwardMode.DECODE, [1], [40])
    made.init_forward_metadata(step)
    with pytest.raises(UsageError, match=named):
        forward(made, step, lists_of(1), **given)
