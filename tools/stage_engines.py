"""Unpack the Python files of vLLM and SGLang, and what they import, into a folder, for the tests of the plug-ins.

    python tools/stage_engines.py --into build/engines

The oldest, a middle and the newest version that the plug-ins take: ``FOLDER/NAME-VERSION`` and ``FOLDER/site`` then go
on PYTHONPATH (``make test-engines``). Compiled parts are left out. 1.3 GB come from the package index. Nothing of this
belongs into this repository.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ENGINES = {"vllm": ("0.26.0", "0.29.0", "0.33.0"), "sglang": ("0.5.16", "0.5.19", "0.5.23")}
# Imported with the engines' base classes, in versions that work together; without the engines' own requirements, which
# bring GPU packages.
NEEDED = (
    *("aiohappyeyeballs==2.7.1", "aiohttp==3.14.5", "aiosignal==1.4.0", "annotated-types==0.8.0", "attrs==26.1.0"),
    *("blake3==1.0.11", "cachetools==8.0.1", "cbor2==6.3.0", "cloudpickle==3.1.2", "compressed-tensors==0.20.0"),
    *("depyf==0.20.0", "dill==0.4.1", "distro==1.9.0", "einops==0.8.2", "fastapi==0.165.0", "frozenlist==1.8.0"),
    *("gguf==0.19.0", "ipython==9.18.1", "jiter==0.19.0", "llvmlite==0.50.0", "msgspec==0.22.0"),
    *("multidict==7.2.1", "ninja==1.13.2", "numba==0.68.1", "openai==2.40.0", "orjson==3.13.0"),
    *("partial-json-parser==0.2.1.1.post7", "pillow==13.0.0", "prometheus-client==0.26.0", "propcache==0.5.4"),
    *("protobuf==7.36.2", "py-cpuinfo==9.0.0", "pybase64==1.5.1", "pydantic==2.14.3", "pydantic-core==2.50.4"),
    *("python-json-logger==4.2.0", "pyzmq==27.3.0", "sentencepiece==0.2.3", "setproctitle==1.3.8"),
    *("sniffio==1.3.1", "starlette==1.10.0", "tiktoken==0.14.0", "traitlets==5.16.1", "triton==3.9.0"),
    *("typing-inspection==0.4.5", "yarl==1.25.1"),
)
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet")


def main() -> None:
    """Fill the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    into = parser.parse_args().into
    site = into / "site"
    subprocess.run([*PIP, "install", "--no-deps", "--upgrade", "--target", str(site), *NEEDED], check=True)
    for named in (f"{name}=={version}" for name, versions in ENGINES.items() for version in versions):
        folder = into / named.replace("==", "-")
        with tempfile.TemporaryDirectory() as wheels:
            asked = [*PIP, "download", "--no-deps", "--only-binary=:all:", "--dest", wheels, named]
            subprocess.run(asked, check=True)
            (wheel,) = Path(wheels).glob("*.whl")
            unpack(wheel, folder)
        print(folder)


def unpack(wheel: Path, into: Path) -> None:
    """Unpack a wheel without its compiled parts; sources that an engine compiles later stay, which it looks for."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(into, [name for name in opened.namelist() if not name.endswith((".so", ".a"))])


if __name__ == "__main__":
    main()
