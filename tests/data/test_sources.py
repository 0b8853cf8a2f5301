"""Every format gives the same documents, what is skipped is counted, and what is wrong is told with its place."""

from __future__ import annotations

import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_tinylm.config import load_config
from hf_tinylm.data.chunks import Skipped
from hf_tinylm.data.sources import read_chunks, read_documents, source_files
from hf_tinylm.errors import ConfigError, DataError
from hf_tinylm.sections import SourceSection

DOCUMENTS = ["one\ntwo", "셋 🙂", "four "]


def read(path: Path | str, **settings: Any) -> list[str]:
    return [document.text for document in read_documents(SourceSection("s", str(path), **settings), Skipped())]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("first line\r\n\n\nlast ÿ\n".encode())
    assert read(tmp_path / "a.txt") == ["first line\r\n\n\nlast ÿ\n"]


def test_jsonl_parquet_and_dataset_names_give_the_same_documents(tmp_path: Path) -> None:
    rows = [{"body": text, "other": 1} for text in DOCUMENTS]
    write_jsonl(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.table({"other": [1, 2, 3], "body": DOCUMENTS}), tmp_path / "a.parquet")
    (tmp_path / "named").mkdir()
    write_jsonl(tmp_path / "named" / "train.jsonl", rows)
    for found in (
        read(tmp_path / "a.jsonl", text_column="body"),
        read(tmp_path / "a.parquet", text_column="body"),
        read(tmp_path / "named", format="datasets", text_column="body"),
    ):
        assert found == DOCUMENTS


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".xz", lzma.compress),
        (".gz", gzip.compress),
        (".zst", lambda content: pa.compress(content, codec="zstd", asbytes=True)),
    ],
)
def test_compressed_files_read_as_plain_ones(suffix: str, compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    text = "héllo\n" * 200_000  # several blocks
    (tmp_path / f"a.txt{suffix}").write_bytes(compress(text.encode()))
    lines = "".join(json.dumps({"text": line}) + "\n" for line in DOCUMENTS)
    (tmp_path / f"a.jsonl{suffix}").write_bytes(compress(lines.encode()))
    assert read(tmp_path / f"a.txt{suffix}") == [text]
    assert read(tmp_path / f"a.jsonl{suffix}") == DOCUMENTS


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("a.txt.xz", lzma.compress),
        ("a.txt.gz", gzip.compress),
        ("a.txt.zst", lambda content: pa.compress(content, codec="zstd", asbytes=True)),
    ],
)
def test_a_compressed_file_that_was_cut_off_is_an_error(
    name: str, compress: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(compress(b"some text\n" * 1000)[:-9])
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        read(tmp_path / name)


def test_paragraphs_are_cut_at_blank_lines_near_the_size(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {number}\nof two lines" for number in range(9)]
    (tmp_path / "a.txt").write_text("\n\n  \n".join(["", *paragraphs, ""]))
    found = read(tmp_path / "a.txt", splitter="paragraphs_60")
    # A paragraph has 24 bytes and a break 4 or 5, so the third one brings a document above 60.
    assert found == ["\n\n  \n".join(paragraphs[start : start + 3]) for start in (0, 3, 6)]
    assert read(tmp_path / "a.txt", splitter="paragraphs_1") == paragraphs


def test_a_paragraph_above_the_size_stays_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 500 + "\n\nshort")
    assert read(tmp_path / "a.txt", splitter="paragraphs_10") == ["x" * 500, "short"]


def test_lines_are_documents_without_their_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\n two \nlast")
    skipped = Skipped()
    found = list(read_documents(SourceSection("s", str(tmp_path / "a.txt"), splitter="lines"), skipped))
    assert [document.text for document in found] == ["one", " two ", "last"]
    assert skipped.counts == {"empty": 1}
    assert [document.place.rsplit(" ", 1)[1] for document in found] == ["0", "6", "12"]


def test_records_without_text_are_skipped_and_counted_by_reason(tmp_path: Path) -> None:
    rows = [{"text": ""}, {"text": "   "}, {"text": None}, {"other": "x"}, {"text": "a"}, {"text": "\n"}]
    skipped = Skipped()
    source = SourceSection("s", str(write_jsonl(tmp_path / "a.jsonl", rows)))
    assert [document.text for document in read_documents(source, skipped)] == ["a"]
    assert skipped.counts == {"empty": 1, "white_space": 2, "null": 1, "missing": 1}
    assert {reason: place.rsplit(" ", 1)[1] for reason, place in skipped.first.items()} == {
        "empty": "1",
        "white_space": "2",
        "null": "3",
        "missing": "4",
    }


def test_nulls_of_parquet_are_counted(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None, "", "b"]}), tmp_path / "a.parquet")
    skipped = Skipped()
    source = SourceSection("s", str(tmp_path / "a.parquet"))
    assert [document.text for document in read_documents(source, skipped)] == ["a", "b"]
    assert skipped.counts == {"null": 1, "empty": 1}


