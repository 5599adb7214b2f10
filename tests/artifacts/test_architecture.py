from __future__ import annotations

import pytest

from cubin_runtime.artifacts.cubins.architecture import Architecture
from cubin_runtime.errors import UsageError


@pytest.mark.parametrize(
    ("target", "device", "runs"),
    [
        ("sm_80", 80, True),
        ("sm_80", 86, True),
        ("sm_86", 80, False),
        ("sm_80", 90, False),
        ("sm_90a", 90, True),
        ("sm_100a", 100, True),
        ("sm_100a", 103, False),
        ("sm_100f", 100, True),
        ("sm_100f", 103, True),
        ("sm_100f", 110, False),
        ("sm_100f", 120, False),
        ("sm_103f", 100, False),
        ("sm_120f", 121, True),
        ("sm_99f", 99, False),
        ("sm_100", 103, True),
        ("sm_100", 120, False),
    ],
)
def test_a_target_runs_on_exactly_the_devices_of_its_rule(target: str, device: int, runs: bool) -> None:
    assert Architecture.parse(target).runs_on(device) is runs


def test_an_unknown_suffix_runs_nowhere() -> None:
    assert not Architecture(100, None).runs_on(100)


def test_the_prefix_is_optional() -> None:
    assert Architecture.parse("90a") == Architecture.parse("sm_90a") == Architecture(90, "a")


@pytest.mark.parametrize("text", ["", "sm_", "sm_9", "90b", "sm_090", "compute_90", "90a ", "sm_1000"])
def test_other_words_are_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="architecture"):
        Architecture.parse(text)


@pytest.mark.parametrize(
    ("architecture", "text"),
    [
        (Architecture(100, "f"), "sm_100f"),
        (Architecture(80, ""), "sm_80"),
        (Architecture(103, None), "sm_103?"),
    ],
)
def test_text_shows_the_suffix_or_that_it_is_unknown(architecture: Architecture, text: str) -> None:
    assert str(architecture) == text


def test_one_target_stays_one_whoever_names_it() -> None:
    assert Architecture(100, "f").same_target(Architecture(100, "f", declared=True))
