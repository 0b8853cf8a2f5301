"""Open whatever is to be scored: a model folder of ours, any causal language model by path or name, a GGUF file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ..errors import CheckpointError, ConfigError, TokenizerError
from ..files import read_record, sha256_of_file, sha256_of_json
from ..model_folder import OWN_MODEL_TYPES, find_model_folder, require_model_folder
from ..modeling.factory import load_model
from ..tokenization.encoder import FastEncoder
from ..tokenization.load import load_tokenizer, tokenizer_sha256, vocabulary_size
from ..tokenization.special import END_OF_TEXT
from .likelihood import CausalLMEngine, Engine
from .likelihood_gguf import LlamaCppEngine


def resolve_model(name: str) -> Path:
    """The local folder or GGUF file of a path, or of a model on the Hub.

    Raises:
        ConfigError: there is neither.
    """
    path = Path(name).expanduser()
    return path if path.suffix == ".gguf" else find_model_folder(name)


def open_engine(
    model: Path, tokenizer: str, batch_size: int = 8, bf16: bool = False, device: str | None = None
) -> Engine:
    """An engine for a model folder or GGUF file, in float32 unless `bf16`.

    Several processes (torchrun, accelerate launch) each score their part of what is asked.

    Args:
        tokenizer: folder of the tokenizer; a GGUF file has its own.
        batch_size: spans in one batch.
        device: such as cuda:0 or cpu; None: an accelerator where there is one.

    Raises:
        ConfigError: the model cannot be opened.
        TokenizerError: the tokenizer has more tokens than the model.
    """
    index, processes, default_device = _process()
    about = {"model_sha256": weights_sha256(model)}
    if model.suffix == ".gguf":
        return LlamaCppEngine(model, (index, processes), about)
    loaded = load_causal_lm(model)
    encoder = load_tokenizer(tokenizer)
    about["tokenizer_sha256"] = tokenizer_sha256(encoder)
    try:
        loaded.to(torch.device(device or default_device))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={device} cannot be used ({' '.join(str(error).split())[:150]}).") from error
    prefix, start_id = special_beginning(encoder)
    engine = CausalLMEngine(
        loaded, FastEncoder(encoder), prefix, start_id, batch_size, bf16, process=(index, processes), about=about
    )
    tokens = vocabulary_size(encoder)
    if tokens > engine.vocab_size:
        raise TokenizerError(
            f"The tokenizer {tokenizer} has {tokens:,} tokens and the model {model} {engine.vocab_size:,}: they do not "
            "belong together. Give the model's own tokenizer: --tokenizer DIR."
        )
    return engine


def load_causal_lm(folder: Path) -> PreTrainedModel:
    """A model in float32: ours, or what `AutoModelForCausalLM` opens; every expected weight must be there.

    Raises:
        ConfigError: the folder is no causal language model that transformers knows.
        CheckpointError: weights are missing, damaged or of another shape.
    """
    require_model_folder(folder)
    if read_record(folder / "config.json").get("model_type") in OWN_MODEL_TYPES:
        return load_model(folder)
    try:
        AutoConfig.from_pretrained(folder)
        found: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{folder} cannot be opened as a model ({' '.join(str(error).split())[:200]}).") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "safetensors":  # its own class for a damaged file
            raise
        raise CheckpointError(f"{folder}: the weights cannot be read ({error}).") from error
    model, info = found
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info.get(kind):
            name = sorted(map(str, info[kind]))[0]
            raise CheckpointError(f"{folder}: {len(info[kind])} {kind.replace('_', ' ')} of the weights, first {name}.")
    return model.eval()


def special_beginning(tokenizer: Any) -> tuple[tuple[int, ...], int]:
    """Ids that a tokenizer puts before every text, and the id that stands before a text that has nothing before it.

    The latter is <|endoftext|> where there is one, as between documents in training, else the begin or end token.

    Raises:
        TokenizerError: it has none of the three.
    """
    backend = tokenizer.backend_tokenizer
    plain = backend.encode("a", add_special_tokens=False).ids
    special = backend.encode("a", add_special_tokens=True).ids
    prefix = tuple(special[: special.index(plain[0])]) if plain and plain[0] in special else ()
    start = tokenizer.get_vocab().get(END_OF_TEXT)
    for candidate in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        start = candidate if start is None else start
    if start is None:
        raise TokenizerError("The tokenizer has no begin or end token to start a text with. Give another: --tokenizer.")
    return prefix, int(start)


def weights_sha256(model: Path) -> str:
    """SHA-256 of the one weight file, as `DONE.json` has it; of names and hashes where there are several."""
    if model.is_file():
        return sha256_of_file(model)
    hashes = {file.name: sha256_of_file(file) for file in sorted(model.glob("*.safetensors"))}
    hashes.pop("optimizer.safetensors", None)
    hashes = {name: found for name, found in hashes.items() if not name.startswith("rng")}
    return next(iter(hashes.values())) if len(hashes) == 1 else sha256_of_json(hashes)


def _process() -> tuple[int, int, str]:
    """Index and number of processes, and the device of this one."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1, "cpu" if accelerator is None else str(accelerator)
    from accelerate import PartialState

    state = PartialState(cpu=accelerator is None)
    return state.process_index, state.num_processes, str(state.device)
