"""One run as plain dataclasses: sectioned YAML, every key overridable as `--key value`.

A key has one home: names are unique over all sections, so `--learning_rate 6e-4` needs no section name (a section
name is accepted too: `--training.learning_rate 6e-4`). Unknown keys are errors that name the nearest key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from .errors import ConfigError
from .files import bundled

Number = float


@dataclass
class ModelSection:
    """Shape of the model. Parameter names and file format are those of stock Llama (with `qk_norm`: Qwen3)."""

    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None  # None: as many as attention heads
    intermediate_size: int = 768
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    max_position_embeddings: int | None = None  # None: sequence_length
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float | Literal["auto"] = "auto"  # auto: sqrt(2 / (5 * hidden_size))
    attention_dropout: float = 0.0
    pad_vocab_to_multiple_of: int = 1
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"


@dataclass
class TokenizerSection:
    """Byte-level BPE tokenizer. `sample_bytes` caps the text that merges are counted on."""

    tokenizer_path: str | None = None
    vocab_size: int = 32_000
    sample_bytes: int = 1_000_000_000
    max_word_bytes: int = 64
    min_frequency: int = 2


@dataclass
class SourceSection:
    """One source of text. `path` is a file, a glob, a folder, `bundled:NAME`, or a `datasets` name with `config`/`split`."""

    name: str
    path: str
    licence: str = "unknown"
    format: Literal["auto", "text", "jsonl", "parquet", "datasets"] = "auto"
    splitter: str | None = None  # None: one document per text file; paragraphs_N: about N bytes each; lines
    text_column: str = "text"
    config: str | None = None
    split: str = "train"
    max_documents: int | None = None


@dataclass
class DataSection:
    """Where the shards are, what they are made of, and how windows are cut from them."""

    shards: str | None = None
    sequence_length: int = 1024
    window_order: Literal["permutation", "random"] = "permutation"
    validation_fraction: float = 0.01
    shard_ids: int = 2**24
    num_workers: int | None = None  # None: one per core
    sources: list[SourceSection] = field(default_factory=list)


@dataclass
class TrainingSection:
    """The run. `global_batch_tokens` is the source of truth for the batch; accumulation steps follow from it."""

    output_dir: str | None = None
    train_tokens: int | Literal["epoch"] = "epoch"
    global_batch_tokens: int = 524_288
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int | None = None  # None: as in training
    learning_rate: float = 6e-4
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    bf16: bool | Literal["auto"] = "auto"  # auto: where the device multiplies bf16 matrices fast
    torch_compile: bool = False
    gradient_checkpointing: bool = False
    use_cpu: bool = False
    logging_steps: int = 1
    eval_steps: int | None = None
    save_steps: int | None = None
    save_minutes: float | None = 30.0
    save_total_limit: int | None = 3
    resume_from_checkpoint: str | None = None  # a checkpoint folder, or auto
    report_to: list[str] = field(default_factory=list)
    run_name: str | None = None
    seed: int = 42


@dataclass
class EvaluationSection:
    """Validation inside training: the same fixed windows every time."""

    eval_tokens: int = 1_048_576


@dataclass
class ExportSection:
    """What is written after the last update."""

    gguf: list[Literal["f32", "f16"]] = field(default_factory=list)
    verify: bool = False


@dataclass
class RunConfig:
    """A whole run: what `hf-tinylm` commands and recipes read."""

    model: ModelSection = field(default_factory=ModelSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    export: ExportSection = field(default_factory=ExportSection)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, in the order of the sections."""
        return dataclasses.asdict(self)


SECTIONS: dict[str, type] = {f.name: typing.get_type_hints(RunConfig)[f.name] for f in dataclasses.fields(RunConfig)}
SECTION_OF_KEY: dict[str, str] = {
    key.name: section for section, section_type in SECTIONS.items() for key in dataclasses.fields(section_type)
}


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `6e-4` as text; this loader reads every usual spelling of a number as a number."""


def load_config(path: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML config (a path, or the name of a bundled one) and apply `--key value` overrides.

    Raises:
        ConfigError: the file is missing, is not YAML, has an unknown key, or a value of the wrong type.
    """
    nested: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    if path is not None:
        for section, values in _read_yaml(find_config(path)).items():
            _check_name(section, SECTIONS, f"section in {path}")
            if not isinstance(values, Mapping):
                raise ConfigError(f"{path}: section {section} is {values!r}; a mapping of keys is needed, such as {section}: {{...}}.")
            nested[section].update(values)
    for key, value in parse_overrides(overrides).items():
        section, key = _home_of(key)
        nested[section][key] = value
    config = RunConfig(**{s: _build(t, nested[s], s) for s, t in SECTIONS.items()})
    check_config(config)
    return config


