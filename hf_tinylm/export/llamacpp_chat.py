"""Chat with a GGUF file in llama.cpp, by the chat template that the file carries."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from ..errors import ConfigError
from ..tokenization.chat import Drawing
from .facts import GGUFFacts, read_facts
from .llamacpp import LlamaCppServer


class LlamaCppChat:
    """Context manager that answers as `evaluation.chat.ChatEngine` asks, with a file's own template and tokenizer.

    Raises:
        ConfigError: no such file, no GGUF file, or one without a chat template.
        MissingExtraError: xllamacpp is not installed.
        VerificationError: llama.cpp does not load the file, or dies.
    """

    def __init__(self, path: Path) -> None:
        self.facts: GGUFFacts = read_facts(path)
        if self.facts.chat_template is None:
            raise ConfigError(
                f"{path} has no chat template, so it is no chat model. Give the GGUF file of a model that was trained "
                f"on conversations: recipes/sft.py."
            )
        self.context = self.facts.context_length
        self._server = LlamaCppServer(path, context_length=0)
        self._control = re.compile("(" + "|".join(map(re.escape, self.facts.control_texts)) + ")")

    def __enter__(self) -> LlamaCppChat:
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, traceback)

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation with the header of the reply.

        The template is rendered with a placeholder for every control token that a message spells. What then reads as a
        control token is the template's; the text between them, placeholders put back, is encoded as ordinary text.
        """
        mark = _unused_character(messages)
        spelled: list[str] = []

        def hide(match: re.Match[str]) -> str:
            spelled.append(match[0])
            return f"{mark}{len(spelled) - 1}{mark}"

        hidden = [{**message, "content": self._control.sub(hide, message["content"])} for message in messages]
        rendered = self._server.apply_chat_template(hidden, add_generation_prompt=True)
        parts = self._control.split(rendered)  # text, control token, text, ...
        restored = [re.sub(f"{mark}([0-9]+){mark}", lambda match: spelled[int(match[1])], text) for text in parts[::2]]
        texts = self._server.tokenize(restored, parse_special=False)
        control = self._server.tokenize(parts[1::2], parse_special=True)
        return [*texts[0], *(token for pair in zip(control, texts[1:], strict=True) for ids in pair for token in ids)]

    def reply(self, ids: list[int], drawing: Drawing, emit: Callable[[str], None] | None = None) -> tuple[str, bool]:
        """The reply to `ids`, given piece by piece to `emit` too, and whether the model ended it by itself."""
        text, stop = "", ""
        for event in self._server.stream(ids, drawing):
            text += event["content"]
            stop = event.get("stop_type", stop)
            if emit is not None and event["content"]:
                emit(event["content"])
        return text, stop == "eos"


def _unused_character(messages: Sequence[dict[str, str]]) -> str:
    """A private-use character that no message holds."""
    used = {character for message in messages for character in message["content"]}
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
