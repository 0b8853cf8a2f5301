"""Text from a model, by transformers' own `generate`, without touching the state of a run that is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
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
    end_ids: list[int] | None = None,
    *,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
) -> str:
    """The text that the model continues `prompt` with; the prompt itself and special tokens are left out.

    It ends before the first of the `stop` texts. See `sample_ids` for the other arguments and the errors.
    """
    ids = sample_ids(
        model, tokenizer, prompt, max_new_tokens, temperature, top_p, seed, end_ids,
        top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty, stop=stop,
    )  # fmt: skip
    text = _text_of(tokenizer, ids)
    return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]


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
    *,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
) -> list[int]:
    """The ids that the model continues `prompt` with, up to and with its end-of-text id.

    Logits are changed in the order of transformers: penalty, temperature, `top_k`, `top_p`, `min_p`.

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
        top_k: draw from so many most likely tokens; 0 from all.
        min_p: draw from tokens that are at least this share as likely as the most likely one; 0 from all.
        repetition_penalty: logits of tokens that the prompt or the answer holds already are divided by it where they
            are positive and multiplied where negative; 1 changes nothing. Also at temperature 0.
        stop: the ids end with the token that completes one of these texts.

    Raises:
        ConfigError: an argument out of its range, or a prompt that leaves no room for a new token.
    """
    check_arguments(max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, stop)
    ids = prompt_ids(tokenizer, prompt)
    drawing = _drawing(temperature, top_p, top_k, min_p, repetition_penalty)
    settings = _generation_config(model, tokenizer, min(max_new_tokens, room_for(model, ids)), drawing, end_ids)
    stopping = StoppingCriteriaList([_StopTexts(tokenizer, len(ids), stop)] if stop else [])
    inputs = torch.tensor([ids], dtype=torch.long, device=model.device)  # (1, prompt)
    with _own_random_state(model.device, seed), _evaluation_mode(model), _settings_of(model, settings):
        output: Any = model.generate(  # type: ignore[operator]
            inputs,
            attention_mask=torch.ones_like(inputs),
            generation_config=settings,
            streamer=streamer,
            stopping_criteria=stopping,
        )
    return [int(token) for token in output[0, len(ids) :]]


def room_for(model: PreTrainedModel, ids: Sequence[int]) -> int:
    """How many new tokens the model has room for after the prompt `ids`.

    Raises:
        ConfigError: none.
    """
    positions = int(model.config.max_position_embeddings)
    if len(ids) >= positions:
        raise ConfigError(
            f"The prompt has {len(ids):,} tokens; the model reads {positions:,} at most, the new ones included. "
            "Give a shorter prompt."
        )
    return positions - len(ids)


def _text_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _StopTexts(StoppingCriteria):
    """Ends a text whose new part holds one of the stop texts; transformers' own also counts what the prompt ends in."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, stop: Sequence[str]) -> None:
        self.tokenizer, self.prompt_length, self.stop = tokenizer, prompt_length, stop

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Whether each row (B,) is done."""
        texts = [_text_of(self.tokenizer, row[self.prompt_length :].tolist()) for row in input_ids]
        done = [any(stop in text for stop in self.stop) for text in texts]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)


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
    drawing: dict[str, Any],
    end_ids: list[int] | None,
) -> GenerationConfig:
    rows = len(model.get_input_embeddings().weight)  # type: ignore[arg-type]
    own = model.generation_config
    end = end_ids or getattr(own, "eos_token_id", None)
    end = tokenizer.eos_token_id if end is None else end
    first_end = end[0] if isinstance(end, list) else end
    return GenerationConfig(
        **drawing,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        eos_token_id=end,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else first_end,
        suppress_tokens=list(range(len(tokenizer), rows)) or None,
    )


def _drawing(temperature: float, top_p: float, top_k: int, min_p: float, repetition_penalty: float) -> dict[str, Any]:
    """The fields of a `GenerationConfig` that decide which token is next."""
    penalty = {} if repetition_penalty == 1 else {"repetition_penalty": float(repetition_penalty)}
    if temperature == 0:
        return {"do_sample": False, **penalty}
    drawing = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    return {**drawing, **penalty, **({"min_p": min_p} if min_p > 0 else {})}


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


def check_arguments(
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: Sequence[str] = (),
) -> None:
    """Raise `ConfigError` for a value out of its range."""
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} must be 1 or more.")
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature={temperature} must be 0 (always the most likely token) or more.")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={top_p} must be above 0 and at most 1.")
    if top_k < 0:
        raise ConfigError(f"top_k={top_k} must be 0 (draw from all tokens) or more.")
    if not 0 <= min_p <= 1:
        raise ConfigError(f"min_p={min_p} must be from 0 (draw from all tokens) to 1.")
    if not 0 < repetition_penalty < float("inf"):
        raise ConfigError(f"repetition_penalty={repetition_penalty} must be above 0; 1 changes nothing.")
    if isinstance(stop, str) or "" in stop:
        raise ConfigError(f"stop={stop!r} must be a list of texts, none of them empty.")
