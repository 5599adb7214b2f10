"""No verb has more than 256 MiB in memory, but for a file of over 128 MiB, which adds its size once."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from cubin_runtime.artifacts.manifest import MAX_MANIFEST_BYTES
from cubin_runtime.artifacts.pins.pin import format_pin
from tests.artifacts.children import PACKAGE_ROOT
from tests.artifacts.releases import make_release, zip_tree
from tests.artifacts.serving import resumable, serving

LARGEST = 256 << 20
# not ru_maxrss, which a child inherits from the process that started it
RUN = """
import sys
from cubin_runtime.cli import main
code = main(sys.argv[1:])
with open("/proc/self/status") as file:
    peak = next(line.split()[1] for line in file if line.startswith("VmHWM"))
sys.stderr.write(f"\\n{peak}")
sys.exit(code)
"""


def peak(*words: object) -> tuple[int, int]:
    """Exit code of a verb and the most memory that its process had, in bytes."""
    command = [sys.executable, "-c", RUN, *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=300)
    return done.returncode, int(done.stderr.split()[-1]) * 1024


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tree with nothing but the largest manifest, and its pin."""
    place = tmp_path_factory.mktemp("wide")
    folder = place / "tree" / "wide-1" / "fmha"
    folder.mkdir(parents=True)
    count = MAX_MANIFEST_BYTES // 81
    lines = (f"{hashlib.sha256(b'%d' % n).hexdigest()}  k{n:07}.cubin" for n in range(count))
    manifest = "\n".join(lines).encode() + b"\n"
    assert 0.98 * MAX_MANIFEST_BYTES < len(manifest) <= MAX_MANIFEST_BYTES
    (folder / "checksums.txt").write_bytes(manifest)
    pins = place / "pins.toml"
    pins.write_text(
        f'[[pin]]\nname = "wide-1"\npath = "wide-1/fmha"\nfiles = {count}\nbytes = 0\nmax_file_bytes = 1000\n'
        f'manifest_sha256 = "{hashlib.sha256(manifest).hexdigest()}"\nlicence = "MIT"\nsources = []\n'
    )
    return place / "tree", pins


@pytest.mark.parametrize(
    "words",
    [
        ("fetch", "wide-1", "--dry-run"),
        ("list", "wide-1", "--json"),
        ("verify", "wide-1", "--complete", "--json"),
        ("diff", "wide-1", "hopper-0.1.0", "--json"),
        ("gc", "wide-1"),
        ("where", "k0000001"),
    ],
)
def test_the_largest_manifest_fits(environment: Path, wide: tuple[Path, Path], words: tuple[str, ...]) -> None:
    tree, pins = wide
    code, most = peak(*words, "--pins", pins, "--source", tree)
    assert code in (0, 4, 7)
    assert most < LARGEST


def test_two_of_the_largest_manifests_fit(environment: Path, wide: tuple[Path, Path]) -> None:
    tree, pins = wide
    data = (tree / "wide-1" / "fmha" / "checksums.txt").read_bytes()
    other = b"".join(line[63::-1] + line[64:] for line in data.splitlines(keepends=True))
    place = environment / "tree" / "wide-2" / "fmha"
    place.mkdir(parents=True)
    (place / "checksums.txt").write_bytes(other)
    table = pins.read_text().replace("wide-1", "wide-2")
    digests = (hashlib.sha256(one).hexdigest() for one in (data, other))
    (environment / "other.toml").write_text(table.replace(*digests))
    sources = ("--source", tree, "--source", environment / "tree")
    named = ("--pins", pins, "--pins", environment / "other.toml", *sources)
    code, most = peak("diff", "wide-1", "wide-2", "--json", *named)
    assert (code, most < LARGEST) == (0, True)


def test_pinning_the_largest_manifest_fits(environment: Path, wide: tuple[Path, Path]) -> None:
    code, most = peak("pin", "wide-1/fmha", "--source", wide[0])
    assert (code, most < LARGEST) == (3, True)


