"""How much of each source: exact to the id, repeated and reported; and an order that only content and seed decide."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_tinylm.config import load_config
from hf_tinylm.data import ledger, mixture
from hf_tinylm.data import prepare as prepare_module
from hf_tinylm.data.prepare import prepare
from hf_tinylm.data.shards import load_shards
from hf_tinylm.errors import ConfigError, DataError
from hf_tinylm.sections import RunConfig, SourceSection
from hf_tinylm.tokenization.load import load_tokenizer

MakeConfig = Callable[..., RunConfig]
Rows = list[tuple[str, tuple[int, ...]]]


def write(folder: Path, name: str, texts: list[str], **amount: Any) -> SourceSection:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return SourceSection(name, str(path), **amount)


def rows_of(folder: Path) -> dict[str, Rows]:
    """(source, ids) of each row of each split."""
    shards = load_shards(folder, verify=True)
    return {
        split: [
            (shard.sources[row].as_py(), tuple(shard.ids[shard.offsets[row] : shard.offsets[row + 1]].tolist()))
            for shard in part
            for row in range(shard.rows)
        ]
        for split, part in (("train", shards.train), ("validation", shards.validation))
    }


def ids_by_source(rows: dict[str, Rows]) -> Counter[str]:
    found: Counter[str] = Counter()
    for source, ids in [*rows["train"], *rows["validation"]]:
        found[source] += len(ids)
    return found


@pytest.fixture
def encoded(texts: list[str], tokenizer_path: Path) -> dict[str, tuple[int, ...]]:
    tokenizer = load_tokenizer(tokenizer_path)
    return {text: (0, *tokenizer(text).input_ids) for text in texts}


@pytest.mark.parametrize("shuffle", [True, False])
def test_budgets_are_exact_and_a_source_is_repeated_as_often_as_needed(
    shuffle: bool, make_config: MakeConfig, texts: list[str], encoded: dict[str, tuple[int, ...]], tmp_path: Path
) -> None:
    sizes = [len(encoded[text]) for text in texts]
    web, topic = sum(sizes[:150]), sum(sizes[150:])
    asked = {"web": web // 3 + 1, "topic": 3 * topic + 7}
    config = make_config(
        write(tmp_path, "web", texts[:150], tokens=asked["web"]),
        write(tmp_path, "topic", texts[150:], tokens=asked["topic"]),
    )
    config.data.shuffle, config.data.shard_ids = shuffle, 3000
    manifest = prepare(config, progress=False)
    rows = rows_of(tmp_path / "shards")
    assert ids_by_source(rows) == asked
    assert manifest["ids"] == sum(asked.values())
    assert {name: s["ids"] for name, s in manifest["sources"].items()} == asked
    assert manifest["sources"]["web"]["available_ids"] == web
    assert manifest["sources"]["topic"]["repeated"] == pytest.approx(asked["topic"] / topic, abs=1e-4)
    # Whole documents but for one of each source, training documents as often as each other but for one pass.
    whole = set(encoded.values())
    cut = [ids for split in rows.values() for _, ids in split if ids not in whole]
    assert len(cut) <= 2
    assert all(any(ids == document[: len(ids)] for document in whole) for ids in cut)
    times = Counter(ids for source, ids in rows["train"] if source == "topic" and ids in whole)
    assert max(times.values()) - min(times.values()) <= 1
    assert max(Counter(ids for _, ids in rows["validation"]).values()) == 1
    assert not {ids for _, ids in rows["train"]} & {ids for _, ids in rows["validation"]}


def test_weights_share_a_pack_and_epochs_repeat_training_documents(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    sources = [
        write(tmp_path, "a", texts[:100], weight=0.7),
        write(tmp_path, "b", texts[100:160], weight=0.3),
        write(tmp_path, "c", texts[160:], epochs=2.5),
    ]
    config = make_config(*sources)
    config.data.pack_tokens = 20_001
    manifest = prepare(config, progress=False)
    found = ids_by_source(rows_of(tmp_path / "shards"))
    assert manifest["ids"] == found.total() == 20_001
    assert abs(found["a"] - 0.7 * (found["a"] + found["b"])) <= 1
    once = make_config(write(tmp_path, "c", texts[160:]), shards="once")
    splits = prepare(once, progress=False)["splits"]
    assert found["c"] == splits["validation"]["ids"] + round(2.5 * splits["train"]["ids"])


def test_weights_without_a_size_repeat_nothing(make_config: MakeConfig, texts: list[str], tmp_path: Path) -> None:
    manifest = prepare(
        make_config(write(tmp_path, "a", texts[:150], weight=1), write(tmp_path, "b", texts[150:], weight=1)),
        progress=False,
    )
    a, b = (manifest["sources"][name] for name in "ab")
    assert abs(a["ids"] - b["ids"]) <= 1
    assert b["available_ids"] - b["ids"] <= 1
    assert a["repeated"] < 1


def test_the_order_depends_on_content_and_seed_alone(
    make_config: MakeConfig, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of files shuffled, files renamed, sources in another order, other numbers of workers and buckets."""
    found = []
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 2000)
        monkeypatch.setattr(ledger, "BUCKET_ROWS", (1000, 7, 33, 1000)[number])
        first, second = texts[:120], texts[120:]
        random.Random(number).shuffle(first)
        random.Random(number).shuffle(second)
        sources = [write(folder, "a", first, tokens=2000), write(folder, "b", second, tokens=9000)]
        config = make_config(*(sources[::-1] if number % 2 else sources), shards=f"shards{number}")
        config.data.num_workers = 1 + number % 3
        config.data.shuffle_seed = 42 if number < 3 else 43
        prepare(config, progress=False)
        found.append(rows_of(tmp_path / f"shards{number}"))
    assert found[0] == found[1] == found[2]
    assert found[0] != found[3]
    order = [source for source, _ in found[0]["train"]]
    changes = sum(first != second for first, second in itertools.pairwise(order))
    b = order.count("b") / len(order)
    assert changes > 0.7 * 2 * b * (1 - b) * len(order)  # sources are mixed, not one after the other


