"""Device models from published data, to plan for a GPU that is not present."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...errors import UsageError
from ...launch.driver import DeviceFacts
from ...values import dataclass


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    multiprocessors: int
    shared_kib: int  # a multiprocessor's; one block gets 1 KiB less (CUDA programming guide, technical specifications)
    l2_mib: int


# By compute capability times ten; a product that has it, where several do.
_MODELS: Mapping[int, _Model] = MappingProxyType(
    {
        80: _Model("A100", 108, 164, 40),
        86: _Model("A40", 84, 100, 6),
        87: _Model("Orin", 16, 164, 4),
        89: _Model("L40S", 142, 100, 96),
        90: _Model("H200", 132, 228, 50),
        100: _Model("B200", 148, 228, 126),
        103: _Model("B300", 148, 228, 126),
        120: _Model("RTX PRO 6000", 188, 100, 128),
        121: _Model("GB10", 48, 100, 24),
    }
)


# GPUs by the name that a caller may use -> compute capability times ten; an H100 has its own costs.
_NAMED: Mapping[str, int] = MappingProxyType({**{model.name: sm for sm, model in _MODELS.items()}, "H100": 90})


def device_named(name: str) -> DeviceFacts:
    """The device of a name such as ``"H200"``, ``"NVIDIA H100"`` or ``"b200"``.

    Raises:
        UsageError: no such device is described; the message lists those that are.
    """
    lower = name.lower().removeprefix("nvidia ").strip()
    gpu = next((name_of_gpu for name_of_gpu in _NAMED if name_of_gpu.lower() == lower), None)
    if gpu is None:
        raise UsageError(
            f"expected DeviceFacts or one of {', '.join(sorted(_NAMED))}", argument="device_facts", value=repr(name)
        )
    return describe_device(_NAMED[gpu], name=f"NVIDIA {gpu}")


def describe_device(sm: int, multiprocessors: int | None = None, name: str | None = None) -> DeviceFacts:
    """A device of compute capability ``sm / 10``, with its model's name and multiprocessors where none are given.

    Raises:
        UsageError: nothing is known of that capability, or there is no multiprocessor.
    """
    model = _MODELS.get(sm)
    if model is None:
        raise UsageError(f"--sm {sm}: expected one of {', '.join(map(str, _MODELS))}")
    count = model.multiprocessors if multiprocessors is None else multiprocessors
    if count < 1:
        raise UsageError(f"--sms {count}: expected at least 1")
    return DeviceFacts(
        ordinal=0,
        name=name or model.name,
        capability=divmod(sm, 10),
        multiprocessors=count,
        shared_bytes_per_block_optin=(model.shared_kib - 1) << 10,
        shared_bytes_per_multiprocessor=model.shared_kib << 10,
        l2_bytes=model.l2_mib << 20,
        driver_version=13000,
    )
