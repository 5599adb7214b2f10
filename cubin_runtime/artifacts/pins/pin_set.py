"""All active pins, built-in and the user's, which never contradict each other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

from ...config import Config, local_path
from ...errors import PinError
from ..path import ArtifactPath, PathError
from .pin import BUILTIN_PINS, Pin, parse_pins
from .signatures import KEYS_VARIABLE, load_keys, read_pin_file

_Stated = tuple[Pin, str]  # a pin and the place it came from
_JOINED = ("sources", "groups")  # fields that pins of one release may have more or less of


def refuse_trust_in_store(config: Config) -> None:
    """Check that pins, keys and versions are not read from a store, which anybody may have filled.

    Raises:
        PinError: a file of these lies inside the store.
    """
    root = Path(os.path.realpath(config.store))
    keys = (local_path(key, KEYS_VARIABLE) for key in config.pin_keys)
    state = () if config.pin_state is None else (config.pin_state,)
    for file in (*config.pin_files, *keys, *state):
        if Path(os.path.realpath(file)).is_relative_to(root):
            raise PinError(f"{file}: is inside the store {config.store}; pins and keys are never read from a store")


class PinSet:
    """All pins in force, from the built-in file and the user's; no two of them disagree."""

    def __init__(self, pins: Iterable[tuple[Pin, str]]) -> None:
        """``pins`` are pairs of a pin and the place it came from (for messages).

        Raises:
            PinError: two pins disagree, whatever their order.
        """
        stated: dict[ArtifactPath, list[_Stated]] = {}
        for pin, origin in pins:
            stated.setdefault(pin.path, []).append((pin, origin))
        joined = [_joined(same) for same in stated.values()]
        self._by_path: dict[ArtifactPath, Pin] = {pin.path: pin for pin, _ in joined}
        self._by_name: dict[str, Pin] = {}
        self._origins: dict[str, str] = {}
        for pin, origin in joined:
            if (earlier := self._by_name.setdefault(pin.name, pin)) is not pin:
                raise _disagreement(
                    f"the folder of the name {pin.name!r}", (earlier, self._origins[pin.name]), (pin, origin)
                )
            self._origins[pin.name] = origin
        self._check_folders()

    def _check_folders(self) -> None:
        """No folder is inside another, and none is the name of another pin, so that each word means one release.

        In the order where ``/`` comes before all else a folder is followed by what lies below it.
        """
        pins = sorted(self, key=lambda pin: pin.path.text.replace("/", "\0"))
        for one, after in pairwise(pins):
            if after.path.is_below(one.path):
                raise _disagreement("a folder that both cover", *((pin, self.origin(pin)) for pin in (one, after)))
        for pin in pins:
            named = self._by_name.get(pin.path.text, pin)
            if named is not pin:
                raise _disagreement("a name that is the other's folder", *((p, self.origin(p)) for p in (named, pin)))

    @classmethod
    def from_files(
        cls, builtin: Path | None, *user_files: Path, keys: Sequence[str] = (), state: Path | None = None
    ) -> PinSet:
        """Read the built-in pins (None: the ones of the package), then each user file.

        With ``keys`` (see ``Config.pin_keys``) each user file must be signed by one of them; that is checked
        over the very bytes that are then parsed, before they are. ``state`` remembers the newest version of each
        signed file.

        Raises:
            PinError: a file cannot be read or parsed, is not signed (or out of date) although keys are set, or two
                pins disagree.
        """
        loaded = load_keys(keys)
        read = [(file, read_pin_file(file, ())) for file in (builtin or BUILTIN_PINS,)]
        read += [(file, read_pin_file(file, loaded, state)) for file in user_files]
        return cls((pin, str(file)) for file, data in read for pin in parse_pins(data, str(file)))

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def origin(self, pin: Pin) -> str:
        """The file that a pin came from."""
        return self._origins[pin.name]

    def group(self, name: str) -> tuple[Pin, ...]:
        """The pins of a group, none if there is no such group."""
        return tuple(pin for pin in self if name in pin.groups)

    def get(self, name_or_path: str) -> Pin:
        """The pin of that name, of that folder, or covering that path.

        Raises:
            PinError: nothing is pinned there; the message lists the names that are.
        """
        if (named := self._by_name.get(name_or_path)) is not None:
            return named
        try:
            path = ArtifactPath(name_or_path.removesuffix("/"))
        except PathError as error:
            raise PinError(f"{name_or_path!r} is neither a pin ({self._names()}) nor a path: {error}") from None
        return self._by_path.get(path) or self.covering(path)

    def covering(self, path: ArtifactPath) -> Pin:
        """The pin whose folder holds ``path``.

        Raises:
            PinError: no pin covers it.
        """
        text = path.text
        while text := text.rpartition("/")[0]:
            if (pin := self._by_path.get(ArtifactPath(text))) is not None:
                return pin
        raise PinError(f"{path.text!r} is not pinned; {self._names()}")

    def _names(self) -> str:
        return "pinned are " + (", ".join(sorted(self._by_name)) or "no releases")


def _joined(same: Sequence[_Stated]) -> _Stated:
    """One pin of all those of a release; one for a group only says that the release belongs to it.

    Raises:
        PinError: two of them disagree, whatever their order.
    """
    base = next((stated for stated in same if not stated[0].groups), same[0])
    for stated in same:
        for field in fields(Pin):
            if (stated[0].groups and field.name != "manifest_sha256") or field.name in _JOINED:
                continue
            if getattr(stated[0], field.name) != getattr(base[0], field.name):
                raise _disagreement(f"{field.name} of the folder {base[0].path.text!r}", base, stated)
    pins = [base[0], *(pin for pin, _ in same)]
    sources, groups = (tuple(dict.fromkeys(item for pin in pins for item in getattr(pin, name))) for name in _JOINED)
    return replace(base[0], sources=sources, groups=groups), base[1]


def _disagreement(what: str, one: _Stated, other: _Stated) -> PinError:
    return PinError(
        f"two pins disagree on {what}: {one[0].name!r} ({one[0].path}, from {one[1]}) and "
        f"{other[0].name!r} ({other[0].path}, from {other[1]})"
    )
