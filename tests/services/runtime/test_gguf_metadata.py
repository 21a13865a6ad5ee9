from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from kvern.services.runtime.gguf_metadata import GgufError, read_gguf_header, read_gguf_metadata
from kvern.services.runtime.model_source import find_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "grüezi 日")
    writer.add_bool("a.bool", True)
    writer.add_int8("an.int8", -8)
    writer.add_uint16("a.uint16", 65535)
    writer.add_uint64("a.uint64", 2**63)
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_array("some.strings", ["", "a", "ď"])
    writer.add_array("some.floats", [0.5, -1.0])
    writer.add_array("some.lists", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_metadata_of_every_type_is_read(path: Path) -> None:
    assert read_gguf_metadata(path) == {
        "general.architecture": "llama",
        "a.string": "grüezi 日",
        "a.bool": True,
        "an.int8": -8,
        "a.uint16": 65535,
        "a.uint64": 2**63,
        "a.float32": 0.5,
        "a.float64": 0.1,
        "some.strings": ["", "a", "ď"],
        "some.floats": [0.5, -1.0],
        "some.lists": [[1, 2], [3]],
    }


def test_metadata_of_a_real_model_is_what_the_gguf_package_reads() -> None:
    path = find_model("smollm2").path
    reader = gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert read_gguf_metadata(path) == expected
    shapes = {tensor.name: tuple(int(size) for size in tensor.shape) for tensor in reader.tensors}
    assert read_gguf_header(path).shapes == shapes


def test_file_cut_anywhere_in_its_metadata_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in range(len(data) - 8):
        cut.write_bytes(data[:length])
        with pytest.raises(GgufError):
            read_gguf_metadata(cut)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"PK\x03\x04 and more", "not a GGUF file"),
        (b"GGUF\x01\0\0\0" + b"\0" * 16, "version 1"),
        (b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\xff" * 8, "ends within"),
        (b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\x01" + b"\0" * 7 + b"\0" * 8 + b"\x63\0\0\0", "unknown type 99"),
        (
            b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\x01" + b"\0" * 7 + b"\0" * 8 + b"\x09\0\0\0\x04\0\0\0" + b"\xff" * 8,
            "ends",
        ),
        (b"GGUF\x03\0\0\0" + b"\0" * 8 + b"\x01" + b"\0" * 7 + b"\x01" + b"\0" * 7 + b"\xff", "not UTF-8"),
    ],
)
def test_file_that_is_no_gguf_is_refused_with_the_reason(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(GgufError, match=message):
        read_gguf_metadata(path)