@pytest.mark.parametrize(
    ("name", "content", "offset"),
    [
        ("a.txt", b"ok line\nbad \xff\xfe byte\nlast\n", "12"),
        ("b.txt", b"\xef\xbb\xbfok\n\xe9", "6"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "bad \xff"}\n', "29"),
    ],
)
@pytest.mark.parametrize("splitter", [None, "lines"])
def test_bytes_that_are_not_utf8_are_an_error_with_their_offset(
    name: str, content: bytes, offset: str, splitter: str | None, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} is not valid UTF-8: byte 0x.. at offset {offset} "):
        read(tmp_path / name, splitter=splitter if name.endswith("txt") else None)


def test_half_a_surrogate_pair_in_json_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "ab\\ud83d"}\n')
    with pytest.raises(DataError, match=r"line 2: U\+D83D at character 2"):
        read(tmp_path / "a.jsonl")


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hello"}')
    assert read(tmp_path / "a.txt") == read(tmp_path / "a.jsonl") == ["hello"]


@pytest.mark.parametrize(
    ("line", "message"),
    [('{"text": "a"', "line 2 is not valid JSON"), ('["a"]', "line 2 is a JSON list"), ('{"text": 5}', "text is int")],
)
def test_a_line_that_is_no_object_with_text_is_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.jsonl")


def test_a_wrong_column_is_told_with_the_right_ones(tmp_path: Path) -> None:
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="no column text; its columns are body, id"):
        read(tmp_path / "a.parquet")
    write_jsonl(tmp_path / "train.jsonl", [{"body": "a"}])
    with pytest.raises(DataError, match="no column text; its columns are body"):
        read(tmp_path, format="datasets")


def test_a_file_that_is_not_parquet_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(tmp_path / "a.parquet")


def test_folders_and_patterns_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("c.txt", "a.txt", "sub/b.txt", ".hidden.txt", ".git/x.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "d.jsonl", [{"text": "d.jsonl"}])
    assert read(tmp_path) == ["a.txt", "c.txt", "d.jsonl", "sub/b.txt"]
    assert read(tmp_path, format="text") == ["a.txt", "c.txt", "sub/b.txt"]
    assert read(tmp_path / "*.txt") == ["a.txt", "c.txt"]
    assert read(tmp_path / "**" / "*.txt") == ["a.txt", "c.txt", "sub/b.txt"]


@pytest.mark.parametrize("path", ["nowhere.txt", "nowhere/books.jsonl", "nowhere/*.txt", "bundled:nowhere.txt"])
def test_a_source_that_is_not_there_is_named(path: str) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read(path)


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no \.txt"):
        read(tmp_path)


def test_a_name_that_is_neither_file_nor_dataset_is_an_error(tmp_path: Path) -> None:
    assert source_files(SourceSection("s", "someone/some-data")) == []
    with pytest.raises(DataError, match="someone/some-data is no file here, and the Hub is not asked"):
        read("someone/some-data")
    with pytest.raises(DataError, match="could not be read"):
        read(tmp_path, format="datasets")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("policy", ["strict", "replace", "skip"])
def test_utf16_is_no_text_with_zeros_under_any_policy(encoding: str, name: str, policy: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes("\ufeff".encode(encoding) + '{"text": "one"}\n{"text": "two"}\n'.encode(encoding))
    with pytest.raises(DataError, match=rf"{re.escape(name)} is UTF-16 text; UTF-8 is needed. Convert it: iconv"):
        read(tmp_path / name, utf8=policy)


def test_the_bytes_read_of_a_source_add_up_over_its_files(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("a line\n" * 100)
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(b"a line\n" * 100))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    chunks = list(read_chunks(SourceSection("s", str(tmp_path))))
    assert len({chunk.read for chunk in chunks}) == len(chunks) == 6
    assert chunks[-1].read == size


def test_bundled_texts_are_found() -> None:
    first = next(read_documents(SourceSection("s", "bundled:kjv.txt.xz", splitter="paragraphs_4096"), Skipped()))
    assert len(first.text.encode()) >= 4096


def test_max_documents_counts_documents_with_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in ("", "a", "", "b", "c")])
    assert read(path, max_documents=2) == ["a", "b"]


@pytest.mark.parametrize("splitter", ["paragraphs", "paragraphs_0", "sentences", "paragraphs_99999999999999999999"])
def test_an_unknown_splitter_is_refused(splitter: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=f"splitter '{splitter}' is unknown"):
        read(tmp_path / "a.txt", splitter=splitter)


def test_a_splitter_for_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="splitter lines is for text files only"):
        read(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}]), splitter="lines")


def test_the_examples_of_the_documentation_are_configurations(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(examples) >= 5
    for number, example in enumerate(examples):
        (tmp_path / f"{number}.yaml").write_text(example, encoding="utf-8")
        assert load_config(str(tmp_path / f"{number}.yaml")).data.sources
