"""A plug-in of SGLang that judges calls of our sparse MLA in its scheduler's process, see ``listed.py``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NAME, RESULT = "engine_listed", "ENGINE_LISTED_RESULT"


def install(folder: Path) -> Path:
    """Have the processes that SGLang starts load the plug-in; the file to which they write what they counted."""
    described = folder / "engine_listed-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-listed\nVersion: 1\n")
    (described / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{NAME} = {__name__}:register\n")
    sys.path.insert(0, str(folder))  # which spawned processes inherit, whatever PYTHONPATH says
    os.environ["SGLANG_PLUGINS"] = f"{os.environ['SGLANG_PLUGINS']},{NAME}"
    os.environ[RESULT] = str(folder / "counted.json")
    return folder / "counted.json"


def register() -> None:
    """Wrap the operator, before our backend imports it."""
    from cubin_runtime.attention.operators import sparse_mla_decode as operator

    from .listed import NOTHING, count

    inner, counted, result = operator.sparse_mla_decode, dict(NOTHING), Path(os.environ[RESULT])

    def judged(q: Any, kv_cache: Any, indices: Any, *given: Any, softmax_scale: float, out: Any, **named: Any) -> Any:
        made = inner(q, kv_cache, indices, *given, softmax_scale=softmax_scale, out=out, **named)
        count(counted, q, kv_cache, indices, softmax_scale, out)
        result.write_text(json.dumps(counted))
        return made

    operator.sparse_mla_decode = judged
