"""The same model through llama.cpp: an F32 GGUF file of a small model scores as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_tinylm.config import load_config
from hf_tinylm.errors import ConfigError
from hf_tinylm.evaluation.engines import open_engine
from hf_tinylm.evaluation.likelihood import Engine, encode_pairs
from hf_tinylm.export.gguf import write_gguf
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.stock import save_stock_model
from hf_tinylm.tokenization.load import load_tokenizer

pytest.importorskip("llama_cpp")

PAIRS = [
    ("It was the same with Emma, who had been very much", " in the habit of walking."),
    ("It was the same with Emma, who had been very much", " asleep"),
    ("It was the same with Emma, who had been very much", " Zwölf 한국어 <|endoftext|>"),
    ("", "Nothing stands before this."),
]


@pytest.fixture(scope="module")
def engines(tiny_config: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    """The same small model in transformers and, as an F32 file, in llama.cpp."""
    folder = tmp_path_factory.mktemp("gguf")
    model = new_model(load_config(str(tiny_config)).model, 512, 192, seed=3)
    save_stock_model(model, folder / "model", load_tokenizer(tiny_config.parent / "tokenizer"))
    write_gguf(folder / "model", folder / "model-F32.gguf", "f32", name="tiny")
    return [
        open_engine(folder / "model", str(folder / "model"), device="cpu"),
        open_engine(folder / "model-F32.gguf", ""),
    ]


def test_both_engines_have_the_same_ids_and_the_same_log_probabilities(engines: list[Engine]) -> None:
    transformers, llamacpp = engines
    spans = encode_pairs(transformers, PAIRS)
    assert encode_pairs(llamacpp, PAIRS) == spans
    assert (llamacpp.max_length, llamacpp.vocab_size) == (192, 512)
    questions = [spans[:3], spans[3:], [spans[0], spans[0]]]
    ours, theirs = transformers.score(questions), llamacpp.score(questions)
    for a, b in zip(ours, theirs, strict=True):
        for first, second in zip(a, b, strict=True):
            assert second.logprobs == pytest.approx(first.logprobs, abs=2e-3)
            assert second.greedy == first.greedy
    assert theirs[2][0].total == theirs[2][1].total


def test_a_span_of_several_calls_is_scored_like_a_short_one(engines: list[Engine]) -> None:
    """llama.cpp reads 128 ids in a call; the border of two calls lies inside what is scored."""
    (span,) = encode_pairs(engines[0], [("Emma", " walked on and on" * 24)])
    assert 128 < len(span.ids) <= 192
    ours, theirs = (engine.score([[span]])[0][0] for engine in engines)
    assert theirs.tokens == ours.tokens == len(span.ids) - span.start
    assert theirs.logprobs == pytest.approx(ours.logprobs, abs=2e-3)


def test_a_file_that_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + b"\x00" * 64)
    for name in ("bad.gguf", "missing.gguf"):
        with pytest.raises(ConfigError, match=name):
            open_engine(tmp_path / name, "")
