"""A fixed file of prompts, so that checkpoints can be compared side by side, after a run and during it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import ConfigError
from ..files import bundled
from .chat import TransformersChat
from .sampling import prompt_ids, room_for, sample

if TYPE_CHECKING:
    from ..training.trainer import LMTrainer

SAMPLED_TOKENS = 64  # of a text that is written during training


def read_prompts(path: str | None = None) -> list[str]:
    """The prompts of a file, in its order; of the bundled one when `path` is None.

    A line of a `.jsonl` file is an object with `prompt`, or a string; of any other file the prompt itself, without the
    white space at its end. Empty lines are passed over.

    Raises:
        ConfigError: the file cannot be read as UTF-8, holds no prompt, or a line of it has none.
    """
    file = bundled("eval", "prompts.txt") if path is None else Path(path)
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as UTF-8 text: {error}. Give a file with a prompt a line.") from error
    numbered = [(number, line.rstrip()) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(f"{file} holds no prompt. Write one a line.")
    if file.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt_of(line, f"{file}, line {number}") for number, line in numbered]


def _prompt_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else row
    if not isinstance(prompt, str):
        raise ConfigError(f'{where} has no prompt. A line is {{"prompt": "text"}}.')
    return prompt


class SampleTexts(TrainerCallback):
    """Every `sample_steps` updates the main process writes what the model makes of the prompts into events.jsonl.

    The event is `sampled`, with `samples` [{prompt, text}]; texts are drawn as `sample` does by default, with the seed
    of the run. Neither weights nor random states nor modes are touched: a run ends with the same bits with and without
    it. The time is counted as that of evaluation.

    Args:
        prompts: texts to continue.
        chat: each is the message of a user, and the text is the reply.

    Raises:
        ConfigError: a prompt leaves no room for a new token.
    """

    def __init__(self, trainer: LMTrainer, sample_steps: int, prompts: Sequence[str], chat: bool = False) -> None:
        self.trainer, self.every = trainer, sample_steps
        tokenizer: Any = trainer.processing_class
        self.tokenizer, self.end_ids = tokenizer, None
        model = trainer.model
        if chat:
            talker = TransformersChat(model, tokenizer)
            self.end_ids = talker.end_ids
            ids = [talker.prompt_ids([{"role": "user", "content": prompt}]) for prompt in prompts]
        else:
            ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
        for prompt, its_ids in zip(prompts, ids, strict=True):
            try:
                room_for(model, its_ids)
            except ConfigError as error:
                raise ConfigError(f"sample_steps cannot continue {prompt!r}. {error}") from error
        self.prompts = list(zip(prompts, ids, strict=True))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Sample where it is due."""
        trainer = self.trainer
        if state.global_step % self.every or not state.is_world_process_zero:
            return
        with trainer.record.clocks.measure("evaluation_seconds"):
            samples = [
                {
                    "prompt": prompt,
                    "text": sample(
                        trainer.model, self.tokenizer, ids, SAMPLED_TOKENS, seed=args.seed, end_ids=self.end_ids
                    ),
                }
                for prompt, ids in self.prompts
            ]
        trainer.record.events.add("sampled", state.global_step, samples=samples)
