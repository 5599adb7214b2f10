"""Unpack the Python files of vLLM and SGLang, and what they import, into a folder, for the tests of the plug-ins.

    python tools/stage_engines.py --into build/engines

``FOLDER/vllm``, ``FOLDER/sglang`` and ``FOLDER/site`` then go on PYTHONPATH (``make test-engines``); compiled parts of
the engines are left out. 600 MB come from the package index. Nothing of this belongs into this repository.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ENGINES = {"vllm": "0.33.0", "sglang": "0.5.23"}
# Imported with the engines' base classes; without their own requirements, which bring GPU packages.
NEEDED = (
    *("aiohappyeyeballs", "aiohttp", "aiosignal", "annotated-types", "attrs", "blake3", "cachetools", "cbor2"),
    *("cloudpickle", "compressed-tensors", "depyf", "dill", "distro", "einops", "fastapi", "frozenlist", "gguf"),
    *("ipython", "jiter", "llvmlite", "msgspec", "multidict", "ninja", "numba", "openai", "orjson"),
    *("partial-json-parser", "pillow", "prometheus-client", "propcache", "protobuf", "py-cpuinfo", "pybase64"),
    *("pydantic", "pydantic-core", "python-json-logger", "pyzmq", "sentencepiece", "setproctitle", "sniffio"),
    *("starlette", "tiktoken", "traitlets", "triton", "typing-inspection", "yarl"),
)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet")


def main() -> None:
    """Fill the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    into = parser.parse_args().into
    site = into / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--upgrade", "--target", str(site), *NEEDED], check=True)
    for name, version in ENGINES.items():
        with tempfile.TemporaryDirectory() as wheels:
            asked = [*PIP, "download", "--no-deps", "--only-binary=:all:", "--dest", wheels, f"{name}=={version}"]
            subprocess.run(asked, check=True)
            (wheel,) = Path(wheels).glob("*.whl")
            unpack(wheel, into / name)
        print(f"{into / name}: {name} {version}")


def unpack(wheel: Path, into: Path) -> None:
    """Unpack a wheel without its compiled parts."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(into, [name for name in opened.namelist() if not name.endswith((".so", ".a"))])


if __name__ == "__main__":
    main()
