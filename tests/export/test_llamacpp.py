"""llama.cpp runs beside us: whatever happens to it, we get an answer or one clear error."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hf_tinylm.errors import ConfigError, MissingExtraError, VerificationError
from hf_tinylm.export.gguf import write_gguf
from hf_tinylm.export.llamacpp import LlamaCppServer

pytest.importorskip("xllamacpp")


@pytest.fixture
def model(make_model: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_gguf(make_model(chat=True), path, "f32")
    return path


def is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_ids_probabilities_continuations_and_templates_come_back(model: Path, tokenizer_json: str) -> None:
    from tokenizers import Tokenizer

    reference = Tokenizer.from_str(tokenizer_json)
    reference.encode_special_tokens = True
    texts = ["don't stop", "", "안녕하세요\n\n", "a<|im_end|>b", "\x00"] * 100  # more than one request holds
    with LlamaCppServer(model, threads=1) as server:
        assert server.tokenize(texts, parse_special=False) == [row.ids for row in reference.encode_batch(texts)]
        assert 2 in server.tokenize(["a<|im_end|>b"], parse_special=True)[0]
        logprobs = server.next_token_logprobs([50, 60, 70], 544)
        assert np.exp(logprobs).sum() == pytest.approx(1.0, abs=1e-4)
        first = server.generate([50, 60, 70], 5)
        assert first == server.generate([50, 60, 70], 5)
        assert first.ids[0] == int(logprobs.argmax())
        assert server.end_of_generation_ids() == {0, 2}
        rendered = server.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
        assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        process_id = server.process_id
        assert process_id is not None
    assert server.process_id is None
    assert not is_running(process_id)


def test_a_child_that_dies_is_named_with_its_signal(model: Path) -> None:
    with LlamaCppServer(model, threads=1) as server:
        assert server.process_id is not None
        os.kill(server.process_id, signal.SIGABRT)
        with pytest.raises(VerificationError, match="SIGABRT"):
            server.generate([5], 3)


def test_a_file_that_does_not_load_is_named_with_the_reason(model: Path) -> None:
    model.write_bytes(model.read_bytes()[:-4096])
    with (
        pytest.raises(VerificationError, match=r"did not load .*model\.gguf.*not within the file bounds"),
        LlamaCppServer(model, threads=1),
    ):
        pass


def test_a_child_that_does_not_answer_in_time_is_ended(model: Path) -> None:
    with (
        pytest.raises(VerificationError, match="SIGKILL"),
        LlamaCppServer(model, threads=1, timeout=0.001),
    ):
        pass


def test_a_refused_request_leaves_the_server_usable(model: Path) -> None:
    with LlamaCppServer(model, threads=1) as server:
        with pytest.raises(VerificationError, match="invalid tokens"):
            server.generate([99_999], 1)
        assert len(server.generate([50], 2).ids) == 2


def test_a_missing_file_and_a_missing_engine_are_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"absent\.gguf"), LlamaCppServer(model.with_name("absent.gguf")):
        pass
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="gguf-verify"), LlamaCppServer(model):
        pass
