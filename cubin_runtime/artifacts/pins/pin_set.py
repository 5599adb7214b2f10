"""All active pins, built-in and the user's, which never contradict each other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from ...config import Config, local_path
from ...errors import PinError
from ..path import ArtifactPath, PathError
from .pin import BUILTIN_PINS, Pin, parse_pins
from .signatures import KEYS_VARIABLE, load_keys, read_pin_file

_JOINED = ("sources", "groups")  # what pins of one release may have more or less of


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
        self._by_name: dict[str, Pin] = {}
        self._by_path: dict[ArtifactPath, Pin] = {}
        self._origins: dict[str, str] = {}
        self._stated: set[ArtifactPath] = set()
        for pin, origin in pins:
            self._add(pin, origin)

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

    def _add(self, pin: Pin, origin: str) -> None:
        for known in list(self._by_name.values()):
            member = bool(pin.groups) or pin.path not in self._stated
            if (fault := _disagreement(known, pin, member=member)) is not None:
                raise PinError(
                    f"two pins disagree on {fault}: {known.name!r} ({known.path}, from "
                    f"{self._origins[known.name]}) and {pin.name!r} ({pin.path}, from {origin})"
                )
        known_pin = self._by_path.get(pin.path)
        if known_pin is None:
            self._by_name[pin.name] = self._by_path[pin.path] = pin
            self._origins[pin.name] = origin
        else:
            self._join(known_pin, pin, origin)
        if not pin.groups:
            self._stated.add(pin.path)

    def _join(self, known: Pin, pin: Pin, origin: str) -> None:
        """Make one of two pins of a release; one for a group only says that the release belongs to it."""
        kept, other = (pin, known) if not pin.groups and pin.path not in self._stated else (known, pin)
        if kept is pin:
            del self._by_name[known.name]
            self._origins[pin.name] = origin
        sources, groups = (tuple(dict.fromkeys((*getattr(kept, n), *getattr(other, n)))) for n in _JOINED)
        joined = replace(kept, sources=sources, groups=groups)
        self._by_name[kept.name] = self._by_path[kept.path] = joined

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


def _disagreement(one: Pin, other: Pin, *, member: bool) -> str | None:
    """What two pins disagree on, or None; symmetric, so that the order of files never matters.

    ``member``: one of them only makes the release a member of a group, and need not tell more than its digest.
    """
    if one.path != other.path:
        if one.name == other.name:
            return f"the folder of the name {one.name!r}"
        if one.path.is_below(other.path) or other.path.is_below(one.path):
            return "a folder that both cover"
        if one.name == other.path.text or other.name == one.path.text:
            return "a name that is the other's folder"
        return None
    for field in fields(Pin):
        if (
            field.name not in _JOINED
            and (not member or field.name == "manifest_sha256")
            and getattr(one, field.name) != getattr(other, field.name)
        ):
            return f"{field.name} of the folder {one.path.text!r}"
    return None
