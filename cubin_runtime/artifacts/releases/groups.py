"""Groups of releases under one name, narrowed by what their folder names state: family, CPU and SM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ...errors import UsageError
from ...values import dataclass
from ..cubins.architecture import Architecture
from ..path import ArtifactPath
from ..pins.pin import Pin
from ..tables.kernel_filter import KernelFilter

CPUS = ("x86_64", "aarch64")
_BUILD = re.compile(r"(-[0-9a-f]{7,40})+")
_SM = re.compile(r"sm_[0-9]{2,3}[af]?")
# family words that tell kernels of one release apart
_ROW_WORDS = frozenset({"context", "prefill", "generation", "decode", "paged"})
_WITHOUT_TARGETS = frozenset({"deep-gemm"})  # neither folder nor file names tell
_WITH_ROWS = "trtllm-gen"


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """The facts that the folder of a release tells of all its files."""

    families: frozenset[str]
    cpu: str | None
    target: Architecture | None


def folder_facts(folder: ArtifactPath) -> FolderFacts:
    """Facts of a folder such as ``HASH/fmha/cute-dsl/x86_64/sm_100a``.

    >>> sorted(folder_facts(ArtifactPath("8ee5/batched_gemm-fdba669-16ba8ed")).families)
    ['batched-gemm', 'batched_gemm']
    """
    words: set[str] = set()
    cpu = target = None
    for part in folder.parts[1:]:
        if part in CPUS:
            cpu = part
        elif _SM.fullmatch(part):
            target = Architecture.parse(part)
        else:
            word = _BUILD.sub("", part)
            words |= {word, word.replace("_", "-")}
    return FolderFacts(frozenset(words), cpu, target)


def narrowed(
    group: str, pins: Sequence[Pin], kernel_filter: KernelFilter, cpu: str | None
) -> list[tuple[Pin, KernelFilter]]:
    """The releases of a group that a filter asks for, and what is left to filter by inside each.

    Raises:
        UsageError: none is asked for.
    """
    groups: list[tuple[Pin, KernelFilter]] = []
    for pin in pins:
        facts = folder_facts(pin.path)
        left = _left(facts, kernel_filter)
        if left is not None and (cpu is None or facts.cpu in (None, cpu)):
            groups.append((pin, left))
    if not groups:
        words = sorted({word for pin in pins for word in folder_facts(pin.path).families})
        raise UsageError(f"{group}: no release of it matches the filters; its families are {', '.join(words)}")
    return groups


def _left(facts: FolderFacts, kernel_filter: KernelFilter) -> KernelFilter | None:
    """The filter without what holds for the whole release; None if it keeps nothing of it."""
    if facts.target is not None or facts.families & _WITHOUT_TARGETS:
        if kernel_filter.sm is not None and facts.target is not None and not facts.target.runs_on(kernel_filter.sm):
            return None
        kernel_filter = replace(kernel_filter, sm=None)
    if kernel_filter.families:
        if facts.families & set(kernel_filter.families):
            return replace(kernel_filter, families=())
        if _WITH_ROWS not in facts.families or not set(kernel_filter.families) <= _ROW_WORDS:
            return None
    return kernel_filter
