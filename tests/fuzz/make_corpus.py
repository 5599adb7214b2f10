"""Write the hand-made part of the corpus: valid files, and one for each trick that the readers must refuse.

``.venv/bin/python -m tests.fuzz.make_corpus`` runs it.
"""

from __future__ import annotations

import io
import struct
import tempfile
import zipfile
from pathlib import Path

from tests.artifacts.flashinfer_wheel import artifacts_text, make_tree
from tests.artifacts.kernel_headers import header_of
from tests.attention.recorded_calls import call_bytes, decode_call, mla_call
from tests.fuzz.fuzz_inputs import CORPUS

A, B = "a" * 64, "b" * 64
LINE = f"{A}  one.cubin\n"


def manifests() -> dict[str, bytes]:
    texts = {
        "valid": LINE + f"{B}  fmha/two.cubin\n",
        "binary-mode": f"{A} *one.cubin\n",
        "unicode": f"{A}  kernel-ü-カ.cubin\n",
        "climbs": f"{A}  ../../etc/passwd\n",
        "absolute": f"{A}  /etc/passwd\n",
        "climbs-inside": f"{A}  fmha/../../x\n",
        "backslash": f"{A}  fmha\\x\n",
        "escape": f"{A}  \x1b[2Jx\n",
        "bidi": f"{A}  kernel\u202elnibuc\n",
        "crlf": LINE.replace("\n", "\r\n"),
        "truncated": LINE + B[:40],
        "twice": LINE + LINE,
        "file-and-folder": f"{A}  x\n{B}  x/y\n",
        "upper-hex": LINE.replace("a" * 64, "A" * 64),
        "itself": f"{A}  checksums.txt\n",
        "empty-line": LINE + "\n" + LINE,
        "long-name": f"{A}  {'x' * 300}\n",
        "deep": f"{A}  {'x/' * 600}y\n",
        "empty": "",
    }
    return {**{name: text.encode() for name, text in texts.items()}, "no-utf8": f"{A}  ".encode() + b"\xff\xfe\n"}


def headers() -> dict[str, bytes]:
    kernels = ("fmhaSm100fKernel_A", "fmhaSm103aKernel_B")
    good = header_of(*kernels)
    return {
        "valid": good,
        "no-rows": header_of(),
        "twice": header_of(kernels[0], kernels[0]),
        "other-sm": header_of(kernels[0], mSM="kSM_90"),
        "huge-number": header_of(kernels[0], mThreadsPerCTA="99999999999999999999"),
        "negative": header_of(kernels[0], mThreadsPerCTA="-1"),
        "bad-digest": header_of(kernels[0], sha256='"zz"'),
        "odd-symbol": header_of(kernels[0], mFuncName='"../x\x1b[2J"'),
        "no-end": good[: good.rindex(b"};")],
        "no-struct": good[good.index(b"static") :],
        "column-twice": good.replace(b"int mSM;", b"int mSM; int mSM;"),
        "column-missing": good.replace(b"int mSM;", b""),
        "new-column": good.replace(b"int mSM;", b"int mNew; int mSM;"),
        "unclosed-brace": good.replace(b"},", b","),
        "no-ascii": good + b"\xff",
        "empty": b"",
    }


