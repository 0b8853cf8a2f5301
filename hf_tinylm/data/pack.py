"""Open what a run trains on: a tokenizer and the shards that were written with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, DataError, TokenizerError
from ..sections import RunConfig
from ..tokenization.load import backend_json, is_byte_level, load_tokenizer, token_byte_lengths, tokenizer_sha256
from .local_copy import local_copy
from .shards import Shard, Shards, load_shards
from .target_sources import TargetSources
from .windows import TokenWindows, WindowOrder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def special_ids(tokenizer: PreTrainedTokenizerFast) -> dict[str, int | None]:
    """The ids that model, generation and export must agree on. Nothing here uses a begin token."""
    return {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


@dataclass(frozen=True, eq=False)
class Pack:
    """A tokenizer, the shards it wrote, and the windows that a run takes from them.

    `eval_sets` are the validation windows of other packs, by the names that the configuration gives them, and
    `eval_shards` those packs, without their training files.
    """

    tokenizer: PreTrainedTokenizerFast
    shards: Shards
    train: TokenWindows
    validation: TokenWindows
    eval_sets: dict[str, TokenWindows] = field(default_factory=dict)
    eval_shards: dict[str, Shards] = field(default_factory=dict)

    @property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of each token, int64 (V,); None when the tokenizer is not byte-level."""
        return token_byte_lengths(self.tokenizer) if is_byte_level(backend_json(self.tokenizer)) else None

    @property
    def identity(self) -> dict[str, Any]:
        """Hashes that make two packs the same."""
        others = {name: shards.shards_sha256 for name, shards in self.eval_shards.items()}
        return {
            "tokenizer_sha256": self.shards.tokenizer_sha256,
            "manifest_sha256": self.shards.manifest_sha256,
            "shards_sha256": self.shards.shards_sha256,
            "documents": self.shards.documents,
            **({"eval_sets": others} if others else {}),
        }


def open_pack(config: RunConfig, verify: bool = True) -> Pack:
    """Open the tokenizer and shards that a configuration names, and cut windows; with `stage_dir`, of a local copy.

    Args:
        verify: read every shard byte and compare SHA-256.

    Raises:
        ConfigError: a path is missing from the configuration, or there is no room for a local copy.
        DataError: a shard is damaged, or holds no window of the asked length.
        TokenizerError: the shards were written with another tokenizer.
    """
    if config.data.shards is None:
        raise ConfigError("data.shards is missing. Give the folder that hf-tinylm prepare wrote: --shards DIR.")
    if config.tokenizer.tokenizer_path is None:
        raise ConfigError("tokenizer_path is missing. Give the folder of the tokenizer: --tokenizer_path DIR.")
    tokenizer = load_tokenizer(config.tokenizer.tokenizer_path)
    folder, stage_dir = Path(config.data.shards), config.training.stage_dir
    if stage_dir is not None:
        folder = local_copy(folder, Path(stage_dir), "shards")
    shards = load_shards(folder, verify=verify)
    others = {one.name: load_shards(one.shards, verify, ["validation"]) for one in config.evaluation.eval_sets}
    found = tokenizer_sha256(tokenizer)
    for each in (shards, *others.values()):
        if found != each.tokenizer_sha256:
            raise TokenizerError(
                f"{each.path} was written with the tokenizer {each.tokenizer_sha256[:12]}..., but "
                f"{config.tokenizer.tokenizer_path} is {found[:12]}.... Give the tokenizer of the shards, or write "
                "them again: hf-tinylm prepare."
            )
    length, seed = config.data.sequence_length, config.training.seed
    for each in (shards, *others.values()):
        if not each.validation:
            raise DataError(f"{each.path} has no validation shards. Write it again with a validation_fraction above 0.")
    separator = int(shards.manifest["separator"]["id"]) if config.data.document_attention else None

    def windows(of: Shards, split: list[Shard], order: WindowOrder) -> TokenWindows:
        sources = TargetSources(split, list(of.manifest["sources"]))
        return TokenWindows([s.ids for s in split], length, order, seed, [s.name for s in split], separator, sources)

    return Pack(
        tokenizer,
        shards,
        windows(shards, shards.train, config.data.window_order),
        windows(shards, shards.validation, "sequential"),
        {name: windows(other, other.validation, "sequential") for name, other in others.items()},
        others,
    )
