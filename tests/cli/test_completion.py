"""The shell completes names of releases, artifact paths, and values of filters."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cubin_runtime.cli import completion, json_schema
from tests.artifacts.releases import Release


def test_names_of_releases(release: Release) -> None:
    assert completion.targets("made") == ["made-1.0"]
    assert completion.targets("trtllm-gen-0.6.1") == ["trtllm-gen-0.6.13", "trtllm-gen-0.6.18.post1"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ma", ["made-1.0"]),
        ("made/", ["made/fmha/"]),
        ("made/fmha/", ["made/fmha/fmha/", "made/fmha/kernels.bin"]),
        ("made/fmha/fmha/d", ["made/fmha/fmha/decode.cubin"]),
        ("nothing", []),
    ],
)
def test_paths_part_by_part(release: Release, monkeypatch: pytest.MonkeyPatch, typed: str, offered: list[str]) -> None:
    monkeypatch.setenv("CUBIN_RUNTIME_SOURCES", str(release.root))
    assert completion.targets(typed) == offered


def test_a_manifest_that_is_not_here_is_not_fetched(release: Release) -> None:
    assert completion.targets("made/fmha/k") == []


def test_pins_that_cannot_be_read_offer_nothing(release: Release) -> None:
    release.pin_file.write_text("[[pin]]\nname = 1\n")
    assert completion.targets("made") == []


def test_values_of_filters() -> None:
    assert completion.dtypes("b") == ["bf16"]
    assert completion.families("pre") == ["prefill"]
    assert completion.sms("10") == ["100", "103"]
    assert completion.head_dims("5") == ["512", "576"]
    assert "launch" in completion.tasks("l")


def test_a_shell_is_offered_them(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_CUBIN_RUNTIME_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "cubin-runtime fetch made")
    monkeypatch.setenv("COMP_CWORD", "2")
    code = "import sys; from cubin_runtime.cli import app; app(prog_name='cubin-runtime')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["made-1.0"]


def test_verbs_whose_output_has_a_schema() -> None:
    assert json_schema.verbs("ver") == ["verify"]