def archives() -> dict[str, bytes]:
    files = {"made/fmha/checksums.txt": LINE.encode(), "made/fmha/one.cubin": b"kernel " * 30}
    plain, packed = zip_of(files), zip_of(files, zipfile.ZIP_DEFLATED)
    end = packed.rindex(b"PK\x05\x06")
    central = packed.index(b"PK\x01\x02")
    return {
        "stored": plain,
        "deflated": packed,
        "prefix": b"#!/bin/sh\n" + packed,
        "deeper": zip_of({f"package/data/{name}": data for name, data in files.items()}),
        "climbs": zip_of({**files, "made/fmha/../../../etc/passwd": b"x", "/etc/passwd": b"y"}),
        "escape": zip_of({**files, "made/fmha/\x1b[2J": b"x"}),
        "bomb": zip_of({**files, "made/fmha/one.cubin": bytes(1 << 20)}, zipfile.ZIP_DEFLATED),
        "lzma": zip_of(files, zipfile.ZIP_LZMA),
        "twice": zip_of({"made/fmha/checksums.txt": b"1"}, more=[("made/fmha/checksums.txt", b"2")]),
        "says-small": packed[: central + 24] + struct.pack("<I", 1) + packed[central + 28 :],
        "says-large": packed[: central + 20] + b"\xff\xff\xff\x7f\xff\xff\xff\x7f" + packed[central + 28 :],
        "encrypted": packed[: central + 8] + b"\x01" + packed[central + 9 :],
        "far-header": packed[: central + 42] + b"\xfe\xff\xff\xff" + packed[central + 46 :],
        "zip64-far": far_away(),
        "many-said": packed[: end + 8] + b"\xff\xff\xff\xff" + packed[end + 12 :],
        "long-directory": packed[: end + 12] + b"\xff\xff\xff\x7f" + packed[end + 16 :],
        "truncated": packed[: len(packed) // 2],
        "no-zip": b"PK\x05\x06" + bytes(10),
        "empty": b"",
        "empty-zip": zip_of({}),
    }


def zip_of(
    files: dict[str, bytes], kind: int = zipfile.ZIP_STORED, more: list[tuple[str, bytes]] | None = None
) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", kind) as archive:
        for name, data in [*files.items(), *(more or [])]:
            archive.writestr(zipfile.ZipInfo(name), data, kind)
    return made.getvalue()


def far_away() -> bytes:
    """A member whose zip64 extra field says that it starts beyond any file."""
    name = b"made/fmha/checksums.txt"
    extra = struct.pack("<HHQ", 1, 8, 2**63 + 5)
    head = struct.pack(
        "<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0, 0, 0, 33, 0, 4, 4, len(name), len(extra), 0, 0, 0, 0, 0
    )
    central = head[:-4] + b"\xff\xff\xff\xff" + name + extra
    return central + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(central), 0, 0)


def cubins() -> dict[str, bytes]:
    good = (Path(__file__).parents[1] / "fixtures" / "pair_sm_100f.cubin").read_bytes()
    table = struct.unpack_from("<Q", good, 40)[0]
    far = good[:40] + struct.pack("<Q", 1 << 63) + good[48:]
    many = good[:60] + b"\xff\xff" + good[62:]
    return {"header-only": good[:64], "cut": good[:table], "far-table": far[:512], "many-sections": many[:512]}


def calls() -> dict[str, bytes]:
    good = call_bytes(decode_call())
    text, at = good[8:].decode("latin-1"), 8 + int.from_bytes(good[:8], "little")
    return {
        "valid": good,
        "ragged": call_bytes(decode_call(ragged=True)),
        "mla": call_bytes(mla_call()),
        "failed": call_bytes(decode_call(error="cuStreamSynchronize returned 700")),
        "no-reference": call_bytes(decode_call(operator="other")),
        "long-header": (1 << 40).to_bytes(8, "little") + good[8:],
        "damaged": good[:-1] + bytes([good[-1] ^ 1]),
        "cut": good[:-40],
        "more": good + b"more",
        "no-json": good[:8] + b"}" + good[9:],
        "nested": (70000).to_bytes(8, "little") + b"[" * 70000,
        "nan": with_header(good, text[: at - 8].replace('\\"window_left\\": -1', '\\"window_left\\": NaN')),
        "negative": with_header(good, text[: at - 8].replace('"shape": [2, 4]', '"shape": [-2, -4]')),
        "huge": with_header(good, text[: at - 8].replace('\\"shape\\": [8, 16', '\\"shape\\": [8000000000000, 16')),
        "overlap": with_header(good, text[: at - 8].replace('"data_offsets": [256', '"data_offsets": [0')),
        "empty": b"",
    }


