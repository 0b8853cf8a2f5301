"""Suites of questions: a YAML file that says where the rows are and how a row becomes contexts, endings and a label."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, DataError
from ..files import bundled, sha256_of_json
from .rows import jsonl_rows

KINDS = ("multiple_choice", "last_word")
_EXPRESSIONS = ("context", "contexts", "ending", "endings", "label")
_KEYS = {"suite", "kind", "dataset", "cleanup", *_EXPRESSIONS}


def wikihow_brackets(text: str) -> str:
    """HellaSwag's clean-up: marks of WikiHow such as [title] and [step] go, double spaces become one.

    Source: `preprocess` of the task hellaswag in lm-evaluation-harness, which took it from the paper's code.
    """
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


CLEANUPS: dict[str, Callable[[str], str]] = {"none": lambda text: text, "wikihow_brackets": wikihow_brackets}


@dataclass(frozen=True)
class Item:
    """One question: choice k is `contexts[k]` continued by `endings[k]`; `label` is the right one, None if all are.

    An ending begins without white space: exactly one space is put before it.
    """

    contexts: tuple[str, ...]
    endings: tuple[str, ...]
    label: int | None

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(context, continuation) of each choice, joined by exactly one space."""
        return [
            (context.rstrip(), (" " if context.strip() else "") + ending)
            for context, ending in zip(self.contexts, self.endings, strict=True)
        ]


