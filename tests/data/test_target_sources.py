"""Each target knows its source, wherever its window begins, across shards and in documents longer than one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest

from hf_tinylm.data.shard_writer import ShardWriter
from hf_tinylm.data.shards import Shards, load_shards
from hf_tinylm.data.target_sources import TargetSources
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.errors import DataError

NAMES = ["web", "books", "unused", "code"]
T = 8


@pytest.fixture
def shards(tmp_path: Path) -> Shards:
    """Documents of 1 to 90 ids in shards of 64: the ids of source n are 10n + 1 to 10n + 9, separators 0."""
    (tmp_path / "pack").mkdir()
    writer = ShardWriter(tmp_path / "pack", 300, separator_id=0, shard_ids=64, sources=NAMES)
    generator = np.random.default_rng(3)
    for number in range(60):
        source = int(generator.choice([0, 1, 3]))
        length = 90 if number in (20, 40) else int(generator.integers(1, 14))
        writer.add("train", NAMES[source], 10 * source + generator.integers(1, 10, length))
    separator = {"token": "<|endoftext|>", "id": 0, "policy": "first id of each document"}
    writer.finish({"tokenizer_sha256": "t", "separator": separator, "sources": {}})
    return load_shards(tmp_path / "pack")


@pytest.mark.parametrize("order", ["permutation", "random", "sequential"])
def test_targets_have_the_source_that_their_ids_tell(shards: Shards, order: str) -> None:
    assert len(shards.train) > 5
    sources = TargetSources(shards.train, NAMES)
    windows = TokenWindows([s.ids for s in shards.train], T, order, 1, sources=sources)  # type: ignore[arg-type]
    ks = range(len(windows))
    targets, found = windows.gather(ks)[:, 1:], windows.target_sources(ks)
    assert found.shape == targets.shape == (len(windows), T)
    assert windows.source_names == NAMES
    assert set(found.ravel().tolist()) == {0, 1, 3}
    text = targets != 0
    assert (found[text] == targets[text] // 10).all()
    before_text = (targets[:, :-1] == 0) & (targets[:, 1:] != 0)
    assert before_text.any()
    assert (found[:, :-1][before_text] == found[:, 1:][before_text]).all(), "a separator is of the document it begins"


def test_a_source_that_the_manifest_does_not_list_is_an_error_with_the_shard(shards: Shards) -> None:
    sources = TargetSources(shards.train, ["web", "books"])
    stream = next(n for n, shard in enumerate(shards.train) if "code" in shard.sources.to_pylist())
    with pytest.raises(DataError, match=rf"{shards.train[stream].name} has rows of a source"):
        sources.at(stream, np.array([0]))


def test_a_lookup_in_a_large_shard_touches_no_row_but_its_own(shards: Shards) -> None:
    """2^24 rows: converting the offsets at each call would take some 20 ms, a search takes microseconds."""
    shard = replace(shards.train[0], offsets=np.arange(2**24 + 1, dtype=np.int32))
    positions = np.random.default_rng(0).integers(0, 2**24, 64)
    started = perf_counter()
    for _ in range(50):
        found = shard.row_at(positions)
    assert perf_counter() - started < 0.2
    assert (found == positions).all()
