"""One run as plain dataclasses: sectioned YAML, every key overridable as `--key value`.

A key has one home: names are unique over all sections, so `--learning_rate 6e-4` needs no section name (a section
name is accepted too: `--training.learning_rate 6e-4`). Unknown keys are errors that name the nearest key.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .config_files import find_config, read_with_bases
from .errors import ConfigError
from .files import write_text
from .sections import ConversationSource, ModelSection, RunConfig, SourceSection, TrainingSection
from .values import PlainDumper, accepts, build, check_name, describe, parse_text, shown

SECTIONS: dict[str, type] = {f.name: typing.get_type_hints(RunConfig)[f.name] for f in dataclasses.fields(RunConfig)}
SECTION_OF_KEY: dict[str, str] = {
    key.name: section for section, section_type in SECTIONS.items() for key in dataclasses.fields(section_type)
}


def load_config(path: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML config (a path, or the name of a bundled one) and apply `--key value` overrides.

    A config with a `base` states what differs from it. The run.json of a run is a config too: it starts the run again.

    Raises:
        ConfigError: the file or a base is missing, is not YAML, has an unknown key, or a value of the wrong type.
    """
    nested: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    files = read_with_bases(find_config(path)) if path is not None else []
    for file, content in files:
        _add(nested, content, file)
        if file is not files[-1][0]:
            _check_base(nested, f"{file}, which {path} is based on")
    for key, value in parse_overrides(overrides).items():
        section, key = _home_of(key)
        nested[section][key] = value
    config = _build(nested)
    check_config(config)
    return config


def _add(nested: dict[str, dict[str, Any]], content: Mapping[str, Any], path: Path) -> None:
    """Put the sections of a file over those before them."""
    for section, values in content.items():
        check_name(section, SECTIONS, f"section in {path}")
        if not isinstance(values, Mapping | None):
            raise ConfigError(f"{path}: section {section} is {shown(values)}; keys are needed: {section}: {{...}}.")
        nested[section].update(values or {})


def _check_base(nested: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Refuse keys and values that no configuration has, by the file that they are in."""
    try:
        _build(nested)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _build(nested: Mapping[str, Mapping[str, Any]]) -> RunConfig:
    return RunConfig(**{section: build(kind, nested[section], section) for section, kind in SECTIONS.items()})


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`["--learning_rate", "6e-4", "--bf16=false", "--qk_norm", "--gguf", "f32", "f16"]` as a mapping.

    A key of text takes its value as typed; other values are read as YAML. Only a truth value may be left out (true),
    and only a list takes several.

    Raises:
        ConfigError: an unknown key, a value that is missing, or an argument that is neither a key nor a value.
    """
    values: dict[str, Any] = {}
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if not argument.startswith("--"):
            raise ConfigError(f"Unexpected argument {shown(argument)}; settings are given as --key value.")
        name, equals, text = argument[2:].partition("=")
        given = [text] if equals else []
        while not equals and position < len(arguments) and not arguments[position].startswith("--"):
            given.append(arguments[position])
            position += 1
        section, key = _home_of(name.replace("-", "_"))
        values[key] = _value_of_override(key, typing.get_type_hints(SECTIONS[section])[key], given)
    return values


def _value_of_override(key: str, hint: Any, given: list[str]) -> Any:
    if not given:
        if accepts(hint, bool):
            return True
        raise ConfigError(f"--{key} needs a value after it: {describe(hint)}.")
    if accepts(hint, list):
        values = [_parse_override(key, text) for text in given]
        return values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if len(given) > 1:
        raise ConfigError(f"--{key} takes one value and got {len(given)}: {shown(' '.join(given))}. Put it in quotes.")
    if accepts(hint, str):
        return None if given[0] == "null" and accepts(hint, type(None)) else given[0]
    return _parse_override(key, given[0])


def _parse_override(key: str, text: str) -> Any:
    try:
        return parse_text(text)
    except ConfigError as error:
        raise ConfigError(f"--{key} {shown(text)} is {error}") from error


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}\Z")  # of a set, which becomes part of a metric's name

