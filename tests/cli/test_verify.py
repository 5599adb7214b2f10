from __future__ import annotations

import os
from pathlib import Path

import pytest

from cubin_runtime.artifacts.store.store import Store
from cubin_runtime.cli import main
from tests.artifacts.children import EVERYTHING, run_child
from tests.artifacts.releases import Release, zip_tree

NAME = "fmha/prefill.cubin"


@pytest.fixture
def filled(release: Release, monkeypatch: pytest.MonkeyPatch) -> Release:
    assert main(["fetch", "made-1.0", "--source", str(release.root)]) == 0
    monkeypatch.setenv("CUBIN_RUNTIME_SOURCES", str(release.root))
    return release


def damage(release: Release, store: Path, name: str = NAME) -> None:
    place = Store(store).object_path(release.digest(name))
    place.unlink()
    place.write_bytes(b"damaged")


def lose(release: Release, store: Path, name: str) -> None:
    Store(store).object_path(release.digest(name)).unlink()


def test_repair_fetches_again_what_is_corrupt(filled: Release, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(filled, store)
    assert main(["verify", "made-1.0", "--repair"]) == 0
    assert "3 files verified (8.00 kB), 1 of them repaired; in" in capsys.readouterr().out
    assert main(["verify", "made-1.0", "--complete"]) == 0


def test_repair_restores_what_an_earlier_verification_moved_aside(filled: Release, store: Path, run_json) -> None:
    damage(filled, store)
    assert main(["verify", "made-1.0"]) == 5
    code, shown = run_json("verify", "made-1.0", "--repair")
    found = shown["releases"][0]
    assert (code, found["ok"], found["repaired"], found["missing"]) == (0, 3, 1, 0)
    assert main(["verify", "made-1.0", "--complete"]) == 0


def test_a_file_larger_than_the_pin_allows_is_neither_moved_nor_repaired(
    filled: Release, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = filled.pin_file.read_text()
    filled.pin_file.write_text(text.replace(f"max_file_bytes = {filled.pin.max_file_bytes}", "max_file_bytes = 3000"))
    assert main(["verify", "made-1.0"]) == 5
    assert main(["verify", "made-1.0", "--repair"]) == 5
    assert "at most 3000 are allowed by 'made-1.0', although its sha256 matches" in capsys.readouterr().err
    assert Store(store).has(filled.digest(NAME))


def test_repair_leaves_what_was_never_fetched(filled: Release, store: Path, run_json) -> None:
    lose(filled, store, "kernels.bin")
    damage(filled, store)
    code, shown = run_json("verify", "made-1.0", "--repair")
    found = shown["releases"][0]
    assert (code, found["ok"], found["repaired"], found["missing"]) == (0, 2, 1, 1)


def test_repair_of_a_complete_store_fetches_what_is_missing(filled: Release, store: Path, run_json) -> None:
    lose(filled, store, "kernels.bin")
    damage(filled, store)
    code, shown = run_json("verify", "made-1.0", "--repair", "--complete")
    found = shown["releases"][0]
    assert (code, found["ok"], found["repaired"], found["missing"], found["corrupt"]) == (0, 3, 2, 0, [])


def test_repair_of_a_right_store_asks_nobody(filled: Release, run_json) -> None:
    code, shown = run_json("verify", "made-1.0", "--repair", "--source", "/nowhere")
    assert (code, shown["releases"][0]["repaired"]) == (0, 0)


def test_repair_takes_its_bytes_from_an_archive(filled: Release, store: Path, tmp_path: Path) -> None:
    archive = zip_tree(filled.root, tmp_path / "x.zip")
    damage(filled, store)
    assert main(["verify", "made-1.0", "--repair", "--source", str(archive), "--offline"]) == 0


def test_repair_replaces_a_planted_link(filled: Release, store: Path) -> None:
    place = Store(store).object_path(filled.digest(NAME))
    place.unlink()
    place.symlink_to(filled.file(NAME))
    assert main(["verify", "made-1.0", "--repair"]) == 0
    assert not place.is_symlink()


@pytest.mark.timeout(20)
def test_repair_replaces_a_planted_fifo(filled: Release, store: Path) -> None:
    place = Store(store).object_path(filled.digest(NAME))
    place.unlink()
    os.mkfifo(place)
    assert main(["verify", "made-1.0", "--repair"]) == 0


def test_without_a_source_a_repair_is_code_7(filled: Release, store: Path) -> None:
    damage(filled, store)
    assert main(["verify", "made-1.0", "--repair", "--source", "/nowhere"]) == 7


def test_a_source_that_is_damaged_too_is_code_5(filled: Release, store: Path) -> None:
    damage(filled, store)
    filled.file(NAME).write_bytes(b"damaged as well")
    assert main(["verify", "made-1.0", "--repair"]) == 5


def test_damage_that_cannot_be_moved_aside_is_code_8(
    open_place: Path, release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pins = open_place / "store", open_place / "pins.toml"
    pins.write_bytes(release.pin_file.read_bytes())
    zip_tree(release.root, open_place / "x.zip")
    assert main(["fetch", "made-1.0", "--source", str(release.root), "--store", str(store)]) == 0
    damage(release, store)
    monkeypatch.delenv("CUBIN_RUNTIME_PINS")
    body = """
    import sys
    from cubin_runtime.cli import main
    raise SystemExit(main(["verify", "made-1.0", "--repair", *sys.argv[1:]]))
    """
    arguments = ("--store", store, "--pins", pins, "--source", open_place / "x.zip")
    done = run_child(body, *arguments, as_user=True, before=EVERYTHING)
    assert (done.returncode, "cannot be moved to quarantine; not repaired" in done.stderr) == (8, True), done.stderr


def test_repair_is_of_stores_alone(filled: Release) -> None:
    assert main(["verify", "made-1.0", "--repair", "--tree", str(filled.root)]) == 2


def test_a_release_is_verified_though_another_is_not_available(
    filled: Release, monkeypatch: pytest.MonkeyPatch, run_json
) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_OFFLINE", "1")
    code, shown = run_json("verify", "trtllm-gen-0.6.13", "made-1.0")
    assert (code, [one["code"] for one in shown["errors"]]) == (7, [7])
    assert [one["ok"] for one in shown["releases"]] == [3]
