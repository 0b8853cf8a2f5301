"""Log-probabilities of spans of token ids under a causal language model: what every score is made of.

A question is a list of spans that may begin alike (a context with its endings). What its spans share is computed once
and read from the key/value cache; padding is masked and never counted; logits exist for the scored rows of a small
chunk only, whatever the vocabulary and the length.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..errors import DataError, TokenizerError

Question = Sequence["Span"]

_LOGITS_AT_ONCE = 2**23  # values, 32 MiB in float32
_SHARE_FROM = 8  # ids; a shorter common beginning costs more to share than to compute again


@dataclass(frozen=True)
class Span:
    """Ids of a text (n,); those from `start` on are scored, each given all before it. 1 <= start < n."""

    ids: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.ids):
            raise DataError(
                f"A span of {len(self.ids)} ids cannot be scored from id {self.start}: an id before it and one to "
                "score are needed."
            )

    @property
    def tokens(self) -> int:
        """Ids that are scored."""
        return len(self.ids) - self.start

    def fitted(self, max_length: int | None) -> Span:
        """The span without as many ids from its left as a model of `max_length` positions does not read.

        Raises:
            DataError: the scored ids alone are too many.
        """
        excess = 0 if max_length is None else len(self.ids) - 1 - max_length
        if excess <= 0:
            return self
        if self.start - excess < 1:
            raise DataError(
                f"{self.tokens:,} tokens are to be scored at once and the model reads {max_length:,}. Leave the item "
                "out, or give a model with a longer context."
            )
        return Span(self.ids[excess:], self.start - excess)


@dataclass(frozen=True, eq=False)
class SpanScore:
    """Natural log-probability of each scored id, float32 (tokens,), and whether each was the model's first choice."""

    logprobs: np.ndarray
    greedy: bool

    @property
    def total(self) -> float:
        """Summed log-probability in nats, added up in float64."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def tokens(self) -> int:
        """Ids that were scored."""
        return len(self.logprobs)


class Engine(Protocol):
    """A model that scores spans, with what turns text into its ids."""

    prefix: tuple[int, ...]  # ids that the tokenizer puts before every text
    vocab_size: int  # tokens that get a probability
    start_id: int  # stands before a text that has nothing before it
    max_length: int | None  # positions that the model reads; None: no limit

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of raw texts, without special ones."""
        ...

    def score(self, questions: Sequence[Question], progress: bool = False) -> list[list[SpanScore]]:
        """The score of every span of every question, in order."""
        ...

    def facts(self) -> dict[str, Any]:
        """What a report says of the model and how it was run."""
        ...


def encode_pairs(engine: Engine, pairs: Sequence[tuple[str, str]]) -> list[Span]:
    """A span for each (context, continuation), encoded together as one text.

    White space at the end of the context belongs to the continuation. The continuation begins where the ids of the
    whole stop beginning with those of the context alone: where the border falls inside a token, that token is scored.
    A text without anything before it begins after `start_id`. The rules are those of lm-eval's `_encode_pair`, which
    instead keeps the context's own ids where the border falls inside a token, so that the ids are not the text's.

    Raises:
        DataError: a continuation is empty.
    """
    stripped = [(context.rstrip(), context[len(context.rstrip()) :] + ending) for context, ending in pairs]
    texts = dict.fromkeys(text for context, ending in stripped for text in (context, context + ending))
    ids_of = dict(zip(texts, engine.encode(list(texts)), strict=True))
    spans = []
    for context, ending in stripped:
        before, whole = ids_of[context], ids_of[context + ending]
        if not ending or not whole:
            raise DataError(f"An empty ending cannot be scored (after {context[-60:]!r}). Correct the item.")
        border = min(_common_length([before, whole]), len(whole) - 1)
        front = engine.prefix if engine.prefix or border else (engine.start_id,)
        spans.append(Span((*front, *whole), len(front) + border))
    return spans


