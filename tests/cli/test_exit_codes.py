"""Each exit code once, from the command line, with a sentence on the standard error stream."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from cubin_runtime.artifacts.library import Library
from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.cli import main
from cubin_runtime.errors import AbiError
from tests.artifacts.children import EVERYTHING, run_child
from tests.artifacts.releases import Release, make_release
from tests.artifacts.serving import serving, status

NAME = "fmha/prefill.cubin"
FETCH = ["fetch", "made-1.0"]


def fetch(release: Release) -> int:
    return main([*FETCH, "--source", str(release.root)])


def damage(release: Release, store: Path) -> None:
    place = Store(store).object_path(release.digest(NAME))
    place.unlink()
    place.write_bytes(b"damaged")


def raise_in_fetch(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Library, "fetch", fail)


@pytest.fixture
def sentence(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capsys.readouterr().err.splitlines()[-1]


def test_0_is_success(release: Release) -> None:
    assert fetch(release) == 0


def test_1_is_a_bug_of_ours_and_says_so(release: Release, monkeypatch: pytest.MonkeyPatch, sentence) -> None:
    raise_in_fetch(monkeypatch, ZeroDivisionError("division by zero"))
    assert fetch(release) == 1
    assert sentence() == "error: division by zero (this is a bug; please report it)"


def test_2_is_a_usage_that_makes_no_sense(release: Release, sentence) -> None:
    assert main([*FETCH, "--sm", "hopper"]) == 2
    assert sentence() == "error: sm 'hopper': expected a device such as 100 or sm_90"


def test_3_is_what_is_not_pinned(release: Release, sentence) -> None:
    assert main(["verify", "made/other/x"]) == 3
    assert "'made/other/x' is not pinned; pinned are" in sentence()


def test_4_is_what_is_missing(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    main(["fetch", release.path(NAME).text, "--source", str(release.root)])
    assert main(["verify", "made-1.0", "--complete"]) == 4
    assert "missing: made/fmha/kernels.bin" in capsys.readouterr().out


def test_5_is_what_is_corrupt(release: Release, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch(release)
    damage(release, store)
    assert main(["verify", "made-1.0"]) == 5
    assert f"corrupt: {release.path(NAME)}: sha256 of" in capsys.readouterr().out


def test_6_is_what_a_tree_has_too_much(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    release.file("fmha/extra").write_bytes(b"extra")
    assert main(["verify", "made-1.0", "--tree", str(release.root)]) == 6
    assert "extra: fmha/extra" in capsys.readouterr().out


def test_7_is_what_no_source_delivered(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(release.root) as server:
        server.fault(NAME, status(404))
        assert main([*FETCH, "--source", server.url]) == 7
    first, cause = capsys.readouterr().err.splitlines()[-2:]
    assert first == f"error: no source delivered {release.path(NAME)}:"
    assert cause.strip() == f"{server.url}: status 404"


def test_8_is_a_store_that_cannot_be_written(release: Release, store: Path, sentence) -> None:
    store.write_bytes(b"a file")
    assert fetch(release) == 8
    assert str(store) in sentence()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "there is not enough memory"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
    ],
)
def test_8_is_a_machine_without_enough_memory_or_files(
    release: Release, monkeypatch: pytest.MonkeyPatch, sentence, error: Exception, said: str
) -> None:
    raise_in_fetch(monkeypatch, error)
    assert fetch(release) == 8
    assert sentence() == f"error: {said}"


def test_9_is_what_device_or_abi_refuse(release: Release, monkeypatch: pytest.MonkeyPatch, sentence) -> None:
    raise_in_fetch(monkeypatch, AbiError("1280 bytes, the kernel takes 1248"))
    assert fetch(release) == 9
    assert sentence() == "error: 1280 bytes, the kernel takes 1248"


def test_130_is_an_interrupt(release: Release, monkeypatch: pytest.MonkeyPatch, sentence) -> None:
    raise_in_fetch(monkeypatch, KeyboardInterrupt())
    assert fetch(release) == 130
    assert sentence() == "error: interrupted; what came is in the store: run it again to continue"


RUN = "import sys; from cubin_runtime.cli import main; sys.exit(main(sys.argv[1:]))"


def closed_store(place: Path) -> Path:
    """A store below a folder that an ordinary user may not even look into."""
    closed = place / "closed"
    (closed / "store" / "sha256").mkdir(parents=True)
    closed.chmod(0o700)
    return closed / "store"


@pytest.mark.parametrize("source", ["tree", "nowhere"])
def test_a_store_that_cannot_be_searched_is_8_and_not_missing_for_verify(open_place: Path, source: str) -> None:
    made = make_release(open_place)
    places = ("--pins", made.pin_file, "--source", open_place / source, "--store", closed_store(open_place))
    words = ("verify", "made-1.0", "--complete", "--offline", *places)
    done = run_child(RUN, *words, as_user=True, before=EVERYTHING)
    assert (done.returncode, done.stderr.count("error:")) == (8, 1), done.stderr


def test_doctor_tells_of_a_store_that_cannot_be_searched(open_place: Path) -> None:
    done = run_child(RUN, "doctor", "--store", closed_store(open_place), as_user=True, before=EVERYTHING)
    assert (done.returncode, done.stderr) == (0, "")
    assert "not writable" in done.stdout


def test_a_umask_that_keeps_its_own_user_out_is_8(open_place: Path) -> None:
    made = make_release(open_place)
    words = ("fetch", "made-1.0", "--pins", made.pin_file, "--source", made.root, "--store", open_place / "store")
    done = run_child(f"import os; os.umask(0o777); {RUN}", *words, as_user=True, before=EVERYTHING)
    assert done.returncode == 8, done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_that_an_interrupt_brought_about_is_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def app(**_: object) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("cannot schedule new futures") from None

    monkeypatch.setattr("cubin_runtime.cli.app", app)
    assert main(["list"]) == 130
    assert "interrupted" in capsys.readouterr().err
