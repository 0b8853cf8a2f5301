"""Tiny stock models with a tokenizer trained on the spot, written as the folders that users export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Contractions, digits, runs of spaces, line ends, indentation and several scripts: merges that cross the borders of
# other splits must be learnable, or a wrong label would go unnoticed.
TEXT = (
    "It's 1984 and we're sure they'll say I'm wrong; don't you think he'd agree? You've 1234567890 ways.\r\n"
    "IT'S LOUD, DON'T SHOUT!!! ...  two  spaces   three    four\n\n\n"
    "def area(width, height):\n    if width < 0:\n        raise ValueError('negative')\n    return width * height\n"
    "\t\tx_1 = [10, 200, 3000]  # comment\n\n"
    "안녕하세요 여러분, 오늘은 12월 25일입니다. 한국어 문장을 조금 넣는다.\n"
    "Die Straße nach Zürich ist 120 km lang; naïve café owners résumé work. Привет, мир! 你好，世界。 🙂🙂\n"
    "The quick brown fox jumps over the lazy dog while 99 other foxes watch from the hill above the river.\n"
)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., dict[str, Any]]:
    """A function that trains a byte-level BPE with other steps before merging; gives the object of a tokenizer.json."""

    def make(pre_tokenizer: Any, **changes: Any) -> dict[str, Any]:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=544,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator([TEXT] * 4, trainer)
        value: dict[str, Any] = json.loads(tokenizer.to_str())
        value["model"].update(changes)
        return value

    return make


@pytest.fixture(scope="session")
def tokenizer_json(make_tokenizer: Callable[..., dict[str, Any]]) -> str:
    """A byte-level BPE of 544 tokens with the split of Qwen2, as the text of a tokenizer.json."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return json.dumps(make_tokenizer(pre_tokenizers.Sequence([split, byte_level])), ensure_ascii=False)


@pytest.fixture
def make_model(tmp_path: Path, tokenizer_json: str) -> Callable[..., Path]:
    """A function that writes a stock llama or qwen3 folder with random weights whose logits vary."""
    count = 0

    def make(
        architecture: str = "llama",
        heads: tuple[int, int] = (8, 2),
        head_dim: int = 8,
        hidden_size: int | None = None,
        theta: float = 10_000.0,
        tied: bool = True,
        vocab_size: int = 544,
        context: int = 256,
        layers: int = 2,
        chat: bool = False,
        **save: Any,
    ) -> Path:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

        nonlocal count
        count += 1
        folder = tmp_path / f"model-{count}"
        configure, build = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[
            architecture
        ]
        config = configure(
            vocab_size=vocab_size,
            hidden_size=hidden_size or heads[0] * head_dim,
            intermediate_size=160,
            num_hidden_layers=layers,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            tie_word_embeddings=tied,
            bos_token_id=None,
            eos_token_id=2 if chat else 0,
            pad_token_id=3,
        )
        generator = torch.Generator().manual_seed(7)
        model = build(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.uniform_(0.5, 1.5, generator=generator)
                else:
                    scale = 0.25 if "embed" in name or "lm_head" in name else 1.5 / parameter.shape[1] ** 0.5
                    parameter.normal_(std=scale, generator=generator)
        model.generation_config.eos_token_id = [2, 0] if chat else 0
        model.save_pretrained(folder, **save)
        (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>" if chat else "<|endoftext|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
        if chat:
            (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        return folder

    return make


@pytest.fixture
def edit_json() -> Callable[[Path, Callable[[dict[str, Any]], Any]], None]:
    """A function that loads a JSON file, lets a function change it in place, and writes it back."""

    def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
        value = json.loads(path.read_text(encoding="utf-8"))
        change(value)
        path.write_text(json.dumps(value), encoding="utf-8")

    return edit
