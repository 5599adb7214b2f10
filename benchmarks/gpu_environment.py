"""Where a GPU measurement finds our kernels, and what it ran on: device, driver, clocks, versions, date."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

_BUILT = Path(__file__).resolve().parents[1] / "build" / "artifacts"
_PACKAGES = ("cubin-runtime", "flashinfer-python", "torch", "transformers", "triton", "numpy", "vllm")
_QUERY = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


def built_sources() -> tuple[str, ...]:
    """The sources that ``CUBIN_RUNTIME_SOURCES`` names, else what ``make artifacts`` builds."""
    return tuple(os.environ.get("CUBIN_RUNTIME_SOURCES", str(_BUILT)).split())


def first_device() -> str:
    """What nvidia-smi calls the first device that this process sees."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]


def gpu_environment() -> dict[str, object]:
    """Facts of the first device, read from nvidia-smi now, and the versions of what takes part."""
    asked = subprocess.run(
        ["nvidia-smi", f"--id={first_device()}", f"--query-gpu={_QUERY}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    values = [value.strip() for value in asked.stdout.splitlines()[0].split(",")]
    return {
        "gpu": dict(zip(_QUERY.split(","), values, strict=True)),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str | None:
    if name == "cubin-runtime":
        from cubin_runtime import __version__

        return __version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
