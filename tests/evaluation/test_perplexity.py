"""Perplexity is one sum divided once: the same for every batch size and company, per source and in total."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional

from hf_tinylm.config import load_config
from hf_tinylm.data.pack import Pack, open_pack
from hf_tinylm.data.records import Document
from hf_tinylm.data.target_sources import TargetSources
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.errors import ConfigError, DataError, TokenizerError
from hf_tinylm.evaluation.likelihood import CausalLMEngine
from hf_tinylm.evaluation.perplexity import evaluate_pack, evaluate_text, rolling_spans
from hf_tinylm.evaluation.rows import text_documents
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.modeling.stock import save_stock_model, stock_model
from hf_tinylm.tokenization.encoder import FastEncoder
from hf_tinylm.tokenization.load import load_tokenizer, tokenizer_sha256


@pytest.fixture(scope="module")
def pack(tiny_config: Path) -> Pack:
    return open_pack(load_config(str(tiny_config)))


@pytest.fixture(scope="module")
def model(tiny_config: Path) -> TinyLMForCausalLM:
    return new_model(load_config(str(tiny_config)).model, 512, 32, seed=1)


# --- the validation text of a pack


def test_loss_and_bits_per_byte_equal_a_plain_float64_reference(pack: Pack, model: TinyLMForCausalLM) -> None:
    ids = torch.from_numpy(pack.validation.gather(np.arange(20)))
    with torch.no_grad():
        logits = model.eval()(ids[:, :-1]).logits.double()
    nats = float(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    text = "".join(pack.tokenizer.decode([int(i)]) for i in ids[:, 1:].flatten() if i > 3 and i < 260)
    assert text, "single bytes occur among the targets"
    assert pack.token_bytes is not None
    size = int(pack.token_bytes[ids[:, 1:].numpy()].sum())
    found = evaluate_pack(CausalLMEngine(model), pack, 20 * 32)
    assert (found["items"], found["tokens"]) == (20, 640)
    assert found["results"]["loss"]["value"] == pytest.approx(nats / 640, abs=1e-6)
    assert found["results"]["perplexity"]["value"] == pytest.approx(math.exp(nats / 640), rel=1e-5)
    assert found["results"]["bits_per_byte"]["value"] == pytest.approx(nats / math.log(2) / size, abs=1e-6)
    assert found["results"]["uniform_loss"]["value"] == pytest.approx(math.log(512))
    uniform_bits = 640 * math.log(512) / math.log(2) / size
    assert found["results"]["uniform_bits_per_byte"]["value"] == pytest.approx(uniform_bits)
    per_window = [
        float(functional.cross_entropy(logits[row], ids[row, 1:], reduction="mean")) for row in range(len(ids))
    ]
    expected = np.std(per_window, ddof=1) / math.sqrt(20)
    assert found["results"]["loss"]["stderr"] == pytest.approx(expected, rel=1e-4)
    low, high = found["results"]["loss"]["interval"]
    assert high - low == pytest.approx(2 * 1.96 * expected, rel=1e-4)


def test_document_attention_scores_each_document_alone(tiny_config: Path, model: TinyLMForCausalLM) -> None:
    pack = open_pack(load_config(str(tiny_config), ["--document_attention"]))
    total, documents = 0.0, 0
    for window in pack.validation.gather(np.arange(20)).tolist():
        begins = sorted({0, *(place for place, token in enumerate(window[:-1]) if token == 0)})
        for begin, end in zip(begins, [*begins[1:], 32], strict=True):
            with torch.no_grad():
                logits = model.eval()(torch.tensor([window[begin:end]])).logits[0]
            expected = torch.tensor(window[begin + 1 : end + 1])
            total += float(functional.cross_entropy(logits, expected, reduction="sum"))
            documents += 1
    assert documents > 20
    for scored in (model, stock_model(model)):
        found = evaluate_pack(CausalLMEngine(scored), pack, 20 * 32)
        assert found["tokens"] == sum(record["tokens"] for record in found["records"]) == 640
        assert found["results"]["loss"]["value"] == pytest.approx(total / 640, abs=1e-5)
        assert "inside their document" in found["results"]["loss"]["rule"]


def test_losses_of_sources_are_means_over_their_targets_with_the_error_of_a_ratio(
    pack: Pack, model: TinyLMForCausalLM
) -> None:
    """The error against a bootstrap over windows."""
    names = ["a", "b", "none"]
    marked = [
        replace(shard, sources=pa.array([names[row % 2] for row in range(shard.rows)]))
        for shard in pack.shards.validation
    ]
    streams = [shard.ids for shard in marked]
    validation = TokenWindows(streams, 32, "sequential", 0, sources=TargetSources(marked, names))
    found = evaluate_pack(CausalLMEngine(model), replace(pack, validation=validation), 60 * 32)["results"]
    ids = torch.from_numpy(validation.gather(range(60)))
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits.double()
    each = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").numpy()
    sources = validation.target_sources(range(60))
    assert {name for name in found if name.startswith("loss/")} == {"loss/a", "loss/b"}
    assert pack.token_bytes is not None
    total = 0.0
    generator = np.random.default_rng(0)
    for number, name in enumerate(names[:2]):
        own = sources == number
        nats, counts = np.where(own, each, 0).sum(axis=1), own.sum(axis=1)
        assert 0 < counts.sum() < 60 * 32
        assert found[f"loss/{name}"]["value"] == pytest.approx(nats.sum() / counts.sum(), rel=1e-5)
        size = pack.token_bytes[ids[:, 1:].numpy()][own].sum()
        assert found[f"bits_per_byte/{name}"]["value"] == pytest.approx(nats.sum() / math.log(2) / size, rel=1e-5)
        total += found[f"loss/{name}"]["value"] * counts.sum()
        drawn = generator.integers(0, 60, (4_000, 60))
        spread = (nats[drawn].sum(1) / counts[drawn].sum(1)).std()
        assert found[f"loss/{name}"]["stderr"] == pytest.approx(spread, rel=0.1)
    assert total / (60 * 32) == pytest.approx(found["loss"]["value"], abs=1e-6)


def test_more_tokens_than_there_are_scores_what_there_is(pack: Pack, model: TinyLMForCausalLM) -> None:
    assert evaluate_pack(CausalLMEngine(model), pack, 10**9)["items"] == len(pack.validation)


def test_a_model_with_fewer_tokens_or_another_tokenizer_than_the_pack_is_refused(
    pack: Pack, model: TinyLMForCausalLM, tiny_config: Path
) -> None:
    small = new_model(load_config(str(tiny_config)).model, 500, 32, seed=1)
    with pytest.raises(TokenizerError, match=r"512 tokens\) than the model has \(500 tokens"):
        evaluate_pack(CausalLMEngine(small), pack, 64)
    other = CausalLMEngine(model, about={"tokenizer_sha256": "0" * 64})
    with pytest.raises(TokenizerError, match="another tokenizer"):
        evaluate_pack(other, pack, 64)


# --- windows of raw text


@pytest.mark.parametrize("seed", range(30))
def test_windows_score_every_token_once_and_read_no_more_than_they_may(seed: int) -> None:
    draw = random.Random(seed)
    start, window = draw.randint(1, 3), draw.randint(3, 12)
    stride = draw.choice([window, draw.randint(1, window)])
    ids = list(range(100, 100 + start + draw.randint(1, 60)))
    spans = rolling_spans(ids, start, window, stride)
    scored = [id_ for span in spans for id_ in span.ids[span.start :]]
    assert scored == ids[start:]
    for number, span in enumerate(spans):
        assert len(span.ids) - 1 <= window
        assert tuple(span.ids) == tuple(ids[span.ids[0] - 100 :][: len(span.ids)])  # a stretch of the text
        if stride < window and number:
            assert len(span.ids) - 1 == window or span.ids[0] == 100
            assert span.start >= window - stride


def test_overlapping_windows_read_what_a_hand_drawn_table_says() -> None:
    spans = rolling_spans([0, 1, 2, 3, 4, 5, 6, 7], 1, 4, 2)
    assert [(list(span.ids), span.start) for span in spans] == [
        ([0, 1, 2, 3, 4], 1),
        ([2, 3, 4, 5, 6], 3),
        ([3, 4, 5, 6, 7], 4),
    ]
    apart = rolling_spans([0, 1, 2, 3, 4, 5, 6, 7], 1, 4, 4)
    assert [(list(span.ids), span.start) for span in apart] == [([0, 1, 2, 3, 4], 1), ([4, 5, 6, 7], 1)]


DOCUMENTS = [
    Document("A short one.", "a", "1"),
    Document("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, " * 4, "b", "2"),
    Document("x", "a", "3"),
    Document("The quick brown fox jumps over the lazy dog; " * 3, "b", "4"),
    Document("한국어 문장을 조금 넣는다.", "c", "5"),
]


def test_perplexity_is_the_same_for_every_batch_size_and_company(
    byte_model: TinyLMForCausalLM, byte_engine: CausalLMEngine
) -> None:
    found = {}
    for batch_size in (1, 2, 4, 8):
        byte_engine.batch_size = batch_size
        found[batch_size] = evaluate_text(byte_engine, DOCUMENTS, 48, 32)
    for results in found.values():
        for name in ("loss", "bits_per_byte"):
            assert results["results"][name]["value"] == pytest.approx(found[1]["results"][name]["value"], abs=1e-5)
    for number, document in enumerate(DOCUMENTS):
        alone = evaluate_text(byte_engine, [document], 48, 32)["records"][0]
        beside = found[8]["records"][number]
        assert alone["nats"] / alone["tokens"] == pytest.approx(beside["nats"] / beside["tokens"], abs=1e-5)


def test_raw_text_equals_a_plain_reference_per_source_and_in_total(
    byte_model: TinyLMForCausalLM, byte_engine: CausalLMEngine
) -> None:
    def nats_of(text: str) -> float:
        ids = [0, *(byte_engine.encode([text])[0])]
        total = 0.0
        for first in range(0, len(ids) - 1, 40):
            part = torch.tensor([ids[first : first + 41]])
            with torch.no_grad():
                logits = byte_model(part[:, :-1]).logits[0].double()
            total += float(functional.cross_entropy(logits, part[0, 1:], reduction="sum"))
        return total

    found = evaluate_text(byte_engine, DOCUMENTS, 40)
    nats = [nats_of(document.text) for document in DOCUMENTS]
    sizes = [len(document.text.encode()) for document in DOCUMENTS]  # of one byte each are the tokens
    assert found["tokens"] == sum(sizes)
    assert found["results"]["loss"]["value"] == pytest.approx(sum(nats) / sum(sizes), abs=1e-5)
    assert found["results"]["bits_per_byte"]["value"] == pytest.approx(sum(nats) / math.log(2) / sum(sizes), abs=1e-5)
    of_a = (nats[0] + nats[2]) / (sizes[0] + sizes[2])
    assert found["results"]["loss/a"]["value"] == pytest.approx(of_a, abs=1e-5)
    assert found["results"]["bits_per_byte/c"]["value"] == pytest.approx(nats[4] / math.log(2) / sizes[4], abs=1e-5)
    assert f"the {sizes[1] + sizes[3]} tokens of b" in found["results"]["loss/b"]["rule"]
    assert found["results"]["uniform_loss"]["value"] == pytest.approx(math.log(260))
    assert "non-overlapping windows of 40 tokens" in found["results"]["loss"]["rule"]
    overlapping = evaluate_text(byte_engine, DOCUMENTS, 40, 10)["results"]["loss"]
    assert "move by 10; each token scored once, with at least 30 tokens before it" in overlapping["rule"]


def test_counts_of_a_pack_stand_beside_raw_text_when_the_tokenizer_is_the_packs(
    pack: Pack, model: TinyLMForCausalLM
) -> None:
    about = {"tokenizer_sha256": tokenizer_sha256(pack.tokenizer)}
    engine = CausalLMEngine(model, FastEncoder(pack.tokenizer), about=about)
    results = evaluate_text(engine, [Document("It was the same with Emma.", "x", "1")], pack=pack)["results"]
    assert results["kneser_ney_bigram_loss"]["value"] < results["uniform_loss"]["value"]
    assert results["unigram_bits_per_byte"]["value"] > 0
    with pytest.raises(TokenizerError, match="another tokenizer"):
        evaluate_text(
            CausalLMEngine(model, FastEncoder(pack.tokenizer), about={"tokenizer_sha256": "x"}), DOCUMENTS, pack=pack
        )


@pytest.mark.parametrize(("window", "stride"), [(97, None), (1, None), (40, 0), (40, 41)])
def test_a_window_or_stride_that_the_model_does_not_allow_is_refused(
    window: int, stride: int | None, byte_engine: CausalLMEngine
) -> None:
    with pytest.raises(ConfigError, match=r"window=|stride="):
        evaluate_text(byte_engine, DOCUMENTS, window, stride)


def test_documents_come_from_text_and_jsonl_with_their_sources(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\nTwo.\n")
    rows = [{"text": "x", "source": "web"}, {"text": "y"}, {"text": " "}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = text_documents([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")])
    assert [(d.text, d.source) for d in found] == [("One.\nTwo.\n", "a.txt"), ("x", "web"), ("y", "b.jsonl")]
    lines = text_documents([str(tmp_path / "a.txt")], "lines")
    assert [document.text.strip() for document in lines] == ["One.", "Two."]


@pytest.mark.parametrize("content", ["", " \n", '{"text": 3}', '{"text": "\\ud800"}', "{}"])
def test_a_file_without_text_is_refused(content: str, tmp_path: Path) -> None:
    for name in ("empty.jsonl", "empty.txt"):
        if name.endswith(".txt") and content.strip():
            continue
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=r"holds no text|has no text"):
            text_documents([str(tmp_path / name)])


@pytest.mark.slow
def test_two_processes_give_what_one_gives_and_one_of_them_speaks(
    byte_model: TinyLMForCausalLM, byte_engine: CausalLMEngine, tiny_config: Path, tmp_path: Path
) -> None:
    model = new_model(load_config(str(tiny_config)).model, 512, 64, seed=1)
    save_stock_model(model, tmp_path / "model", load_tokenizer(tiny_config.parent / "tokenizer"))
    rows = [json.dumps({"text": document.text, "source": document.source}) for document in DOCUMENTS]
    (tmp_path / "text.jsonl").write_text("\n".join(rows))
    command = ["eval", "model", "--text", "text.jsonl", "--json", "--device", "cpu", "--output_dir", "out"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    found = []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]):
        run = [sys.executable, *launcher, "-m", "hf_tinylm.cli", *command]
        result = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=170)
        assert result.returncode == 0, result.stderr
        found.append(json.loads(result.stdout))
    one, two = found
    assert two["items"] == one["items"] == 5
    assert two["results"]["loss"]["value"] == pytest.approx(one["results"]["loss"]["value"], abs=1e-5)
    assert two["ids_sha256"] == one["ids_sha256"]
