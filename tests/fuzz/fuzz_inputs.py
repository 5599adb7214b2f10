"""Inputs for the targets: the corpus, changed in ways that keep much of its form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

CORPUS = Path(__file__).with_name("corpus")
MAX_INPUT_BYTES = 1 << 17

_FIXTURES = Path(__file__).parents[1] / "fixtures"
_NUMBERS = (0, 1, 2, 3, 4, 7, 8, 16, 64, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
VERBS = ("fetch", "where", "verify", "list", "inspect", "diff", "pin", "unpin", "gc", "doctor", "explain", "replay")
OPTIONS = ("--source", "--tree", "--pins", "--store", "--sha256", "--match", "--jobs", "--retries", "--timeout", "--sm")
_TOKENS = {
    "manifest": (
        b"\n",
        b"\r\n",
        b"  ",
        b" *",
        b"../",
        b"/",
        b"\\",
        b"\0",
        b"checksums.txt",
        b"\xff",
        b"a" * 64,
        b"\x1b[",
    ),
    "header": (
        b"{",
        b"}",
        b"};\n",
        b",",
        b'"',
        b"struct ",
        b"[] = {",
        b"kSM_100f",
        b"true",
        b"DATA_TYPE_",
        b"//",
        b"\n",
    ),
    "elf": (
        b"\x7fELF",
        b"\0",
        b".nv.info",
        b".text.",
        b".symtab",
        b"\x04\x17\x0c\0",
        b"\x04\x45",
        b"-arch sm_",
        b"\xff" * 8,
    ),
    "call": (
        b'{"',
        b'":',
        b"[",
        b"]",
        b"null",
        b"true",
        b"1e999",
        b"-1",
        b"NaN",
        b"9" * 20,
        b"BF16",
        b"page_ids",
        b"data_offsets",
        b"shape",
    ),
    "pins": (b"[[pin]]\n", b"[", b"{", b'"""', b"'''", b"a.", b"=", b"\\u0041", b"0x", b"9" * 40, b"1e999", b"nan"),
    "artifacts": (b"class ", b"(", b"{", b"'", b"\\ud800", b"0x", b"-", b"\n", b"ArtifactPath", b"CheckSumHash", b"f'"),
    "wheel": (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"\x0c\0", b"\x0e\0", b"\x08\0", b"\xff" * 4),
    "record": (b"checksums.txt", b"made/fmha/", b'"', b",", b"\n", b"\0", b"\xff", b"../", b"Name: x\n"),
    "words": (
        *(word.encode() for word in (*VERBS, *OPTIONS)),
        b"\n",
        b"=",
        b"nan",
        b"-1",
        b"1e400",
        b"9" * 5000,
        b"http://[",
        b"https:x",
        b"~nobody-of-that-name",
        b"hopper-0.1.0",
        b"\xff",
    ),
    "environment": (b"\n", b"http://", b"[", b"@", b"~nobody-of-that-name", b"=", b"nan", b"1e400", b"\xff", b":"),
    "zip": (
        b"PK\x01\x02",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"PK\x06\x06",
        b"PK\x06\x07",
        b"\x01\0\x18\0",
        b"made/fmha/",
        b"../",
    ),
}


def seeds_of(target: str) -> list[bytes]:
    """The target's corpus, in a stable order."""
    files = sorted((CORPUS / target).iterdir())
    if target == "elf":
        files += sorted(_FIXTURES.glob("*.cubin"))
    return [file.read_bytes() for file in files]


def changed(target: str, seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """One of the seeds after up to a dozen edits, of at most 128 KiB."""
    place = st.integers(0, 1 << 17)
    edit = st.one_of(
        st.tuples(st.just("set"), place, st.binary(min_size=1, max_size=4)),
        st.tuples(st.just("set"), place, st.builds(_number, st.sampled_from(_NUMBERS), st.sampled_from((1, 2, 4, 8)))),
        st.tuples(st.just("insert"), place, st.sampled_from(_TOKENS[target]) | st.binary(max_size=16)),
        st.tuples(st.just("insert"), place, st.sampled_from(list(seeds)).map(lambda seed: seed[:4096])),
        st.tuples(st.just("cut"), place, st.integers(0, 512).map(bytes)),
        st.tuples(st.just("repeat"), place, st.integers(1, 512).map(bytes)),
        st.tuples(st.just("end"), place, st.just(b"")),
    )
    return st.builds(_edited, st.sampled_from(list(seeds)), st.lists(edit, max_size=12))


def _number(value: int, width: int) -> bytes:
    return (value % (1 << 8 * width)).to_bytes(width, "little")


def _edited(seed: bytes, edits: Sequence[tuple[str, int, bytes]]) -> bytes:
    data = bytearray(seed)
    for kind, place, piece in edits:
        at = place % (len(data) + 1)
        if kind == "set":
            data[at : at + len(piece)] = piece
        elif kind == "insert":
            data[at:at] = piece
        elif kind == "cut":
            del data[at : at + len(piece)]
        elif kind == "repeat":
            data[at:at] = data[at : at + len(piece)]
        else:
            del data[at:]
    return bytes(data[:MAX_INPUT_BYTES])
