"""The unmodified loader of FlashInfer finds everything in a folder that ``export --layout flashinfer`` filled."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.cli import main

pytestmark = pytest.mark.release
LOADER = Path(__file__).with_name("flashinfer_loader.py")
MADE = ("include/flashInferMetaInfo.h", "first_sm100f.cubin", "second_sm103a.cubin")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CACHE", "SOURCES", "PINS", "PIN_KEYS", "OFFLINE"):
        monkeypatch.delenv(f"CUBIN_RUNTIME_{name}", raising=False)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    return tmp_path


def unpacked(wheel: Path, place: Path) -> Path:
    """The Python files of a FlashInfer wheel that its loader needs."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = re.compile(r"flashinfer/([a-z_]+\.py|jit/[a-z_]+\.py)")
        archive.extractall(place, [name for name in archive.namelist() if wanted.fullmatch(name)])
    return place


def load_all(package: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What FlashInfer's loader says of a folder, under the variables that we print."""
    capsys.readouterr()
    assert main(["flashinfer-env", str(out), "--json"]) == 0
    variables = json.loads(capsys.readouterr().out)["variables"]
    environment = {**os.environ, **variables, "FLASHINFER_CUDA_ARCH_LIST": "10.0a"}
    command = [sys.executable, str(LOADER), str(package)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["folder"] == str(out)
    found: dict[str, Any] = said["found"]
    return found


def test_the_loader_of_0_6_13_finds_the_published_kernels_of_one_gpu(
    home: Path, wheel: Path, flashinfer_wheel: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    named = flashinfer_wheel("0.6.13")
    out = home / "out"
    source = ["--source", str(wheel)]
    some = ["--sm", "103", "--dtype", "bf16", "--head-dim", "128", "--family", "decode"]
    families = ["--family", "gemm", "--family", "deep-gemm"]
    assert main(["pin", "--from-flashinfer", str(named)]) == 0
    for choice in ([*some], [*families]):
        assert main(["fetch", "flashinfer-0.6.13", *choice, *source]) == 0
        assert main(["export", "flashinfer-0.6.13", *choice, "--layout", "flashinfer", "--out", str(out)]) == 0
    found = load_all(unpacked(named, home / "package"), out, capsys)
    counts = {folder.split("/", 1)[1]: tuple(count.values()) for folder, count in found.items()}
    decode, *others = counts.pop("fmha/trtllm-gen/")
    assert (decode, sum(others)) == (13453, 13453)
    assert 500 < others[0] < 2000
    assert counts == {"gemm-91e0ba0-2710384/": (108, 108, 0), "deep-gemm/": (317, 317, 0)}
    # and again: what the loader left in the folder is in nobody's way
    assert main(["export", "flashinfer-0.6.13", *families, "--layout", "flashinfer", "--out", str(out)]) == 0


def test_the_loader_of_the_newest_version_finds_a_tree_of_its_layout(
    home: Path, flashinfer_wheel: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bytes are on no index: a made-up tree, and its list of artifacts with the digests replaced."""
    package = unpacked(flashinfer_wheel("0.7.2.post1"), home / "package")
    listed = package / "flashinfer" / "artifacts.py"
    listed.write_text(with_made_up_digests(listed.read_text(), home / "tree"))
    named = home / "flashinfer_python-0.7.2.post1-py3-none-any.whl"
    with zipfile.ZipFile(named, "w") as archive:
        archive.write(listed, "flashinfer/artifacts.py")
    out = home / "out"
    assert main(["pin", "--from-flashinfer", str(named)]) == 3  # the release of FMHA is built in, with the real digest
    pins = home / "home" / "cubin-runtime" / "pins.toml"
    assert not pins.exists()
    listed.write_text(listed.read_text().replace("/fmha/trtllm-gen/", "/fmha/made-up/"))
    (home / "tree" / FMHA).rename(home / "tree" / FMHA.replace("trtllm-gen", "made-up"))
    with zipfile.ZipFile(named, "w") as archive:
        archive.write(listed, "flashinfer/artifacts.py")
    assert main(["pin", "--from-flashinfer", str(named)]) == 0
    group = "flashinfer-0.7.2.post1"
    assert main(["fetch", group, "--source", str(home / "tree")]) == 0
    assert main(["export", group, "--layout", "flashinfer", "--out", str(out)]) == 0
    found = load_all(package, out, capsys)
    assert len(found) == 4 + 2 * 4  # FMHA, batched GEMM, GEMM, DeepGEMM; CuTe DSL of two CPUs and four SMs
    assert {tuple(count.values()) for count in found.values()} == {(3, 3, 0)}


FMHA = "2d6a5a029eefcc388ec0ceb87efb55d8bcce5c3c/fmha/trtllm-gen"


def with_made_up_digests(text: str, tree: Path) -> str:
    """FlashInfer's list with the digests of a tree that is made here, family by family."""
    from cubin_runtime.artifacts.pins.flashinfer import parse_artifacts

    for pin in parse_artifacts(text.encode(), "0.7.2.post1", "wheel").pins:
        lines = []
        for name in MADE:
            file, data = tree / pin.path.text / name, f"{pin.path}/{name}".encode()
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            lines.append(f"{hashlib.sha256(data).hexdigest()}  {name}\n")
        manifest = "".join(lines).encode()
        (tree / pin.path.text / "checksums.txt").write_bytes(manifest)
        text = text.replace(pin.manifest_sha256, hashlib.sha256(manifest).hexdigest())
    return text
