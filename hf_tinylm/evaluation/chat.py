"""Talk with a model: the messages so far, replies as they are written, and chats that grow beyond its context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerFast, TextStreamer

from ..errors import ConfigError
from ..tokenization.chat import ChatRenderer, Drawing, end_ids
from .sampling import sample_ids

Message = dict[str, str]


class ChatEngine(Protocol):
    """What answers: transformers here, or llama.cpp (`export.llamacpp_chat`)."""

    context: int  # tokens that the model reads, those of the reply included

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the conversation with the header of the reply; text of a message never yields a control token."""
        ...

    def reply(self, ids: list[int], drawing: Drawing, emit: Callable[[str], None] | None = None) -> tuple[str, bool]:
        """The reply to `ids`, given piece by piece to `emit` too, and whether the model ended it by itself."""
        ...


class TransformersChat:
    """A `ChatEngine` on a model of transformers, on the device where its weights are.

    Raises:
        TokenizerError: the tokenizer has no ChatML control tokens.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.context = int(model.config.max_position_embeddings)
        self._renderer = ChatRenderer(tokenizer)
        self.end_ids = end_ids(tokenizer)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """As `ChatEngine` says."""
        return [int(token) for token in self._renderer.render(messages, add_generation_prompt=True).ids]

    def reply(self, ids: list[int], drawing: Drawing, emit: Callable[[str], None] | None = None) -> tuple[str, bool]:
        """As `ChatEngine` says."""
        streamer = None if emit is None else _Pieces(self.tokenizer, emit)
        found = sample_ids(self.model, self.tokenizer, ids, **asdict(drawing), end_ids=self.end_ids, streamer=streamer)
        text = self.tokenizer.decode(found, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text), bool(found) and found[-1] in self.end_ids


class _Pieces(TextStreamer):
    """Hands whole characters to `emit` as soon as their ids are drawn."""

    def __init__(self, tokenizer: Any, emit: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._emit = emit

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called by `generate` with each new piece."""
        if text:
            self._emit(text)


@dataclass
class Conversation:
    """The messages of a chat and how its replies are drawn.

    Equal messages and an equal seed give equal replies; each further reply of a chat draws from the next seed.
    """

    engine: ChatEngine
    system: str | None = None
    drawing: Drawing = field(default_factory=Drawing)

    def __post_init__(self) -> None:
        self.reseed(self.drawing.seed)
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.rounds: list[list[Message]] = []
        self._replies = 0

    def reseed(self, seed: int) -> None:
        """Draw the following replies from `seed` on.

        Raises:
            ConfigError: it is negative, which llama.cpp takes for a seed of its own choice, or beyond 32 bits.
        """
        if not 0 <= seed < 2**32 - 1:
            raise ConfigError(f"seed={seed} must be from 0 to {2**32 - 2:,}.")
        self.drawing, self._replies = replace(self.drawing, seed=seed), 0

    def ask(
        self, text: str, emit: Callable[[str], None] | None = None, notice: Callable[[str], None] | None = None
    ) -> str:
        """The reply to `text`, which is remembered; a reply that fails or is interrupted leaves nothing behind.

        The oldest rounds of a chat that leaves less room than a reply needs are forgotten; `notice` is told.

        Raises:
            ConfigError: the message alone is too long.
        """
        asked = {"role": "user", "content": text}
        ids, dropped = self._fit(asked)
        if dropped and notice is not None:
            rounds = "oldest round is" if dropped == 1 else f"{dropped} oldest rounds are"
            notice(
                f"the chat has outgrown the model's {self.engine.context:,} tokens: its {rounds} left out from here."
            )
        room = min(self.drawing.max_new_tokens, self.engine.context - len(ids))
        now = replace(self.drawing, max_new_tokens=room, seed=self.drawing.seed + self._replies)
        reply, _ = self.engine.reply(ids, now, emit)
        self.rounds = [*self.rounds[dropped:], [asked, {"role": "assistant", "content": reply}]]
        self._replies += 1
        return reply

    def _fit(self, asked: Message) -> tuple[list[int], int]:
        """Ids of as many of the newest rounds as leave room for a reply, and how many older ones are left out."""
        needed = min(self.drawing.max_new_tokens, self.engine.context // 2)
        system = [{"role": "system", "content": self.system}] if self.system else []
        for dropped in range(len(self.rounds) + 1):
            past = [message for messages in self.rounds[dropped:] for message in messages]
            ids = self.engine.prompt_ids([*system, *past, asked])
            if len(ids) + needed <= self.engine.context:
                return ids, dropped
        raise ConfigError(
            f"the message takes {len(ids):,} tokens{' with the system prompt' if system else ''}; the model reads "
            f"{self.engine.context:,}, and a reply needs {needed:,} of them. Give a shorter message."
        )
