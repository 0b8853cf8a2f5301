"""Bytes that are not UTF-8: the line is refused, repaired or left out as asked, counted with its place, and no other
line is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_tinylm.data.chunks import Skipped
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.sources import read_documents
from hf_tinylm.data.utf8 import BLOCK_BYTES
from hf_tinylm.errors import DataError
from hf_tinylm.sections import RunConfig, SourceSection

BAD_TEXT = b"ok line\nbad \xff\xfe byte\nlast\n"


def read(path: Path, utf8: str, splitter: str | None = None) -> tuple[list[str], Skipped]:
    skipped = Skipped()
    source = SourceSection("s", str(path), utf8=utf8, splitter=splitter)  # type: ignore[arg-type]
    return [document.text for document in read_documents(source, skipped)], skipped


@pytest.mark.parametrize(
    ("policy", "whole", "lines"),
    [
        ("replace", ["ok line\nbad �� byte\nlast\n"], ["ok line", "bad �� byte", "last"]),
        ("skip", ["ok line\nlast\n"], ["ok line", "last"]),
    ],
)
def test_a_bad_line_goes_by_the_policy_and_the_others_are_used(
    policy: str, whole: list[str], lines: list[str], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(BAD_TEXT)
    for splitter, expected in ((None, whole), ("lines", lines), ("paragraphs_1000", [whole[0].rstrip("\n")])):
        found, skipped = read(tmp_path / "a.txt", policy, splitter)
        assert found == expected
        assert (skipped.bad_lines, skipped.bad_bytes) == (1, 2)
        assert skipped.bad_places == [f"{tmp_path / 'a.txt'} at byte 12"]
        assert skipped.counts == ({"not_utf8": 1} if policy == "skip" else {})


@pytest.mark.parametrize(("policy", "expected"), [("replace", ["ok", "bad �", "last"]), ("skip", ["ok", "last"])])
def test_a_bad_value_in_jsonl_goes_by_the_policy(policy: str, expected: list[str], tmp_path: Path) -> None:
    content = b'{"text": "ok"}\n{"text": "bad \xff"}\n{"text": "last"}\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    found, skipped = read(tmp_path / "a.jsonl", policy)
    assert found == expected
    assert skipped.bad_places == [f"{tmp_path / 'a.jsonl'} at byte {content.index(0xFF)}"]


@pytest.mark.parametrize(("policy", "expected"), [("replace", ["ok", "ab�c"]), ("skip", ["ok"])])
def test_half_a_surrogate_pair_goes_by_the_policy(policy: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ok"}\n{"text": "ab\\ud83dc"}\n')
    found, skipped = read(tmp_path / "a.jsonl", policy)
    assert found == expected
    assert (skipped.bad_lines, skipped.bad_bytes) == (1, 1)
    assert skipped.bad_places[0].endswith("line 2")


def test_a_bad_text_in_parquet_goes_by_the_policy(tmp_path: Path) -> None:
    texts = pa.array([b"ok", b"bad \xff", b"last"]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", "replace")[0] == ["ok", "bad �", "last"]
    found, skipped = read(tmp_path / "a.parquet", "skip")
    assert (found, skipped.bad_places) == (["ok", "last"], [f"{tmp_path / 'a.parquet'} row 2 at byte 4"])
    with pytest.raises(DataError, match="row 2 is not valid UTF-8: byte 0xff at offset 4"):
        read(tmp_path / "a.parquet", "strict")


def test_offsets_are_bytes_of_the_file_across_blocks_and_byte_order_marks(tmp_path: Path) -> None:
    lines = [f"line {number} é".encode() for number in range(200_000)]
    for number in (3, 100_000, 199_999):
        lines[number] = b"x\xe9y"
    content = b"\xef\xbb\xbf" + b"\n".join(lines)
    assert len(content) > 2 * BLOCK_BYTES
    (tmp_path / "a.txt").write_bytes(content)
    found, skipped = read(tmp_path / "a.txt", "skip", "lines")
    expected = [content.index(b"x\xe9y") + 1]
    while len(expected) < 3:
        expected.append(content.index(b"x\xe9y", expected[-1] + 1) + 1)
    assert [int(place.rsplit(" ", 1)[1].replace(",", "")) for place in skipped.bad_places] == expected
    assert len(found) == 199_997


def test_a_character_across_two_blocks_is_no_bad_byte(tmp_path: Path) -> None:
    """One line, longer than a line may be, of three-byte characters: every cut falls inside one."""
    text = "가" * 6_000_000
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found, skipped = read(tmp_path / "a.txt", "strict")
    assert found == [text]
    assert skipped.bad_lines == 0


def test_many_bad_bytes_are_all_counted_and_the_first_hundred_listed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 " * 300_000)
    _, skipped = read(tmp_path / "a.txt", "replace")
    assert (skipped.bad_bytes, len(skipped.bad_places)) == (300_000, 100)


def test_the_manifest_tells_what_was_not_utf8(
    make_config: Callable[..., RunConfig], texts: list[str], tmp_path: Path
) -> None:
    lines = [json.dumps({"text": text}).encode() for text in texts]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines[:50], b'{"text": "\xff"}', *lines[50:]]))
    offset = len(b"\n".join(lines[:50])) + len(b'\n{"text": "')
    source = SourceSection("a", str(tmp_path / "a.jsonl"), utf8="skip")
    manifest = prepare(make_config(source), progress=False)
    assert manifest["documents"] == 200
    assert manifest["not_utf8"] == {"lines": 1, "bytes": 1, "places": [f"{tmp_path / 'a.jsonl'} at byte {offset:,}"]}
    assert manifest["dropped"] == {"not_utf8": 1}
