"""The help of verbs: groups of options, and names of values instead of Python's types."""

from __future__ import annotations

import re

import pytest

from cubin_runtime.cli import app, main

VERBS = sorted(str(command.name) for command in app.registered_commands)


def page(verb: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([verb, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_values_have_names_and_not_types(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.findall(r"<(?:str|int|float|path|list).*?>|[{}]|\[\[|\.\.\.\]?\.\.\.", page(verb, capsys)) == []


def test_options_are_listed_by_group_and_general_ones_last(capsys: pytest.CaptureFixture[str]) -> None:
    titles = re.findall(r"^(\w.*):$", page("explain", capsys), re.MULTILINE)
    assert titles[:3] == ["Arguments", "Operator and kernels", "GPU"]
    assert titles[-1] == "Options"


def test_what_may_be_left_out_is_in_brackets(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gc [OPTIONS] [PIN-or-PATH...]\n" in page("gc", capsys)
    assert "fetch [OPTIONS] PIN-or-PATH...\n" in page("fetch", capsys)


def test_help_is_a_verb_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "gc"]) == 0
    assert capsys.readouterr().out == page("gc", capsys)
