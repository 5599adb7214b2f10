"""The ABI gate: a kernel is launched only if its parameters, block size and architecture are proven to fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..artifacts.cubins.architecture import Architecture
from ..errors import AbiError
from .driver import DeviceFacts
from .structs import StructLayout

if TYPE_CHECKING:
    from ..artifacts.cubins.cubin import Cubin, KernelFacts


class LaunchNeeds(NamedTuple):
    """The requirements of a launch on a kernel.

    ``layout`` is the struct passed by value as the only parameter, ``threads`` a block's size,
    ``fingerprint`` the one recorded for the release (None: only the size is compared),
    ``dynamic_shared_bytes`` what a block asks for beyond static shared memory,
    ``nonportable_cluster`` whether clusters of more than 8 blocks are launched,
    ``declared`` the architecture in the release's metadata, for cubins that do not state it themselves.
    """

    layout: StructLayout
    threads: int
    fingerprint: str | None = None
    dynamic_shared_bytes: int = 0
    declared: Architecture | None = None
    nonportable_cluster: bool = False


def check_launchable(cubin: Cubin, symbol: str, needs: LaunchNeeds, device: DeviceFacts) -> KernelFacts:
    """Compare a launch with what the cubin states, and return the facts of the kernel.

    Raises:
        AbiError: a mismatch; the message gives both sides.
    """
    facts = cubin.kernels.get(symbol)
    if facts is None:
        raise AbiError(f"kernel {symbol!r}: the cubin holds {', '.join(cubin.kernels) or 'no kernel'}")
    check_architecture(effective_architecture(cubin.architecture, needs.declared), device)
    if needs.fingerprint is not None:
        check_fingerprint(needs.layout, needs.layout.size, needs.fingerprint)
    check_parameters(symbol, needs.layout, tuple(p.size for p in facts.parameters), "its ELF")
    if facts.max_threads is not None:
        check_threads(symbol, needs.threads, facts.max_threads, "its ELF")
    if needs.dynamic_shared_bytes > device.shared_bytes_per_block_optin:
        raise AbiError(
            f"kernel {symbol!r}: needs {needs.dynamic_shared_bytes} bytes of dynamic shared memory per block, "
            f"device {device.name} gives at most {device.shared_bytes_per_block_optin}"
        )
    return facts


def effective_architecture(actual: Architecture, declared: Architecture | None) -> Architecture:
    """The cubin's own architecture; where its suffix is unknown, the declared one of the same number.

    Raises:
        AbiError: the two contradict each other, or nothing states the suffix.
    """
    if actual.suffix is None:
        if declared is None or declared.suffix is None:
            raise AbiError(f"architecture {actual}: neither the cubin nor its metadata states the suffix")
        # A family cubin such as sm_100f carries the plain number, so the numbers must still agree.
        if declared.number != actual.number:
            raise AbiError(f"architecture: the cubin says {actual}, its metadata declares {declared}")
        return Architecture(declared.number, declared.suffix, declared=True)
    if declared is not None and not actual.same_target(declared):
        raise AbiError(f"architecture: the cubin says {actual}, its metadata declares {declared}")
    return actual


def check_architecture(architecture: Architecture, device: DeviceFacts) -> None:
    """Raise ``AbiError`` unless a kernel built for ``architecture`` runs on ``device``."""
    major, minor = device.capability
    if not architecture.runs_on(device.sm_number):
        label = " (declared)" if architecture.declared else ""
        raise AbiError(
            f"architecture: the kernel is built for {architecture}{label}, "
            f"device {device.ordinal} ({device.name}) is {major}.{minor}"
        )


def check_parameters(symbol: str, layout: StructLayout, sizes: tuple[int, ...], source: str) -> None:
    """Raise ``AbiError`` unless the kernel takes exactly one parameter of the struct's size."""
    if sizes != (layout.size,):
        size_text = f"one of {sizes[0]} bytes" if len(sizes) == 1 else f"{len(sizes)} of {list(sizes)} bytes"
        raise AbiError(
            f"kernel {symbol!r}: struct {layout.name} has {layout.size} bytes; "
            f"according to {source}, the kernel takes {size_text if sizes else 'no parameter'}"
        )


def check_threads(symbol: str, threads: int, limit: int, source: str) -> None:
    """Raise ``AbiError`` if a block of ``threads`` is more than the kernel was built for."""
    if not 1 <= threads <= limit:
        raise AbiError(f"kernel {symbol!r}: a block of {threads} threads; according to {source}, at most {limit}")


def check_fingerprint(layout: StructLayout, size: int, fingerprint: str) -> None:
    """Raise ``AbiError`` unless ``layout`` has the size and the fingerprint recorded for a release."""
    if (layout.size, layout.fingerprint) != (size, fingerprint):
        raise AbiError(
            f"struct {layout.name}: declared with {layout.size} bytes, "
            f"fingerprint {layout.fingerprint[:16]}; "
            f"the release was recorded with {size} bytes, fingerprint {fingerprint[:16]}"
        )
