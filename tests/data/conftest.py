"""A small tokenizer on disk, and texts to prepare."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_tinylm.sections import RunConfig, SourceSection
from hf_tinylm.tokenization.load import save_tokenizer
from hf_tinylm.tokenization.train import train_tokenizer

WORDS = [
    "the",
    "sea",
    "was",
    "calm",
    "and",
    "a",
    "small",
    "boat",
    "went",
    "over",
    "it",
    "with",
    "two",
    "men",
    "who",
    "said",
    "nothing",
    "소리",
    "없이",
    "né",
    "42",
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """200 different documents of 5 to 60 words."""
    rng = random.Random(7)
    return [f"{number} " + " ".join(rng.choices(WORDS, k=rng.randrange(5, 60))) for number in range(200)]


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """300 tokens."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    save_tokenizer(train_tokenizer(texts, 300)[0], path)
    return path


@pytest.fixture
def make_config(tmp_path: Path, tokenizer_path: Path) -> Callable[..., RunConfig]:
    """A configuration that writes `tmp_path/shards` from the given sources."""

    def make(*sources: SourceSection, validation_fraction: float = 0.1, shards: str = "shards") -> RunConfig:
        config = RunConfig()
        config.tokenizer.tokenizer_path = str(tokenizer_path)
        config.data.shards = str(tmp_path / shards)
        config.data.validation_fraction = validation_fraction
        config.data.sources = list(sources)
        return config

    return make
