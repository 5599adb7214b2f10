"""A small release of our own making, used in place from a directory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cubin_runtime import cli

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDER = "small-1/fmha"
ENTRY = {
    "name": "block",
    "symbol": "empty",
    "file": "kernels/facts_sm_90a.cubin",
    "sm": "90a",
    "family": "fmha",
    "operation": "paged_decode",
    "traits": {"head_dim": 128, "dtype": "bf16"},
    "struct": "P",
    "struct_bytes": 0,
    "struct_fingerprint": "0" * 64,
    "threads": 96,
    "dynamic_shared_bytes": 4096,
    "static_shared_bytes": 0,
    "registers": 4,
    "spill_bytes": 0,
    "flags": [],
    "sources_sha256": "0" * 64,
    "status": "measured",
}


class SmallRelease:
    """A directory tree, the pin file that covers it, and a runner of the command line on both."""

    def __init__(self, root: Path, *entries: dict[str, object]) -> None:
        self.tree = root / "tree"
        self.folder = self.tree / FOLDER
        (self.folder / "kernels").mkdir(parents=True)
        self.files = {
            "kernels.json": json.dumps({"schema": 1, "release": "small", "kernels": list(entries)}).encode(),
            "kernels/facts_sm_90a.cubin": (FIXTURES / "facts_sm_90a.cubin").read_bytes(),
            "kernels/facts_sm_80.cubin": (FIXTURES / "facts_sm_80.cubin").read_bytes(),
        }
        for name, data in self.files.items():
            (self.folder / name).write_bytes(data)
        manifest = "".join(f"{self.digest(name)}  {name}\n" for name in self.files).encode()
        (self.folder / "checksums.txt").write_bytes(manifest)
        self.pins = root / "pins.toml"
        self.pins.write_text(
            f'[[pin]]\nname = "small"\npath = "{FOLDER}"\n'
            f'manifest_sha256 = "{hashlib.sha256(manifest).hexdigest()}"\nfiles = {len(self.files)}\n'
            f"bytes = {sum(map(len, self.files.values()))}\nmax_file_bytes = 65536\n"
            'licence = "Apache-2.0"\nsources = []\n'
        )
        self.arguments = [
            "--pins",
            str(self.pins),
            "--source",
            str(self.tree),
            "--store",
            str(root / "store"),
        ]

    def digest(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()

    def run(self, *arguments: str) -> int:
        return cli.main([*arguments, *self.arguments])
