"""``make dist``: what a release consists of, the same bytes from the same commit; ``make release`` checks all of it.

Usage: dist.py [--out DIR] [--release | --problems] [--no-isolation]. Times in archives are ``SOURCE_DATE_EPOCH``, by
default the commit's. With ``PROJECT_URL=https://HOST/OWNER/NAME`` the distributions state the project's addresses, and
links of the README are absolute; without it the project has no address to state.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from cubin_runtime._version import KERNELS_VERSION, __version__  # noqa: E402
from kernels_src.packaging import build_wheel  # noqa: E402
from kernels_src.provenance import write_statements  # noqa: E402

TAG = f"v{__version__}"
EARLIEST = 315532800  # 1980, before which a zip has no times
PAGES = {"Documentation": "/blob/{tag}/docs/index.md", "Changelog": "/blob/{tag}/CHANGELOG.md", "Issues": "/issues"}


def git(*words: str) -> str:
    """What git prints; empty outside a clone."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def epoch() -> int:
    """The time that archives state for all files."""
    found = os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct") or EARLIEST
    return max(EARLIEST, int(found))


def staged(folder: Path, url: str) -> Path:
    """A copy of the tracked files, with the project's addresses where there are any."""
    listed = git("ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    names = listed or [str(file.relative_to(ROOT)) for file in ROOT.rglob("*") if file.is_file()]
    for name in names:
        if (ROOT / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
            target.chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)
    if url:
        readme, project = folder / "README.md", folder / "pyproject.toml"
        readme.write_text(absolute_links(readme.read_text(), url))
        project.write_text(project.read_text() + project_urls(url))
    return folder


def absolute_links(text: str, url: str) -> str:
    """The README with links into the repository at this version's tag; images are shown, other files are opened."""

    def absolute(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        return f"{mark}[{words}]({url}/{'raw' if mark else 'blob'}/{TAG}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, text)


def project_urls(url: str) -> str:
    """The table of the project's addresses."""
    lines = [f'{name} = "{url}{path.format(tag=TAG)}"' for name, path in {"Homepage": "", **PAGES}.items()]
    return "\n[project.urls]\n" + "\n".join(lines) + "\n"


def normalised(sdist: Path) -> None:
    """Rewrite a source archive with sorted members, one time, and no user."""
    members: list[tuple[tarfile.TarInfo, bytes]] = []
    with tarfile.open(sdist) as opened:
        for member in sorted(opened.getmembers(), key=lambda one: one.name):
            file = opened.extractfile(member) if member.isfile() else None
            clean = tarfile.TarInfo(member.name)
            clean.type, clean.mtime = member.type, epoch()
            clean.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            data = file.read() if file else b""
            clean.size = len(data)
            members.append((clean, data))
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as written:
        for clean, data in members:
            written.addfile(clean, io.BytesIO(data))
    with sdist.open("wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=epoch()) as packed:
        packed.write(plain.getvalue())


def build(*words: str | Path, isolated: bool) -> None:
    """Run ``python -m build``; what it prints is shown if it fails."""
    command = [sys.executable, "-m", "build", *(() if isolated else ("--no-isolation",)), *map(str, words)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed\n{done.stdout}{done.stderr}")


def build_package(out: Path, *, isolated: bool = True, url: str = "") -> None:
    """The package's sdist, and the wheel that is built from it."""
    sdist = build_sdist(out, isolated=isolated, url=url)
    with usual_permissions(), tempfile.TemporaryDirectory(prefix="dist-") as scratch:
        with tarfile.open(sdist) as opened:
            opened.extractall(scratch, filter="data")
        (tree,) = Path(scratch).iterdir()
        build("--wheel", "--outdir", out, tree, isolated=isolated)


def build_sdist(out: Path, *, isolated: bool = True, url: str = "") -> Path:
    """The package's sdist."""
    out.mkdir(parents=True, exist_ok=True)
    with usual_permissions(), tempfile.TemporaryDirectory(prefix="dist-") as scratch:
        copy = staged(Path(scratch, "copy"), url)
        build("--sdist", "--outdir", scratch, copy, isolated=isolated)
        (sdist,) = Path(scratch).glob("*.tar.gz")
        normalised(sdist)
        return Path(shutil.move(sdist, out / sdist.name))


@contextmanager
def usual_permissions() -> Iterator[None]:
    """In the block files are made with the permissions that archives state."""
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


def build_accelerator(out: Path) -> None:
    """The wheel of the accelerator, for this machine's platform."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    with tempfile.TemporaryDirectory(prefix="accelerator-") as scratch:
        shutil.copytree(ROOT / "accelerator", Path(scratch, "accelerator"), ignore=shutil.ignore_patterns("build"))
        environment = {
            **os.environ,
            "SOURCE_DATE_EPOCH": str(epoch()),
            "CFLAGS": "-g0",
            "LDFLAGS": "-s -Wl,--build-id=none",
        }
        built = [*command, "--wheel-dir", str(out), f"{scratch}/accelerator"]
        subprocess.run(built, env=environment, check=True, stdout=subprocess.DEVNULL)


def digests(folder: Path) -> Mapping[str, str]:
    """The SHA-256 of every file of a folder, by name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def build_all(out: Path, *, isolated: bool, url: str) -> None:
    """Everything that a release consists of."""
    tree = ROOT / "build" / "artifacts" / f"hopper-{KERNELS_VERSION}"
    build_package(out, isolated=isolated, url=url)
    build_accelerator(out)
    wheel = build_wheel(tree, out, isolated=isolated)
    write_statements(tree, wheel, out, commit=git("rev-parse", "HEAD"))


def problems(environment: Mapping[str, str]) -> Iterable[str]:
    """What speaks against tagging this commit as a release, besides its tests."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md: has no section '## [{__version__}] - DATE'"
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## [")[0]
    if unreleased.strip():
        yield f"CHANGELOG.md: has entries under [Unreleased] that version {__version__} would contain"
    if git("status", "--porcelain"):
        yield "the working tree has changes that are not committed"
    if git("tag", "--list", TAG):
        yield f"the tag {TAG} exists already"
    if not environment.get("PROJECT_URL", "").startswith("https://"):
        yield "PROJECT_URL is not set: give the address of the repository, which the distributions state, for example"
        yield "  make release PROJECT_URL=https://HOST/OWNER/NAME"


def tell(found: Iterable[str]) -> int:
    """Print what speaks against a release; the exit code."""
    lines = list(found)
    for one in lines:
        print(one if one.startswith(" ") else f"error: {one}", file=sys.stderr)
    return 1 if lines else 0


def check_release(out: Path, *, isolated: bool) -> int:
    """Build a second time, compare, and say how to tag; with ``TAG=1`` tag."""
    with tempfile.TemporaryDirectory(prefix="again-") as again:
        build_all(Path(again), isolated=isolated, url=os.environ.get("PROJECT_URL", "").rstrip("/"))
        first, second = digests(out), digests(Path(again))
    for name, digest in first.items():
        print(f"{digest}  {name}")
    if tell(f"{name}: a second build has other bytes" for name in first if first[name] != second.get(name)):
        return 1
    words = ["tag", "--annotate", TAG, "--message", f"cubin_runtime {__version__}"]
    if os.environ.get("TAG") == "1":
        subprocess.run(["git", *words], cwd=ROOT, check=True)
        print(f"tagged {TAG}")
    else:
        print(f"all checks passed; 'make release TAG=1' runs: {shlex.join(['git', *words])}")
    return 0


def main() -> int:
    """Build, and with ``--release`` check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--release", action="store_true", help="check that this commit can be tagged")
    parser.add_argument("--problems", action="store_true", help="say what speaks against that, and build nothing")
    parser.add_argument("--no-isolation", action="store_true", help="use the setuptools of this environment")
    given = parser.parse_args()
    if given.problems or given.release:
        code = tell(problems(os.environ))
        if code or given.problems:
            return code
    shutil.rmtree(given.out, ignore_errors=True)
    given.out.mkdir(parents=True)
    isolated = not given.no_isolation
    build_all(given.out, isolated=isolated, url=os.environ.get("PROJECT_URL", "").rstrip("/"))
    return check_release(given.out, isolated=isolated) if given.release else 0


if __name__ == "__main__":
    raise SystemExit(main())
