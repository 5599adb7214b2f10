"""Steps of SGLang for our MLA backend: pools, model runners and layers of its real classes.

Whoever imports this needs SGLang's Python files; tools/stage_engines.py puts them into a folder.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.integrations.sglang_steps import (  # first: it imports SGLang
    BF16,
    INT32,
    NAME,
    RadixAttention,
    ReqToTokenPool,
)

# isort: split
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

LATENT, ROPE, HEADS, PAGE, MAX_LEN, REQUESTS = 512, 64, 16, 64, 256, 6
COLUMNS = MAX_LEN // PAGE
FP8 = torch.float8_e4m3fn


def pool_of(dtype: Any = BF16, latent: int = LATENT, page: int = PAGE, rope: int = ROPE) -> Any:
    return MLATokenToKVPool(
        size=(REQUESTS + 1) * MAX_LEN,
        page_size=page,
        dtype=dtype,
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


def layer_of(latent: int = LATENT, rope: int = ROPE, **changed: Any) -> Any:
    given = {"num_heads": HEADS, "head_dim": latent + rope, "scaling": 192**-0.5, "num_kv_heads": 1, "layer_id": 1}
    return RadixAttention(**{**given, "v_head_dim": latent, **changed})


def prompt_layer(**changed: Any) -> Any:
    """The layer of the same attention for prompts: projected keys and values of every head."""
    given = {"num_heads": HEADS, "head_dim": 192, "scaling": 192**-0.5, "num_kv_heads": HEADS, "layer_id": 1}
    return RadixAttention(**{**given, "v_head_dim": 128, **changed})


def runner(**changed: Any) -> Any:
    """What the backend reads of a model runner: request ``i`` has the pages from ``4 i`` on, in reverse."""
    requests = ReqToTokenPool(size=REQUESTS, max_context_len=MAX_LEN, device="cpu", enable_memory_saver=False)
    for request in range(REQUESTS + 1):
        pages = [COLUMNS * request + column for column in reversed(range(COLUMNS))]
        slots = [page * PAGE + token for page in pages for token in range(PAGE)]
        requests.req_to_token[request] = torch.tensor(slots, dtype=INT32)
    given = {
        "token_to_kv_pool": pool_of(),
        "req_to_token_pool": requests,
        "page_size": PAGE,
        "dtype": BF16,
        "use_mla_backend": True,
        "model_config": SimpleNamespace(context_len=MAX_LEN),
        "server_args": SimpleNamespace(attention_backend=NAME, chunked_prefill_size=64),
        "model": torch.nn.ModuleList([layer_of(), prompt_layer()]),
    }
    return SimpleNamespace(**{**given, **changed})


def backend(**changed: Any) -> Any:
    return ATTENTION_BACKENDS[NAME](runner(**changed))


def forward(made: Any, step: Any, layer: Any = None, save: bool = False, **given: Any) -> Any:
    """The output of a layer's forward pass in the latent space."""
    layer = layer or layer_of()
    tokens, width = len(step.input_ids), layer.qk_head_dim
    q = torch.zeros(tokens, layer.tp_q_head_num * width, dtype=BF16)
    k = torch.ones(tokens, 1, width, dtype=BF16)
    return made.forward(q, k, k[..., : layer.v_head_dim], layer, step, save_kv_cache=save, **given)