# Bounds of single keys; what depends on other keys, data or devices is checked where those are known.
_ABOVE_ZERO = {
    "model": (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "max_position_embeddings", "rope_theta", "rms_norm_eps", "initializer_range"),
        *("pad_vocab_to_multiple_of", "layer_norm_epsilon"),
    ),
    "tokenizer": ("vocab_size", "sample_bytes", "max_word_bytes", "min_frequency"),
    "data": ("sequence_length", "shard_ids", "num_workers", "pack_tokens"),
    "training": (
        *("train_tokens", "global_batch_tokens", "per_device_train_batch_size", "per_device_eval_batch_size"),
        *("epochs", "learning_rate", "adam_epsilon", "logging_steps", "eval_steps", "save_steps", "save_minutes"),
        "sample_steps",
        *("save_total_limit", "milestone_steps", "nonfinite_limit", "stop_after_updates", "max_hours"),
        *("max_cost", "price_per_hour", "price_per_kwh", "sensor_seconds", "peak_flops"),
    ),
    "evaluation": ("eval_tokens",),
}
_RANGES = {
    "initializer_range": (0.0, 1.0),
    "rope_theta": (1.0, 1e12),
    "rms_norm_eps": (0.0, 1.0),
    "layer_norm_epsilon": (0.0, 1.0),
    "attention_dropout": (0.0, 0.99),
    "validation_fraction": (0.0, 0.5),
    "min_lr_ratio": (0.0, 1.0),
    "decay_fraction": (0.0, 1.0),
    "embedding_lr_ratio": (0.0, math.inf),
    "head_lr_ratio": (0.0, math.inf),
    "gain_lr_ratio": (0.0, math.inf),
    "muon_momentum": (0.0, 0.999999),
    "muon_momentum_warmup_steps": (0, math.inf),
    "muon_ns_steps": (1, 99),
    "adam_beta1": (0.0, 0.999999),
    "adam_beta2": (0.0, 0.999999),
    "weight_decay": (0.0, math.inf),
    "max_grad_norm": (0.0, math.inf),
    "warmup_steps": (0, math.inf),
    "seed": (0, 2**32 - 1),
    "cpu_threads": (1, 65_536),
}


def check_config(config: RunConfig) -> None:
    """Refuse values that no run can have; what depends on data or devices is checked where it is known.

    Raises:
        ConfigError: naming the key, its value and what is possible.
    """
    for key in (key for keys in _ABOVE_ZERO.values() for key in keys):
        value = _value_of(config, key)
        if isinstance(value, int | float) and value <= 0:
            raise ConfigError(f"{key}={value} must be above 0.")
    for key, (low, high) in _RANGES.items():
        value = _value_of(config, key)
        if isinstance(value, int | float) and not low <= value <= high:
            raise ConfigError(f"{key}={value} must be {f'{low} to {high}' if high < math.inf else f'{low} or more'}.")
    training = config.training
    if training.max_cost is not None and training.price_per_hour is None:
        raise ConfigError(f"max_cost={training.max_cost:g} needs a price. Give it: --price_per_hour 1.10.")
    if training.fp16 and training.bf16 is True:
        raise ConfigError("bf16 and fp16 are both true; one precision is needed. Leave out one of them.")
    if training.precision != "auto" and (training.fp16 or training.bf16 != "auto"):
        raise ConfigError(
            f"precision={training.precision} is given beside bf16={training.bf16} and fp16={training.fp16}. Leave out "
            "bf16 and fp16."
        )
    if training.init_optimizer and training.init_from is None:
        raise ConfigError("init_optimizer is true, but init_from names no checkpoint. Give it: --init_from DIR.")
    if training.branch_from is not None and training.init_from is not None:
        raise ConfigError("init_from and branch_from both say where the run starts. Leave out one of them.")
    _check_settings_of(config, "optim", "muon", OF_MUON)
    _check_settings_of(config, "lr_schedule", "wsd", OF_WSD)
    if training.epochs != 1 and training.train_tokens != "epoch":
        raise ConfigError(
            f"epochs={training.epochs:g} and train_tokens={training.train_tokens:,} both say how long the run is. "
            f"Leave out one of them."
        )
    if config.data.pack_tokens is not None and not any(source.weight for source in config.data.sources):
        raise ConfigError(
            f"pack_tokens={config.data.pack_tokens:,} is shared out by weight, and no source has one. Give each source "
            f"a weight, or leave it out."
        )
    _check_heads(config.model)
    if config.model.architecture == "gpt2":
        _check_gpt2(config.model)
    _check_lengths(config)
    _check_eval_sets(config)
    names = [source.name for source in config.data.sources]
    for source in config.data.sources:
        if names.count(source.name) > 1:
            raise ConfigError(f"Two sources are named {source.name!r}; give each source its own name.")
        if source.max_documents is not None and source.max_documents <= 0:
            raise ConfigError(
                f"max_documents={source.max_documents} of source {source.name!r} must be above 0, or null."
            )
        _check_filters(source)
        _check_amount(source, ("tokens", "epochs", "weight"))
    for conversations in (config.data.conversations, config.data.test_conversations):
        _check_conversations(conversations)


