"""Filters of a source: length, language and licence; what they drop is counted with the place of the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_tinylm.config import load_config
from hf_tinylm.data.chunks import Skipped
from hf_tinylm.data.sources import read_documents
from hf_tinylm.errors import ConfigError, DataError
from hf_tinylm.sections import SourceSection

ROWS = [
    {"text": "english text", "language": "en", "licence": "MIT"},
    {"text": "deutscher Text", "language": "de", "licence": "MIT"},
    {"text": "more english", "language": "en", "licence": "GPL-3.0"},
    {"text": "no language", "language": None, "licence": "MIT"},
    {"text": "short", "language": "en", "licence": "Apache-2.0"},
]


def read(path: Path, **settings: Any) -> tuple[list[str], Skipped]:
    skipped = Skipped()
    return [d.text for d in read_documents(SourceSection("s", str(path), **settings), skipped)], skipped


def write(folder: Path, format_: str) -> Path:
    path = folder / f"a.{format_}"
    table = pa.table(
        {"licence": [r["licence"] for r in ROWS], **{k: [r[k] for r in ROWS] for k in ("language", "text")}}
    )
    if format_ == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif format_ == "parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("format_", ["jsonl", "parquet", "arrow"])
def test_rows_are_kept_by_language_and_licence(format_: str, tmp_path: Path) -> None:
    path = write(tmp_path, format_)
    found, skipped = read(path, language_column="language", allowed_languages=["en"])
    assert found == ["english text", "more english", "short"]
    assert skipped.counts == {"language": 2}
    assert skipped.first["language"].endswith(" 2")
    found, skipped = read(
        path,
        licence_column="licence",
        allowed_licences=["MIT", "Apache-2.0"],
        language_column="language",
        allowed_languages=["en", "de"],
    )
    assert found == ["english text", "deutscher Text", "short"]
    assert skipped.counts == {"licence": 1, "language": 1}


def test_every_licence_of_a_row_must_be_allowed(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": list("abcd"), "l": [["MIT"], ["MIT", "GPL-3.0"], [], None]}), tmp_path / "a.parquet"
    )
    found, skipped = read(tmp_path / "a.parquet", licence_column="l", allowed_licences=["MIT"])
    assert (found, skipped.counts) == (["a"], {"licence": 3})


def test_length_counts_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("가나\n가나다\n가나다라\n", encoding="utf-8")
    found, skipped = read(tmp_path / "a.txt", splitter="lines", min_characters=3, max_characters=3)
    assert (found, skipped.counts) == (["가나다"], {"short": 1, "long": 1})


def test_a_column_to_filter_by_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column lang; its columns are licence, language, text"):
        read(write(tmp_path, "parquet"), language_column="lang", allowed_languages=["en"])
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="text files have no column lang"):
        read(tmp_path / "a.txt", language_column="lang", allowed_languages=["en"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("allowed_licences: [MIT]", "licence_column=None and allowed_licences="),
        ("language_column: l", "A filter needs both: language_column"),
        ("min_characters: 5, max_characters: 4", "no document has"),
        ("utf8: ignore", "strict or replace or skip"),
    ],
)
def test_half_a_filter_is_refused(settings: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"data: {{sources: [{{name: a, path: a.txt, {settings}}}]}}")
    with pytest.raises(ConfigError, match=message):
        load_config(str(tmp_path / "c.yaml"))


def test_arrow_files_of_both_formats_are_read(tmp_path: Path) -> None:
    table = pa.table({"text": ["one", None, "zwei"]})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    found, skipped = read(tmp_path / "a.arrow")
    assert (found, skipped.counts) == (["one", "zwei"], {"null": 1})
    (tmp_path / "b.arrow").write_bytes(b"nothing")
    with pytest.raises(DataError, match="not a readable Arrow file"):
        read(tmp_path / "b.arrow")
