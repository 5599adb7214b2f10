"""Comparison of a release's metadata with its cubins, fact by fact."""

from __future__ import annotations

from ...values import dataclass
from ..cubins.architecture import Architecture
from ..cubins.cubin import Cubin, kernel_code
from .metadata import KernelMeta
from .native_kernels import NativeKernel

SMEM_SIZE_SUFFIX = "GetSmemSize"
# Size of the one parameter of every trtllm-gen FMHA kernel (flashinfer-cubin 0.6.13).
TRTLLM_PARAMETER_BYTES = 1280


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One fact on which the metadata and the binary differ."""

    fact: str
    metadata: str
    cubin: str

    def __str__(self) -> str:
        return f"{self.fact}: the metadata says {self.metadata}, the cubin {self.cubin}"


def resolve_architecture(cubin: Cubin, declared: Architecture) -> Architecture:
    """The target to compare a device with: the binary's own, or the declared one where it states no suffix.

    A binary without a suffix whose number is not the declared one keeps its unknown suffix, which runs
    nowhere.
    """
    actual = cubin.architecture
    return declared if actual.suffix is None and actual.number == declared.number else actual


def trtllm_disagreements(
    meta: KernelMeta, data: bytes, cubin: Cubin, *, manifest_sha256: str, parameter_bytes: int
) -> tuple[Disagreement, ...]:
    """Compare a cubin of a trtllm-gen release with its row; empty when all facts agree.

    The ELF has no field for dynamic shared memory: it agrees when the row's value occurs exactly once as an
    aligned 32-bit word in the code of ``<symbol>GetSmemSize``, the kernel that reports it.

    Args:
        meta: the release's row.
        data: the verified bytes of its cubin.
        cubin: what ``parse_cubin`` returned for them.
        manifest_sha256: the digest that the manifest lists.
        parameter_bytes: size of the one parameter that the release's launcher passes.
    """
    disagreements: list[Disagreement] = []

    def compare(fact: str, metadata: object, binary: object) -> None:
        if metadata != binary:
            disagreements.append(Disagreement(fact, str(metadata), str(binary)))

    compare("digest in the manifest", meta.sha256, manifest_sha256)
    compare("digest", meta.sha256, cubin.sha256)
    compare("architecture", str(meta.architecture), str(resolve_architecture(cubin, meta.architecture)))
    reporter = meta.symbol + SMEM_SIZE_SUFFIX
    compare("kernels", sorted((meta.symbol, reporter)), sorted(cubin.kernels))
    if meta.symbol in cubin.kernels:
        facts = cubin.kernels[meta.symbol]
        compare("parameter sizes", [parameter_bytes], [p.size for p in facts.parameters])
        compare("threads", meta.threads, facts.max_threads)
    if reporter in cubin.kernels:
        compare("parameter sizes of GetSmemSize", [8], [p.size for p in cubin.kernels[reporter].parameters])
        words = memoryview(_whole_words(kernel_code(data, reporter))).cast("I")
        count = sum(word == meta.shared_bytes for word in words)
        compare(f"occurrences of {meta.shared_bytes} in GetSmemSize", 1, count)
    return tuple(disagreements)


def native_disagreements(kernel: NativeKernel, cubin: Cubin, *, manifest_sha256: str) -> tuple[Disagreement, ...]:
    """Compare a native cubin with its entry of ``kernels.json``; empty when all facts agree."""
    disagreements: list[Disagreement] = []

    def compare(fact: str, metadata: object, binary: object) -> None:
        if metadata != binary:
            disagreements.append(Disagreement(fact, str(metadata), str(binary)))

    compare("digest in the manifest", manifest_sha256, cubin.sha256)
    compare("architecture", str(kernel.architecture), str(resolve_architecture(cubin, kernel.architecture)))
    facts = cubin.kernels.get(kernel.symbol)
    if facts is None:
        compare("symbol", kernel.symbol, ", ".join(cubin.kernels) or "none")
        return tuple(disagreements)
    compare("parameter sizes", [kernel.struct_bytes], [p.size for p in facts.parameters])
    compare("registers", kernel.registers, facts.registers)
    if facts.max_threads is not None and kernel.threads > facts.max_threads:
        compare("threads", kernel.threads, f"at most {facts.max_threads}")
    return tuple(disagreements)


def _whole_words(code: bytes) -> bytes:
    return code[: len(code) // 4 * 4]