# Keys that do nothing without another one.
OF_MUON = (
    *("embedding_lr_ratio", "head_lr_ratio", "gain_lr_ratio"),
    *("muon_momentum", "muon_momentum_warmup_steps", "muon_ns_steps"),
)
OF_WSD = ("decay_fraction", "decay_shape")


def _check_settings_of(config: RunConfig, key: str, needed: str, settings: tuple[str, ...]) -> None:
    chosen, default = getattr(config.training, key), TrainingSection()
    for name in settings:
        value = getattr(config.training, name)
        if chosen != needed and value != getattr(default, name):
            raise ConfigError(
                f"{name}={value} has no effect with {key}={chosen}. Give {key}: {needed}, or leave it out."
            )


def _check_conversations(sources: list[ConversationSource]) -> None:
    names = [source.name for source in sources]
    for source in sources:
        if names.count(source.name) > 1:
            raise ConfigError(f"Two sources are named {source.name!r}; give each source its own name.")
        _check_amount(source, ("epochs", "share"))
        _check_pair(source, "filter_column", "allowed_values")
    shares = sum(source.share or 0.0 for source in sources)
    if shares >= 1 or (sources and all(source.share for source in sources)):
        raise ConfigError(
            f"the shares of the {len(sources)} sources of conversations add up to {shares:g}; below 1 is needed, and a "
            f"source without a share, which decides how much there is. Give one source epochs in place of its share."
        )


def _check_filters(source: SourceSection) -> None:
    _check_pair(source, "language_column", "allowed_languages")
    _check_pair(source, "licence_column", "allowed_licences")
    low, high = source.min_characters, source.max_characters
    if (low is not None and low < 0) or (high is not None and high < max(low or 0, 1)):
        raise ConfigError(
            f"source {source.name!r}: no document has min_characters={low} to max_characters={high}. Change one."
        )


def _check_pair(source: SourceSection | ConversationSource, column: str, allowed: str) -> None:
    if bool(getattr(source, column)) != bool(getattr(source, allowed)):
        raise ConfigError(
            f"source {source.name!r} has {column}={getattr(source, column)} and {allowed}={getattr(source, allowed)}. "
            f"A filter needs both: {column}: NAME, {allowed}: [VALUE, ...]."
        )


def _check_amount(source: SourceSection | ConversationSource, keys: tuple[str, ...]) -> None:
    given = {key: getattr(source, key) for key in keys if getattr(source, key) is not None}
    if len(given) > 1:
        raise ConfigError(f"source {source.name!r} has {' and '.join(given)}; one of them says how much. Leave one.")
    for key, value in given.items():
        if value <= 0:
            raise ConfigError(f"{key}={value} of source {source.name!r} must be above 0.")


def _check_heads(model: ModelSection) -> None:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads or model.num_attention_heads
    if heads % kv_heads:
        raise ConfigError(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}. Change one of them."
        )
    if model.head_dim is None and model.hidden_size % heads:
        raise ConfigError(
            f"hidden_size={model.hidden_size} is not a multiple of num_attention_heads={heads}. "
            "Change one of them, or give head_dim."
        )
    head_dim = model.head_dim or model.hidden_size // heads
    if head_dim % 2:
        raise ConfigError(
            f"head_dim={head_dim} is odd; rotary positions need an even number. "
            "Change hidden_size, num_attention_heads or head_dim."
        )