@dataclass(frozen=True)
class Suite:
    """A checked suite: `rule` is all that decides an item's text, as written in its file."""

    name: str
    kind: str
    dataset: dict[str, str]
    cleanup: str
    expressions: dict[str, str]

    @property
    def rule(self) -> dict[str, Any]:
        """What decides the text of an item."""
        return {"kind": self.kind, "cleanup": self.cleanup, **self.expressions}

    def item(self, row: dict[str, Any], place: str) -> Item:
        """The question of one row.

        Raises:
            DataError: a field is missing, or what the row gives is no question; `place` is named.
        """
        found = {key: self._value(key, row, place) for key in self.expressions}
        endings, contexts = found.get("endings"), found.get("contexts")
        if "ending" in found:
            endings = [found["ending"]] * (len(contexts) if isinstance(contexts, list) else 1)
        if "context" in found:
            contexts = [found["context"]] * (len(endings) if isinstance(endings, list) else 0)
        return self._checked(contexts, endings, found.get("label"), place)

    def _checked(self, contexts: Any, endings: Any, label: Any, place: str) -> Item:
        needed = 2 if self.kind == "multiple_choice" else 1
        texts = [*contexts, *endings] if isinstance(contexts, list) and isinstance(endings, list) else [None]
        if not all(isinstance(text, str) for text in texts) or len(contexts) != len(endings) or len(endings) < needed:
            raise DataError(f"{place} does not give {needed} or more endings as text to the suite {self.name}.")
        clean = CLEANUPS[self.cleanup]
        item = Item(tuple(map(clean, contexts)), tuple(clean(ending).lstrip() for ending in endings), label)
        if not all(item.endings):
            raise DataError(f"{place}: an ending is empty after the clean-up {self.cleanup}. Correct the row.")
        if self.kind == "multiple_choice" and not (isinstance(label, int) and 0 <= label < len(endings)):
            raise DataError(f"{place}: the label {label!r} names none of {len(endings)} endings. Give labelled rows.")
        return item

    def _value(self, key: str, row: dict[str, Any], place: str) -> Any:
        from jinja2 import TemplateError, Undefined

        text = self.expressions[key]
        try:
            value = _compiled(text, f"{self.name}: {key}")(**row)
            if not isinstance(value, Undefined):
                return value
            reason = "a field is missing"
        except (TemplateError, ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            reason = " ".join(str(error).split())
        raise DataError(
            f"{place}: {key} of the suite {self.name} ({text}) cannot be made of fields {', '.join(map(str, row))}: "
            f"{reason}. Give rows of the suite's schema."
        )


def load_suite(name: str) -> Suite:
    """A bundled suite by name, or one in a YAML file.

    Raises:
        ConfigError: there is none, or it has wrong keys.
    """
    folder = bundled("eval", "suites")
    is_file = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_file else folder / f"{name}.yaml"
    if not path.is_file() or not (is_file or re.fullmatch(r"\w+", name)):
        known = ", ".join(sorted(file.stem for file in folder.glob("*.yaml")))
        raise ConfigError(f"There is no suite {name}. Give one of {known}, a YAML file, or lm-eval:TASK.")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML ({' '.join(str(error).split())}).") from error
    return _parsed(values, path)


def _parsed(values: Any, path: Path) -> Suite:
    def refuse(what: str) -> ConfigError:
        return ConfigError(f"The suite {path} {what}. See the bundled ones: hf-tinylm where eval.")

    if not isinstance(values, dict) or set(values) - _KEYS:
        strange = ", ".join(sorted(map(str, set(values) - _KEYS))) if isinstance(values, dict) else "no mapping"
        raise refuse(f"has unknown keys ({strange}); {', '.join(sorted(_KEYS))} are known")
    expressions = {key: values[key] for key in _EXPRESSIONS if key in values}
    if not all(isinstance(text, str) for text in expressions.values()):
        raise refuse("has an expression that is no text")
    kind, cleanup, dataset = values.get("kind"), values.get("cleanup", "none"), values.get("dataset", {})
    if kind not in KINDS or cleanup not in CLEANUPS:
        raise refuse(f"needs a kind of {', '.join(KINDS)} and a cleanup of {', '.join(CLEANUPS)}")
    if not isinstance(dataset, dict) or set(dataset) - {"path", "name", "split"}:
        raise refuse("needs dataset: {path, name, split}")
    wanted = {"context", "ending"} if kind == "last_word" else {"label", "context", "endings"}
    if set(expressions) != wanted and (kind == "last_word" or set(expressions) != {"label", "contexts", "ending"}):
        raise refuse(
            "needs context and ending"
            if kind == "last_word"
            else "needs label with context and endings, or with contexts and ending"
        )
    for key, text in expressions.items():
        _compiled(text, f"{path}: {key}")
    return Suite(str(values.get("suite", path.stem)), kind, dataset, cleanup, expressions)


def load_items(suite: Suite, data: str | None = None, limit: int | None = None) -> list[Item]:
    """The questions of a suite: from its dataset by name, or from a JSONL file of the same schema.

    Raises:
        ConfigError: the suite names no dataset and no file was given.
        DataError: the dataset or file cannot be read, holds nothing, or a row does not fit.
    """
    rows = jsonl_rows(Path(data)) if data is not None else _dataset_rows(suite)
    items = []
    for place, row in rows:
        items.append(suite.item(row, place))
        if limit is not None and len(items) == limit:
            break
    if not items:
        raise DataError(f"{data or suite.dataset['path']} holds no item. Give a file with one JSON object per line.")
    return items


def items_sha256(items: list[Item]) -> str:
    """Hash of the texts and labels of items: equal for the same questions, whatever the model."""
    return sha256_of_json([[item.contexts, item.endings, item.label] for item in items])


def _dataset_rows(suite: Suite) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    path, split = suite.dataset.get("path"), suite.dataset.get("split", "validation")
    if path is None:
        raise ConfigError(f"The suite {suite.name} names no dataset. Give its rows: --data FILE.jsonl.")
    try:
        rows = datasets.load_dataset(path, suite.dataset.get("name"), split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"The dataset {path} of the suite {suite.name} could not be loaded: {reason} Give its rows as a file "
            "instead: --data FILE.jsonl."
        ) from error
    for number, row in enumerate(rows):
        yield f"{path} row {number:,}", row


@functools.lru_cache
def _compiled(text: str, where: str) -> Callable[..., Any]:
    """A Jinja expression over the fields of a row, in a sandbox: a suite may come from anywhere.

    Raises:
        ConfigError: it does not parse.
    """
    from jinja2 import StrictUndefined, TemplateSyntaxError
    from jinja2.sandbox import SandboxedEnvironment

    try:
        return SandboxedEnvironment(undefined=StrictUndefined).compile_expression(text, undefined_to_none=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{where}: {text} is no expression ({error}).") from error
