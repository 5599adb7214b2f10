"""Every argument that a layer of transformers passes to its attention function is read, of no use, or refused."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs  # noqa: E402
from transformers.utils.generic import TransformersKwargs  # noqa: E402

from cubin_runtime.errors import UsageError  # noqa: E402
from cubin_runtime.integrations.transformers.arguments import REFUSED, UNUSED, check_rest  # noqa: E402
from cubin_runtime.integrations.transformers.attention import attention  # noqa: E402

pytestmark = pytest.mark.torch
MODELS = Path(transformers.__file__).parent / "models"
PACKED = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k"}
CONTINUOUS = {"cache", "read_index", "write_index", "block_table"}
READ = {*inspect.signature(attention).parameters} - {"operators", "given"} | PACKED | CONTINUOUS


def calls_of(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of what ``ALL_ATTENTION_FUNCTIONS.get_interface`` returned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "attention_interface":
            yield node


@cache
def sites() -> dict[str, list[ast.Call]]:
    """Model -> its calls of attention."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text()
        if "ALL_ATTENTION_FUNCTIONS" in text:
            found[path.stem.removeprefix("modeling_")] = list(calls_of(ast.parse(text)))
    return found


def test_models_call_attention_by_the_name_that_is_looked_for() -> None:
    without = [model for model, calls in sites().items() if not calls]
    assert len(sites()) > 100
    assert not without


def test_every_argument_of_a_call_is_known() -> None:
    passed: dict[str, list[str]] = {}
    for model, calls in sites().items():
        for keyword in (word.arg for call in calls for word in call.keywords):
            if keyword is not None:
                passed.setdefault(keyword, []).append(model)
    unknown = {word: models for word, models in passed.items() if word not in READ | UNUSED | REFUSED.keys()}
    assert not unknown


def test_every_argument_that_passes_through_a_model_is_known() -> None:
    passed = {*TransformersKwargs.__annotations__, *FlashAttentionKwargs.__annotations__}
    assert not passed - READ - UNUSED - REFUSED.keys()


def test_calls_give_the_tensors_and_the_mask_by_position_or_by_their_names() -> None:
    names = {"module", "query", "key", "value", "attention_mask"}
    for model, calls in sites().items():
        for call in calls:
            positions = sum(5 if isinstance(one, ast.Starred) else 1 for one in call.args)
            named = {word.arg for word in call.keywords} & names
            assert None in {word.arg for word in call.keywords} or positions + len(named) >= 5, (model, call.lineno)


def test_no_argument_is_both_of_no_use_and_refused() -> None:
    assert len(READ | UNUSED | REFUSED.keys()) == len(READ) + len(UNUSED) + len(REFUSED)


@pytest.mark.parametrize("name", [*REFUSED, "an_argument_of_a_later_version"])
def test_what_is_not_honoured_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}="):
        check_rest({name: torch.ones(1)})
    check_rest({name: None})
