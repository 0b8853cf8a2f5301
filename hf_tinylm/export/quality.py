"""What a storage type costs: the model's predictions on a text against those of a GGUF file in llama.cpp.

With llama-cpp-python every position of the text counts; without it llama.cpp's server is asked for one position at a
time, so few are taken and the figures are rougher. The report says how many.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..errors import ConfigError
from ..files import bundled
from ..gguf_plan import GGUFType
from .llamacpp import LlamaCppServer, chosen_threads
from .logits import every_logit_is_available, raw_logits

_POSITIONS, _ROW = 2_048, 256  # with llama-cpp-python
_LARGEST_ANSWER = 2**26  # logits, 256 MiB
_SERVER_POSITIONS, _SERVER_ROW = 64, 32
_FEWEST_TOKENS = 64
_TEXT_CHARACTERS = 200_000
_SMALLEST_LOGPROB = -100.0  # nats; stands for a probability that is zero in float32


@dataclass(frozen=True)
class QualityLimits:
    """What a file may cost: mean KL divergence (nats), rise of perplexity (0.01 is 1%), least share of equal top-1."""

    kl_divergence: float
    perplexity_rise: float
    top1_agreement: float


# Divergence and perplexity: three to seven times what llama.cpp measured on a model of 8 billion parameters; it loses
# more than a small one does (5.6 million parameters lost a tenth of it). Top-1 is given more room: where a model is
# unsure, the smallest change moves it. A wrong file (rows not reordered, another rope base) is far beyond all of them.
# Source: llama.cpp, tools/perplexity/README.md, "LLaMA 3 8b Scoreboard".
DEFAULT_LIMITS: dict[GGUFType, QualityLimits] = {
    "bf16": QualityLimits(0.01, 0.01, 0.85),
    "q8_0": QualityLimits(0.01, 0.01, 0.85),
    "q6_k": QualityLimits(0.02, 0.02, 0.80),
    **dict.fromkeys(("q5_0", "q5_1", "q5_k_s", "q5_k_m"), QualityLimits(0.06, 0.05, 0.75)),
    **dict.fromkeys(("q4_k_s", "q4_k_m"), QualityLimits(0.12, 0.10, 0.60)),
    **dict.fromkeys(("q4_0", "q4_1"), QualityLimits(0.25, 0.20, 0.60)),
}


class Predictor(Protocol):
    """The Hugging Face side."""

    tokens: int
    context: int

    def logits(self, ids: list[int]) -> np.ndarray:
        """(positions, V)."""

    def encode(self, texts: list[str], parse_special: bool) -> list[list[int]]:
        """Ids of each text."""


@dataclass(frozen=True)
class Quality:
    """A file beside its model on a text.

    Attributes:
        positions: predictions compared.
        kl_divergence: mean over positions of KL(model || file) in nats.
        perplexity, model_perplexity: of the file and of the model on the same positions.
        top1_agreement: share of positions with the same most likely token.
        tokens_per_second: generation one by one on `threads` threads with an F32 cache, as verification runs it.
    """

    text: str
    engine: str
    positions: int
    kl_divergence: float
    perplexity: float
    model_perplexity: float
    top1_agreement: float
    tokens_per_second: float
    threads: int

    @property
    def perplexity_rise(self) -> float:
        """Relative change of the perplexity; 0.01 is one percent more."""
        return self.perplexity / self.model_perplexity - 1

    def failures(self, limits: QualityLimits) -> list[str]:
        """What is beyond a limit. A figure that is not a number is within none."""
        found = []
        if not self.kl_divergence <= limits.kl_divergence:
            found.append(f"mean KL divergence is {self.kl_divergence:.4g} nats; the limit is {limits.kl_divergence:g}")
        if not self.perplexity_rise <= limits.perplexity_rise:
            found.append(f"perplexity rises by {self.perplexity_rise:.2%}; the limit is {limits.perplexity_rise:.2%}")
        if not self.top1_agreement >= limits.top1_agreement:
            found.append(
                f"top-1 agrees at {self.top1_agreement:.1%} of positions; at least {limits.top1_agreement:.1%}"
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values; a figure that is not a number becomes null."""
        values = {**asdict(self), "perplexity_rise": self.perplexity_rise}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def measure_quality(gguf: Path, server: LlamaCppServer, model: Predictor, text: Path | None = None) -> Quality:
    """Compare the predictions of `gguf`, which `server` has loaded, with those of its model on a text.

    Raises:
        ConfigError: the text cannot be read, or is too short.
        VerificationError: llama.cpp fails.
    """
    name, ids = _text_ids(model, text)
    threads = chosen_threads(gguf)
    exact = every_logit_is_available()
    pairs = _at_every_position(gguf, model, ids, threads) if exact else _at_few_positions(server, model, ids)
    divergences, losses, model_losses, agreements = [], [], [], []
    for ours, theirs, following in pairs:
        ours, theirs = log_softmax(ours), log_softmax(theirs)
        divergences.append((np.exp(ours) * (ours - theirs)).sum(axis=-1))
        places = np.arange(len(following))
        model_losses.append(-ours[places, following])
        losses.append(-theirs[places, following])
        agreements.append(ours.argmax(axis=-1) == theirs.argmax(axis=-1))
    return Quality(
        text=name,
        engine="llama-cpp-python" if exact else "xllamacpp",
        positions=sum(map(len, divergences)),
        kl_divergence=float(np.concatenate(divergences).mean()),
        perplexity=float(np.exp(np.concatenate(losses).mean())),
        model_perplexity=float(np.exp(np.concatenate(model_losses).mean())),
        top1_agreement=float(np.concatenate(agreements).mean()),
        tokens_per_second=server.tokens_per_second(ids[:8], min(64, model.context - 8)),
        threads=threads,
    )