class CausalLMEngine:
    """A causal language model of transformers on the device where its parameters are.

    Args:
        model: a `PreTrainedModel`; its mode is restored after each call.
        encoder: has `encode_batch(texts)`, as `tokenization.encoder.FastEncoder`; None when only ids are scored.
        batch_size: spans in one batch.
        bf16: compute under bfloat16 autocast; log-probabilities are float32 in any case.
        share: read what the spans of a question share from the cache, where the model's cache allows it.
        process: (index, number): this process scores every number-th question; results are gathered on each.
        about: what `facts` reports besides.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        encoder: Any = None,
        prefix: Sequence[int] = (),
        start_id: int = 0,
        batch_size: int = 8,
        bf16: bool = False,
        share: bool = True,
        process: tuple[int, int] = (0, 1),
        about: dict[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.encoder = encoder
        self.prefix = tuple(prefix)
        self.start_id = start_id
        self.batch_size = batch_size
        self.bf16 = bf16
        self.share = share
        self.process = process
        self.about = about or {}
        positions = getattr(model.config, "max_position_embeddings", None)
        self.max_length: int | None = None if positions is None else int(positions)
        self.vocab_size = _rows_of(model)
        self._base: Any = model.base_model
        self._parameters = inspect.signature(self._base.forward).parameters
        self._cache_key = "cache" if "cache" in self._parameters else "past_key_values"
        self._head_is_plain: bool | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of raw texts; text that spells a special token has ordinary ids."""
        return [ids.tolist() for ids in self.encoder.encode_batch(list(texts))]

    def facts(self) -> dict[str, Any]:
        """Device, precision, batch and what was said at the start."""
        return {
            **self.about,
            "device": str(self.model.device),
            "precision": "bf16 autocast" if self.bf16 else str(self.model.dtype).removeprefix("torch."),
            "batch_size": self.batch_size,
        }

    @torch.inference_mode()
    def score(self, questions: Sequence[Question], progress: bool = False) -> list[list[SpanScore]]:
        """Log-probabilities of every span, in the order given; every process gets all of them.

        Raises:
            DataError: a span that is too long for the model.
            TokenizerError: an id that the model does not have.
        """
        fitted = [[span.fitted(self.max_length) for span in question] for question in questions]
        self._check_ids(max((max(span.ids) for question in fitted for span in question), default=0))
        index, processes = self.process
        order = sorted(range(len(fitted)), key=lambda q: (-max(len(s.ids) for s in fitted[q]), q))[index::processes]
        found: dict[int, list[SpanScore]] = {}
        was_training = self.model.training
        self.model.eval()
        try:
            with (
                torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self.bf16),
                tqdm(total=len(order), desc="score", disable=not progress or index > 0) as bar,
            ):
                self._find_out_about_the_head()
                for batch in self._batches(fitted, order):
                    found |= self._score_batch(fitted, batch)
                    bar.update(len(batch))
        finally:
            self.model.train(was_training)
        return gathered(found, len(fitted), processes)

    def _check_ids(self, highest: int) -> None:
        if highest >= self.vocab_size:
            raise TokenizerError(
                f"The text has id {highest:,} and the model {self.vocab_size:,} tokens: it was trained with another "
                "tokenizer. Give the tokenizer that belongs to the model: --tokenizer DIR."
            )

    def _batches(self, questions: Sequence[Question], order: Sequence[int]) -> Iterator[list[int]]:
        """Questions of about equal length, at most `batch_size` spans together, at least one question."""
        batch: list[int] = []
        spans = 0
        for question in order:
            if batch and spans + len(questions[question]) > self.batch_size:
                yield batch
                batch, spans = [], 0
            batch.append(question)
            spans += len(questions[question])
        if batch:
            yield batch

    def _score_batch(self, questions: Sequence[Question], batch: Sequence[int]) -> dict[int, list[SpanScore]]:
        unique = [list(dict.fromkeys(questions[q])) for q in batch]  # equal spans must tie exactly: scored once
        shared = [shared_length(spans) if self.share else 0 for spans in unique]
        rows: dict[tuple[int, Span], SpanScore] = {}
        for together in (True, False):
            chosen = [k for k in range(len(batch)) if (shared[k] >= _SHARE_FROM) is together]
            if not chosen:
                continue
            spans = [span for k in chosen for span in unique[k]]
            owner = [place for place, k in enumerate(chosen) for _ in unique[k]]
            prefixes = [unique[k][0].ids[: shared[k]] for k in chosen] if together else []
            scores = self._score_rows(spans, owner, prefixes)
            rows |= {(chosen[o], span): score for o, span, score in zip(owner, spans, scores, strict=True)}
        return {q: [rows[k, span] for span in questions[q]] for k, q in enumerate(batch)}

    def _score_rows(
        self, spans: Sequence[Span], owner: Sequence[int], prefixes: Sequence[tuple[int, ...]]
    ) -> list[SpanScore]:
        """Scores of `spans` (R of them); row r begins with `prefixes[owner[r]]`, when there are prefixes."""
        arguments: dict[str, Any] = {}
        past: torch.Tensor | None = None  # (Q, P) where the cache holds a token
        if prefixes:
            ids, past = self._padded(prefixes)
            cache = self._forward(ids, attention_mask=past, use_cache=True).get(self._cache_key)
            if not _rows_can_be_selected(cache) or "position_ids" not in self._parameters:
                self.share, prefixes, past = False, [], None  # a window or a state: not a list of past tokens
            else:
                rows = torch.tensor(owner, device=self.model.device)
                cache.batch_select_indices(rows)
                past = past[rows]
                arguments = {self._cache_key: cache, "use_cache": True}
        skipped = [len(prefixes[o]) if prefixes else 0 for o in owner]
        ids, mask = self._padded([span.ids[skip:-1] for span, skip in zip(spans, skipped, strict=True)])
        if past is not None:
            first = torch.tensor(skipped, device=self.model.device)[:, None]
            arguments["position_ids"] = first + torch.arange(ids.shape[1], device=self.model.device)
            arguments["attention_mask"] = torch.cat([past, mask], dim=1)
        # Padding on the right of a row is in nobody's past: without a cache no mask is needed.
        columns = [range(s.start - 1 - skip, len(s.ids) - 1 - skip) for s, skip in zip(spans, skipped, strict=True)]
        places = torch.tensor([(r, c) for r, found in enumerate(columns) for c in found]).T.to(self.model.device)
        targets = torch.tensor([i for s in spans for i in s.ids[s.start :]], device=self.model.device)
        logprobs, greedy = self._target_logprobs(ids, arguments, places, targets)
        return _split(logprobs, greedy, [span.tokens for span in spans])

    def _target_logprobs(
        self, ids: torch.Tensor, arguments: dict[str, Any], places: torch.Tensor, targets: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """Log-probability and first choice at `places` (2, n: row and column), for `targets` (n,)."""
        chunks: Iterable[torch.Tensor]
        if self._head_is_plain:
            hidden = self._forward(ids, **arguments).last_hidden_state[places[0], places[1]]  # (n, D)
            head: Any = self.model.get_output_embeddings()
            chunks = (head(part) for part in hidden.split(max(1, _LOGITS_AT_ONCE // self.vocab_size)))
        else:  # a head that scales or caps its logits: only the model itself knows how
            chunks = self._logits_of_rows(ids, places)
        logprobs, greedy, first = [], [], 0
        for chunk in chunks:
            logits = chunk[:, : self.vocab_size].float()  # padding rows of the embedding are no tokens
            wanted = targets[first : first + len(logits), None]
            logprobs.append(logits.gather(1, wanted)[:, 0] - logits.logsumexp(dim=1))
            greedy.append(logits.argmax(dim=1) == wanted[:, 0])
            first += len(logits)
        return torch.cat(logprobs).cpu().numpy(), torch.cat(greedy).cpu().numpy()

    def _logits_of_rows(self, ids: torch.Tensor, places: torch.Tensor) -> Iterator[torch.Tensor]:
        """The model's own logits at `places`, a few whole rows of `ids` at a time."""
        step = max(1, _LOGITS_AT_ONCE // (ids.shape[1] * self.vocab_size))
        for first in range(0, len(ids), step):
            row, column = places[:, (places[0] >= first) & (places[0] < first + step)]
            yield self.model(input_ids=ids[first : first + step], use_cache=False).logits[row - first, column]

    def _forward(self, ids: torch.Tensor, **arguments: Any) -> Any:
        return self._base(input_ids=ids, **{"use_cache": False, **arguments})

    def _find_out_about_the_head(self) -> None:
        """Whether the model's logits are its output layer applied to its last hidden state, and nothing else."""
        if self._head_is_plain is not None:
            return
        ids = torch.arange(4, device=self.model.device)[None] % self.vocab_size
        head: Any = self.model.get_output_embeddings()
        expected = self.model(input_ids=ids, use_cache=False).logits[..., : self.vocab_size]
        found = None if head is None else head(self._forward(ids).last_hidden_state)[..., : self.vocab_size]
        self._head_is_plain = found is not None and torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
        self.share = self.share and self._head_is_plain

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (R, L) padded on the right, and 1 where an id stands."""
        longest = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row, dtype=torch.long)
            mask[number, : len(row)] = 1
        return ids.to(self.model.device), mask.to(self.model.device)


def _rows_of(model: PreTrainedModel) -> int:
    """Tokens that get a probability; rows of a padded embedding of ours are none."""
    own = getattr(model.config, "num_tokens", None)
    return int(own if own is not None else model.config.get_text_config().vocab_size)


def _common_length(rows: Sequence[Sequence[int]]) -> int:
    """Ids with which all rows begin."""
    shortest = min(rows, key=len)
    return next((i for i, id_ in enumerate(shortest) if any(row[i] != id_ for row in rows)), len(shortest))


def shared_length(spans: Question) -> int:
    """Ids that the spans of a question share before anything is scored, less the one that predicts the first."""
    if len(spans) < 2:
        return 0
    return min(_common_length([span.ids for span in spans]), *(span.start - 1 for span in spans))


def _rows_can_be_selected(cache: Any) -> bool:
    """Whether a cache keeps the keys and values of every past token, so that rows can be copied and padding masked."""
    from transformers.cache_utils import DynamicLayer

    layers = getattr(cache, "layers", None) or ()
    return len(layers) > 0 and all(type(layer) is DynamicLayer for layer in layers)


def _split(logprobs: np.ndarray, greedy: np.ndarray, counts: Sequence[int]) -> list[SpanScore]:
    if not np.isfinite(logprobs).all():
        raise DataError("The model gives a token of the text no finite log-probability. Check its weights.")
    ends = np.cumsum(counts)
    parts = zip(np.split(logprobs, ends[:-1]), np.split(greedy, ends[:-1]), strict=True)
    return [SpanScore(part.astype(np.float32), bool(first.all())) for part, first in parts]


def gathered(found: dict[int, list[SpanScore]], questions: int, processes: int) -> list[list[SpanScore]]:
    """All results in order, on every process; each question must have been scored exactly once."""
    parts: Iterable[tuple[int, list[SpanScore]]] = found.items()
    if processes > 1:
        from accelerate.utils import gather_object

        parts = gather_object(list(found.items()))
    scored = sorted(parts, key=lambda part: part[0])
    assert [number for number, _ in scored] == list(range(questions)), "a question was lost or scored twice"
    return [scores for _, scores in scored]
