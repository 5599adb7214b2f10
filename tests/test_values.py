"""Values behave as the dataclasses that they stand for."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from cubin_runtime.values import HashedOnce, dataclass, replaced


@dataclass(frozen=True, slots=True)
class Size:
    """Two numbers."""

    rows: int
    columns: int = 1

    def __post_init__(self) -> None:
        if self.rows < 0:
            raise ValueError(f"rows={self.rows}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Named(Size):
    """With a list that is its own and a note that does not count."""

    name: str
    parts: list[int] = dataclasses.field(default_factory=list)
    note: str = dataclasses.field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class One:
    """One thing."""

    thing: object


def test_fields_are_taken_by_place_and_by_name() -> None:
    assert (Size(2).rows, Size(2).columns, Size(2, 3).columns, Size(columns=4, rows=5).rows) == (2, 1, 3, 5)


def test_lists_are_not_shared() -> None:
    assert Named(1, name="a").parts is not Named(1, name="a").parts


@pytest.mark.parametrize(
    ("arguments", "named", "message"),
    [
        ((), {}, "Size: missing a required argument: 'rows'"),
        ((1, 2, 3), {}, "Size: too many positional arguments"),
        ((1,), {"rows": 2}, "Size: multiple values for argument 'rows'"),
        ((1,), {"depth": 2}, "Size: got an unexpected keyword argument 'depth'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], named: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Size(*arguments, **named)


def test_a_keyword_field_is_not_taken_by_place() -> None:
    with pytest.raises(TypeError, match="Named: too many positional arguments"):
        Named(1, 2, "a")  # type: ignore[call-arg, misc]


def test_values_are_checked_when_made_and_when_replaced() -> None:
    with pytest.raises(ValueError, match="rows=-1"):
        Size(-1)
    for replace in (dataclasses.replace, replaced):
        with pytest.raises(ValueError, match="rows=-2"):
            replace(Named(1, name="a"), rows=-2)


def test_a_value_with_other_fields_is_another_value() -> None:
    value = Named(1, name="a", parts=[1], note="x")
    other = replaced(value, rows=2, note="y")
    assert (other, other.parts, other.note) == (dataclasses.replace(value, rows=2), value.parts, "y")
    assert (value.rows, value.note, type(other)) == (1, "x", Named)
    with pytest.raises(TypeError, match=r"Named: no fields \['depth'\]"):
        replaced(value, rows=2, depth=3)


def test_equality_and_hash_follow_the_class_and_what_is_compared() -> None:
    assert Size(1) == Size(1, 1)
    assert hash(Size(1)) == hash(Size(1, 1))
    assert Size(1) != Size(2)
    assert Size(1, 2) != (1, 2)
    assert Named(1, name="a", note="x") == Named(1, name="a", note="y")
    assert Named(1, name="a") != Named(1, name="b")
    assert One(1) != One(2)


def test_nothing_can_be_set_or_deleted() -> None:
    value: Any = Size(1)
    for change in (lambda: setattr(value, "rows", 2), lambda: setattr(value, "new", 2), lambda: delattr(value, "rows")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert not hasattr(value, "__dict__")


def test_the_text_names_the_fields() -> None:
    assert repr(Named(1, name="a", note="hidden")) == "Named(rows=1, columns=1, name='a', parts=[])"


def test_copies_and_pickles_are_equal() -> None:
    value = Named(1, name="a", parts=[1])
    assert copy.copy(value) == copy.deepcopy(value) == pickle.loads(pickle.dumps(value)) == value


def test_functions_of_dataclasses_take_them() -> None:
    assert dataclasses.asdict(Size(1)) == {"rows": 1, "columns": 1}
    assert dataclasses.replace(Size(1), columns=3) == Size(1, 3)
    assert [field.name for field in dataclasses.fields(One)] == ["thing"]


def test_what_is_not_frozen_or_has_no_slots_is_refused() -> None:
    with pytest.raises(TypeError, match="frozen=False"):
        dataclass(frozen=False, slots=True)


class Counted:
    """Counts how often its hash is asked for."""

    asked = 0

    def __hash__(self) -> int:
        self.asked += 1
        return 1


def test_a_long_tuple_is_hashed_once_and_equals_its_like() -> None:
    item = Counted()
    table = HashedOnce((item, 2))
    assert hash(table) == hash(table) == hash((item, 2))
    assert item.asked == 2
    assert table == (item, 2)
    assert pickle.loads(pickle.dumps(HashedOnce((1, 2)))) == (1, 2)