def quality_table(files: Mapping[GGUFType, tuple[int, Quality]]) -> list[str]:
    """A line for each file with its size in bytes, under a heading that says what was compared; empty for none."""
    if not files:
        return []
    first = next(iter(files.values()))[1]
    rows = [
        f"against the model on {first.positions:,} tokens of {first.text} (perplexity {first.model_perplexity:.3f}):",
        f"  {'type':<7} {'bytes':>14} {'KL (nats)':>10} {'perplexity':>11} {'top-1':>7} {'tokens/s':>9}",
    ]
    for kind, (size, quality) in files.items():
        rows.append(
            f"  {kind:<7} {size:>14,} {quality.kl_divergence:>10.1e} {quality.perplexity_rise:>+11.2%} "
            f"{quality.top1_agreement:>7.1%} {quality.tokens_per_second:>9,.0f}"
        )
    return [*rows, f"  (tokens/s: {first.threads} thread(s), F32 cache, as verification runs llama.cpp)"]


def limits_of(file_type: GGUFType, given: Mapping[str, float] | None = None) -> QualityLimits | None:
    """The limits of a type, those `given` in place of the defaults; None when the type has none and none is given."""
    default = DEFAULT_LIMITS.get(file_type)
    if not given:
        return default
    return replace(default or QualityLimits(math.inf, math.inf, 0.0), **given)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities of the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _text_ids(model: Predictor, path: Path | None) -> tuple[str, list[int]]:
    """Name and ids of the text; the bundled one is prose of which a model trained on it has seen every word."""
    if path is None:
        name = "bundled:austen.txt.xz"
        with lzma.open(bundled("recipes", "corpora", "austen.txt.xz"), "rt", encoding="utf-8") as file:
            text = file.read(_TEXT_CHARACTERS)[-_TEXT_CHARACTERS // 4 :]
    else:
        name = str(path)
        try:
            text = path.read_text(encoding="utf-8")[:_TEXT_CHARACTERS]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the text {path} cannot be read ({error}). Give a file of UTF-8 text.") from error
    ids = model.encode([text], False)[0]
    if len(ids) < _FEWEST_TOKENS:
        raise ConfigError(
            f"the text {name} has {len(ids)} tokens; at least {_FEWEST_TOKENS} are needed. Give more text."
        )
    return name, ids


def _at_every_position(
    gguf: Path, model: Predictor, ids: list[int], threads: int
) -> Iterator[tuple[np.ndarray, np.ndarray, list[int]]]:
    """(model logits, file logits, next ids) of whole rows of the text."""
    width = min(_ROW, model.context, len(ids) - 1)
    count = max(1, min(_POSITIONS, _LARGEST_ANSWER // model.tokens, len(ids) - 1) // width)
    rows = [ids[start : start + width + 1] for start in range(0, count * width, width)]
    for row, theirs in zip(rows, raw_logits(gguf, [row[:-1] for row in rows], model.tokens, threads), strict=True):
        yield model.logits(row[:-1]), theirs, row[1:]


def _at_few_positions(
    server: LlamaCppServer, model: Predictor, ids: list[int]
) -> Iterator[tuple[np.ndarray, np.ndarray, list[int]]]:
    """The same for the last position of short rows spread over the text."""
    width = min(_SERVER_ROW, model.context - 1)  # the server keeps one place of the context for the sampled token
    starts = np.linspace(0, len(ids) - width - 1, min(_SERVER_POSITIONS, len(ids) - width)).astype(int)
    for start in starts.tolist():
        row = ids[start : start + width]
        theirs = np.nan_to_num(server.next_token_logprobs(row, model.tokens), nan=_SMALLEST_LOGPROB)
        yield model.logits(row)[-1:], theirs[None], [ids[start + width]]
