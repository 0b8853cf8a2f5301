"""Text from a model, by transformers' own `generate`, without touching the state of a run that is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseStreamer

from ..errors import ConfigError
from ..tokenization.special import END_OF_TEXT


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.9,
    seed: int = 42,
) -> str:
    """The text that the model continues `prompt` with; the prompt itself and special tokens are left out.

    See `sample_ids` for the arguments and the errors.
    """
    ids = sample_ids(model, tokenizer, prompt, max_new_tokens, temperature, top_p, seed)
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def sample_ids(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[int],
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.9,
    seed: int = 42,
    end_ids: list[int] | None = None,
    streamer: BaseStreamer | None = None,
) -> list[int]:
    """The ids that the model continues `prompt` with, up to and with its end-of-text id.

    The answer depends on the arguments alone. The random state of the process, the training mode of every submodule and
    the model's own generation settings are as before afterwards. Ids that are no token (rows that pad the embedding)
    are never drawn.

    Args:
        prompt: text, in which special tokens have no meaning, or ids. Empty: starts from <|endoftext|>.
        max_new_tokens: at most so many; fewer where the model's `max_position_embeddings` ends.
        temperature: 0 takes the most likely token every time.
        top_p: draw from the most likely tokens that together reach this probability; 1 draws from all.
        seed: two calls with equal arguments give equal ids.
        end_ids: ids that end the text; None: those of the model's generation settings.
        streamer: is given every id as soon as it is drawn.

    Raises:
        ConfigError: an argument out of its range, or a prompt that leaves no room for a new token.
    """
    check_arguments(max_new_tokens, temperature, top_p)
    ids = prompt_ids(tokenizer, prompt)
    room = int(model.config.max_position_embeddings) - len(ids)
    if room < 1:
        raise ConfigError(
            f"The prompt has {len(ids):,} tokens; the model reads {len(ids) + room:,} at most, the new ones included. "
            "Give a shorter prompt."
        )
    settings = _generation_config(model, tokenizer, min(max_new_tokens, room), temperature, top_p, end_ids)
    inputs = torch.tensor([ids], dtype=torch.long, device=model.device)  # (1, prompt)
    with _own_random_state(model.device, seed), _evaluation_mode(model), _settings_of(model, settings):
        output: Any = model.generate(  # type: ignore[operator]
            inputs, attention_mask=torch.ones_like(inputs), generation_config=settings, streamer=streamer
        )
    return [int(token) for token in output[0, len(ids) :]]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int]) -> list[int]:
    """The ids of a prompt; text never yields a special id, and an empty prompt is one <|endoftext|>."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    else:
        ids = prompt
    return [int(token) for token in ids] or [_end_of_text_id(tokenizer)]


def _end_of_text_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of <|endoftext|>, or of the end token of a tokenizer from elsewhere that has no such token."""
    token = tokenizer.get_vocab().get(END_OF_TEXT, tokenizer.eos_token_id)
    if token is None:
        raise ConfigError(f"The tokenizer has neither {END_OF_TEXT} nor an end token to start from. Give a prompt.")
    return int(token)


def _generation_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    end_ids: list[int] | None,
) -> GenerationConfig:
    rows = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    own = model.generation_config
    end = end_ids or getattr(own, "eos_token_id", None)
    end = tokenizer.eos_token_id if end is None else end
    first_end = end[0] if isinstance(end, list) else end
    drawing = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    return GenerationConfig(
        **(drawing if temperature > 0 else {"do_sample": False}),
        max_new_tokens=max_new_tokens,
        use_cache=True,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else first_end,
        suppress_tokens=list(range(len(tokenizer), rows)) or None,
    )


@contextmanager
def _own_random_state(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch inside the block; afterwards the CPU's and the device's generators are where they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


@contextmanager
def _evaluation_mode(model: PreTrainedModel) -> Iterator[None]:
    """No dropout inside the block; afterwards each submodule is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _settings_of(model: PreTrainedModel, settings: GenerationConfig) -> Iterator[None]:
    """`generate` fills what `settings` leaves open from the model's own; inside the block those are `settings` too."""
    own = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = own


def check_arguments(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Raise `ConfigError` for a value out of its range."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be 1 or more.")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature={temperature} must be 0 (always the most likely token) or more.")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p} must be above 0 and at most 1.")
