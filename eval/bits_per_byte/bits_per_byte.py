"""Bits per byte of UTF-8 text: the loss of a language model in a unit that does not depend on its tokenizer."""

from __future__ import annotations

import math
from typing import Any

import datasets
import evaluate
import numpy as np

_DESCRIPTION = "sum of nats / ln 2 / bytes of the UTF-8 text, over all spans together."
_INPUTS = """
Args:
    predictions: summed negative log-likelihood of each span, in nats.
    references: the text of each span, or its number of UTF-8 bytes.
Returns:
    bits_per_byte: bits per byte over all spans.
    bits_per_byte_stderr: standard error of the ratio over spans; None for a single span.
    bits_per_byte_interval: value -+ 1.96 standard errors.
    bytes: number of bytes.
"""


class BitsPerByte(evaluate.Metric):
    """See the card beside this file."""

    def _info(self) -> Any:
        features = [
            datasets.Features({"predictions": datasets.Value("float64"), "references": datasets.Value(kind)})
            for kind in ("string", "int64")
        ]
        return evaluate.MetricInfo(description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=features)

    def _compute(self, predictions: Any, references: Any) -> dict[str, Any]:
        nats = np.asarray(predictions, dtype=np.float64)
        sizes = [len(text.encode("utf-8")) if isinstance(text, str) else int(text) for text in references]
        size, count = np.asarray(sizes, dtype=np.float64), len(sizes)
        if count == 0 or size.sum() <= 0:
            raise ValueError("the spans hold no byte of text")
        bits = nats / math.log(2)
        value, error = float(bits.sum() / size.sum()), None
        if count > 1:  # linearised ratio of two sums
            residuals = bits - value * size
            error = float(math.sqrt(count / (count - 1) * (residuals**2).sum()) / size.sum())
        return {
            "bits_per_byte": value,
            "bits_per_byte_stderr": error,
            "bits_per_byte_interval": None if error is None else [value - 1.96 * error, value + 1.96 * error],
            "bytes": int(size.sum()),
        }
