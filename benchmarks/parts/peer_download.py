"""The peer: flashinfer-python's own ``download_artifacts`` for one release, and nothing else of it.

Run in an environment with flashinfer-python (``--no-deps``), filelock, requests and tqdm:
``python peer_download.py BASE_URL FOLDER RELEASE MANIFEST_SHA256``. Its package would import torch on the way; empty
modules stand for the packages above ``flashinfer.artifacts``, whose own code runs unchanged. Only its list of releases
is replaced by the one named, so that both sides fetch the same files. Prints seconds of the call alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import time
import types
from pathlib import Path


def main() -> None:
    """Import, cut, run, print."""
    url, folder, path, digest = sys.argv[1], Path(sys.argv[2]), f"{sys.argv[3]}/", sys.argv[4]
    os.environ["FLASHINFER_CUBINS_REPOSITORY"] = url + "/"
    artifacts = import_artifacts(folder)
    join = artifacts.safe_urljoin

    def only_attention() -> object:
        checksums = artifacts.get_checksums([path])
        yield join(path, "checksums.txt"), digest
        for name in artifacts.get_available_cubin_files(join(url, path)):
            yield join(path, name), checksums[join(path, name)]
        for name in artifacts.get_available_header_files(join(url, path)):
            yield join(path, name), checksums[join(path, name)]

    artifacts.get_subdir_file_list = only_attention
    began = time.perf_counter()
    artifacts.download_artifacts()
    print(time.perf_counter() - began)


def import_artifacts(folder: Path) -> types.ModuleType:
    """``flashinfer.artifacts`` with its cubin folder set, and torch never imported."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("flashinfer-python is not installed here")
    base = Path(next(iter(spec.submodule_search_locations)))
    _stand_in("flashinfer", base)
    _stand_in("flashinfer.jit", base / "jit")
    core = _stand_in("flashinfer.jit.core", None)
    core.logger = logging.getLogger("flashinfer.jit")
    core.logger.setLevel("INFO")
    core.logger.addHandler(logging.StreamHandler())
    environment = _stand_in("flashinfer.jit.env", None)
    environment.FLASHINFER_CUBIN_DIR = folder
    return importlib.import_module("flashinfer.artifacts")


def _stand_in(name: str, folder: Path | None) -> types.ModuleType:
    module = types.ModuleType(name)
    if folder is not None:
        module.__path__ = [str(folder)]
    sys.modules[name] = module
    return module


if __name__ == "__main__":
    main()
