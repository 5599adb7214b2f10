"""Completion of names in a shell: pinned releases and groups, their folders and files, and the values of filters."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from enum import Enum

from ..errors import CubinRuntimeError, UsageError

VARIABLE = "_CUBIN_RUNTIME_COMPLETE"
_LINE = "_TYPER_COMPLETE_ARGS"
_TYPED = {"bash": "COMP_WORDS", "zsh": _LINE, "fish": _LINE, "powershell": _LINE, "pwsh": _LINE}
DTYPES = ("bf16", "fp16", "e4m3", "e2m1", "int8")
FAMILIES = ("decode", "prefill", "fmha", "mla", "append", "merge", "native", "trtllm-gen")
SMS = ("80", "86", "89", "90", "100", "103", "120")
HEAD_DIMS = ("64", "128", "192", "256", "512", "576")


class Shell(str, Enum):
    """The shells that there is a completion script for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    POWERSHELL = "powershell"
    PWSH = "pwsh"


def script(shell: Shell) -> str:
    """The lines by which a shell asks this program for completions."""
    from typer._completion_shared import get_completion_script

    return get_completion_script(prog_name="cubin-runtime", complete_var=VARIABLE, shell=shell.value)


def prepare() -> None:
    """Let the parser answer a shell, if one asks by the variables that its script sets.

    Raises:
        UsageError: the variables have other values.
    """
    question = os.environ.get(VARIABLE)
    if not question:
        return
    verb, _, shell = question.partition("_")
    if verb != "complete" or shell not in _TYPED:
        raise UsageError(f"{VARIABLE}={question!r}: expected complete_SHELL with one of {', '.join(_TYPED)}")
    if not os.environ.get(_TYPED[shell], "").strip():
        raise UsageError(f"{VARIABLE}={question!r}: expected the words to complete in {_TYPED[shell]}")
    position = os.environ.get("COMP_CWORD", "")
    if shell == "bash" and not re.fullmatch("[0-9]{1,9}", position):
        raise UsageError(f"COMP_CWORD={position!r}: expected the position of a word")
    from typer._completion_classes import completion_init

    completion_init()


def targets(incomplete: str) -> list[str]:
    """Names of releases and groups; else the next part of artifact paths in releases whose manifest is local."""
    from ..artifacts.library import Library
    from ..config import Config

    with suppress(CubinRuntimeError):
        library = Library(Config.from_environment())
        names = {pin.name for pin in library.pins} | {group for pin in library.pins for group in pin.groups}
        if matches := sorted(name for name in names if name.startswith(incomplete)):
            return matches
        paths = {f"{pin.path}/" for pin in library.pins}
        for pin in library.pins:
            if incomplete.startswith(f"{pin.path}/"):
                with suppress(CubinRuntimeError):
                    paths |= {path.text for path in library.manifest(pin, network=False).digests}
        return sorted({_next_part(path, incomplete) for path in paths - {incomplete} if path.startswith(incomplete)})
    return []


def dtypes(incomplete: str) -> list[str]:
    """Element types of kernels."""
    return _starting(DTYPES, incomplete)


def families(incomplete: str) -> list[str]:
    """Families and uses of kernels."""
    return _starting(FAMILIES, incomplete)


def sms(incomplete: str) -> list[str]:
    """Numbers of devices."""
    return _starting(SMS, incomplete)


def head_dims(incomplete: str) -> list[str]:
    """Head dimensions of kernels."""
    return _starting(HEAD_DIMS, incomplete)


def tasks(incomplete: str) -> list[str]:
    """The values that ``doctor --require`` takes."""
    from .doctor_tasks import TASKS

    return _starting(TASKS, incomplete)


def _starting(words: tuple[str, ...], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]


def _next_part(path: str, incomplete: str) -> str:
    """A path up to its next slash after what was typed."""
    head, slash, _ = path[len(incomplete) :].partition("/")
    return incomplete + head + slash
