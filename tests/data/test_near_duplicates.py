"""Near duplicates: those that a count of shared word sequences finds; one of each kept, whatever order and workers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.shards import load_shards
from hf_tinylm.files import read_json, sha256_of_file
from hf_tinylm.sections import RunConfig, SourceSection
from hf_tinylm.tokenization.load import load_tokenizer

pytest.importorskip("datatrove")
near_duplicates = pytest.importorskip("hf_tinylm.data.near_duplicates")
MakeConfig = Callable[..., RunConfig]


def word(rng: random.Random) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6))


def altered(text: str, rng: random.Random, words: int) -> str:
    """The text with some of its words replaced."""
    parts = text.split()
    for place in rng.sample(range(len(parts)), words):
        parts[place] = word(rng)
    return " ".join(parts)


def pair(text: str, rng: random.Random) -> tuple[str, str]:
    return text, altered(text, rng, 1)


def sequences(text: str) -> set[tuple[str, ...]]:
    """All runs of five words."""
    words = text.split()
    return {tuple(words[n : n + 5]) for n in range(len(words) - 4)}


def overlap(first: set[tuple[str, ...]], second: set[tuple[str, ...]]) -> float:
    """The share of the five-word sequences of both that two texts have in common."""
    return len(first & second) / len(first | second)


@pytest.fixture(scope="module")
def documents() -> dict[str, list[str]]:
    """Source `first`: 60 documents of 150 words, 10 in Japanese. `second`: a copy of each of 25 with a word changed,
    two of 5; 20 with 40 words changed; those in Japanese with a character more. `third`: pairs of near copies."""
    rng = random.Random(3)
    first = [" ".join(word(rng) for _ in range(150)) for _ in range(60)]
    second = [altered(text, rng, 1) for text in first[:25] + first[:5]]
    second += [altered(text, rng, 40) for text in first[25:45]]
    japanese = ["".join(chr(rng.randrange(0x3041, 0x3097)) for _ in range(200)) for _ in range(10)]
    third = [text for number in range(12) for text in pair(" ".join(word(rng) for _ in range(150)), rng)]
    copies = [text[:50] + "漢" + text[50:] for text in japanese]
    return {"first": first + japanese, "second": second + copies, "third": third}


def write(folder: Path, documents: dict[str, list[str]], seed: int) -> list[SourceSection]:
    """The documents as JSONL, in an order of its own for each seed."""
    folder.mkdir()
    sources = []
    for name, texts in documents.items():
        shuffled = random.Random(seed).sample([*texts, f"{name} is short", f"{name} is so short"], len(texts) + 2)
        rows = "".join(json.dumps({"text": text}) + "\n" for text in shuffled)
        (folder / f"{name}.jsonl").write_text(rows, encoding="utf-8")
        sources.append(SourceSection(name, str(folder / f"{name}.jsonl"), epochs=2))
    return sources


def shard_hashes(folder: Path) -> list[str]:
    return [sha256_of_file(path) for path in sorted(folder.rglob("*.arrow"))]


def texts_of(folder: Path, tokenizer_path: Path) -> list[str]:
    tokenizer, shards = load_tokenizer(tokenizer_path), load_shards(folder)
    rows = (
        shard.ids[start + 1 : end]
        for shard in shards.train + shards.validation
        for start, end in itertools.pairwise(shard.offsets)
    )
    return [tokenizer.decode(row) for row in rows]


def test_near_copies_are_dropped_before_any_repetition_and_nothing_else_is(
    make_config: MakeConfig, tokenizer_path: Path, documents: dict[str, list[str]], tmp_path: Path
) -> None:
    config = make_config(*write(tmp_path / "in", documents, 1))
    config.data.near_duplicates = "minhash"
    manifest = prepare(config, progress=False)
    first = [sequences(text) for text in documents["first"][:60]]
    most = {text: max(overlap(sequences(text), other) for other in first) for text in documents["second"][:50]}
    assert not any(0.4 < share <= 0.9 for share in most.values())  # between, chance decides
    near = {text for text in documents["second"] if "漢" in text or most[text] > 0.9}
    assert len(near) == 25 + 5 + 10
    kept = texts_of(tmp_path / "shards", tokenizer_path)
    pairs = list(zip(documents["third"][::2], documents["third"][1::2], strict=True))
    assert all((first in kept) != (second in kept) for first, second in pairs)
    short = {f"{name} is {so}short" for name in documents for so in ("", "so ")}
    assert set(kept) - set(documents["third"]) == {*documents["first"], *documents["second"], *short} - near
    assert manifest["dropped"] == {"near_duplicate": 52}
    assert manifest["sources"]["second"]["dropped"] == {"near_duplicate": 40}
    assert manifest["sources"]["third"]["dropped"] == {"near_duplicate": 12}
    assert manifest["sources"]["first"]["dropped"] == {}
    assert manifest["duplicates"] == 0
    assert manifest["near_duplicates"] == "minhash"
    assert manifest["sources"]["second"]["bytes"] == sum(
        len(t.encode()) for t in (*documents["second"], "second is short", "second is so short") if t not in near
    )
    validation = load_shards(tmp_path / "shards").validation
    assert len(kept) == 2 * len(set(kept)) - sum(len(shard.offsets) - 1 for shard in validation)


@pytest.mark.parametrize("by", ["file_order", "tasks", pytest.param("workers", marks=pytest.mark.slow)])
def test_what_is_dropped_depends_on_the_documents_alone(
    make_config: MakeConfig,
    documents: dict[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    found = []
    for seed in (1, 2):
        config = make_config(*write(tmp_path / f"in{seed}", documents, seed), shards=f"shards{seed}")
        config.data.near_duplicates, config.data.num_workers = "minhash", 1
        if seed == 2 and by != "file_order":
            monkeypatch.setattr(near_duplicates, "TASK_DOCUMENTS", 7)
            config.data.num_workers = 2 if by == "workers" else 1
        prepare(config, progress=False)
        found.append(shard_hashes(tmp_path / f"shards{seed}"))
    assert found[0] == found[1]
    assert read_json(tmp_path / "shards2" / "manifest.json")["dropped"] == {"near_duplicate": 52}


def test_in_reading_order_the_first_one_read_stays(
    make_config: MakeConfig, tokenizer_path: Path, documents: dict[str, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(documents["second"][::-1] + documents["first"][:60]), encoding="utf-8")
    config = make_config(SourceSection("a", str(tmp_path / "a.txt"), splitter="lines"))
    config.data.near_duplicates = "minhash"
    assert prepare(config, progress=False)["dropped"] == {"near_duplicate": 30}
    kept = set(texts_of(tmp_path / "shards", tokenizer_path))
    assert kept & set(documents["first"][:25]) == set()
    assert set(documents["second"][5:]) <= kept
