"""From YAML text to dataclasses, by their type hints: every value is converted or refused, never guessed."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import yaml

from .errors import ConfigError


class PlainLoader(yaml.SafeLoader):
    """YAML whose plain scalars mean what they look like.

    YAML 1.1 reads `6e-4` as text, `010` as 8, `1:30` as 90, `no` as false and `2026-11-29` as a date, and keeps the
    last of two equal keys. Here `6e-4` and `4_000_000` are numbers, only true and false are truth values, the rest is
    text, and an equal key is an error.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  none of YAML 1.1's; ours are added below

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping whose keys are all different."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"the key {key.value} is given twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class PlainDumper(yaml.SafeDumper):
    """Writes text that `PlainLoader` would take for a number in quotes, so that a saved value reads back the same."""


def parse_text(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        ConfigError: it is not YAML, or nested or numbered beyond reason.
    """
    try:
        return yaml.load(text, Loader=PlainLoader)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError("not valid YAML: nested too deep") from error


# Keys as other trainers spell them, whose nearest letters are those of a key that means something else.
_ELSEWHERE = {
    "max_steps": "train_tokens",
    "num_train_epochs": "epochs",
    "gradient_accumulation_steps": "global_batch_tokens",
    "block_size": "sequence_length",
    "batch_size": "per_device_train_batch_size",
    "per_device_batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "evaluation_strategy": "eval_steps",
    "eval_strategy": "eval_steps",
    "save_strategy": "save_steps",
    "lr": "learning_rate",
    "grad_clip": "max_grad_norm",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "dropout": "attention_dropout",
    "dataset": "sources",
}


def check_name(name: object, known: Iterable[str], what: str) -> None:
    """Raise `ConfigError` naming the nearest of `known` when `name` is not one of them."""
    names = list(known)
    if name in names:
        return
    meant = _ELSEWHERE.get(str(name))
    near = [meant] if meant in names else difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(names)}."
    raise ConfigError(f"Unknown {what}: {shown(name) if not isinstance(name, str) else name[:80]}. {hint}")


def build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """An instance of the dataclass `kind` from plain values.

    Raises:
        ConfigError: an unknown or missing key, or a value of the wrong type.
    """
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in values:
        check_name(key, fields, f"key in {where}")
    for key, f in fields.items():
        if key not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: the key {key} is missing. Add {key}: {describe(hints[key])}.")
    return kind(**{key: convert(value, hints[key], f"{where}.{key}") for key, value in values.items()})


def convert(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint`: a scalar, a `Literal`, a list, a dataclass or a union of these.

    Raises:
        ConfigError: naming `where`, the value and what is needed.
    """
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in options:
            if option in (int, float, bool, str, type(None)) or typing.get_origin(option) is Literal:
                accepted, converted = _scalar(value, option)
                if accepted:
                    return converted
        raise ConfigError(f"{where}={shown(value)} must be {describe(hint)}.{_quoting(value, hint)}")
    if origin is list:
        if value is None or isinstance(value, Mapping):
            raise ConfigError(f"{where}={shown(value)} must be a list.")
        items = value if isinstance(value, list) else [value]
        return [convert(item, options[0], f"{where}[{i}]") for i, item in enumerate(items)]
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(typing.cast(type, hint), value, where)
    accepted, converted = _scalar(value, hint)
    if not accepted:
        raise ConfigError(f"{where}={shown(value)} must be {describe(hint)}.{_quoting(value, hint)}")
    return converted


def accepts(hint: Any, wanted: type) -> bool:
    """Whether `wanted` is `hint` itself or one of its union's members; `list` stands for every list."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return any(member is wanted or typing.get_origin(member) is wanted for member in members)


def describe(hint: Any) -> str:
    """A type in words: `a whole number or null`."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(option) for option in options)
    if origin is Literal:
        return " or ".join(str(option) for option in options)
    if origin is list:
        return "a list"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    return words.get(hint, "a mapping of keys")


def shown(value: object) -> str:
    """A value in an error line: short, however large or self-referring it is."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 80, 80
    return short.repr(value)


def _scalar(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether `value` is of the scalar type `hint`, and the value as that type."""
    if hint is type(None):
        return value is None, None
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint), value
    if hint is bool:
        return isinstance(value, bool), value
    if hint is str:
        return isinstance(value, str) and value.strip() != "" and _is_unicode(value), value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False, None
    if (isinstance(value, int) and abs(value) >= 2**63) or not math.isfinite(value):
        return False, None
    if hint is int:
        return float(value).is_integer() and abs(value) < 2**63, int(value)
    return hint is float, float(value)


def _quoting(value: Any, hint: Any) -> str:
    if isinstance(value, str) and not _is_unicode(value):
        return " It holds a zero byte or half a surrogate pair (bytes that are not UTF-8), which no file can record."
    takes_text = accepts(hint, str) and isinstance(value, bool | int | float)
    return " Put it in quotes." if takes_text else ""


def _is_unicode(text: str) -> bool:
    """Whether every file and path can hold a text: no zero byte, no half of a surrogate pair."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)


def _construct_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    text = str(node.value).replace("_", "")
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


_NUMBER_TAG = "tag:hf_tinylm,number"
_NUMBER = re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)([eE][-+]?\d+)?$")
_TRUTH = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_NULL = re.compile(r"^(~|null|Null|NULL|)$")

PlainLoader.add_implicit_resolver("tag:yaml.org,2002:null", _NULL, ["~", "n", "N", ""])
PlainLoader.add_implicit_resolver("tag:yaml.org,2002:bool", _TRUTH, list("tTfF"))
PlainLoader.add_implicit_resolver(_NUMBER_TAG, _NUMBER, list("-+.0123456789"))
PlainLoader.add_constructor(_NUMBER_TAG, _construct_number)
PlainDumper.add_implicit_resolver(_NUMBER_TAG, _NUMBER, list("-+.0123456789"))
