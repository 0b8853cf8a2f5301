"""The files that Ollama reads; what it must say follows from the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_tinylm.export.gguf import GGUFSource
from hf_tinylm.export.modelfile import is_chatml, lm_studio_path, write_modelfile

MakeModel = Callable[..., Path]


def modelfile_of(source: GGUFSource, folder: Path, *files: str) -> str:
    write_modelfile(folder, files, source.section, source.config.context_length)
    return (folder / "Modelfile").read_text(encoding="utf-8")


def test_a_base_model_gets_a_stop_token_and_no_template(make_model: MakeModel, tmp_path: Path) -> None:
    written = modelfile_of(GGUFSource(make_model(context=192)), tmp_path, "tiny-F16.gguf", "tiny-Q8_0.gguf")
    assert written.splitlines() == [
        "# ollama create NAME -f Modelfile",
        "FROM ./tiny-F16.gguf",
        "# FROM ./tiny-Q8_0.gguf",
        "PARAMETER num_ctx 192",
        'PARAMETER stop "<|endoftext|>"',
    ]


def test_a_chat_model_gets_the_template_of_its_turns_and_both_stop_tokens(
    make_model: MakeModel, tmp_path: Path
) -> None:
    written = modelfile_of(GGUFSource(make_model(chat=True)), tmp_path, "tiny-F16.gguf")
    assert 'PARAMETER stop "<|im_end|>"' in written
    assert 'PARAMETER stop "<|endoftext|>"' in written
    assert written.endswith('{{ .Content }}<|im_end|>\n{{ end }}<|im_start|>assistant\n"""\n')
    assert "{{- range .Messages }}<|im_start|>{{ .Role }}\n" in written
    assert "generation" not in written


def test_a_template_that_is_not_chatml_is_left_to_ollama(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(chat=True)
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    written = modelfile_of(GGUFSource(folder), tmp_path, "tiny-F16.gguf")
    assert "TEMPLATE" not in [line.split()[0] for line in written.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ("{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}", True),
        ("{{ '<|im_start|>' + m.role + '\n' + m.content | trim + '<|im_end|>\n' }}", False),
        ("{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}", False),
        ("{{ raise_exception('no') }}", False),
    ],
)
def test_only_exact_chatml_is_taken_for_chatml(turn: str, expected: bool) -> None:
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    prompt = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    assert is_chatml(template + prompt) is expected
    assert is_chatml(template) is False


def test_lm_studio_wants_publisher_model_and_file() -> None:
    assert lm_studio_path("tiny", "tiny-Q8_0.gguf") == "models/local/tiny/tiny-Q8_0.gguf"
