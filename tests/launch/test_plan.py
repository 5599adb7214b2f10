from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubin_runtime.errors import UsageError
from cubin_runtime.launch.plan import LaunchAttributes
from tests.launch.examples import SPEC, VALUES, plan


def test_attributes_come_in_the_order_cluster_policy_pdl() -> None:
    entries = LaunchAttributes((4, 2, 1), 1, True).entries()
    assert [(number, value.hex()) for number, value in entries] == [
        (4, "040000000200000001000000"),
        (5, "01000000"),
        (6, "01000000"),
    ]


def test_pdl_is_always_stated() -> None:
    assert LaunchAttributes().entries() == ((6, bytes(4)),)


@pytest.mark.parametrize(
    "changes",
    [
        {"cluster": (0, 1, 1)},
        {"cluster": (3, 3, 1)},
        {"cluster": (1, 1)},
        {"cluster": (17, 1, 1), "nonportable_cluster": True},
        {"cluster": 2},
        {"cluster": (2.0, 1, 1)},
        {"cluster": ("2", 1, 1)},
        {"scheduling_policy": 3},
        {"scheduling_policy": 1.0},
        {"scheduling_policy": [1]},
    ],
)
def test_attributes_outside_their_domain_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        LaunchAttributes(**changes)


def test_sixteen_blocks_need_the_non_portable_word() -> None:
    with pytest.raises(UsageError, match="16 blocks, expected at most 8 with nonportable_cluster=False"):
        LaunchAttributes((16, 1, 1))
    assert LaunchAttributes((16, 1, 1), nonportable_cluster=True).cluster == (16, 1, 1)


def test_a_cluster_may_be_a_list_of_numbers_of_other_libraries() -> None:
    assert LaunchAttributes([np.int64(2), 1, 1]) == LaunchAttributes((2, 1, 1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (LaunchAttributes(), "pdl off"),
        (LaunchAttributes((2, 1, 1), 1, True), "cluster (2, 1, 1), policy spread, pdl on"),
        (
            LaunchAttributes((16, 1, 1), 0, False, True),
            "cluster (16, 1, 1), policy default, pdl off, non-portable",
        ),
    ],
)
def test_attributes_read_as_words(attributes: LaunchAttributes, text: str) -> None:
    assert str(attributes) == text


@pytest.mark.parametrize(
    "changes",
    [
        {"grid": (0, 1, 1)},
        {"grid": (2, 65536, 1)},
        {"grid": (2**31, 1, 1)},
        {"grid": (2, 1)},
        {"block": (0, 1, 1)},
        {"block": (1, 1, 65)},
        {"block": (1024, 2, 1)},
        {"shared_bytes": -1},
        {"grid": (131, 1, 1)},
        {"values": {}},
        {"values": {**VALUES, "more": 1}},
    ],
)
def test_a_plan_that_no_device_takes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"expected|missing"):
        plan(**changes)


def test_the_largest_grid_and_block_are_taken() -> None:
    made = plan(grid=(2**31 - 2, 65535, 65535), block=(16, 1, 64))
    assert made.threads == 1024


def test_values_cannot_change_behind_the_plan() -> None:
    values = dict(VALUES)
    made = plan(values=values)
    values["batch"] = 99
    assert made.values["batch"] == 7
    with pytest.raises(TypeError):
        made.values["batch"] = 1  # type: ignore[index]


def test_describe_needs_no_driver_and_shows_specs() -> None:
    rows = {row.name: row for row in plan().describe()}
    assert rows["k"].value is SPEC
    assert (rows["batch"].offset, rows["batch"].text, rows["batch"].meaning) == (140, "7", "sequences")
