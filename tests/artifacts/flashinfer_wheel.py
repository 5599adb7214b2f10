"""A made-up flashinfer-python wheel and the tree of artifacts that it names, in the form of 0.6.13 and 0.7.2."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

FAMILIES = {
    "TRTLLM_GEN_FMHA": "aaa1/fmha/trtllm-gen/",
    "TRTLLM_GEN_BMM": "aaa2/batched_gemm-fdba669-16ba8ed/",
    "TRTLLM_GEN_GEMM": "aaa3/gemm-b738138-25754e6/",
    "DEEPGEMM": "aaa4/deep-gemm/",
}
DSL = "aaa5/fmha/cute-dsl/"
TARGETS = ("sm_100a", "sm_103a")
CPUS = ("x86_64", "aarch64")
FILES = {
    "TRTLLM_GEN_FMHA": ("include/flashInferMetaInfo.h", "fmhaSm100fKernel_Q.cubin", "fmhaSm103aKernel_Q.cubin"),
    "TRTLLM_GEN_BMM": ("include/flashinferMetaInfo.h", "Bmm_t128_sm100f.cubin", "Bmm_t128_sm103a.cubin"),
    "TRTLLM_GEN_GEMM": ("include/flashinferMetaInfo.h", "Gemm_t128_sm100f.cubin", "Gemm_t128_sm100a.cubin"),
    "DEEPGEMM": ("kernel.fp8_gemm.0074.cubin",),
}


def make_tree(root: Path) -> dict[str, str]:
    """Write every release; the digest of each manifest by its folder."""
    folders = {FAMILIES[name]: files for name, files in FILES.items()}
    folders |= {f"{DSL}{cpu}/{sm}/": (f"cute_dsl_{cpu}_{sm}.so",) for cpu in CPUS for sm in TARGETS}
    digests: dict[str, str] = {}
    for folder, files in folders.items():
        lines = []
        for name in files:
            data = f"{folder}{name}".encode() * 20
            (root / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (root / folder / name).write_bytes(data)
            lines.append(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
        manifest = "".join(lines).encode()
        (root / folder / "checksums.txt").write_bytes(manifest)
        digests[folder] = hashlib.sha256(manifest).hexdigest()
    return digests


def artifacts_text(digests: Mapping[str, str]) -> str:
    """A list of artifacts in FlashInfer's form, in which whatever is run would be noticed."""
    paths = "".join(f'    {name}: str = (\n        "{folder}"\n    )\n' for name, folder in FAMILIES.items())
    hashes = "".join(f'    {name}: str = "{digests[folder]}"\n' for name, folder in FAMILIES.items())
    dsl = {cpu: {sm: digests[f"{DSL}{cpu}/{sm}/"] for sm in TARGETS} for cpu in CPUS}
    return (
        'raise SystemExit("this must not be run")\n'
        f"class ArtifactPath:\n{paths}"
        '    CUDNN_SDPA: str = "aaa6/fmha/cudnn/"\n'
        f'    DSL_FMHA: str = "{DSL}"\n    DSL_FMHA_ARCHS: tuple[str, ...] = {TARGETS!r}\n\n'
        f"class CheckSumHash:\n{hashes}    DSL_FMHA_CHECKSUMS: dict[str, dict[str, str]] = {dsl!r}\n"
        "    map_checksums: dict[str, str] = {safe_urljoin(ArtifactPath.DEEPGEMM, 'checksums.txt'): DEEPGEMM}\n"
    )


def make_wheel(place: Path, text: str, version: str = "9.1.0") -> Path:
    """A wheel that holds nothing but that list."""
    file = place / f"flashinfer_python-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("flashinfer/artifacts.py", text)
    return file
