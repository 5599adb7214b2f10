"""The shell completes names of releases, artifact paths, and values of filters."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cubin_runtime.cli import completion, json_schema, main
from tests.artifacts.releases import Release

RUN = "import sys; from cubin_runtime.cli import main; sys.exit(main())"


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
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["made-1.0"]), done.stderr


@pytest.mark.parametrize("shell", list(completion.Shell))
def test_the_script_of_a_shell_asks_by_our_variable(
    environment: Path, capsys: pytest.CaptureFixture[str], shell: completion.Shell
) -> None:
    assert main(["--show-completion", shell.value]) == 0
    assert completion.VARIABLE in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_its_script(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--show-completion", "bash"])
    script = capsys.readouterr().out + "complete -p cubin-runtime"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert "-F _cubin_runtime_completion cubin-runtime" in done.stdout


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({completion.VARIABLE: "x"}, "expected complete_SHELL with one of bash, zsh"),
        ({completion.VARIABLE: "complete_"}, "expected complete_SHELL"),
        ({completion.VARIABLE: "complete_tcsh"}, "expected complete_SHELL"),
        ({completion.VARIABLE: "source_bash"}, "expected complete_SHELL"),
        ({completion.VARIABLE: "complete_bash"}, "expected the words to complete in COMP_WORDS"),
        ({completion.VARIABLE: "complete_bash", "COMP_WORDS": "x"}, "COMP_CWORD='': expected the position"),
        ({completion.VARIABLE: "complete_bash", "COMP_WORDS": "x", "COMP_CWORD": "9" * 5000}, "expected the position"),
        (
            {completion.VARIABLE: "complete_zsh", "_TYPER_COMPLETE_ARGS": "\t"},
            "expected the words to complete",
        ),
    ],
)
def test_variables_that_no_script_sets_are_refused_by_name(
    environment: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variables: dict[str, str],
    said: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 2
    assert said in capsys.readouterr().err


def test_no_file_of_the_users_is_changed(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--install-completion"]) == 2
    assert list(environment.iterdir()) == []


def test_verbs_whose_output_has_a_schema() -> None:
    assert json_schema.verbs("ver") == ["verify"]