def test_repetitions_of_a_source_are_spread_over_the_pack(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    prepare(make_config(write(tmp_path, "a", texts, epochs=4), write(tmp_path, "b", ["one other"] * 2)), progress=False)
    train = [ids for source, ids in rows_of(tmp_path / "shards")["train"] if source == "a"]
    half = Counter(train[: len(train) // 2])
    mean = sum(half.values()) / len(set(train))
    assert mean == pytest.approx(2, abs=0.1)
    assert 1 in half.values()
    assert 3 in half.values()


@pytest.mark.parametrize("repeat", [None, 3])
def test_copies_are_found_before_repetition_whatever_order_workers_and_sources(
    repeat: int | None,
    make_config: MakeConfig,
    texts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """100 documents, 20 of them copies of others, one with a space at its end, over two sources."""
    documents = [*texts[:80], texts[0] + " ", *texts[1:20]]
    monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 1000)
    packs = []
    for number in range(3):
        random.Random(number).shuffle(documents)
        folder = tmp_path / str(number)
        folder.mkdir()
        sources = [write(folder, "a", documents[:50], epochs=repeat), write(folder, "b", documents[50:], epochs=repeat)]
        config = make_config(*sources, shards=f"shards{number}")
        config.data.num_workers = 1 + number
        manifest = prepare(config, progress=False)
        assert manifest["duplicates"] == 20
        rows = rows_of(tmp_path / f"shards{number}")
        train, validation = ({ids for _, ids in rows[split]} for split in ("train", "validation"))
        assert not train & validation
        assert len(train | validation) == 80
        packs.append((len(train), len(validation)))
    assert packs[0] == packs[1] == packs[2]


def test_the_copy_that_stays_does_not_depend_on_the_order_of_files(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    spaced = [text.replace(" ", "  ", 1) for text in texts[:40]]
    found = []
    for number, documents in enumerate(([*texts, *spaced], [*spaced, *texts])):
        config = make_config(write(tmp_path, f"s{number}", documents), shards=f"shards{number}")
        config.data.shuffle = True
        prepare(config, progress=False)
        found.append([ids for split in rows_of(tmp_path / f"shards{number}").values() for _, ids in split])
    assert found[0] == found[1]
    assert len(found[0]) == 200


def test_what_cannot_be_given_is_refused(make_config: MakeConfig, texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="source b holds no documents of its own, but 10 ids"):
        prepare(make_config(write(tmp_path, "a", texts), write(tmp_path, "b", texts[:5], tokens=10)), progress=False)
    config = make_config(write(tmp_path, "a", texts[:100], weight=1), write(tmp_path, "b", texts[100:], tokens=999))
    config.data.pack_tokens = 999
    with pytest.raises(DataError, match="pack_tokens=999 leaves 0 ids"):
        prepare(config, progress=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("sources: [{name: a, path: a, tokens: 5, weight: 1}]", "has tokens and weight"),
        ("sources: [{name: a, path: a, epochs: 0}]", "epochs=0.0 of source 'a' must be above 0"),
        ("pack_tokens: 5, sources: [{name: a, path: a}]", "no source has one"),
    ],
)
def test_amounts_that_say_nothing_or_two_things_are_refused(settings: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(f"data: {{{settings}}}")
    with pytest.raises(ConfigError, match=message):
        load_config(str(tmp_path / "c.yaml"))


def test_whole_numbers_of_ids_are_apportioned_to_the_last_one() -> None:
    from fractions import Fraction

    assert mixture._apportion(10, [Fraction(1), Fraction(1), Fraction(1)]) == [4, 3, 3]
    assert sum(mixture._apportion(626_642_944, [Fraction(p) for p in (0.3, 0.3, 0.4)])) == 626_642_944


def test_the_pack_of_tot_345m_adds_up_and_is_built_to_the_id_at_a_smaller_scale(
    make_config: MakeConfig, texts: list[str], tmp_path: Path
) -> None:
    """The recipe's own sources, filters and proportions, each read from a local file, at 1/20,000 of the size."""
    data = load_config("tot-345m").data
    assert sum(source.tokens or 0 for source in data.sources) == 626_642_944
    words = [word for text in texts for word in text.split()]
    rng = random.Random(1)
    sources = []
    for source in data.sources:
        few = source.name == "encyclopedia-topic"
        rows = []
        for number in range(5 if few else 300):
            text = " ".join([source.name, str(number), *rng.choices(words, k=120)])
            rows.append({source.text_column: text, "max_stars_repo_licenses": [["MIT"], ["GPL-3.0"]][number % 2]})
        path = tmp_path / f"{source.name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        tokens = (source.tokens or 0) // 20_000
        sources.append(replace(source, path=str(path), format="jsonl", config=None, tokens=tokens, max_documents=None))
    config = make_config(*sources, validation_fraction=data.validation_fraction * 10)
    config.data.shuffle, config.data.shuffle_seed = data.shuffle, data.shuffle_seed
    manifest = prepare(config, progress=False)
    assert ids_by_source(rows_of(tmp_path / "shards")) == {
        **{"web": 16_050, "encyclopedia": 9_000, "encyclopedia-topic": 650, "code": 4_850, "korean": 650},
        "curated": 132,
    }
    assert manifest["ids"] == 31_332
    assert manifest["sources"]["code"]["dropped"] == {"licence": 150}
