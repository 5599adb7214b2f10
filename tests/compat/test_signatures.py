"""Calls written for FlashInfer 0.6.13 and 0.7.4 fit our functions; the table is read from their wheels."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cubin_runtime.compat import flashinfer
from cubin_runtime.compat.flashinfer import arguments
from cubin_runtime.compat.flashinfer.arguments import Arguments

TABLE = json.loads((Path(__file__).parents[1] / "data" / "flashinfer_signatures.json").read_text())
OLDEST, NEWEST = TABLE
FUNCTIONS = [(version, name) for version in TABLE for name in TABLE[version]]
# What they compute of a token depends on no other, so they have no ``batch_invariant``.
PLAIN = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
INVARIANT = sorted(set(TABLE[NEWEST]) - set(PLAIN))
RENAMED = {"q": "query", "attention_sinks": "sinks"}  # arguments whose fields have another name


def parameters_of(name: str) -> list[inspect.Parameter]:
    operator: Callable[..., Any] = getattr(flashinfer, name)
    return list(inspect.signature(operator).parameters.values())


def test_the_table_is_of_the_two_versions() -> None:
    assert (OLDEST, NEWEST) == ("0.6.13", "0.7.4")


def test_every_function_of_the_newest_version_is_offered() -> None:
    assert sorted(TABLE[NEWEST]) == sorted(set(flashinfer.__all__) - {"FP4Tensor", "Installed", "install"})


@pytest.mark.parametrize(("version", "name"), FUNCTIONS)
def test_arguments_by_place_mean_the_same(version: str, name: str) -> None:
    theirs = [parameter for parameter, kind, _ in TABLE[version][name]["parameters"] if kind == "positional"]
    ours = [parameter.name for parameter in parameters_of(name) if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert ours[: len(theirs)] == theirs


@pytest.mark.parametrize(("version", "name"), FUNCTIONS)
def test_arguments_by_name_have_the_same_defaults(version: str, name: str) -> None:
    ours = {parameter.name: parameter.default for parameter in parameters_of(name)}
    for parameter, _, default in TABLE[version][name]["parameters"]:
        assert ours[parameter] == (inspect.Parameter.empty if default is None else ast.literal_eval(default))


@pytest.mark.parametrize(("version", "name"), FUNCTIONS)
def test_what_a_version_lacks_may_be_left_out(version: str, name: str) -> None:
    theirs = {parameter for parameter, _, _ in TABLE[version][name]["parameters"]}
    assert all(
        parameter.default is not parameter.empty for parameter in parameters_of(name) if parameter.name not in theirs
    )


@pytest.mark.parametrize("name", TABLE[NEWEST])
def test_places_and_names_are_those_of_the_newest_version(name: str) -> None:
    kinds = {inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional", inspect.Parameter.KEYWORD_ONLY: "keyword"}
    ours = [[parameter.name, kinds[parameter.kind]] for parameter in parameters_of(name)]
    more = [] if name in PLAIN else [["batch_invariant", "keyword"]]
    assert ours == [row[:2] for row in TABLE[NEWEST][name]["parameters"]] + more


@pytest.mark.parametrize("name", INVARIANT)
def test_batch_invariant_is_off_unless_asked_for(name: str) -> None:
    assert parameters_of(name)[-1].default is False


def test_a_wrapper_class_is_told_what_there_is_instead() -> None:
    with pytest.raises(ImportError, match=r"not its wrapper classes; instead of these, .* has paged_decode"):
        from cubin_runtime.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[attr-defined]  # noqa: F401


def test_another_name_is_missing_as_in_any_module() -> None:
    assert not hasattr(flashinfer, "nothing")


@cache
def call_value_of(name: str) -> tuple[type[Arguments], dict[str, str]]:
    """The class of an operator's typed value, and what each of its fields is set to in the operator's source."""
    source = inspect.getsource(inspect.unwrap(getattr(flashinfer, name)))
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    (value,) = (node for node in calls if ast.unparse(node.func).endswith("Arguments"))
    keywords = {str(keyword.arg): ast.unparse(keyword.value) for keyword in value.keywords}
    return getattr(arguments, ast.unparse(value.func)), keywords


@pytest.mark.parametrize("name", INVARIANT)
def test_the_typed_value_has_every_argument_under_its_name(name: str) -> None:
    names = [parameter.name for parameter in parameters_of(name)]
    operator = inspect.unwrap(getattr(flashinfer, name)).__name__
    assert call_value_of(name)[1] == {
        "operator": operator,
        **{RENAMED.get(argument, argument): argument for argument in names},
    }


def test_every_field_of_the_typed_values_is_an_argument_of_an_operator() -> None:
    values = [call_value_of(name) for name in INVARIANT]
    unset = {
        (kind.__name__, field.name)
        for kind, _ in values
        for field in fields(kind)
        if not any(field.name in keywords for _, keywords in values)
    }
    assert unset == {(kind.__name__, "runtime") for kind, _ in values}
