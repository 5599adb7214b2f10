"""FlashInfer's own loader against a filled folder, with every socket refused; run as a script of its own.

``python flashinfer_loader.py PACKAGE_ROOT``: the folder in which ``flashinfer/`` lies, unpacked from a wheel. The
variables of ``cubin-runtime flashinfer-env`` are in the environment. Empty modules stand for torch and for the
packages above FlashInfer's loader, which would import torch; ``flashinfer.jit.env``, ``flashinfer.jit.cubin_loader``
and ``flashinfer.artifacts`` are its own and run unchanged. Prints one JSON object.
"""

from __future__ import annotations

import importlib
import json
import logging
import socket
import sys
import types
from pathlib import Path


def main() -> None:
    root = Path(sys.argv[1]) / "flashinfer"
    socket.socket.connect = refuse  # type: ignore[method-assign]
    stand_in("torch", None)
    stand_in("flashinfer", root)
    stand_in("flashinfer.jit", root / "jit")
    stand_in("flashinfer.jit.core", None).logger = logging.getLogger("quiet")  # type: ignore[attr-defined]
    environment = importlib.import_module("flashinfer.jit.env")
    loader = importlib.import_module("flashinfer.jit.cubin_loader")
    artifacts = importlib.import_module("flashinfer.artifacts")
    folder = Path(environment.FLASHINFER_CUBIN_DIR)
    found: dict[str, dict[str, int]] = {}
    for manifest, digest in artifacts.CheckSumHash.map_checksums.items():
        if not (folder / manifest).exists():
            continue
        # what the JIT modules do first: the manifest by its digest, then files by the manifest's digests
        assert loader.get_artifact(manifest, digest), manifest
        subdir = manifest.removesuffix("checksums.txt")
        names = artifacts.get_checksums([subdir])
        counts = found[subdir] = {"listed": len(names), "loaded": 0, "refused": 0}
        for name, file_digest in names.items():
            path = name if name.startswith(subdir) else subdir + name  # 0.6.13 has the files' own names
            try:
                counts["loaded"] += bool(loader.get_artifact(path, file_digest))
            except RuntimeError as error:
                if "refusing to download" not in str(error):
                    raise
                counts["refused"] += 1
    print(json.dumps({"folder": str(folder), "found": found}))


def stand_in(name: str, folder: Path | None) -> types.ModuleType:
    module = types.ModuleType(name)
    if folder is not None:
        module.__path__ = [str(folder)]
    sys.modules[name] = module
    return module


def refuse(*_: object) -> None:
    raise AssertionError("FlashInfer asked the network")


if __name__ == "__main__":
    main()
