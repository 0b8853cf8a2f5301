"""A real tokenizer, trained once on the bundled prose with some other scripts mixed in."""

from __future__ import annotations

import lzma

import pytest
from transformers import PreTrainedTokenizerFast

from hf_tinylm.files import bundled
from hf_tinylm.tokenization.train import train_tokenizer

OTHER_SCRIPTS = (
    "Zürich naïve Ångström 你好，世界 한국어 조사 ไทย हिन्दी العربية 🙂 "
    "don't WE'LL 3.14159  \r\n\tdef f(x):\n    return x\n"
)


@pytest.fixture(scope="session")
def prose() -> str:
    """A million characters of English prose."""
    with lzma.open(bundled("recipes", "corpora", "austen.txt.xz"), "rt", encoding="utf-8") as file:
        return file.read(1_000_000)


@pytest.fixture(scope="session")
def documents(prose: str) -> list[str]:
    """The prose in pieces of 4,000 characters, and a text of many scripts."""
    return [prose[start : start + 4000] for start in range(0, len(prose), 4000)] + [OTHER_SCRIPTS * 20]


@pytest.fixture(scope="session")
def tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """2,048 tokens."""
    return train_tokenizer(documents, 2048)[0]
