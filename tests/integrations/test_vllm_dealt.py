"""vLLM's decode context parallelism of models with GQA: two ranks as threads, with its real classes and metadata.

Skipped where vLLM's Python files are not importable; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not importable (tools/stage_engines.py, make test-engines)", allow_module_level=True)
# isort: off
from tests.integrations.vllm_steps import BACKEND, BF16, INT32, ParallelConfig, speculative, step  # noqa: E402  (first: it imports vLLM)

# isort: on
import numpy as np  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402

from cubin_runtime.attention import Runtime  # noqa: E402
from cubin_runtime.distributed import KvPartition  # noqa: E402
from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.testing import StandIn  # noqa: E402
from tests.integrations.dealt_ranks import DIM, PAGE, Group, Requests, use_references  # noqa: E402
from tests.integrations.launch_records import integers, launches  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("hopper")]
WORLD, HEADS, MAX_LEN, SCALE = 2, 8, 256, 0.1  # heads of both ranks, which share one KV head
COLUMNS = MAX_LEN // PAGE // WORLD


def reductions() -> Any:
    """vLLM's module of what combines the outputs of ranks: all-to-all, and its reference on a CPU."""
    try:
        return importlib.import_module("vllm.v1.attention.ops.dcp")
    except ImportError:  # before 0.29
        return importlib.import_module("vllm.v1.attention.ops.dcp_alltoall")


def combined(out: Any, lse: Any, group: Group, return_lse: bool, is_lse_base_on_e: bool) -> Any:
    """As vLLM's collectives, by its own reference."""
    parts = [torch.stack(each) for each in zip(*group.exchange((out.double(), lse)), strict=True)]
    total, sums = reductions()._lse_weighted_combine(*parts, return_lse, is_lse_base_on_e)
    return group.own_heads(total.to(out.dtype), sums)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    made = Group(WORLD)
    monkeypatch.setattr(parallel_state, "_DCP", made)
    monkeypatch.setattr(reductions(), "dcp_a2a_lse_reduce", combined)
    return made


