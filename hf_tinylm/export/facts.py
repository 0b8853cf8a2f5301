"""What a GGUF file says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, VerificationError

_CONTROL = 3  # tokenizer.ggml.token_type of a control token


@dataclass(frozen=True)
class GGUFFacts:
    """Name, storage type (llama.cpp's name), trained context in tokens, texts of the control tokens, and template."""

    name: str
    file_type: str
    context_length: int
    control_texts: tuple[str, ...]
    chat_template: str | None


def read_facts(path: Path) -> GGUFFacts:
    """The facts of a GGUF file; its tensors are not read.

    Raises:
        ConfigError: the file does not exist, or is no GGUF file.
        VerificationError: the file is cut short or damaged.
    """
    import gguf

    if not path.is_file():
        raise ConfigError(f"{path} does not exist. Give a GGUF file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ConfigError(
                f"{path} is not a GGUF file. Make one: hf-tinylm export MODEL --output_dir DIR --gguf f16"
            )
    try:
        fields = gguf.GGUFReader(path).fields
    except (ValueError, IndexError, OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"{path} is not a whole GGUF file ({error}). Export it again.") from error
    found = {key: field.contents() for key, field in fields.items() if not key.startswith("tokenizer.ggml.")}
    types = fields["tokenizer.ggml.token_type"].contents() if "tokenizer.ggml.token_type" in fields else []
    tokens = fields.get("tokenizer.ggml.tokens")
    control = [place for place, kind in enumerate(types) if kind == _CONTROL]
    number = found.get("general.file_type")
    file_type = "of unknown type" if number is None else gguf.LlamaFileType(number).name
    return GGUFFacts(
        name=str(found.get("general.name", path.stem)),
        file_type=file_type.removeprefix("MOSTLY_").removeprefix("ALL_"),
        context_length=int(found[f"{found['general.architecture']}.context_length"]),
        control_texts=tuple(tokens.contents(place) for place in control) if tokens is not None else (),
        chat_template=found.get("tokenizer.chat_template"),
    )
