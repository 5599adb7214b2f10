"""The treatment by L2 of the keys, values and states that a kernel reads, and why; the build's flags say it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ...artifacts.tables.native_kernels import NativeKernel

NO_HINT = "no hint"
_WORDS = {"evict_unchanged": NO_HINT, "__ldcg": "no hint (`__ldcg`)", "__ldcs": "evict-first loads (`__ldcs`)"}
_NOT_MEASURED = "no other policy was measured for this kernel"
_MEASURED_SM = "90a"
_LOAD = "LOAD_FUNCTION"
# Flag of the build that chooses a policy -> by operation, why the flag's value was chosen, all in sequences of layers.
_REASONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "L2_POLICY": {
            "paged_decode": "each key is read once, and most decodes are slower without this hint",
            "paged_mla_decode": "one CTA reads a key, and 16 heads are up to 4% slower without this hint",
            "context_attention": "other row tiles read a key again, and prompts of 2,048 tokens are faster without one",
        },
        "GROUP_L2_POLICY": {
            "paged_mla_decode": "several CTAs read a key, and up to 64 requests are 1% to 3% faster without one",
        },
        _LOAD: {
            "append_kv": "new keys and values are read once, up to 4% faster than with evict-first loads",
            "merge_states": "states are read once, 2% to 11% faster than with evict-first loads",
        },
    }
)


class L2Choice(NamedTuple):
    """A policy in words, and why it was chosen."""

    policy: str
    reason: str


def l2_choice(kernel: NativeKernel, cta_group_size: int = 1) -> L2Choice | None:
    """The policy with which a kernel reads keys, values or states; None for a kernel that reads none.

    Args:
        kernel: of a native release.
        cta_group_size: how many CTAs of the launch read the same MLA keys.
    """
    if kernel.operation == "draft_mask":
        return None
    flags = dict(flag.removeprefix("-D").partition("=")[::2] for flag in kernel.flags)
    grouped = cta_group_size > 1 and "GROUP_L2_POLICY" in flags
    name = "GROUP_L2_POLICY" if grouped else next((name for name in ("L2_POLICY", _LOAD) if name in flags), "")
    if not name:
        return L2Choice(NO_HINT, _NOT_MEASURED)
    reason = _REASONS[name].get(kernel.operation, _NOT_MEASURED)
    if kernel.sm != _MEASURED_SM and reason is not _NOT_MEASURED:
        reason += f", as measured with kernels for SM{_MEASURED_SM}"
    return L2Choice(_WORDS.get(flags[name], flags[name]), reason)
