from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.nn import functional

from hf_tinylm.config import load_config
from hf_tinylm.data.pack import Pack, open_pack
from hf_tinylm.data.target_sources import TargetSources
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.errors import DataError
from hf_tinylm.evaluation.perplexity import evaluate_pack, target_losses
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.stock import stock_model


@pytest.fixture(scope="module")
def pack(tiny_config: Path) -> Pack:
    return open_pack(load_config(str(tiny_config)))


@pytest.fixture(scope="module")
def model(tiny_config: Path) -> torch.nn.Module:
    return new_model(load_config(str(tiny_config)).model, 512, 32, seed=1)


def test_loss_and_bits_per_byte_equal_a_plain_float64_reference(pack: Pack, model: torch.nn.Module) -> None:
    ids = torch.from_numpy(pack.validation.gather(np.arange(20)))
    with torch.no_grad():
        logits = model.eval()(ids[:, :-1]).logits.double()
    nats = float(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    text = "".join(pack.tokenizer.decode([int(i)]) for i in ids[:, 1:].flatten() if i > 3 and i < 260)
    assert text, "single bytes occur among the targets"
    assert pack.token_bytes is not None
    size = int(pack.token_bytes[ids[:, 1:].numpy()].sum())
    found = evaluate_pack(model, pack, 20 * 32)
    assert (found["items"], found["tokens"]) == (20, 640)
    assert found["results"]["loss"]["value"] == pytest.approx(nats / 640, abs=1e-6)
    assert found["results"]["bits_per_byte"]["value"] == pytest.approx(nats / math.log(2) / size, abs=1e-6)
    assert found["results"]["uniform_loss"]["value"] == pytest.approx(math.log(512))
    per_window = [
        float(functional.cross_entropy(logits[row], ids[row, 1:], reduction="mean")) for row in range(len(ids))
    ]
    expected = np.std(per_window, ddof=1) / math.sqrt(20)
    assert found["results"]["loss"]["stderr"] == pytest.approx(expected, rel=1e-4)


def test_document_attention_scores_each_document_alone(tiny_config: Path, model: torch.nn.Module) -> None:
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
    for scored in (model, stock_model(model)):  # type: ignore[arg-type]
        found = evaluate_pack(scored, pack, 20 * 32)["results"]["loss"]
        assert found["value"] == pytest.approx(total / 640, abs=1e-5)
        assert "inside their document" in found["rule"]


def test_losses_of_sources_are_means_over_their_targets_with_the_error_of_a_ratio(
    pack: Pack, model: torch.nn.Module
) -> None:
    """The error against a bootstrap over windows."""
    names = ["a", "b", "none"]
    marked = [
        replace(shard, sources=pa.array([names[row % 2] for row in range(shard.rows)]))
        for shard in pack.shards.validation
    ]
    streams = [shard.ids for shard in marked]
    validation = TokenWindows(streams, 32, "sequential", 0, sources=TargetSources(marked, names))
    found = evaluate_pack(model, replace(pack, validation=validation), 60 * 32)["results"]
    each = target_losses(model, validation.gather(range(60)), 512).astype(np.float64)
    sources = validation.target_sources(range(60))
    assert {name for name in found if "/" in name} == {"loss/a", "loss/b"}
    total = 0.0
    generator = np.random.default_rng(0)
    for number, name in enumerate(names[:2]):
        nats = [sum(each[w, t] for t in range(32) if sources[w, t] == number) for w in range(60)]
        counts = [sum(sources[w, t] == number for t in range(32)) for w in range(60)]
        assert 0 < sum(counts) < 60 * 32
        assert found[f"loss/{name}"]["value"] == pytest.approx(sum(nats) / sum(counts), rel=1e-9)
        total += found[f"loss/{name}"]["value"] * sum(counts)
        drawn = generator.integers(0, 60, (4_000, 60))
        spread = (np.array(nats)[drawn].sum(1) / np.array(counts)[drawn].sum(1)).std()
        assert found[f"loss/{name}"]["stderr"] == pytest.approx(spread, rel=0.1)
    assert total / (60 * 32) == pytest.approx(found["loss"]["value"], abs=1e-6)


def test_the_number_does_not_depend_on_how_windows_are_batched(
    pack: Pack, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = pack.validation.gather(np.arange(7))
    whole = target_losses(model, ids, 512)
    monkeypatch.setattr("hf_tinylm.evaluation.perplexity._LOGITS_AT_ONCE", 1)
    assert np.allclose(target_losses(model, ids, 512), whole, rtol=1e-6)


def test_more_tokens_than_there_are_scores_what_there_is(pack: Pack, model: torch.nn.Module) -> None:
    assert evaluate_pack(model, pack, 10**9)["items"] == len(pack.validation)


def test_the_mode_of_the_model_is_restored(pack: Pack, model: torch.nn.Module) -> None:
    model.train()
    target_losses(model, pack.validation.gather([0]), 512)
    assert model.training


def test_a_model_with_fewer_tokens_than_the_pack_is_refused(pack: Pack, tiny_config: Path) -> None:
    small = new_model(load_config(str(tiny_config)).model, 500, 32, seed=1)
    with pytest.raises((DataError, IndexError), match=r"500 tokens and the pack 512|out of range"):
        target_losses(small, np.zeros((1, 33), dtype=np.int64), 512)
