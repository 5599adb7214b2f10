"""``schema``: what each verb prints with ``--json``, as JSON Schema. One envelope, and the fields of each verb."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..errors import UsageError
from . import output

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
FLAG: Schema = {"type": "boolean"}
DIGEST: Schema = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
ANY: Schema = {"type": "object"}
SIZES: Schema = {"type": "array", "items": COUNT}


def verbs(incomplete: str) -> list[str]:
    """The verbs that have a schema, for completion."""
    return [verb for verb in PAYLOADS if verb.startswith(incomplete)]


def schema(
    verb: Annotated[
        str,
        typer.Argument(metavar="VERB", help="The verb whose output is described.", autocompletion=verbs),
    ],
) -> None:
    """Print the JSON Schema of what a verb prints with --json."""
    import json

    if verb not in PAYLOADS:
        raise UsageError(f"schema {verb!r}: expected one of {', '.join(PAYLOADS)}")
    with output.writing():
        print(json.dumps(schema_of(verb), indent=2))


def schema_of(verb: str) -> Schema:
    """The schema of a verb's object: one of its payloads beside the envelope, or the envelope with errors alone."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"cubin-runtime {verb} --json",
        "anyOf": [
            *(_enveloped(verb, payload, least_errors=0) for payload in PAYLOADS[verb]),
            _enveloped(verb, {}, least_errors=1),
        ],
    }


def _enveloped(verb: str, payload: Schema, *, least_errors: int) -> Schema:
    error = closed(code=COUNT, kind=TEXT, message=TEXT)
    errors = {
        "type": "array",
        "items": error,
        "minItems": least_errors,
        "description": "what failed; the exit code is the gravest `code`; empty on success",
    }
    number = {"const": output.JSON_SCHEMA, "description": "grows when a field changes its meaning or goes away"}
    return closed(schema=number, verb={"const": verb}, errors=errors, **payload)


def closed(**fields: Schema) -> Schema:
    """An object with exactly these fields."""
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def listed(items: Schema, about: str = "") -> Schema:
    """An array."""
    return {"type": "array", "items": items, **({"description": about} if about else {})}


def mapped(values: Schema, about: str = "") -> Schema:
    """An object with any names."""
    return {"type": "object", "additionalProperties": values, **({"description": about} if about else {})}


def told(kind: Schema, about: str) -> Schema:
    """The same with a description."""
    return {**kind, "description": about}


def maybe(kind: Schema, about: str) -> Schema:
    """The same, or null for what is not known or not there."""
    return {"anyOf": [kind, {"type": "null"}], "description": about}


