"""What docs/operators.md and its neighbours show of other programs: an image, an init container, an air gap."""

from __future__ import annotations

import json
import re

from tests.artifacts.releases import visible_files
from tests.docs.pages import PAGES, blocks_in, blocks_of
from tests.docs.sandbox import Sandbox

PAGE = "docs/operators.md"


def the_block(kind: str) -> str:
    (text,) = [block.text for block in blocks_of(PAGE) if block.kind == kind]
    return text


def test_the_image_is_built_and_serves_without_a_network(sandbox: Sandbox) -> None:
    commands = re.findall(r"^RUN (cubin-runtime .+)$", the_block("dockerfile"), re.MULTILINE)
    assert len(commands) == 2
    store = sandbox.new_store()
    sandbox.run("\n".join(commands), store)
    sandbox.run(commands[-1], store, CUBIN_RUNTIME_OFFLINE="1", CUBIN_RUNTIME_SOURCES="/nowhere")


def test_the_init_container_fills_an_empty_dir_that_serves_without_a_network(sandbox: Sandbox) -> None:
    parts = re.findall(r"(?:command|args): (\[.+\])", the_block("yaml"))
    assert len(parts) == 2
    words = [word for part in parts for word in json.loads(part)]
    store = sandbox.new_store()
    store.mkdir()
    store.chmod(0o777)
    sandbox.run(" ".join(words), store)
    sandbox.run(" ".join(words), store)
    words[1] = "verify"
    offline = {"CUBIN_RUNTIME_OFFLINE": "1", "CUBIN_RUNTIME_SOURCES": "/nowhere"}
    shown = sandbox.run(" ".join([*words, "--complete"]), store, **offline)
    assert "3 files verified" in shown


def test_an_import_across_the_gap_brings_every_file(sandbox: Sandbox) -> None:
    (export,) = blocks_in("docs/air_gap.md", "Export", "sh")
    (import_,) = blocks_in("docs/air_gap.md", "Import", "sh")
    sandbox.run(export, sandbox.new_store())
    before = len(sandbox.server.targets)
    store = sandbox.new_store()
    sandbox.run(import_, store)
    assert (len(visible_files(store)), len(sandbox.server.targets)) == (5, before)


def test_every_verb_that_the_pages_name_exists(sandbox: Sandbox) -> None:
    blocks = (block for page in PAGES for block in blocks_of(page) if block.kind == "sh")
    named = set(re.findall(r"^cubin-runtime ([a-z]+)", "\n".join(block.text for block in blocks), re.MULTILINE))
    shown = sandbox.run("cubin-runtime --help", sandbox.new_store())
    assert {verb for verb in named if not re.search(rf"\b{verb}\b", shown)} == set()
