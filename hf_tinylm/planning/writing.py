"""YAML files that keep their comments: a proposal as a commented configuration, and one key changed in a file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import SECTION_OF_KEY, load_config, parse_overrides, save_config
from ..errors import ConfigError
from ..files import write_text
from ..sections import RunConfig
from .proposal import RULES

_PROPOSAL = """\
# A starting proposal for about {size} parameters and {train_tokens} tokens, not an optimum: each value
# follows from a rule that stands beside it. Compare learning rates with `hf-tinylm sweep`, measure the micro-batch with
# `hf-tinylm find-batch`, and look at the whole with `hf-tinylm plan`.

model:
  # {hidden_size_rule}
  hidden_size: {hidden_size}
  num_hidden_layers: {num_hidden_layers}
  num_attention_heads: {num_attention_heads}  # {num_attention_heads_rule}
  # {num_key_value_heads_rule}
  num_key_value_heads: {num_key_value_heads}
  # {intermediate_size_rule}
  intermediate_size: {intermediate_size}
  qk_norm: false
  tie_word_embeddings: true
  rope_theta: 10_000.0
  initializer_range: auto             # sqrt(2 / (5 x hidden_size)); residual projections / sqrt(2 x layers)

tokenizer:
  tokenizer_path: runs/{name}/tokenizer
  # {vocab_size_rule}
  vocab_size: {vocab_size}

data:
  shards: runs/{name}/shards
  sequence_length: {sequence_length}  # {sequence_length_rule}
  window_order: permutation           # each window once per epoch, shuffled
  validation_fraction: 0.005
  sources:                            # a public example; any text of this size will do
    - name: fineweb-edu
      path: HuggingFaceFW/fineweb-edu
      config: {subset}
      format: datasets
      max_documents: {documents}  # about 1,000 tokens each; a little more than the budget
      licence: ODC-By 1.0

training:
  output_dir: runs/{name}/pretrain
  train_tokens: {train_tokens}  # {train_tokens_rule}
  # {global_batch_tokens_rule}
  global_batch_tokens: {global_batch_tokens}
  per_device_train_batch_size: {per_device_train_batch_size}  # {per_device_train_batch_size_rule}
  # {learning_rate_rule}
  learning_rate: {learning_rate}
  min_lr_ratio: 0.1
  warmup_steps: {warmup_steps}  # {warmup_steps_rule}
  weight_decay: 0.1
  adam_beta1: 0.9
  adam_beta2: 0.95
  max_grad_norm: 1.0
  bf16: auto                          # matrix products only, where the device is fast at them
  gradient_checkpointing: false       # true: less memory, a third more arithmetic
  eval_steps: {eval_steps}
  save_steps: {save_steps}
  save_minutes: 30
  save_total_limit: 3
  seed: 42

evaluation:
  eval_tokens: 262_144                # the same windows at every evaluation

export:
  gguf: [f16]
  verify: false                       # true needs: pip install 'hf-tinylm[gguf-verify]'
"""


def proposal_yaml(proposal: Mapping[str, Any], size: int, name: str) -> str:
    """The configuration of `proposal.propose` with its rules as comments; its files lie in runs/NAME."""
    tokens = proposal["train_tokens"]
    updates = -(-tokens // proposal["global_batch_tokens"])
    values = {key: f"{value:_}" if isinstance(value, int) else f"{value:.1e}" for key, value in proposal.items()}
    return _PROPOSAL.format(
        **values,
        **{f"{key}_rule": rule for key, rule in RULES.items()},
        size=f"{size:,}",
        name=name,
        subset="sample-10BT" if tokens < 8_000_000_000 else "sample-100BT",
        documents=f"{max(1_000, round(tokens * 1.15 / 1_000)):_}",
        eval_steps=max(1, updates // 20),
        save_steps=max(1, updates // 10),
    )


def write_with_overrides(source: Path, target: Path, overrides: Sequence[str], comment: str | None = None) -> None:
    """Write a copy of a configuration with some keys changed; a YAML file keeps its comments where its layout allows.

    Args:
        overrides: as `load_config` takes them, `["--seed", "5"]`.
        comment: a line put before the first.

    Raises:
        ConfigError: the changed configuration would not load.
    """
    wanted = load_config(str(source), overrides)
    edited = _edited(source, parse_overrides(overrides), comment)
    if edited is not None:
        write_text(target, edited)
        if _holds(target, wanted):
            return
    save_config(wanted, target)


def _edited(source: Path, changes: Mapping[str, Any], comment: str | None) -> str | None:
    """The YAML text with its keys changed in place; None for the record of a run, which is no YAML."""
    if source.suffix == ".json":
        return None
    text = source.read_text(encoding="utf-8")
    for key, value in changes.items():
        text = _with_key(text, key, value)
    return f"# {comment}\n{text}" if comment else text


def _holds(path: Path, wanted: RunConfig) -> bool:
    """Whether a file is the wanted configuration: an edit of text is believed only when it reads back as such."""
    try:
        return load_config(str(path)) == wanted
    except ConfigError:
        return False


def _with_key(text: str, key: str, value: Any) -> str:
    """The text with `key: value` in place of its old value, or as the first key of its section."""
    shown = f"{value:_}" if isinstance(value, int) and not isinstance(value, bool) else json.dumps(value)
    changed, found = re.subn(rf"(?m)(?<![\w.]){re.escape(key)}:\s*[^\s,}}#]+", f"{key}: {shown}", text, count=1)
    if found:
        return changed
    section = SECTION_OF_KEY[key]
    return re.sub(rf"(?m)^{section}:[ \t]*(#.*)?$", rf"\g<0>\n  {key}: {shown}", text, count=1)
