"""What the kernel release is made of (CycloneDX) and how it was built (in-toto, SLSA provenance), as JSON.

Both are derived from the release tree and the wheel alone, so that two builds of one commit state the same. They are
not signed: trust comes from the pin, which names the digest of ``checksums.txt``.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from cubin_runtime._version import KERNELS_VERSION
from cubin_runtime.artifacts.manifest import MANIFEST_NAME
from cubin_runtime.artifacts.tables.native_kernels import FILE_NAME

from .toolchain import PACKAGES

NAME = "cubin-runtime-kernels"


def write_statements(tree: Path, wheel: Path, out: Path, *, commit: str) -> tuple[Path, Path]:
    """Write ``NAME-VERSION.cdx.json`` and ``NAME-VERSION.intoto.json`` into a folder.

    Args:
        tree: the release's folder; ``wheel`` is the distribution that carries it.
        out: where the statements go.
        commit: the commit that was built, empty if it is not known.
    """
    stem = f"{NAME.replace('-', '_')}-{KERNELS_VERSION}"
    parts, origin = out / f"{stem}.cdx.json", out / f"{stem}.intoto.json"
    parts.write_text(json.dumps(bill_of_materials(tree), indent=1) + "\n")
    origin.write_text(json.dumps(provenance(tree, wheel, commit), indent=1) + "\n")
    return parts, origin


def bill_of_materials(tree: Path) -> dict[str, Any]:
    """The release's files with their digests, and the packages that compiled them."""
    lines = (tree / MANIFEST_NAME).read_text().splitlines()
    files = [
        {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": digest}]}
        for digest, _, name in (line.partition("  ") for line in lines)
    ]
    tools = [
        {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
        for name, version in PACKAGES.items()
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "tools": {"components": tools},
            "component": {
                "type": "library",
                "bom-ref": NAME,
                "name": NAME,
                "version": KERNELS_VERSION,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256", "content": _digest(tree / MANIFEST_NAME)}],
            },
        },
        "components": files,
        "dependencies": [{"ref": NAME, "dependsOn": []}],
    }


def provenance(tree: Path, wheel: Path, commit: str) -> dict[str, Any]:
    """Which sources and tools made the release and its wheel."""
    kernels = json.loads((tree / FILE_NAME).read_text())["kernels"]
    sources = sorted({(one["family"], one["sources_sha256"]) for one in kernels})
    tools = [{"uri": f"pkg:pypi/{name}@{version}"} for name, version in PACKAGES.items()]
    revision = [{"name": "cubin_runtime", "digest": {"gitCommit": commit}}] if commit else []
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": wheel.name, "digest": {"sha256": _digest(wheel)}},
            {"name": f"{tree.name}/{MANIFEST_NAME}", "digest": {"sha256": _digest(tree / MANIFEST_NAME)}},
        ],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "make dist",
                "externalParameters": {"release": tree.name},
                "internalParameters": {"sources": [{"family": name, "sha256": digest} for name, digest in sources]},
                "resolvedDependencies": [*revision, *tools],
            },
            "runDetails": {"builder": {"id": "make artifacts, reproducible from the commit"}},
        },
    }


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
