"""Steps of SGLang for our backend: model runners, pools, batches and layers of its real classes.

Whoever imports this needs SGLang's Python files; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.integrations.absent_modules import Anything, in_place_of

# Of its image models, its compiler, its grammars and its kernels' loggers, which its configuration imports.
with in_place_of("llguidance", "loguru", "openai_harmony", "torchvision", "tvm_ffi", "uvloop", "xgrammar"):
    import sglang  # noqa: F401  (it replaces the module of transformers)
    import transformers

    # A newer transformers has models that old versions of SGLang bring along, and no images without torchvision.
    register_config = transformers.AutoConfig.register
    transformers.AutoConfig.register = partial(register_config, exist_ok=True)
    transformers.AutoImageProcessor = Anything

    from sglang.srt import runtime_context, server_args  # noqa: F401  (server_args: for the tests)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from cubin_runtime.integrations.sglang import NAME, register

    register()
    register()  # as in a process that loads its plugins again

transformers.AutoConfig.register = register_config
BF16, INT32 = torch.bfloat16, torch.int32
HEADS, KV_HEADS, DIM, PAGE, MAX_LEN, COLUMNS = 8, 2, 128, 16, 128, 8


def server_flags(monkeypatch: Any) -> SimpleNamespace:
    """Flags of deterministic inference and of drafts, where the plug-in reads them."""
    flags = SimpleNamespace(enable_deterministic_inference=False, speculative_algorithm=None)
    flags.speculative_num_draft_tokens = flags.speculative_eagle_topk = None
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: flags)
    if hasattr(runtime_context, "get_spec"):
        monkeypatch.setattr(runtime_context, "get_spec", lambda: flags)
    if hasattr(runtime_context, "get_exec"):
        monkeypatch.setattr(runtime_context, "get_exec", lambda: SimpleNamespace(deterministic=flags))
    return flags


def pool_of(**changed: Any) -> Any:
    given = {
        "size": 4 * MAX_LEN,
        "page_size": PAGE,
        "dtype": BF16,
        "head_num": KV_HEADS,
        "head_dim": DIM,
        "layer_num": 2,
        "device": "cpu",
        "enable_memory_saver": False,
        "enable_alt_stream": False,
    }
    return MHATokenToKVPool(**{**given, **changed})


def runner(**changed: Any) -> Any:
    """What the backend reads of a model runner: request ``i`` has the pages from ``8 i`` on, in reverse."""
    requests = ReqToTokenPool(size=3, max_context_len=MAX_LEN, device="cpu", enable_memory_saver=False)
    for request in range(4):
        pages = [COLUMNS * request + column for column in reversed(range(COLUMNS))]
        slots = [page * PAGE + token for page in pages for token in range(PAGE)]
        requests.req_to_token[request] = torch.tensor(slots, dtype=INT32)
    given = {
        "token_to_kv_pool": pool_of(),
        "req_to_token_pool": requests,
        "page_size": PAGE,
        "dtype": BF16,
        "model_config": SimpleNamespace(context_len=MAX_LEN),
    }
    return SimpleNamespace(**{**given, **changed})


def backend(**changed: Any) -> Any:
    made = ATTENTION_BACKENDS[NAME](runner(**changed))
    assert isinstance(made, AttentionBackend)
    return made


def batch(mode: ForwardMode, requests: list[int], kv_lens: list[int], new: list[int] | None = None) -> ForwardBatch:
    tokens = len(requests) if new is None else sum(new)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(requests),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        req_pool_indices=torch.tensor(requests),
        seq_lens=torch.tensor(kv_lens),
        seq_lens_cpu=torch.tensor(kv_lens),
        seq_lens_sum=sum(kv_lens),
        out_cache_loc=torch.arange(tokens),
        extend_seq_lens=None if new is None else torch.tensor(new, dtype=INT32),
        extend_seq_lens_cpu=new,
    )


def layer_of(**changed: Any) -> Any:
    given = {"num_heads": HEADS, "head_dim": DIM, "scaling": 0.125, "num_kv_heads": KV_HEADS, "layer_id": 1}
    return RadixAttention(**{**given, **changed})


def forward(made: Any, step: ForwardBatch, layer: Any = None, save: bool = False, **given: Any) -> tuple[Any, Any]:
    tokens = len(step.input_ids)
    q = torch.zeros(tokens, HEADS * DIM, dtype=BF16)
    k, v = (torch.ones(tokens, KV_HEADS, DIM, dtype=BF16) for _ in range(2))
    out = made.forward(q, k, v, layer or layer_of(), step, save_kv_cache=save, **given)
    assert out.shape == q.shape
    return q, out


def branching(step: ForwardBatch, tree: list[list[int]]) -> list[int]:
    """Give a step of verification the mask of SGLang's n-grams, with this tree for each request; its bits by token."""
    seen = torch.tensor(tree, dtype=torch.bool)
    rows = [torch.cat((torch.ones(len(tree), length, dtype=torch.bool), seen), 1) for length in step.seq_lens.tolist()]
    step.spec_info = SimpleNamespace(custom_mask=torch.cat([each.flatten() for each in rows]))
    return [sum(bit << place for place, bit in enumerate(row)) for row in tree] * len(rows)