def find_config(path: str) -> Path:
    """The file that `path` names: itself, or `recipes/configs/NAME.yaml` of this installation.

    Raises:
        ConfigError: neither exists.
    """
    if Path(path).is_file():
        return Path(path)
    folder = bundled("recipes", "configs")
    if (folder / f"{Path(path).stem}.yaml").is_file() and Path(path).parent == Path("."):
        return folder / f"{Path(path).stem}.yaml"
    names = ", ".join(sorted(f.stem for f in folder.glob("*.yaml")))
    raise ConfigError(f"Config {path} does not exist. Give a YAML file, or the name of a bundled config: {names}.")


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`["--learning_rate", "6e-4", "--bf16=false", "--qk_norm"]` as a mapping; a flag without a value is true.

    Raises:
        ConfigError: an argument that is neither a `--key` nor the value of one.
    """
    values: dict[str, Any] = {}
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        position += 1
        if not argument.startswith("--"):
            raise ConfigError(f"Unexpected argument {argument!r}; settings are given as --key value.")
        key, equals, text = argument[2:].partition("=")
        if not equals:
            if position < len(arguments) and not arguments[position].startswith("--"):
                text = arguments[position]
                position += 1
                if position < len(arguments) and not arguments[position].startswith("--"):  # a list: --gguf f32 f16
                    items = [text]
                    while position < len(arguments) and not arguments[position].startswith("--"):
                        items.append(arguments[position])
                        position += 1
                    text = "[" + ", ".join(items) + "]"
            else:
                text = "true"
        try:
            values[key.replace("-", "_")] = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError:
            values[key.replace("-", "_")] = text
    return values


def check_config(config: RunConfig) -> None:
    """Refuse values that no run can have; what depends on data or devices is checked where it is known.

    Raises:
        ConfigError: naming the key, its value and what is possible.
    """
    model, data, training = config.model, config.data, config.training
    positive = {
        "model": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "pad_vocab_to_multiple_of", "rope_theta", "rms_norm_eps"),
        "tokenizer": ("vocab_size", "sample_bytes", "max_word_bytes", "min_frequency"),
        "data": ("sequence_length", "shard_ids"),
        "training": ("global_batch_tokens", "per_device_train_batch_size", "learning_rate", "logging_steps", "adam_epsilon"),
        "evaluation": ("eval_tokens",),
    }
    optional = {
        "model": ("num_key_value_heads", "head_dim", "max_position_embeddings"),
        "data": ("num_workers",),
        "training": ("per_device_eval_batch_size", "eval_steps", "save_steps", "save_minutes", "save_total_limit"),
    }
    for section, keys in positive.items():
        for key in keys:
            _require(getattr(getattr(config, section), key) > 0, config, section, key, "a number above 0")
    for section, keys in optional.items():
        for key in keys:
            value = getattr(getattr(config, section), key)
            _require(value is None or value > 0, config, section, key, "a number above 0, or null")
    for section, key, low, high in (
        ("data", "validation_fraction", 0.0, 0.5),
        ("training", "min_lr_ratio", 0.0, 1.0),
        ("model", "attention_dropout", 0.0, 0.999),
        ("training", "adam_beta1", 0.0, 0.9999999),
        ("training", "adam_beta2", 0.0, 0.9999999),
        ("training", "weight_decay", 0.0, math.inf),
        ("training", "max_grad_norm", 0.0, math.inf),
        ("training", "warmup_steps", 0, math.inf),
        ("training", "seed", 0, 2**32 - 1),
    ):
        _require(low <= getattr(getattr(config, section), key) <= high, config, section, key, f"{low} to {high}")
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads or model.num_attention_heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}. Change one of them.")
    if model.head_dim is None and model.hidden_size % heads:
        raise ConfigError(f"hidden_size={model.hidden_size} is not a multiple of num_attention_heads={heads}. Change one of them, or give head_dim.")
    if (model.head_dim or model.hidden_size // heads) % 2:
        raise ConfigError(f"head_dim={model.head_dim or model.hidden_size // heads} is odd; rotary positions need an even number.")
    if training.train_tokens != "epoch" and training.train_tokens <= 0:
        raise ConfigError(f"train_tokens={training.train_tokens} must be a number above 0, or epoch.")
    if training.global_batch_tokens % data.sequence_length:
        raise ConfigError(
            f"global_batch_tokens={training.global_batch_tokens:,} is not a multiple of sequence_length={data.sequence_length:,}. "
            f"Use {nearest_multiple(training.global_batch_tokens, data.sequence_length):,}."
        )
    if model.max_position_embeddings is not None and model.max_position_embeddings < data.sequence_length:
        raise ConfigError(
            f"max_position_embeddings={model.max_position_embeddings:,} is below sequence_length={data.sequence_length:,}. Raise it, or leave it out."
        )
    names = [source.name for source in data.sources]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"Two sources are named {name!r}; give each source its own name.")


def nearest_multiple(value: int, step: int) -> int:
    """The multiple of `step` nearest to `value`, at least one `step`."""
    return max(step, step * ((value + step // 2) // step))


def save_config(config: RunConfig, path: Path) -> None:
    """Write a config as YAML that `load_config` reads back to the same values."""
    path.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds no sections; the sections are {', '.join(SECTIONS)}.")
    return dict(values)


def _home_of(key: str) -> tuple[str, str]:
    section, dot, rest = key.partition(".")
    if dot:
        _check_name(section, SECTIONS, "section")
        _check_name(rest, {f.name for f in dataclasses.fields(SECTIONS[section])}, f"key in section {section}")
        return section, rest
    _check_name(key, SECTION_OF_KEY, "key")
    return SECTION_OF_KEY[key], key


def _check_name(name: str, known: Any, what: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    raise ConfigError(f"Unknown {what}: {name}." + (f" Did you mean {near[0]}?" if near else f" Known: {', '.join(known)}."))


def _build(section_type: type, values: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(section_type)
    fields = {f.name: f for f in dataclasses.fields(section_type)}
    for key in values:
        _check_name(key, fields, f"key in {where}")
    for key, f in fields.items():
        if key not in values and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: the key {key} is missing.")
    return section_type(**{key: _convert(value, hints[key], f"{where}.{key}") for key, value in values.items()})


def _convert(value: Any, hint: Any, where: str) -> Any:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for option in options:
            try:
                return _convert(value, option, where)
            except ConfigError as failure:
                if dataclasses.is_dataclass(option):
                    raise failure
        raise ConfigError(f"{where}={value!r} must be {_describe(hint)}.")
    if hint is type(None) and value is None:
        return None
    if origin is Literal and value in options:
        return value
    if origin is list:
        items = value if isinstance(value, list) else [value]
        if value is None or isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r} must be a list.")
        return [_convert(item, options[0], f"{where}[{i}]") for i, item in enumerate(items)]
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return _build(typing.cast(type, hint), value, where)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and not isinstance(value, bool) and isinstance(value, int | float) and float(value).is_integer():
        return int(value)
    if hint is float and not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    if hint is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"{where}={value!r} must be {_describe(hint)}.")


def _describe(hint: Any) -> str:
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(option) for option in options)
    if origin is Literal:
        return " or ".join(str(option) for option in options)
    if origin is list:
        return "a list"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}.get(hint, "a mapping of keys")


def _require(condition: bool, config: RunConfig, section: str, key: str, needed: str) -> None:
    if not condition:
        raise ConfigError(f"{key}={getattr(getattr(config, section), key)} must be {needed}.")


def _construct_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(str(node.value).replace("_", ""))


_Loader.add_implicit_resolver(
    "tag:hf_tinylm,number",
    re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$|^[-+]?\.\d[\d_]*[eE][-+]?\d+$"),
    list("-+0123456789."),
)
_Loader.add_constructor("tag:hf_tinylm,number", _construct_number)
