"""The arguments of an attention function of transformers besides tensors: honoured, of no consequence, or refused."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...errors import UsageError
from .masks import WINDOW

# Arguments that models and generation pass on to every layer, and attention has no use for.
UNUSED = {
    *("position_ids", "position_embeddings", "cache_position", "use_cache", "output_hidden_states", "logits_to_keep"),
    *("num_items_in_batch", "logits_indices", "logits_processor_args", "input_ids", "inputs_embeds", "labels"),
    *("return_dict", "return_loss", "past_key_values", "layer_idx", "target_dtype", "output_router_logits"),
    *("token_type_ids", "mm_token_type_ids", "deterministic", "implementation", "use_top_left_mask"),
}
# Arguments that change the result -> the reason why no kernel here honours them.
REFUSED = {
    "position_bias": "no kernel adds a bias to scores",
    "indices": "no kernel attends to keys that are chosen one by one",
    "block_indices": "no kernel attends to blocks of keys that are chosen",
    "output_attentions": "no kernel stores probabilities",
    "sinks": "no kernel has a sink of each query; s_aux are those of heads",
    "seq_idx": "sequences are packed by position_ids, or by cu_seq_lens_q and cu_seq_lens_k",
}


_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k")


class Options(NamedTuple):
    """Options of one layer's attention, in flash-attention's words."""

    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    s_aux: Any

    def words(self) -> dict[str, Any]:
        """The keyword arguments of the operators."""
        return self._asdict()


class Packed(NamedTuple):
    """Running sums of queries and keys, int32 ``[sequences + 1]``, and bounds on their lengths."""

    q_sums: Any
    k_sums: Any
    q_bound: int
    k_bound: int


def options_of(causal: bool, scaling: Any, dropout: float, sliding_window: Any, softcap: Any, s_aux: Any) -> Options:
    """The options of a call.

    Raises:
        UsageError: dropout, or a window of attention that is not causal.
    """
    if dropout:
        raise UsageError(f"dropout={dropout}: no kernel here drops anything; expected 0.0, as in eval()")
    window = (-1, -1)
    if sliding_window is not None:
        if not causal:
            raise UsageError(
                f"sliding_window={sliding_window}: the layer is not causal, and models differ on what it means"
            )
        window = (int(sliding_window) - 1, 0)
    return Options(None if scaling is None else float(scaling), causal, window, float(softcap or 0.0), s_aux)


def check_window(pattern: int | None, sliding_window: Any) -> None:
    """Refuse a layer whose window is not that of its mask: of the two, transformers' own functions honour either one.

    Raises:
        UsageError: only one of them has a window.
    """
    if (pattern == WINDOW) != (sliding_window is not None):
        has = "has a sliding window" if pattern == WINDOW else "has none"
        raise UsageError(f"sliding_window={sliding_window}: the mask that the model asked for {has}; expected the same")


def check_window_without_mask(sliding_window: Any, packed: Packed | None, kv_len: int) -> None:
    """Refuse a layer with a window to which the model gave no mask: sdpa and eager take the window from the mask alone.

    Raises:
        UsageError: there are more keys than the window has, in rows that are not packed.
    """
    if sliding_window is not None and packed is None and kv_len > sliding_window:
        raise UsageError(
            f"attention_mask=None, sliding_window={sliding_window}: {kv_len} keys, and no mask that says which of them "
            "a query sees; expected a mask of this implementation"
        )


def causal_without_mask(module: Any, is_causal: Any, rows: int) -> bool:
    """Return whether a layer is causal to which the model gave no mask, with ``rows`` queries that it could matter to.

    Raises:
        UsageError: only the layer's attribute says that it is; transformers' own functions do not agree on that.
    """
    if is_causal is not None:
        return bool(is_causal)
    causal = bool(getattr(module, "is_causal", True))
    if causal and rows > 1:
        raise UsageError(
            f"attention_mask=None: {type(module).__name__} is causal, but its model asked for no mask, without which "
            "eager attends to every key; expected a mask of this implementation, or is_causal=True"
        )
    return causal


def packed_of(arguments: dict[str, Any], tokens: int) -> Packed | None:
    """Take what says that sequences are packed out of ``arguments``; ``max_length_*`` is ``max_seqlen_*``.

    Raises:
        UsageError: sums of queries or of keys alone.
    """
    if arguments.keys().isdisjoint(_PACKED):
        return None
    sums = [arguments.pop(name, None) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    bounds = [_either(arguments, f"max_length_{side}", f"max_seqlen_{side}") for side in ("q", "k")]
    if sums[0] is None and sums[1] is None:
        return None
    if sums[0] is None or sums[1] is None:
        raise UsageError("cu_seq_lens_q, cu_seq_lens_k: one of them; expected both")
    q_bound, k_bound = (tokens if bound is None else bound for bound in bounds)
    return Packed(sums[0], sums[1], q_bound, k_bound)


def check_rest(arguments: dict[str, Any]) -> None:
    """Refuse what is left of a call's arguments, if it could mean something.

    Raises:
        UsageError: an argument that is honoured nowhere, with a value; the message names it.
    """
    for name, value in arguments.items():
        if name in UNUSED or value is None or value is False:
            continue
        text = repr(value) if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"
        raise UsageError(f"{name}={text}: {REFUSED.get(name, 'attention here does not honour it')}")


def _either(arguments: dict[str, Any], name: str, other: str) -> Any:
    first, second = arguments.pop(name, None), arguments.pop(other, None)
    return second if first is None else first