def pins() -> dict[str, bytes]:
    good = (
        f'[[pin]]\nname = "made-1.0"\npath = "made/fmha"\nmanifest_sha256 = "{A}"\nfiles = 1\nbytes = 2\n'
        'max_file_bytes = 3\nlicence = "MIT"\nsources = ["package"]\n'
    )
    return {
        "valid": good.encode(),
        "empty": b"",
        "dotted": b"a." * 20_000 + b"b = 1",
        "deep": b"x = " + b"[" * 20_000,
        "digits": good.replace("files = 1", "files = 0x" + "f" * 5000).encode(),
        "unclosed": good.replace('"MIT"', '"""MIT').encode(),
        "secret": good.replace('"package"', '"https:/user:s3cr3t@host"').encode(),
        "no-utf8": good.encode().replace(b"MIT", b"\xff"),
    }


def artifacts() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        good = artifacts_text(make_tree(Path(place)))
    return {
        "valid": good.encode(),
        "empty": b"",
        "deep": b"x = " + b"(" * 20_000,
        "minus": b"x = " + b"-" * 50_000 + b"1",
        "surrogate": good.replace("aaa1/", "\\ud800/").encode(),
        "number": good.replace("'x86_64'", "0x" + "f" * 5000).encode(),
    }


def wheels() -> dict[str, bytes]:
    good = zipped(("flashinfer/artifacts.py", artifacts()["valid"].decode(), zipfile.ZIP_DEFLATED))
    return {
        "valid": good,
        "no-zip": b"no zip at all",
        "damaged": good[:80] + b"\xff\xff" + good[82:],
        "other-kind": good.replace(b"\x08\0", b"\x0c\0"),
        "other": zipped(("flashinfer/other.py", "", zipfile.ZIP_STORED)),
    }


def zipped(*members: tuple[str, str, int]) -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, text, kind in members:
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), text, kind)
    return whole.getvalue()


def lines() -> dict[str, dict[str, bytes]]:
    """Inputs of which each line is a word, a variable or a file."""
    return {
        "record": {
            "no-manifest": b"carrier/__init__.py,,\n",
            "manifest": b"made/fmha/checksums.txt,,\n",
            "no-utf8": b"caf\xe9/checksums.txt,,\n",
            "unclosed": b'"a\nchecksums.txt\n\0checksums.txt',
        },
        "words": {
            "list": b"list",
            "doctor": b"doctor\n-vv",
            "fetch": b"fetch\nhopper-0.1.0\n--source\nhttps://user:s3cr3t@[\n--retries\n0",
            "explain": b"explain\n--sm\n90\n--batch\n64\n--kv-len\n8192",
            "inspect": b"inspect\ncaf\xe9",
            "pin": b"pin\nmade\n--source\nhttp://127.0.0.1:9?token=1\n--sha256\n" + A.encode(),
            "gc": b"gc\n--temps\n--older-than\nnan",
            "token": b"list\n--token-file\nhost:token",
        },
        "environment": {
            "empty": b"",
            "all": b"package\n1\n3\n0\nhttp://proxy:1\nhost=token\n" + A.encode() + b"\ndebug\n1",
            "malformed-url": b"http://[",
            "one-slash": b"https:/user:s3cr3t@host",
            "no-utf8": b"caf\xe9\n2\nnan\n-1\nhttp://[\nhost\nzz",
        },
    }


def with_header(data: bytes, header: str) -> bytes:
    size = int.from_bytes(data[:8], "little")
    return len(header).to_bytes(8, "little") + header.encode("latin-1") + data[8 + size :]


def main() -> None:
    parts = {"manifest": manifests(), "header": headers(), "zip": archives(), "elf": cubins(), "call": calls()}
    parts |= {"pins": pins(), "artifacts": artifacts(), "wheel": wheels(), **lines()}
    for target, files in parts.items():
        (CORPUS / target).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (CORPUS / target / name).write_bytes(data)


if __name__ == "__main__":
    main()
