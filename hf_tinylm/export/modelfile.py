"""How other programs take a GGUF file: a Modelfile for Ollama, the folder layout of LM Studio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..errors import ExportError
from ..files import write_text
from .gguf_tokenizer import TokenizerSection

MODELFILE = "Modelfile"

# Ollama's own form of ChatML, as a Go template. Source: ollama, template/chatml.gotmpl.
_CHATML = """{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}<|im_end|>
{{ end }}<|im_start|>assistant
"""
_PROBES = (
    [{"role": "user", "content": " a\n"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "{{ b }}"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
)


def write_modelfile(folder: Path, files: Sequence[str], section: TokenizerSection, context_length: int) -> None:
    """Write `folder/Modelfile` for the first of `files`, which lie beside it; a base model gets no template."""
    first, *others = files
    lines = [f"# ollama create NAME -f {MODELFILE}", f"FROM ./{first}"]
    lines += [f"# FROM ./{name}" for name in others]
    lines.append(f"PARAMETER num_ctx {context_length}")
    lines += [f'PARAMETER stop "{section.tokens[token]}"' for token in sorted(section.end_token_ids)]
    if section.chat_template is not None:
        if is_chatml(section.chat_template):
            lines.append(f'TEMPLATE """{_CHATML}"""')
        else:
            lines.append(
                "# No TEMPLATE: the model's is not ChatML. Ollama takes the one in the file if it knows its like."
            )
    write_text(folder / MODELFILE, "\n".join(lines) + "\n")


def lm_studio_path(name: str, file: str) -> str:
    """Where LM Studio looks for a file: models/publisher/model/file.gguf under its own folder."""
    return f"models/local/{name}/{file}"


def is_chatml(template: str) -> bool:
    """Whether a chat template renders plain ChatML, without a default system turn or any trimming.

    Raises:
        ExportError: the template fails on an ordinary conversation.
    """
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        compiled = environment.from_string(template)
        return all(compiled.render(messages=probe, add_generation_prompt=True) == _chatml(probe) for probe in _PROBES)
    except jinja2.TemplateSyntaxError as error:
        raise ExportError(f"the chat template does not parse ({error}); llama.cpp would not start.") from error
    except jinja2.TemplateError:
        return False  # it refuses a turn or needs what only its program gives


def _chatml(conversation: list[dict[str, str]]) -> str:
    turns = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in conversation)
    return f"{turns}<|im_start|>assistant\n"
