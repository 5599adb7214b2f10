"""Options that verbs share, and the one place that combines flags with the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..config import Config, local_path
from ..process_memory import give_back_large_blocks
from . import completion
from .common_options import GIVEN, option


class Cpu(str, Enum):
    """The CPUs that FlashInfer has host code for."""

    X86_64 = "x86_64"
    AARCH64 = "aarch64"


Targets = Annotated[
    list[str],
    typer.Argument(
        metavar="PIN-or-PATH", help="Pinned releases, folders in them, or files.", autocompletion=completion.targets
    ),
]
StoreOption = Annotated[Path | None, option("--store", "Store to use (CUBIN_RUNTIME_CACHE).", "DIR")]
SourceOption = Annotated[
    list[str] | None,
    option("--source", "URL, directory, .zip, .whl or 'package'; repeat in order (CUBIN_RUNTIME_SOURCES).", "PLACE"),
]
PinsOption = Annotated[list[Path] | None, option("--pins", "A file of further pins (CUBIN_RUNTIME_PINS).", "FILE")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Never use the network (CUBIN_RUNTIME_OFFLINE=1).")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
SmOption = Annotated[
    str | None, option("--sm", "Only kernels for this SM, for example 100.", "SM", autocompletion=completion.sms)
]
FamilyOption = Annotated[
    list[str] | None,
    option(
        "--family",
        "Only this family (native, fmha, ...) or use (decode, prefill).",
        "NAME",
        autocompletion=completion.families,
    ),
]
DtypeOption = Annotated[
    list[str] | None,
    option(
        "--dtype",
        "Only kernels with this Q, K, V or output type, or for any type.",
        "TYPE",
        autocompletion=completion.dtypes,
    ),
]
HeadDimOption = Annotated[
    list[int] | None, option("--head-dim", "Only kernels with this head dimension, or for any.", "N")
]
MatchOption = Annotated[list[str] | None, option("--match", "Only files or symbols that match this glob.", "GLOB")]
CpuOption = Annotated[Cpu | None, option("--cpu", "In a group of releases, only those for this CPU or for any CPU.")]


def make_config(
    store: Path | None = None,
    sources: Sequence[str] | None = None,
    pins: Sequence[Path] | None = None,
    offline: bool = False,
) -> Config:
    """The configuration in force: flags beat the environment, which beats the defaults.

    Raises:
        UsageError: a flag or a variable is outside its domain.
    """
    give_back_large_blocks()  # here, as every verb that reads files passes by and no other needs it
    named = {} if store is None else {"CUBIN_RUNTIME_CACHE": str(local_path(store, "--store"))}
    config = Config.from_environment({**os.environ, **GIVEN.get(), **named})
    if sources:
        config = replace(config, sources=tuple(sources))
    if pins:
        config = replace(config, pin_files=(*config.pin_files, *(local_path(p, "--pins") for p in pins)))
    if offline:
        config = replace(config, offline=True, lazy_fetch=False)
    return config


def absent_source(sources: Sequence[str]) -> str | None:
    """The first folder or archive of some sources that is not there."""
    local = (text for text in sources if "://" not in text and text != "package")
    return next((text for text in local if not os.path.exists(text)), None)


def origin_of(variable: str, flag_given: bool, default: str = "default") -> str:
    """The origin of a setting: ``flag``, the environment variable's name, or ``default``."""
    return "flag" if flag_given or variable in GIVEN.get() else variable if os.environ.get(variable) else default