def test_the_largest_files_fit_whatever_the_jobs(environment: Path) -> None:
    size = 64 << 20
    made = make_release(environment, {f"k{n}.bin": bytes([n]) * size for n in range(3)})
    pins = environment / "large.toml"
    pins.write_text(format_pin(replace(made.pin, max_file_bytes=size)))
    with serving(made.root) as server:
        fetched = peak("fetch", "made-1.0", "--pins", pins, "--source", server.url, "--jobs", "8")
    named = ("made-1.0", "--pins", pins)
    exported = peak("export", *named, "--out", environment / "x.zip")
    found = [fetched, exported, peak("verify", *named), peak("mirror", *named, "--out", environment / "mirror")]
    assert [code for code, _ in found] == [0, 0, 0, 0]
    assert max(most for _, most in found) < LARGEST


@pytest.mark.parametrize(("words", "expected"), [((), 0), (("--complete", "--json"), 4)])
def test_a_tree_of_the_largest_manifest_is_verified(
    environment: Path, wide: tuple[Path, Path], words: tuple[str, ...], expected: int
) -> None:
    code, most = peak("verify", "wide-1", "--tree", wide[0], "--pins", wide[1], *words)
    assert (code, most < LARGEST) == (expected, True)


@pytest.mark.parametrize("jobs", [8, 32])
def test_bodies_that_a_server_breaks_off_are_not_kept(environment: Path, jobs: int) -> None:
    size = 24 << 20
    made = make_release(environment, {f"k{n}.bin": bytes([n]) * size for n in range(12)})
    with serving(made.root) as server:
        server.fault(".bin", resumable(breaks_after=size - 1))
        named = ("--pins", made.pin_file, "--source", server.url, "--jobs", jobs, "--retries", 0)
        code, most = peak("fetch", "made-1.0", *named)
    assert (code, most < LARGEST) == (7, True)


def test_small_bodies_of_many_jobs_fit(environment: Path) -> None:
    size = 8 << 20
    made = make_release(environment, {f"k{n}.bin": bytes([n]) * size for n in range(40)})
    with serving(made.root) as server:
        code, most = peak("fetch", "made-1.0", "--pins", made.pin_file, "--source", server.url, "--jobs", 64)
    assert (code, most < LARGEST) == (0, True)


@pytest.mark.parametrize(("size", "allowed"), [(128 << 20, LARGEST), (200 << 20, LARGEST + (200 << 20))])
def test_a_file_is_in_memory_once(environment: Path, size: int, allowed: int) -> None:
    made = make_release(environment, {"large.bin": random.Random(1).randbytes(1 << 20) * (size >> 20)})
    archive = zip_tree(made.root, environment / "large.zip")
    named = ("made-1.0", "--pins", made.pin_file)
    with serving(made.root) as server:
        found = [peak("fetch", *named, "--source", server.url)]
    found += [
        peak("verify", *named),
        peak("verify", *named, "--tree", archive),
        peak("fetch", *named, "--store", environment / "other", "--source", archive),
        peak("export", *named, "--out", environment / "x.zip", "--compress"),
        peak("mirror", *named, "--out", environment / "mirror"),
    ]
    assert [code for code, _ in found] == [0] * len(found)
    assert max(most for _, most in found) < allowed


def test_a_zip_of_as_many_files_as_a_manifest_lists_is_read(environment: Path) -> None:
    count = MAX_MANIFEST_BYTES // 81
    lines = f"{hashlib.sha256(b'x').hexdigest()}  k%07d.cubin\n"
    manifest = "".join(lines % n for n in range(count)).encode()
    pins = environment / "same.toml"
    pins.write_text(
        f'[[pin]]\nname = "same-1"\npath = "same-1/fmha"\nfiles = {count}\nbytes = 0\nmax_file_bytes = 1000\n'
        f'manifest_sha256 = "{hashlib.sha256(manifest).hexdigest()}"\nlicence = "MIT"\nsources = []\n'
    )
    with zipfile.ZipFile(environment / "same.zip", "w") as archive:
        archive.writestr("same-1/fmha/checksums.txt", manifest)
        for n in range(count):
            archive.writestr(f"same-1/fmha/k{n:07}.cubin", b"x")
    code, most = peak("verify", "same-1", "--pins", pins, "--tree", environment / "same.zip")
    assert (code, most < LARGEST) == (0, True)
