"""The ABIs that releases may have: which parameter structs the kernels of each one take."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from .._version import KERNELS_VERSION
from ..errors import AbiError
from ..launch.abi import check_fingerprint
from ..launch.structs import StructLayout

# A pin's `abi` -> the module whose LAYOUTS holds the structs of that ABI.
ABIS: Mapping[str, str] = {
    "trtllm-gen-0.6.13": "cubin_runtime.kernels.trtllm_gen.params",
    f"hopper-{KERNELS_VERSION}": "cubin_runtime.kernels.native.layouts",
}
# Recorded for releases whose metadata carries no fingerprint: ABI -> struct -> (size, fingerprint).
RECORDED: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "trtllm-gen-0.6.13": {
        "KernelParams": (1280, "1a49d46c2b7e2463458eb8c28df50506da0dc46f1b08db10b3eaff0f0b8d17b8"),
    },
}


def abi_layouts(abi: str | None) -> Mapping[str, StructLayout]:
    """The parameter structs of a release by the ``abi`` of its pin, by struct name.

    Raises:
        AbiError: the release names no ABI, or one that this version does not know: it cannot be launched.
    """
    if abi is None or abi not in ABIS:
        raise AbiError(f"abi {abi!r}: expected one of {', '.join(ABIS)}; a release without it is never launched")
    layouts: Mapping[str, StructLayout] = importlib.import_module(ABIS[abi]).LAYOUTS
    for name, (size, fingerprint) in RECORDED.get(abi, {}).items():
        check_fingerprint(layouts[name], size, fingerprint)
    return layouts
