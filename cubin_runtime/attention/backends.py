"""The backend that runs an operator on a device: an explicit table, and errors that say what there is."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from ..errors import DeviceError, UsageError
from ..kernels.native.device_models import device_named
from ..launch.driver import DeviceFacts
from ..values import dataclass
from .user_frame import stacklevel_of_user

AUTO: Final = "auto"
NATIVE: Final = "native"
FORMER_NATIVE = "hopper"  # accepted with a warning until the next minor version
XQA = "xqa"  # the same kernels under FlashInfer's name
TRTLLM_GEN = "trtllm-gen"


class BackendError(DeviceError):
    """No backend supports the operator on this device; the message names the devices that have one."""


@dataclass(frozen=True, slots=True)
class Support:
    """Compute capabilities of one backend.

    ``measured``: a GPU run of this repository measured it there. ``published``: its publisher built it for them,
    and it is launched as the publisher's own launcher of that release does; not run by us. ``built``: built by us, not
    run.
    ``followed``: those of ``built`` on which FlashInfer's ``auto`` takes this backend, and ours does too.
    """

    measured: frozenset[tuple[int, int]] = frozenset()
    built: frozenset[tuple[int, int]] = frozenset()
    published: frozenset[tuple[int, int]] = frozenset()
    followed: frozenset[tuple[int, int]] = frozenset()

    @property
    def automatic(self) -> frozenset[tuple[int, int]]:
        """Compute capabilities on which ``auto`` selects it before all others, and without a warning."""
        return self.measured | self.published

    def __str__(self) -> str:
        parts = (("measured on", self.measured), ("published for", self.published), ("built for", self.built))
        return ", ".join(f"{words} {_list(where)}" for words, where in parts if where)


_HOPPER = frozenset({(9, 0)})
_SM12X = frozenset({(12, 0), (12, 1)})
_NATIVE_DECODE = Support(
    measured=_HOPPER,
    built=frozenset({(8, 0), (8, 6), (8, 9), (10, 0), (10, 3)}) | _SM12X,
)
_NATIVE_MLA = Support(measured=_HOPPER, built=_SM12X)  # there with e4m3 queries and caches alone
_FOLLOWED_MLA = Support(measured=_HOPPER, built=_SM12X, followed=_SM12X)
_NATIVE_PREFILL = _NATIVE_COPYING = Support(measured=_HOPPER)
_TRTLLM_GEN = {TRTLLM_GEN: Support(published=frozenset({(10, 0), (10, 3)}))}

# Operators that compute the same: an error names the others that run on the device.
_ALIKE = (
    ("paged_decode", "xqa", "xqa_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache"),
    ("mla_decode", "xqa_mla", "xqa_batch_decode_with_kv_cache_mla", "trtllm_batch_decode_with_kv_cache_mla"),
    ("context_attention", "trtllm_batch_context_with_kv_cache", "trtllm_ragged_attention_deepseek"),
)

# Operator -> backend -> where it runs. `auto` takes measured and published entries, then those where it follows.
TABLE: Mapping[str, Mapping[str, Support]] = {
    "paged_decode": {NATIVE: _NATIVE_DECODE},
    "mla_decode": {NATIVE: _NATIVE_MLA},
    "sparse_mla_decode": {NATIVE: _NATIVE_PREFILL},
    "context_attention": {NATIVE: _NATIVE_PREFILL},
    "append_kv": {NATIVE: _NATIVE_COPYING},
    "merge_states": {NATIVE: _NATIVE_COPYING},
    "draft_mask": {NATIVE: _NATIVE_DECODE},
    "xqa": {XQA: _NATIVE_DECODE},
    "xqa_mla": {XQA: _NATIVE_MLA},
    "xqa_batch_decode_with_kv_cache": {XQA: _NATIVE_DECODE},
    "xqa_batch_decode_with_kv_cache_mla": {XQA: _NATIVE_MLA},
    "trtllm_batch_decode_with_kv_cache": {XQA: _NATIVE_DECODE, **_TRTLLM_GEN},
    "trtllm_batch_decode_with_kv_cache_mla": {XQA: _FOLLOWED_MLA, **_TRTLLM_GEN},
    "trtllm_batch_context_with_kv_cache": {NATIVE: _NATIVE_PREFILL, **_TRTLLM_GEN},
    "trtllm_ragged_attention_deepseek": {NATIVE: _NATIVE_PREFILL, **_TRTLLM_GEN},
}


def resolve_backend(operator: str, backend: str, device: DeviceFacts) -> str:
    """The backend to use for ``backend`` (a name or ``auto``) on ``device``.

    A backend that was built for the device but never run there is taken with one warning, and by ``auto`` only where
    FlashInfer's does.

    Raises:
        UsageError: the backend's name is unknown.
        BackendError: it does not run there.
    """
    name = find_backend(operator, backend, device)
    if device.capability in TABLE[operator][name].built:
        words = f"{operator}: backend {name!r} was built for {_words(device)} but never run there"
        warnings.warn(words, stacklevel=stacklevel_of_user())
    return name


@lru_cache(maxsize=256)  # every first call of a form asks
def automatic_backend(operator: str, backend: str, capability: tuple[int, int]) -> str | None:
    """The backend for ``backend`` where it needs neither a warning nor an error; else None."""
    for name, support in TABLE[operator].items():
        if backend in (AUTO, name) and capability in support.automatic:
            return name
    return None


def check_device_facts(facts: Any) -> DeviceFacts | None:
    """The argument ``device_facts``, a name looked up; ``UsageError`` for anything but a described device or None."""
    if isinstance(facts, str):
        return device_named(facts)
    if facts is not None and not isinstance(facts, DeviceFacts):
        raise UsageError(
            f"got {type(facts).__name__}, expected DeviceFacts or a name such as 'H200'", argument="device_facts"
        )
    return facts


def find_backend(operator: str, backend: str, device: DeviceFacts) -> str:
    """As ``resolve_backend``, without the warning of a device: for an operator that hands over to another."""
    backends = TABLE[operator]
    if backend == FORMER_NATIVE and NATIVE in backends:
        words = f"backend={backend!r} is now called {NATIVE!r}; the next minor version refuses the old name"
        warnings.warn(words, DeprecationWarning, stacklevel=stacklevel_of_user())
        backend = NATIVE
    if backend != AUTO and backend not in backends:
        raise UsageError(f"expected {AUTO} or one of {', '.join(backends)}", argument="backend", value=repr(backend))
    if name := automatic_backend(operator, backend, device.capability):
        return name
    candidates = backends if backend == AUTO else {backend: backends[backend]}
    for name, support in candidates.items():
        if device.capability in support.built:
            if backend == AUTO and device.capability not in support.followed:
                raise BackendError(
                    f"{operator} on {_words(device)}: no backend has been measured on it{_instead(operator, device)}; "
                    f"backend {name!r} has kernels for it that have never been run"
                )
            return name
    everywhere = "; ".join(f"{name}: {support}" for name, support in candidates.items())
    where = f"{operator} on {_words(device)}"
    raise BackendError(f"{where}: no backend supports it ({everywhere}){_instead(operator, device)}")


def _instead(operator: str, device: DeviceFacts) -> str:
    """The operators and functions that compute the same and run on the device; empty if there is none."""
    here = [
        f"{other} (backend {name!r})"
        for alike in _ALIKE
        if operator in alike
        for other in alike
        for name, support in TABLE[other].items()
        if other != operator and device.capability in support.automatic
    ]
    where = " in cubin_runtime.compat.flashinfer" if any(TRTLLM_GEN in one for one in here) else ""
    return f"; there is {', '.join(here)}{where}" if here else ""


def _words(device: DeviceFacts) -> str:
    return f"{device.name} (compute capability {device.capability[0]}.{device.capability[1]})"


def _list(capabilities: frozenset[tuple[int, int]]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in sorted(capabilities))
