"""Verdicts of ``doctor``: for each task whether it works here, why, and what to do if it does not. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._version import KERNELS_VERSION
from ..errors import DeviceError, MissingError, PinError, SourceError, StoreError, UsageError
from . import output

YES, NO, NOT_TRIED = "yes", "no", "not tried"
TASKS = ("pins", "store", "fetch", "verify", "kernels", "accelerator", "launch")
LEAST_DRIVER = "580"
_CHOOSE_STORE = "name a folder that you can write with --store or CUBIN_RUNTIME_CACHE"
_CHECK = "'cubin-runtime doctor --check' tries it"
_SETTINGS, _MEND = "a setting is invalid", "mend the setting that the error below names"


def task(
    name: str, state: str, reason: str, step: str | None = None, *, code: int = 0, **about: object
) -> dict[str, Any]:
    """One verdict; ``step`` is what to do about a "no", ``code`` the exit code if the task is required."""
    return {"task": name, **about, "state": state, "reason": reason, "next": step, "code": 0 if state == YES else code}


def tasks_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The verdicts on a report's facts."""
    return [
        _pins(report),
        _store(report),
        *_fetches(report),
        _verify(report),
        _kernels(report),
        _accelerator(report),
        *_launches(report),
    ]


def failed_requirements(required: Sequence[str], tasks: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Exit code and message of each required task that does not work; one of several of a kind is enough.

    Raises:
        UsageError: a requirement is not the name of a task, or its release is not known.
    """
    failed: list[tuple[int, str]] = []
    for word in required:
        name, _, release = word.partition(":")
        rows = [one for one in tasks if one["task"] == name and release in ("", one.get("release"))]
        if not rows:
            releases = sorted(str(one["release"]) for one in tasks if "release" in one)
            raise UsageError(
                f"--require {word!r}: expected one of {', '.join(TASKS)}"
                + (f", or fetch:RELEASE with one of {', '.join(releases)}" if releases else "")
            )
        if all(one["state"] != YES for one in rows):
            worst = rows[0]
            failed.append((int(worst["code"]), f"required: {sentence(worst)}"))
    return failed


def sentence(one: Mapping[str, Any]) -> str:
    """A verdict as a line of text."""
    about = f" {one['release']}" if "release" in one else f" on {one['device']}" if "device" in one else ""
    step = f"; next: {one['next']}" if one["next"] else ""
    name = "native kernels" if one["task"] == "kernels" else one["task"]
    return f"{name}{about}: {one['state']}, {one['reason']}{step}"


def _pins(report: Mapping[str, Any]) -> dict[str, Any]:
    pins = report["pins"]
    if report["settings_problem"]:
        return task("pins", NOT_TRIED, _SETTINGS, _MEND, code=UsageError.exit_code)
    if pins["problem"]:
        step = "repair or sign the pin files, or name others with --pins or CUBIN_RUNTIME_PINS"
        return task("pins", NO, pins["problem"], step, code=PinError.exit_code)
    signed = f", {pins['signed']} signed pin files checked" if pins["signed"] else ""
    return task("pins", YES, f"{pins['releases']} releases are trusted{signed}")


def _store(report: Mapping[str, Any]) -> dict[str, Any]:
    store = report["store"]
    if report["settings_problem"]:
        return task("store", NOT_TRIED, _SETTINGS, _MEND, code=UsageError.exit_code)
    if not store["writable"]:
        reason = store["problem"] or "it cannot be written"
        return task("store", NO, reason, _CHOOSE_STORE, code=StoreError.exit_code)
    there = "exists" if store["exists"] else "does not exist yet and can be made"
    free = "" if store["free_bytes"] is None else f", {output.size(store['free_bytes'])} free"
    return task("store", YES, f"{there}{free}")


def _fetches(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    if report["settings_problem"]:
        return [task("fetch", NO, _SETTINGS, _MEND, code=UsageError.exit_code)]
    if report["pins"]["problem"]:
        return [task("fetch", NO, "the pins cannot be read", "see pins", code=PinError.exit_code)]
    return [_fetch(report, release) for release in report["releases"]]


def _fetch(report: Mapping[str, Any], release: Mapping[str, Any]) -> dict[str, Any]:
    store, name = report["store"], release["name"]
    about = {"release": name}
    if release["in_store"] is not None and release["in_store"] == release["files"]:
        return task("fetch", YES, f"all {release['files']} files are in the store", **about)
    if not store["writable"]:
        return task("fetch", NO, "the store cannot be written", _CHOOSE_STORE, code=StoreError.exit_code, **about)
    missing = release["missing_bytes"]
    if missing is not None and store["free_bytes"] is not None and missing > store["free_bytes"]:
        room = f"about {output.size(missing)} are needed, {output.size(store['free_bytes'])} are free"
        step = f"fetch a part of it with filters, or {_CHOOSE_STORE}"
        return task("fetch", NO, room, step, code=StoreError.exit_code, **about)
    trials = [one for one in report["sources"] if one["release"] == name]
    if delivering := [one["source"] for one in trials if one["delivers"]]:
        return task("fetch", YES, f"from {delivering[0]}", **about)
    waiting = [one for one in trials if one["delivers"] is None]
    if waiting and not report["offline"]:
        sources = ", ".join(one["source"] for one in waiting)
        return task("fetch", NOT_TRIED, f"from {sources}", _CHECK, code=SourceError.exit_code, **about)
    reasons = "; ".join(f"{one['source']}: {one['problem']}" for one in trials) or "no source is configured"
    step = "name a source with --source or CUBIN_RUNTIME_SOURCES"
    if waiting:
        step = "leave --offline and CUBIN_RUNTIME_OFFLINE away, or name a local source with --source"
    elif release["install"]:
        step = release["install"]
    return task("fetch", NO, reasons, step, code=SourceError.exit_code, **about)


def _verify(report: Mapping[str, Any]) -> dict[str, Any]:
    if report["settings_problem"]:
        return task("verify", NO, _SETTINGS, _MEND, code=UsageError.exit_code)
    if report["pins"]["problem"]:
        return task("verify", NO, "the pins cannot be read", "see pins", code=PinError.exit_code)
    if report["store"]["problem"]:
        return task("verify", NO, report["store"]["problem"], _CHOOSE_STORE, code=StoreError.exit_code)
    return task("verify", YES, "it needs no GPU and no network, nor do inspect and list")


def _kernels(report: Mapping[str, Any]) -> dict[str, Any]:
    if report["settings_problem"]:
        return task("kernels", NO, _SETTINGS, _MEND, code=UsageError.exit_code)
    if report["pins"]["problem"]:
        return task("kernels", NO, "the pins cannot be read", "see pins", code=PinError.exit_code)
    name = f"hopper-{KERNELS_VERSION}"
    release = next((one for one in report["releases"] if one["name"] == name), None)
    if release is None:
        return task("kernels", NO, f"{name} is not pinned", "look at the pins", code=MissingError.exit_code)
    if release["problem"]:
        reason, _, step = release["problem"].partition("; ")
        return task("kernels", NO, reason, step or release["install"], code=MissingError.exit_code)
    return task("kernels", YES, f"{name} is available locally")


def _accelerator(report: Mapping[str, Any]) -> dict[str, Any]:
    accelerator = report["accelerator"]
    if accelerator["installed"]:
        return task("accelerator", YES, f"version {accelerator['version']}")
    step = "'make install' in a clone installs it"
    reason = f"{accelerator['problem']}; launches work and take more host time"
    return task("accelerator", NO, reason, step, code=MissingError.exit_code)


def _launches(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    driver, code = report["driver"], DeviceError.exit_code
    if not driver["present"]:
        step = f"install the NVIDIA driver, {LEAST_DRIVER} or newer, and in a container start it with --gpus"
        return [task("launch", NO, driver["problem"] or "there is no driver", step, code=code)]
    if not driver["devices"]:
        step = "look at CUDA_VISIBLE_DEVICES and 'nvidia-smi', and in a container start it with --gpus"
        return [task("launch", NO, driver["problem"] or "no device is visible", step, code=code)]
    return [one for device in driver["devices"] for one in _launches_on(report, device)]


def _launches_on(report: Mapping[str, Any], device: Mapping[str, Any]) -> list[dict[str, Any]]:
    number, code = str(device["number"]), DeviceError.exit_code
    about = {"device": f"{device['name']} (sm_{number})"}
    usable = [one for one in report["releases"] if one["known_abi"] and one["runs_on"].get(number)]
    if not usable:
        problems = [one for one in report["releases"] if one["known_abi"] and one["problem"]]
        step = problems[0]["install"] if problems else "see the table of supported GPUs in the README"
        return [task("launch", NO, "no local release has a kernel for it", step, code=code, **about)]
    return [_launch(one, number, about, code) for one in usable]


def _launch(release: Mapping[str, Any], number: str, about: Mapping[str, Any], code: int) -> dict[str, Any]:
    count, untried = release["runs_on"][number], release["built_not_run"][number]
    if untried == count:
        reason = f"{count} kernels of {release['name']} were built for it and never run"
        return task("launch", NO, reason, "ask for them by name with backend='native'", code=code, **about)
    built = f" ({untried} more were built but never run)" if untried else ""
    return task("launch", YES, f"{count - untried} kernels of {release['name']}{built}", **about)
