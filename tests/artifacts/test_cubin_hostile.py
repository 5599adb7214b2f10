"""Damaged and hostile ELF files: one error type, and no more work than the bytes deserve."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cubin_runtime.artifacts.cubins.cubin import CubinFormatError, parse_cubin

FIXTURES = Path(__file__).parents[1] / "fixtures"
GOOD = {path.name: path.read_bytes() for path in sorted(FIXTURES.glob("*.cubin"))}
FUZZ = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def parses_or_refuses(data: bytes) -> None:
    try:
        parse_cubin(data)
    except CubinFormatError:
        return


def with_field(data: bytes, at: int, form: str, value: int) -> bytes:
    changed = bytearray(data)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


def with_section_field(data: bytes, section: int, offset: int, form: str, value: int) -> bytes:
    table = struct.unpack_from("<Q", data, 40)[0]
    return with_field(data, table + section * 64 + offset, form, value)


def section_number(data: bytes, name: bytes) -> int:
    table, count, names = struct.unpack_from("<Q", data, 40)[0], *struct.unpack_from("<2xHH", data, 58)
    start = struct.unpack_from("<Q", data, table + names * 64 + 24)[0]
    starts = (start + struct.unpack_from("<I", data, table + i * 64)[0] for i in range(count))
    return next(i for i, at in enumerate(starts) if data[at:].startswith(name + b"\0"))


def hostile_file(names: bytes, contents: list[tuple[int, int, bytes]]) -> bytes:
    """A file of a name table (number 1) and sections given as (offset of name, type, content)."""
    body, headers = names, struct.pack("<IIQQQQIIQQ", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    headers += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, len(names), 0, 0, 0, 0)
    for name_at, kind, content in contents:
        headers += struct.pack("<IIQQQQIIQQ", name_at, kind, 0, 0, 64 + len(body), len(content), 1, 0, 0, 0)
        body += content
    header = bytearray(GOOD["facts_sm_80.cubin"][:64])
    struct.pack_into("<Q", header, 40, 64 + len(body))
    struct.pack_into("<HH", header, 60, 2 + len(contents), 1)
    return bytes(header) + body + headers


@given(st.sampled_from(sorted(GOOD)), st.data())
@FUZZ
def test_changed_bytes_parse_or_are_refused(name: str, data: st.DataObject) -> None:
    changed = bytearray(GOOD[name])
    for at in data.draw(st.lists(st.integers(0, len(changed) - 1), min_size=1, max_size=16)):
        changed[at] = data.draw(st.integers(0, 255))
    parses_or_refuses(bytes(changed))


@given(st.sampled_from(sorted(GOOD)), st.data())
@FUZZ
def test_changed_section_headers_parse_or_are_refused(name: str, data: st.DataObject) -> None:
    changed = bytearray(GOOD[name])
    table, count = struct.unpack_from("<Q", changed, 40)[0], struct.unpack_from("<H", changed, 60)[0]
    for _ in range(data.draw(st.integers(1, 4))):
        place = table + data.draw(st.integers(0, count * 16 - 1)) * 4
        value = data.draw(st.sampled_from([0, 1, 2, 3, 8, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, len(changed)]))
        struct.pack_into("<I", changed, place, value)
    parses_or_refuses(bytes(changed))


@given(st.sampled_from(sorted(GOOD)), st.data())
@FUZZ
def test_changed_symbols_and_attributes_parse_or_are_refused(name: str, data: st.DataObject) -> None:
    changed = bytearray(GOOD[name])
    table, count = struct.unpack_from("<Q", changed, 40)[0], struct.unpack_from("<H", changed, 60)[0]
    section = data.draw(st.integers(1, count - 1))
    start, size = struct.unpack_from("<QQ", changed, table + section * 64 + 24)
    end = min(start + size, len(changed))
    for at in data.draw(st.lists(st.integers(start, max(start, end - 1)), min_size=1, max_size=8)):
        if at < len(changed):
            changed[at] = data.draw(st.sampled_from([0, 1, 4, 0x10, 0x17, 0x45, 0x7F, 0xFF]))
    parses_or_refuses(bytes(changed))


@given(st.sampled_from(sorted(GOOD)), st.integers(0, 30000))
@FUZZ
def test_a_truncated_file_parses_or_is_refused(name: str, size: int) -> None:
    parses_or_refuses(GOOD[name][:size])


@given(st.binary(max_size=512))
@FUZZ
def test_noise_behind_a_good_header_is_refused(noise: bytes) -> None:
    with pytest.raises(CubinFormatError):
        parse_cubin(GOOD["facts_sm_80.cubin"][:64] + noise)


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"MZ" + bytes(100), bytes(64), b"<html>" + bytes(100)])
def test_other_files_are_called_no_cubin(data: bytes) -> None:
    with pytest.raises(CubinFormatError, match="not a cubin"):
        parse_cubin(data)


def test_an_elf_for_another_machine_is_called_no_cubin() -> None:
    with pytest.raises(CubinFormatError, match="machine 62"):
        parse_cubin(with_field(GOOD["facts_sm_80.cubin"], 18, "<H", 62))


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (60, "<H", 0, "0 sections"),
        (60, "<H", 0xFFFF, "65535 sections"),
        (62, "<H", 0xFFFF, "names in section 65535"),
        (58, "<H", 1, "section headers of 1 bytes"),
        (40, "<Q", 1 << 63, "section table"),
        (40, "<Q", 0, "section table"),
    ],
)
def test_a_header_that_lies_is_refused_by_what_it_says(at: int, form: str, value: int, message: str) -> None:
    with pytest.raises(CubinFormatError, match=message):
        parse_cubin(with_field(GOOD["facts_sm_80.cubin"], at, form, value))


def test_a_section_beyond_the_file_is_refused_by_name() -> None:
    data = GOOD["facts_sm_80.cubin"]
    with pytest.raises(CubinFormatError, match=r"\.text\.empty"):
        parse_cubin(with_section_field(data, section_number(data, b".text.empty"), 32, "<Q", 1 << 40))


def test_more_shared_memory_than_any_device_has_is_refused() -> None:
    data = GOOD["facts_sm_80.cubin"]
    with pytest.raises(CubinFormatError, match=r"\.nv\.shared\.block"):
        parse_cubin(with_section_field(data, section_number(data, b".nv.shared.block"), 32, "<Q", 1 << 62))


def test_a_name_beyond_its_table_is_refused() -> None:
    with pytest.raises(CubinFormatError, match="name at"):
        parse_cubin(with_section_field(GOOD["facts_sm_80.cubin"], 1, 0, "<I", 0x7FFFFFFF))


def test_two_sections_of_one_name_are_refused() -> None:
    data = GOOD["facts_sm_80.cubin"]
    name_at = struct.unpack_from("<I", data, struct.unpack_from("<Q", data, 40)[0] + 3 * 64)[0]
    with pytest.raises(CubinFormatError, match="two sections"):
        parse_cubin(with_section_field(data, 4, 0, "<I", name_at))


def test_a_parameter_given_twice_is_refused() -> None:
    data = GOOD["pair_sm_100f.cubin"]
    record = struct.pack("<BBHIHHI", 4, 0x17, 12, 0, 0, 0, 0x1400F000)
    place = data.index(struct.pack("<BBH", 4, 0x17, 12), data.index(b"Cuda compilation"))
    following = struct.unpack_from("<Q", data, 40)[0]
    assert place + 2 * len(record) < following
    changed = data[:place] + record + record + data[place + 2 * len(record) :]
    with pytest.raises(CubinFormatError):
        parse_cubin(changed)


def test_a_large_file_of_empty_names_costs_one_pass() -> None:
    names = b"a" * (8 << 20)
    section = struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, 64, len(names), 0, 0, 0, 0)
    header = bytearray(GOOD["facts_sm_80.cubin"][:64])
    struct.pack_into("<Q", header, 40, 64 + len(names))
    struct.pack_into("<HH", header, 60, 4096, 1)
    started = time.thread_time()
    with pytest.raises(CubinFormatError, match="does not end"):
        parse_cubin(bytes(header) + names + section * 4096)
    assert time.thread_time() - started < 5


def test_too_many_kernels_are_refused_before_their_names_are_read() -> None:
    names = b"\0.symtab\0" + b"k" * 4000 + b"\0"
    symbols = struct.pack("<IBBHQQ", 9, 18, 0x10, 1, 0, 0) * 65536
    started = time.thread_time()
    with pytest.raises(CubinFormatError, match="65536 kernels"):
        parse_cubin(hostile_file(names, [(1, 2, symbols)]))
    assert time.thread_time() - started < 2


def test_attribute_sections_that_share_bytes_are_refused() -> None:
    names = b"\0.nv.info.a\0.nv.info.b\0"
    data = hostile_file(names, [(1, 1, bytes(4096)), (12, 1, bytes(4))])
    overlapping = with_section_field(with_section_field(data, 3, 24, "<Q", 64), 3, 32, "<Q", 4096)
    with pytest.raises(CubinFormatError, match="overlap"):
        parse_cubin(overlapping)
