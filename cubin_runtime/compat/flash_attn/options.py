"""Options of flash-attention's functions: what our operators take for them, and those that no operator supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from ...attention.checks import OptionCheck, check_options, integer, option_checks, shown
from ...attention.fast_path.operator_function import is_compiling
from ...errors import UsageError
from .tensors import in_float32

# Arguments that no kernel of ours honours, and what they are where a call leaves them out.
_REFUSED: Mapping[str, Any] = {
    **dict.fromkeys(("alibi_slopes", "qv", "q_descale"), None),
    **dict.fromkeys(("rotary_cos", "rotary_sin", "cache_leftpad"), None),
    "dropout_p": 0.0,
    "attention_chunk": 0,
    "sm_margin": 0,
}


class Options(NamedTuple):
    """The options that all functions have.

    ``names`` maps our operators' arguments to the caller's in errors; ``batch_invariant`` asks for bits that do not
    depend on how a token is computed: in a prompt, as a draft or in a step of its own. ``k_descale`` and ``v_descale``
    are the scales of e4m3 keys and values.
    """

    names: Mapping[str, str]
    softmax_scale: Any
    causal: bool
    window_size: Any
    softcap: float
    sinks: Any
    out: Any
    returns_lse: bool
    batch_invariant: bool
    k_descale: Any = None
    v_descale: Any = None

    @property
    def window(self) -> tuple[int, int]:
        """Keys before and behind its own position that a token sees; -1: all. ``causal`` leaves none behind it.

        Raises:
            UsageError: it is not a pair of integers.
        """
        if not isinstance(self.window_size, (tuple, list)) or len(self.window_size) != 2:
            raise UsageError("expected (left, right)", argument="window_size", value=shown(self.window_size))
        left, right = self.window_size
        if type(left) is int is type(right):
            return max(-1, left), -1 if self.causal else max(-1, right)
        return _side(left), -1 if self.causal else _side(right)


def _side(keys: Any) -> int:
    return -1 if keys is None else max(-1, integer("window_size", keys))


NAMES = {
    "q_cu_seq_lens": "cu_seqlens_q",
    "kv_cu_seq_lens": "cu_seqlens_k",
    "max_q_len": "max_seqlen_q",
    "max_seq_len": "max_seqlen_k",
    "logit_soft_cap": "softcap",
    "window_left": "window_size (left)",
    "window_right": "window_size (right)",
    "k_scale": "k_descale",
    "v_scale": "v_descale",
}


def check_kinds(function: Callable[..., Any], **options: Any) -> None:
    """Check the options of a call of ``function`` by its annotations: all that it annotates with a kind.

    Raises:
        UsageError: one is of another kind than declared.
    """
    if not is_compiling():  # torch cannot trace the checks; the operators' own come later
        check_options(_checks(function), options)


@cache
def _checks(function: Callable[..., Any]) -> tuple[OptionCheck, ...]:
    return option_checks(function.__annotations__)


def refuse(**arguments: Any) -> None:
    """Refuse arguments that no kernel honours, unless they are what they are by default.

    Raises:
        UsageError: another value; the message names the argument.
    """
    for name, value in arguments.items():
        default = _REFUSED[name]
        if value is None or (default is not None and isinstance(value, (int, float)) and value == default):
            continue
        raise UsageError(f"no kernel here honours it; expected {default!r}", argument=name, value=shown(value))


def one_of(first: str, one: Any, second: str, other: Any) -> tuple[str, Any]:
    """The one of two names of an argument that is given, with its value; raises ``UsageError`` if both are."""
    if one is not None and other is not None:
        raise UsageError(f"given with {first}, which is the same argument", argument=second)
    return (second, other) if other is not None else (first, one)


def sinks_of(s_aux: Any, learnable_sink: Any) -> tuple[str, Any]:
    """The sinks as float32, and the name that they came by."""
    name, sinks = one_of("s_aux", s_aux, "learnable_sink", learnable_sink)
    return name, None if sinks is None else in_float32(sinks)
