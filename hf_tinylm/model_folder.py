"""The folder of a model that a user names: on this machine, or fetched from the Hub."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError

OWN_MODEL_TYPES = ("tinylm", "tinylm_gpt2")  # model_type of checkpoints, which only this package opens
_FETCHED = ["*.json", "*.jinja", "*.safetensors", "*.md", "*.txt", "LICENSE*"]


def require_model_folder(folder: Path) -> None:
    """Raise `ConfigError` when a folder holds no config.json; the one that was meant is named, if it is inside."""
    if (folder / "config.json").is_file():
        return
    candidates = [folder / "final", *sorted(folder.glob("checkpoint-*"), reverse=True)]
    inside = [path for path in candidates if (path / "config.json").is_file()]
    meant = f"Did you mean {inside[0]}?" if inside else "Give a run's final folder, a checkpoint, or a model's folder."
    raise ConfigError(f"{folder} is not a model folder: it has no config.json. {meant}")


def find_model_folder(name: str | None) -> Path:
    """The local folder of that name, or a model on the Hub, which is downloaded into the cache.

    Raises:
        ConfigError: there is neither, or a configuration names none.
    """
    if name is None:
        raise ConfigError("init_from is missing. Give the model to start from: --init_from runs/NAME/final.")
    folder = Path(name).expanduser()
    if folder.is_dir():
        require_model_folder(folder)
        return folder
    if folder.exists() or folder.is_absolute() or name.startswith(".") or not 1 <= len(folder.parts) <= 2:
        raise ConfigError(
            f"{name} is no model folder. Give a run's final folder, a checkpoint, or the folder or Hub name of a "
            "llama, qwen3 or gpt2 model."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_FETCHED))
    except (OSError, ValueError) as error:  # the Hub's errors and its checks of names
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{name} is neither a folder here nor a model that the Hub gave: {reason} Give a run's final folder, or "
            "the folder or Hub name of a llama, qwen3 or gpt2 model."
        ) from error
