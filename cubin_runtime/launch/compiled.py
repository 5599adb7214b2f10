"""Functions generated as source at run time, because straight-line code costs a third of a loop over fields."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

GENERATED: Final = "<written "  # how the file names of generated functions begin


def compiled(name: str, source: str, scope: Mapping[str, Any]) -> Callable[..., Any]:
    """The function ``name`` of ``source``, whose free names are those of ``scope``.

    They become cells of a closure, which cost less than globals, and equal sources are compiled once. The function
    keeps all of the scope alive, also what its source does not name: memory that the driver reads, for instance.
    """
    body = "".join(f"    {line}\n" for line in source.splitlines())
    names: dict[str, Any] = {}
    exec(_code(f"def bind({', '.join(sorted(scope))}):\n{body}    return {name}\n"), names)
    # `found` are the globals of both: with the function in it, it would be a reference cycle.
    function: Callable[..., Any] = names.pop("bind")(**scope)
    vars(function)["scope"] = scope
    return function


@lru_cache(maxsize=1024)
def _code(source: str) -> Any:
    file = f"{GENERATED}{hash(source) & (1 << 64) - 1:#x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for tracebacks
    return compile(source, file, "exec")