@pytest.fixture
def first_rank(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, to which the others seem to do as it does."""
    monkeypatch.setattr(group, "exchange", lambda value: [value] * WORLD)


def configure(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> Any:
    """Make a configuration the current one, as while vLLM makes its layers."""
    parallel = ParallelConfig()
    asked = {"decode_context_parallel_size": WORLD, "cp_kv_cache_interleave_size": 1, "dcp_comm_backend": "a2a"}
    for name, value in asked.items():
        setattr(parallel, name, changed.pop(name, value))
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=MAX_LEN, dtype=BF16, rswa_window=None),
        scheduler_config=SimpleNamespace(max_num_seqs=6, max_num_batched_tokens=64),
        cache_config=SimpleNamespace(block_size=PAGE),
        parallel_config=parallel,
        speculative_config=speculative(changed.pop("drafts", None)),
    )
    monkeypatch.setattr(importlib.import_module("vllm.config.vllm"), "_current_vllm_config", config)
    return config


def layer(**changed: Any) -> Any:
    given = {"num_heads": HEADS // WORLD, "head_size": DIM, "scale": SCALE, "num_kv_heads": 1}
    made = BACKEND.get_impl_cls()(**{**given, **changed})
    made.process_weights_after_loading(BF16)
    return made


def metadata(config: Any, requests: Requests, table: Any, padded: int = 0, **changed: Any) -> Any:
    """What vLLM tells a rank of a step, as its builder makes it ours."""
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=1, head_size=DIM, dtype=BF16)
    built = BACKEND.get_builder_cls()(spec, ["layer"], config, torch.device("cpu"))
    partition = built._partition
    kv_lens = torch.tensor(requests.kv_lens, dtype=INT32)
    local = torch.cat([partition.own_lens(kv_lens), torch.zeros(padded, dtype=INT32)])
    given = {"block_table_tensor": table, "dcp_local_seq_lens": local, "seq_lens_cpu_upper_bound": kv_lens}
    return built.build(0, step(requests.q_lens, requests.kv_lens, padded, **{**given, **changed}))


@pytest.mark.parametrize("interleave", [1, 8])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "operators"),
    [
        ([1, 1, 1], [40, 1, 200], {"decode"}),
        ([20, 7], [20, 7], {"new keys"}),
        ([1, 1, 20, 3], [40, 3, 20, 70], {"decode", "context", "new keys", "merge"}),
    ],
)
def test_ranks_compute_what_one_with_all_keys_does(
    q_lens: list[int],
    kv_lens: list[int],
    operators: set[str],
    interleave: int,
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called, requests = use_references(monkeypatch), Requests(q_lens, kv_lens, HEADS, BF16)
    config = configure(monkeypatch, cp_kv_cache_interleave_size=interleave)

    def forward(rank: int) -> Any:
        made, partition = layer(), KvPartition(WORLD, rank, interleave)
        pages, table = requests.cache(partition, COLUMNS)
        (q,) = group.own_heads(requests.q)
        out = torch.full_like(q, torch.nan)
        new = requests.new(requests.keys), requests.new(requests.values)
        assert made.forward(None, q, *new, pages, metadata(config, requests, table), out) is out
        return out

    out = torch.cat(group.run(forward), 1)
    np.testing.assert_allclose(out.float().numpy(), requests.expected(SCALE), atol=0.03)
    assert set(called) == operators


@pytest.mark.usefixtures("first_rank")
def test_launches_of_a_rank(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    config, requests = configure(monkeypatch), Requests([1, 1, 20, 3], [40, 3, 20, 70], HEADS, BF16)
    table = torch.arange(4 * COLUMNS, dtype=INT32).view(4, COLUMNS)
    pages = torch.zeros(4 * COLUMNS, 1, PAGE, 2 * DIM, dtype=BF16)
    q, built, made = requests.q[:, : HEADS // WORLD], metadata(config, requests, table), layer()
    made.forward(None, q, requests.new(requests.keys), requests.new(requests.values), pages, built, torch.empty_like(q))
    (_, decode), (_, context), (_, new) = launches(standin)
    assert (decode["batch"], integers(decode["seq_lens"], 2), decode["max_seq_len"]) == (2, [20, 2], MAX_LEN // WORLD)
    assert (context["batch"], context["tokens"], context["window_right"] > MAX_LEN) == (2, 23, True)
    assert integers(built.prefills.lengths.data_ptr(), 2) == integers(context["seq_lens"], 2) == [0, 34]
    assert context["page_table"] == table[2:].data_ptr()
    assert (new["tokens"], new["window_right"], integers(new["q_cu_seq_lens"], 3)) == (23, 0, [0, 20, 23])


def test_a_padded_step_of_a_graph(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    config, requests = configure(monkeypatch), Requests([1, 1], [40, 3], HEADS, BF16)
    built = metadata(config, requests, torch.zeros(4, COLUMNS, dtype=INT32), padded=2)
    assert (built.decodes.rows, built.decodes.lengths.tolist(), built.prefills) == (4, [20, 2, 0, 0], None)


def test_prompts_may_have_a_context_if_the_host_does_not_know(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    config, requests = configure(monkeypatch), Requests([20], [20], HEADS, BF16)
    table = torch.zeros(1, COLUMNS, dtype=INT32)
    assert metadata(config, requests, table).has_context is False
    assert metadata(config, requests, table, seq_lens_cpu_upper_bound=None).has_context is True


def test_vllms_own_check_finds_what_it_asks_for(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch)
    made = layer()
    assert (made.dcp_world_size, made.need_to_return_lse_for_decode, made.supports_dcp) == (WORLD, True, True)


@pytest.mark.usefixtures("first_rank")
def test_kernels_and_scratch_are_there_before_the_first_request(
    hopper: Runtime, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, requests = configure(monkeypatch), Requests([1, 1, 20, 3], [40, 3, 20, 70], HEADS, BF16)
    made, q = layer(), torch.zeros(64, HEADS // WORLD, DIM, dtype=BF16)
    made.forward(None, q, None, None, torch.empty(0, dtype=BF16), None, torch.empty_like(q))
    allocations = len(standin.calls("cuMemAlloc"))
    hopper.freeze()
    table = torch.zeros(4, COLUMNS, dtype=INT32)
    pages = torch.zeros(4, 1, PAGE, 2 * DIM, dtype=BF16)
    new, q = (requests.new(requests.keys), requests.new(requests.values)), requests.q[:, : HEADS // WORLD]
    made.forward(None, q, *new, pages, metadata(config, requests, table), torch.empty_like(q))
    assert len(standin.calls("cuMemAlloc")) == allocations


@pytest.mark.parametrize(
    ("changed", "has_sink", "invariant", "reasons"),
    [
        ({}, False, False, []),
        ({"drafts": 2}, False, False, ["drafts with DCP not supported"]),
        ({"drafts": 2}, True, True, ["drafts, batch invariance, sinks with DCP not supported"]),
        ({"decode_context_parallel_size": 1, "drafts": 2}, True, True, []),
    ],
)
def test_what_is_refused_at_start(
    changed: dict[str, Any], has_sink: bool, invariant: bool, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    configure(monkeypatch, **changed)
    given = {"head_size": DIM, "dtype": BF16, "kv_cache_dtype": "auto", "block_size": PAGE, "use_mla": False}
    given |= {"has_sink": has_sink, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False}
    given |= {"device_capability": DeviceCapability(9, 0), "attn_type": "decoder"}
    assert BACKEND.validate_configuration(**given) == reasons


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sliding_window": 16}, "sliding_window: expected None with decode context parallelism"),
        ({"kv_sharing_target_layer_name": "first"}, "kv_sharing_target_layer_name: expected None"),
        ({"num_heads": 40}, "num_heads=80, num_kv_heads=1"),
    ],
)
def test_layers_that_are_refused(
    changed: dict[str, Any], named: str, group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch)
    with pytest.raises(UsageError, match=named):
        layer(**changed)
