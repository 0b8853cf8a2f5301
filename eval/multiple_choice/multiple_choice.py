"""Accuracy of a language model on multiple-choice questions under each usual rule of choosing, each with its name."""

from __future__ import annotations

import math
from typing import Any

import datasets
import evaluate
import numpy as np

# What the summed log-probability of an ending is divided by before the largest is taken.
RULES = ("sum", "per_token", "per_character", "per_byte")

_DESCRIPTION = (
    "Share of questions whose right ending has the highest log-probability: summed, or divided by the tokens, the "
    "characters or the UTF-8 bytes of the ending. Equal scores go to the ending that comes first."
)
_INPUTS = """
Args:
    predictions: for each question, the summed log-probability (nats) of each ending.
    references: index of the right ending of each question.
    tokens, characters, bytes: for each question, the length of each ending.
    return_chosen: also give the index that each rule chose for each question.
Returns:
    accuracy_RULE for sum, per_token, per_character, per_byte; accuracy_RULE_stderr, the standard error of a mean of
    zeros and ones (None for one question), and accuracy_RULE_interval, Wilson's 95% interval.
    chance: accuracy of guessing.   chosen_RULE: with return_chosen.
"""


class MultipleChoice(evaluate.Metric):
    """See the card beside this file."""

    def _info(self) -> Any:
        lengths = {name: datasets.Sequence(datasets.Value("int64")) for name in ("tokens", "characters", "bytes")}
        features = datasets.Features(
            {
                "predictions": datasets.Sequence(datasets.Value("float64")),
                "references": datasets.Value("int64"),
                **lengths,
            }
        )
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(
        self, predictions: Any, references: Any, tokens: Any, characters: Any, bytes: Any, return_chosen: bool = False
    ) -> dict[str, Any]:
        if not len(predictions):
            raise ValueError("there is no question")
        found: dict[str, Any] = {}
        lengths = {"sum": None, "per_token": tokens, "per_character": characters, "per_byte": bytes}
        for rule in RULES:
            chosen = [
                choose(scores, None if lengths[rule] is None else lengths[rule][number])
                for number, scores in enumerate(predictions)
            ]
            right = [choice == label for choice, label in zip(chosen, references, strict=True)]
            found |= self.share(f"accuracy_{rule}", right)
            if return_chosen:
                found[f"chosen_{rule}"] = chosen
        found["chance"] = float(np.mean([1 / len(scores) for scores in predictions]))
        return found

    @staticmethod
    def share(name: str, right: list[bool]) -> dict[str, Any]:
        """The share of true values under `name`, with its standard error and Wilson's 95% interval.

        Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
        """
        count, z = len(right), 1.96
        share = sum(map(bool, right)) / count
        middle = (share + z * z / (2 * count)) / (1 + z * z / count)
        half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
        return {
            name: share,
            f"{name}_stderr": math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None,
            f"{name}_interval": [max(0.0, middle - half), min(1.0, middle + half)],
        }


def choose(scores: Any, lengths: Any = None) -> int:
    """Index of the highest score, the first of equal ones; each is divided by its length first, if there are any."""
    values = np.asarray(scores, dtype=np.float64)
    if lengths is not None:
        sizes = np.asarray(lengths, dtype=np.float64)
        if sizes.shape != values.shape or sizes.min() < 1:
            raise ValueError("every ending needs a length of 1 or more")
        values = values / sizes
    return int(np.argmax(values))
