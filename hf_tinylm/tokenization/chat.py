"""ChatML: conversations as token ids, with a mask that says which ids are the assistant's.

    <|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\nGood day.<|im_end|>\\n
                                                            ^^^^^^^^^^^^^^^^^^^ supervised

Only this module writes control tokens: the text of a message is encoded apart from them, so a message that spells
`<|im_start|>` yields ordinary ids. For messages without such text the ids are those of `apply_chat_template` with the
template in `tokenizer/chat_template.jinja`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import DataError, TokenizerError
from ..files import bundled
from .encoder import FastEncoder
from .load import BackendTokenizer, backend_json, load_tokenizer, special_ids
from .special import END_OF_TEXT, IM_END, IM_START

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SYSTEM, USER, ASSISTANT = ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, eq=False)
class RenderedChat:
    """A conversation as the model sees it.

    Attributes:
        ids: (n,) uint32.
        supervised: (n,) bool: ids of a reply and the `<|im_end|>` that ends it.
        message_ends: ids up to the end of each message, the newline behind it included.
    """

    ids: np.ndarray
    supervised: np.ndarray
    message_ends: list[int]


@dataclass(frozen=True)
class Drawing:
    """How a reply is drawn, by whatever program: at most so many tokens; at temperature 0 each is the most likely."""

    max_new_tokens: int = 128
    temperature: float = 0.7
    top_p: float = 0.9
    seed: int = 42

    @classmethod
    def greedy(cls, max_new_tokens: int) -> Drawing:
        """Nothing is left to chance."""
        return cls(max_new_tokens, temperature=0.0, top_p=1.0, seed=0)


def chat_template() -> str:
    """Our ChatML template in Jinja, with the generation markers by which transformers finds the replies."""
    return bundled("tokenizer", "chat_template.jinja").read_text(encoding="utf-8")


def chat_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder, or of a model on the Hub, made that of a chat model: `<|im_end|>` is its eos.

    Its chat template becomes ours, whatever it had.

    Raises:
        TokenizerError: there is none, or it has no ChatML control tokens.
    """
    tokenizer = load_tokenizer(path)
    control_ids(tokenizer)
    tokenizer.eos_token = IM_END
    tokenizer.chat_template = chat_template()
    return tokenizer


def control_ids(tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> tuple[int, int]:
    """The ids of `<|im_start|>` and `<|im_end|>`.

    Raises:
        TokenizerError: the tokenizer lacks one of them as a special token.
    """
    vocabulary, special = tokenizer.get_vocab(), special_ids(backend_json(tokenizer))
    missing = [token for token in (IM_START, IM_END) if vocabulary.get(token) not in special]
    if missing:
        raise TokenizerError(
            f"the tokenizer {tokenizer.name_or_path} has no special token {' and '.join(missing)}, which conversations "
            f"need. Start from a model whose tokenizer has them (every one trained here has); docs/chat.md says how to "
            f"add them to another."
        )
    return vocabulary[IM_START], vocabulary[IM_END]


def end_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Every id at which a chat model stops: `<|im_end|>` first, then `<|endoftext|>` where there is one."""
    other = tokenizer.get_vocab().get(END_OF_TEXT)
    return [control_ids(tokenizer)[1], *([] if other is None else [int(other)])]


class ChatRenderer:
    """Renders conversations with one tokenizer.

    Raises:
        TokenizerError: the tokenizer has no ChatML control tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | BackendTokenizer) -> None:
        self.start_id, self.end_id = control_ids(tokenizer)
        self._encoder = FastEncoder(tokenizer)
        texts = ["\n", *(f"{role}\n" for role in ROLES)]
        self._newline, *headers = self._encoder.encode_batch(texts)
        self._headers = dict(zip(ROLES, headers, strict=True))

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> RenderedChat:
        """The ids and the mask of a conversation.

        Args:
            add_generation_prompt: end with the header of an assistant's message, for the model to go on.

        Raises:
            DataError: the conversation is malformed; the reason is named.
        """
        reason = why_malformed(messages)
        if reason is not None and not (reason == "no_reply" and add_generation_prompt):
            raise DataError(f"the conversation has a fault: {describe_fault(reason)}.")
        pieces: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        message_ends, length = [], 0
        texts = self._encoder.encode_batch([f"{message['role']}\n{message['content']}" for message in messages])
        for message, text in zip(messages, texts, strict=True):
            ids = np.concatenate(([self.start_id], text, [self.end_id], self._newline)).astype(np.uint32)
            mask = np.zeros(len(ids), dtype=bool)
            if message["role"] == ASSISTANT:
                mask[1 + self._header_length(text) : 2 + len(text)] = True
            pieces.append(ids)
            masks.append(mask)
            length += len(ids)
            message_ends.append(length)
        if add_generation_prompt:
            pieces.append(np.concatenate(([self.start_id], self._headers[ASSISTANT])).astype(np.uint32))
            masks.append(np.zeros(len(pieces[-1]), dtype=bool))
        return RenderedChat(np.concatenate(pieces), np.concatenate(masks), message_ends)

    @property
    def reply_header(self) -> np.ndarray:
        """Ids between `<|im_start|>` and a reply."""
        return self._headers[ASSISTANT]

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids` (n,), control tokens spelled out."""
        return self._encoder.decode(ids)

    def _header_length(self, text: np.ndarray) -> int:
        """Ids of an assistant's text that hold any of its header.

        A reply that begins with a line break may share an id with the header's; that id is the header's.
        """
        header = self.reply_header
        if np.array_equal(text[: len(header)], header):
            return len(header)
        characters = len(ASSISTANT) + 1
        return next(n for n in range(1, len(text) + 1) if len(self._encoder.decode(text[:n])) >= characters)


_FAULTS = {
    "no_messages": "it has no list of messages",
    "not_a_message": "a message is no mapping of role and content",
    "unknown_role": f"a message has another role than {', '.join(ROLES)}",
    "null_content": "a message has no content",
    "content_not_text": "the content of a message is no text",
    "not_unicode": "the content of a message holds half a surrogate pair",
    "tool_calls": "a message calls a tool",
    "system_not_first": "a system message comes after the first place",
    "no_reply": "no message is the assistant's",
}


def why_malformed(messages: Any) -> str | None:
    """Why a value is no conversation that can be learned from, as a short name; None when it is one.

    Users and assistants may speak several times in a row, and an assistant may begin.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return "no_messages"
    for position, message in enumerate(messages):
        reason = _why_malformed_message(message, position)
        if reason is not None:
            return reason
    return None if any(message["role"] == ASSISTANT for message in messages) else "no_reply"


def describe_fault(reason: str) -> str:
    """A reason of `why_malformed` in words."""
    return _FAULTS[reason]


def _why_malformed_message(message: Any, position: int) -> str | None:
    if not isinstance(message, Mapping):
        return "not_a_message"
    if message.get("role") not in ROLES:
        return "unknown_role"
    if message.get("tool_calls"):
        return "tool_calls"
    content = message.get("content")
    if content is None:
        return "null_content"
    if not isinstance(content, str):
        return "content_not_text"
    if message["role"] == SYSTEM and position:
        return "system_not_first"
    return None if _is_unicode(content) else "not_unicode"


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