def _check_gpt2(model: ModelSection) -> None:
    if model.max_position_embeddings is None:
        raise ConfigError(
            "architecture=gpt2 learns a position for each place, so their number is a part of its shape. Give it: "
            "max_position_embeddings: 1024."
        )
    plain = ModelSection(num_key_value_heads=model.num_attention_heads)
    for key in ("qk_norm", "head_dim", "rope_theta", "rms_norm_eps", "num_key_value_heads"):
        value = getattr(model, key)
        if value not in (getattr(plain, key), getattr(ModelSection, key)):
            raise ConfigError(f"{key}={value} means nothing to architecture=gpt2. Leave it out.")
    if model.attn_implementation == "flex_attention":
        raise ConfigError("attn_implementation=flex_attention is not there for architecture=gpt2. Use sdpa.")


def _check_lengths(config: RunConfig) -> None:
    batch, length = config.training.global_batch_tokens, config.data.sequence_length
    positions = config.model.max_position_embeddings
    check_growth(batch, config.training.batch_growth)
    if batch % length:
        raise ConfigError(
            f"global_batch_tokens={batch:,} is not a multiple of sequence_length={length:,}. "
            f"Use {nearest_multiple(batch, length):,}."
        )
    if positions is not None and positions < length:
        raise ConfigError(
            f"max_position_embeddings={positions:,} is below sequence_length={length:,}. Raise it, or leave it out."
        )


def check_growth(batch: int, growth: Sequence[Sequence[int]]) -> None:
    """Refuse what is no list of [tokens, batch] in which both rise, beginning above 0 and the first batch."""
    last = [0, batch]
    for pair in growth:
        if len(pair) != 2:
            raise ConfigError(
                f"batch_growth has {shown(list(pair))} in it; pairs [TOKENS, BATCH] are needed: "
                f"batch_growth: [[200_000, {2 * batch:_}]] makes updates of {2 * batch:,} from 200,000 tokens on."
            )
        if pair[0] <= last[0] or pair[1] <= last[1]:
            raise ConfigError(
                f"batch_growth goes from {last[1]:,} (at {last[0]:,} tokens) to {pair[1]:,} (at {pair[0]:,}); both "
                "must rise. Give the pairs [TOKENS, BATCH] in order, beginning above global_batch_tokens."
            )
        last = list(pair)


def _check_eval_sets(config: RunConfig) -> None:
    names = [one.name for one in config.evaluation.eval_sets]
    for name in names:
        if not _NAME.match(name) or names.count(name) > 1:
            raise ConfigError(
                f"eval_sets has the name {name!r}{' twice' if _NAME.match(name) else ''}; each set needs one of its "
                "own of letters, digits, - and _. Give another."
            )
    if config.data.conversations and not config.data.test_conversations and config.training.eval_steps:
        raise ConfigError(
            f"eval_steps={config.training.eval_steps:,} validates on test_conversations, and there are none. Name "
            "them, or leave eval_steps out: --eval_steps null."
        )
    if names and config.data.conversations:
        raise ConfigError("eval_sets are packs beside a pack; a chat stage has test_conversations. Leave them out.")


def _value_of(config: RunConfig, key: str) -> Any:
    return getattr(getattr(config, SECTION_OF_KEY[key]), key)


def nearest_multiple(value: int, step: int) -> int:
    """The multiple of `step` nearest to `value`, at least one `step`."""
    return max(step, step * ((value + step // 2) // step))


def save_config(config: RunConfig, path: Path) -> None:
    """Write a config as YAML that `load_config` reads back to the same values."""
    text = yaml.dump(config.to_dict(), Dumper=PlainDumper, sort_keys=False, allow_unicode=True)
    write_text(path, text)


def _home_of(key: str) -> tuple[str, str]:
    section, dot, rest = key.partition(".")
    if dot:
        check_name(section, SECTIONS, "section")
        check_name(rest, [f.name for f in dataclasses.fields(SECTIONS[section])], f"key in section {section}")
        return section, rest
    check_name(key, SECTION_OF_KEY, "key")
    return SECTION_OF_KEY[key], key