_PATH = told(TEXT, "artifact path")
_FETCHED = closed(
    pin=TEXT,
    chosen=told(COUNT, "files that target and filters choose"),
    present=told(COUNT, "of these, in the store already"),
    missing=told(COUNT, "in a dry run: what would be fetched"),
    fetched=COUNT,
    bytes=told(COUNT, "fetched bytes"),
    about_bytes=maybe(COUNT, "estimate for what was missing; null if the pin has no sizes"),
    seconds=NUMBER,
    dry_run=FLAG,
    by_source=mapped(COUNT, "files by the source that delivered them"),
    saves_about_bytes=maybe(COUNT, "estimate for what the filters left out; null if the pin has no sizes"),
)
_VERIFIED = closed(
    pin=TEXT,
    where=told(TEXT, "the store or the tree"),
    complete=FLAG,
    ok=told(COUNT, "files with the right digest"),
    bytes=COUNT,
    repaired=COUNT,
    missing=COUNT,
    missing_paths=listed(_PATH, "with --complete"),
    corrupt=listed(closed(path=_PATH, reason=TEXT)),
    extra=listed(TEXT, "files that no pinned release lists"),
)
_PINNED = {
    "name": TEXT,
    "path": _PATH,
    "manifest_sha256": DIGEST,
    "files": maybe(COUNT, "lines of the manifest; null if it was not looked at"),
    "max_file_bytes": COUNT,
    "abi": maybe(TEXT, "parameter layout of the kernels; null: never launched"),
    "written": maybe(TEXT, "the pin file, or that the release is pinned already; null: nothing was written"),
}
_KERNEL = closed(
    symbol=TEXT,
    parameters=listed(closed(offset=COUNT, bytes=COUNT)),
    max_threads=maybe(COUNT, "limit of a block"),
    registers=maybe(COUNT, "of a thread"),
    static_shared_bytes=COUNT,
    stack_bytes=maybe(COUNT, "of a thread"),
)
_INSPECTED = {
    "target": TEXT,
    "origin": told(TEXT, "the file, store or source that the bytes came from"),
    "bytes": COUNT,
    "sha256": DIGEST,
    "architecture": TEXT,
    "kernels": listed(_KERNEL),
    "verified": told(FLAG, "whether a pin covers these bytes"),
    "pin": maybe(TEXT, "the pin that covers them"),
    "path": maybe(TEXT, "artifact path"),
    "manifest_line": maybe(TEXT, "the line of checksums.txt"),
}
_WITH_METADATA = {
    "declared_architecture": TEXT,
    "metadata": told(ANY, "the release's own row for the cubin"),
    "disagreements": listed(TEXT, "what metadata and cubin disagree on"),
}
_SURVEYED = {
    "anyOf": [
        closed(
            path=_PATH,
            sha256=DIGEST,
            bytes=COUNT,
            architecture=TEXT,
            kernels=listed(TEXT, "symbols"),
            disagreements=listed(TEXT),
        ),
        closed(path=_PATH, sha256=DIGEST, problem=TEXT),
    ]
}
_COLLECTED = closed(
    releases=listed(TEXT),
    removed=told(COUNT, "objects"),
    bytes=COUNT,
    kept=COUNT,
    needed_by=mapped(COUNT, "objects that stay, by the release that needs them"),
    absent=listed(TEXT, "releases whose manifest is not available locally"),
    dry_run=FLAG,
)
_LEFTOVERS = closed(temporaries=COUNT, quarantined=COUNT, bytes=COUNT, dry_run=FLAG)
_UNREFERENCED = closed(removed=told(COUNT, "objects"), bytes=COUNT, dry_run=FLAG)
_TASK = {
    "anyOf": [
        closed(
            task=TEXT,
            **about,
            state={"enum": ["yes", "no", "not tried"]},
            reason=TEXT,
            next=maybe(TEXT, "what to do"),
        )
        for about in ({}, {"release": TEXT}, {"device": TEXT})
    ]
}
_DOCTOR = {
    "version": TEXT,
    "python": TEXT,
    "platform": TEXT,
    "settings": listed(
        closed(
            name=TEXT,
            value={"anyOf": [TEXT, FLAG, listed(TEXT)]},
            **{"from": told(TEXT, "flag, the variable, or default")},
        )
    ),
    "offline": FLAG,
    "pins": closed(problem=maybe(TEXT, "why they cannot be read"), releases=COUNT, signed=COUNT),
    "store": closed(
        problem=maybe(TEXT, "why it cannot be used"),
        path=maybe(TEXT, "null if none is configured"),
        exists=FLAG,
        writable=FLAG,
        free_bytes=maybe(COUNT, "room on its file system"),
    ),
    "sources": listed(
        closed(
            source=TEXT,
            release=TEXT,
            delivers=maybe(FLAG, "whether it has the release's manifest; null if it was not asked"),
            seconds=maybe(NUMBER, "how long it took"),
            problem=maybe(TEXT, "why it does not deliver, or was not asked"),
        )
    ),
    "settings_problem": maybe(TEXT, "why settings cannot be read; null if only the store is unknown"),
    "accelerator": closed(installed=FLAG, version=maybe(TEXT, "of the distribution"), problem=maybe(TEXT, "why not")),
    "driver": closed(
        present=FLAG,
        cuda=maybe(TEXT, "newest CUDA version that it supports"),
        devices=listed(closed(ordinal=COUNT, name=TEXT, number=COUNT, multiprocessors=COUNT)),
        problem=maybe(TEXT, "why there is no driver or device"),
    ),
    "releases": listed(
        closed(
            name=TEXT,
            files=maybe(COUNT, "of the release"),
            bytes=maybe(COUNT, "of the release"),
            in_store=maybe(COUNT, "files; null if its manifest is not available locally"),
            missing_bytes=maybe(COUNT, "estimate of what a fetch of all of it would bring"),
            install=maybe(TEXT, "what installs a package with it"),
            known_abi=FLAG,
            launchable=FLAG,
            runs_on=mapped(COUNT, "kernels by compute capability of the devices"),
            built_not_run=mapped(COUNT, "of these, never run by this project"),
            problem=maybe(TEXT, "why its kernels are not known"),
        )
    ),
    "tasks": listed(_TASK, "whether each works here"),
}
_EXPORTED = {
    "target": TEXT,
    "releases": listed(TEXT),
    "bytes": COUNT,
    "seconds": NUMBER,
}
_NATIVE = {
    "backend": TEXT,
    "operator": TEXT,
    "launches": listed(ANY, "kernel, grid, block, reason and candidates of each"),
    "pdl": FLAG,
    "shape": ANY,
    "device": ANY,
}
_TRTLLM_GEN = {
    "backend": TEXT,
    "policy": TEXT,
    "occupancy_calls": listed(ANY),
    "kernel": TEXT,
    "grid": SIZES,
    "block": SIZES,
    "smem": COUNT,
    "stream": {},
    "attrs": ANY,
    "nonportable_cluster_set_for": listed(TEXT),
    "tma": told(ANY, "descriptors by name; null where none is built"),
    "params": told(ANY, "fields of the parameter struct"),
    "params_hex": TEXT,
    "reduction": maybe(ANY, "the launch that merges splits"),
    "lse": maybe(ANY, "the launch that writes the log-sum-exp"),
}
_CALL = {
    "file": TEXT,
    "operator": TEXT,
    "tensors": ANY,
    "options": ANY,
    "kernels": {"type": "array"},
    "origin": ANY,
    "failed": maybe(TEXT, "the error of the recorded call"),
    "no_reference": maybe(TEXT, "why there is no reference"),
    "notes": listed(TEXT),
    "recorded": listed(ANY, "outputs against the reference"),
    "device": maybe(TEXT, "where it was run again"),
    "replayed": listed(ANY, "outputs of the run against the reference"),
    "same_bits": maybe(FLAG, "whether the run gave the recorded bits"),
    "ok": FLAG,
}
# Verb -> the payloads that it may print.
PAYLOADS: dict[str, tuple[Schema, ...]] = {
    "fetch": ({"releases": listed(_FETCHED)},),
    "where": (
        {"path": _PATH, "places": listed(closed(kind={"enum": ["store", "source"]}, location=TEXT, sha256=DIGEST))},
        {"pin": TEXT, "store": TEXT, "files": COUNT, "in_store": COUNT},
    ),
    "verify": ({"releases": listed(_VERIFIED)},),
    "pin": (
        _PINNED,
        {
            "group": TEXT,
            "pins": listed(closed(name=TEXT, path=_PATH, manifest_sha256=DIGEST)),
            "unpinnable": listed(TEXT),
            "file": TEXT,
            "written": told(COUNT, "pins that were not there before"),
        },
    ),
    "unpin": (
        {"name": TEXT, "path": _PATH, "file": TEXT, "left_in_store": FLAG},
        {"name": TEXT, "pins": listed(TEXT), "file": TEXT},
    ),
    "inspect": (
        _INSPECTED,
        {**_INSPECTED, **_WITH_METADATA},
        {"pin": TEXT, "cubins": listed(_SURVEYED), "not_fetched": COUNT},
    ),
    "list": (
        {
            "pins": listed(
                closed(
                    name=TEXT,
                    path=_PATH,
                    files=maybe(COUNT, "null if the pin does not state it"),
                    bytes=maybe(COUNT, "null if the pin does not state it"),
                    licence=TEXT,
                )
            )
        },
        {
            "pin": TEXT,
            "count": COUNT,
            "files": listed(closed(path=_PATH, sha256=DIGEST, metadata=maybe(ANY, "the release's row for the file"))),
        },
    ),
    "diff": (
        {
            "old": TEXT,
            "new": TEXT,
            "added": listed(TEXT),
            "removed": listed(TEXT),
            "changed": listed(
                closed(
                    name=TEXT,
                    old_sha256=DIGEST,
                    new_sha256=DIGEST,
                    facts=listed({"type": "array"}, "name, old and new value"),
                )
            ),
            "same": COUNT,
            "metadata": told(FLAG, "whether metadata was compared"),
        },
    ),
    "explain": (
        _NATIVE,
        {**_NATIVE, "microseconds": NUMBER, "costs": ANY},
        _TRTLLM_GEN,
    ),
    "replay": ({"calls": listed(closed(**_CALL)), "not_run": told(TEXT, "why nothing was run again, or empty")},),
    "export": (
        {**_EXPORTED, "files": COUNT, "archive_bytes": COUNT, "sha256": DIGEST},
        {**_EXPORTED, "written": COUNT, "kept": COUNT},
    ),
    "mirror": ({**_EXPORTED, "written": COUNT, "kept": COUNT},),
    "flashinfer-env": ({"variables": mapped(TEXT)},),
    "gc": (
        {
            "store": TEXT,
            "releases": maybe(_COLLECTED, "null if none was named"),
            "leftovers": maybe(_LEFTOVERS, "null without --temps"),
            "unreferenced": maybe(_UNREFERENCED, "null without --unreferenced"),
        },
    ),
    "usage": (
        {
            "store": TEXT,
            "releases": listed(
                closed(
                    release=TEXT,
                    objects=maybe(COUNT, "null if its manifest is not available locally"),
                    bytes=maybe(COUNT, "likewise"),
                    alone_bytes=maybe(COUNT, "of objects that no other pinned release needs"),
                )
            ),
            "objects": COUNT,
            "bytes": COUNT,
            "unreferenced": told(COUNT, "objects that no pinned release needs"),
            "unreferenced_bytes": COUNT,
            "quarantined": COUNT,
        },
    ),
    "keygen": ({"private": TEXT, "public": TEXT, "name": TEXT, "public_hex": DIGEST},),
    "sign": (
        {
            "file": TEXT,
            "signature": TEXT,
            "version": COUNT,
            "expires": maybe(TEXT, "never if null"),
            "keys": listed(TEXT, "names of the keys that signed"),
        },
    ),
    "doctor": (_DOCTOR,),
}
