"""Loss and perplexity of a language model over all tokens of a text: one sum divided once, however it was batched."""

from __future__ import annotations

import math
from typing import Any

import datasets
import evaluate
import numpy as np

_DESCRIPTION = (
    "exp(sum of nats / number of tokens) over all spans of a text; spans of any length count by their tokens."
)
_INPUTS = """
Args:
    predictions: summed negative log-likelihood of each span, in nats.
    references: number of tokens that were scored in each span.
Returns:
    loss: nats per token.
    loss_stderr: standard error of the ratio over spans; None for a single span.
    loss_interval: loss -+ 1.96 standard errors.
    perplexity: exp(loss); its stderr is loss_stderr times it, its interval the exponential of the loss's.
    tokens: number of tokens.
"""


class TokenWeightedPerplexity(evaluate.Metric):
    """See the card beside this file."""

    def _info(self) -> Any:
        features = datasets.Features({"predictions": datasets.Value("float64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features, format="numpy"
        )

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        nats, tokens = np.asarray(predictions, dtype=np.float64), np.asarray(references, dtype=np.float64)
        if tokens.size == 0 or tokens.min() < 1:
            raise ValueError("every span needs at least one scored token")
        loss, count = float(nats.sum() / tokens.sum()), tokens.size
        error = None
        if count > 1:  # linearised ratio of two sums; for spans of one length the usual standard error of the mean
            residuals = nats - loss * tokens
            error = float(math.sqrt(count / (count - 1) * (residuals**2).sum()) / tokens.sum())
        interval = None if error is None else [loss - 1.96 * error, loss + 1.96 * error]
        return {
            "loss": loss,
            "loss_stderr": error,
            "loss_interval": interval,
            "perplexity": float(np.exp(loss)),
            "perplexity_stderr": None if error is None else float(np.exp(loss)) * error,
            "perplexity_interval": None if interval is None else [float(np.exp(bound)) for bound in interval],
            "tokens": int(tokens.sum()),
        }
