"""How FlashMLA is compiled: which sources, and the commit that its library states."""

from __future__ import annotations

from pathlib import Path

from benchmarks.decode.flash_mla_build import LAUNCHER, command, commit_of


def test_the_library_is_of_the_launcher_and_the_kernels_and_states_the_commit(tmp_path: Path) -> None:
    (tmp_path / "COMMIT").write_text("abc\n")
    made = command(tmp_path, tmp_path / "lib.so", "nvcc", commit_of(tmp_path))
    assert LAUNCHER.is_file()
    assert '-DFLASH_MLA_COMMIT="abc"' in made
    assert [Path(word).name for word in made if word.endswith(".cu")] == [
        "flash_mla.cu",
        "get_decoding_sched_meta.cu",
        "combine.cu",
        "bf16.cu",
        "v32_persistent_h64.cu",
        "v32_persistent_h128.cu",
    ]


def test_a_copy_without_a_stated_commit_is_asked_of_git(tmp_path: Path) -> None:
    import subprocess

    for words in (
        ["init", "-q"],
        ["-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    assert len(commit_of(tmp_path)) == 40
