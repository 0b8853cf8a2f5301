"""Prompt files, and texts that a run writes on its way without being changed by it."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_tinylm.errors import ConfigError
from hf_tinylm.evaluation.prompts import SAMPLED_TOKENS, SampleTexts, read_prompts
from hf_tinylm.evaluation.sampling import sample
from hf_tinylm.files import bundled, read_rows
from hf_tinylm.modeling.factory import load_model
from hf_tinylm.tokenization.load import load_tokenizer
from hf_tinylm.training.clocks import Clocks


def test_prompts_are_lines_or_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One \n\n  two\r\n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"prompt": "line\\nbreak "}\n"plain"\n', encoding="utf-8")
    assert read_prompts(str(tmp_path / "a.txt")) == ["One", "  two"]
    assert read_prompts(str(tmp_path / "b.jsonl")) == ["line\nbreak ", "plain"]
    assert len(read_prompts()) == 8


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.txt", b"\n \n", "holds no prompt"),
        ("a.txt", b"\xff", "UTF-8"),
        ("a.jsonl", b'"x"\n{"text": "x"}\n', "line 2 has no prompt"),
        ("a.jsonl", b"{\n", "line 1 is not JSON"),
        ("missing.txt", None, "missing.txt cannot be read"),
    ],
)
def test_a_file_without_prompts_is_named(tmp_path: Path, name: str, text: bytes | None, told: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigError, match=told):
        read_prompts(str(tmp_path / name))


def test_a_run_that_samples_ends_with_the_bits_of_one_that_does_not(tiny_config: Path, tmp_path: Path) -> None:
    """With dropout, so that every draw between two updates would show."""
    recipe: Any = run_path(str(bundled("recipes", "pretrain.py")))["main"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Emma was\nIt is\n")
    runs = {"plain": [], "samples": ["--sample_steps", "2", "--sample_prompts", str(prompts)]}
    shared = ["--config", str(tiny_config), "--attention_dropout", "0.3", "--max_position_embeddings", "48"]
    for name, settings in runs.items():
        assert recipe([*shared, *settings, "--output_dir", str(tmp_path / name)]) == 0
    for step in (2, 6):
        folders = [tmp_path / name / f"checkpoint-{step:08d}" for name in runs]
        for file in ("model.safetensors", "optimizer.safetensors", "rng-00000.safetensors"):
            assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes(), file
    rows = [[row.get("eval_loss", row.get("loss")) for row in read_rows(tmp_path / n / "metrics.jsonl")] for n in runs]
    assert rows[0] == rows[1]
    assert not [row for row in read_rows(tmp_path / "plain" / "events.jsonl") if row["event"] == "sampled"]
    found = [row for row in read_rows(tmp_path / "samples" / "events.jsonl") if row["event"] == "sampled"]
    assert [row["step"] for row in found] == [2, 4, 6]
    assert [row["prompt"] for row in found[0]["samples"]] == ["Emma was", "It is"]
    final = tmp_path / "samples" / "final"
    again = sample(load_model(final), load_tokenizer(str(final)), "It is", SAMPLED_TOKENS)
    assert found[-1]["samples"][1]["text"] == again != found[0]["samples"][1]["text"]


class Writer:
    """Stands for the trainer: keeps the events."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.processing_class = model, tokenizer
        self.events: list[tuple[str, int, list[dict[str, str]]]] = []
        self.record = SimpleNamespace(clocks=Clocks(began=0.0), events=self)

    def add(self, event: str, step: int, samples: list[dict[str, str]]) -> None:
        self.events.append((event, step, samples))


def test_only_the_main_process_writes_at_its_steps_and_a_chat_model_replies(byte_model, byte_chat_tokenizer) -> None:
    trainer: Any = Writer(byte_model, byte_chat_tokenizer)
    texts = SampleTexts(trainer, 3, ["Hi"], chat=True)
    for step in range(1, 7):
        for main in (False, True):
            state: Any = SimpleNamespace(global_step=step, is_world_process_zero=main)
            texts.on_step_end(SimpleNamespace(seed=42), state, None)  # type: ignore[arg-type]
    assert [(event, step) for event, step, _ in trainer.events] == [("sampled", 3), ("sampled", 6)]
    asked = byte_chat_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )
    assert trainer.events[0][2] == [
        {"prompt": "Hi", "text": sample(byte_model, byte_chat_tokenizer, asked, SAMPLED_TOKENS, end_ids=[0, 2])}
    ]
    assert trainer.record.clocks.evaluation_seconds > 0


def test_a_prompt_that_leaves_no_room_is_told_before_the_run(byte_model, byte_tokenizer) -> None:
    trainer: Any = Writer(byte_model, byte_tokenizer)
    with pytest.raises(ConfigError, match=r"cannot continue 'x+'. The prompt has 96 tokens"):
        SampleTexts(trainer, 1, ["fine", "x" * 96])
