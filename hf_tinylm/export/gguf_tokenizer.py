"""A byte-level BPE `tokenizer.json` as the tokenizer section of a GGUF file, or the reason why it cannot be one.

llama.cpp does not read the flags of added tokens and has rules of its own for the texts of tokens. Whatever it would
tokenize differently is refused here, and in `gguf_splits`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, ExportError
from ..files import read_json
from ..tokenization.special import byte_of_character
from .gguf_splits import adds_bos, pre_tokenizer_label

# Token texts at which llama.cpp ends generation, whatever the file says.
# Source: llama.cpp, src/llama-vocab.cpp, "maintain a list of tokens that cause end-of-generation".
END_OF_GENERATION_TEXTS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~[", "<｜end▁of▁sentence｜>", "<|fim_pad|>",
    "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
    "<|file_sep|>",
})  # fmt: skip
# Token texts that it turns into control tokens (infill markers) or, below, into tokens that plain text can hold.
RETYPED_TEXTS = frozenset({
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>",
    "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
    "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>",
    "▁<MID>", "<|code_middle|>", "<|middle|>",
})  # fmt: skip
ALWAYS_PLAIN_TEXTS = frozenset({
    "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>",
})  # fmt: skip

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # gguf.TokenType


@dataclass(frozen=True)
class TokenizerSection:
    """What a GGUF file says about its tokenizer; lists are indexed by token id.

    Attributes:
        add_bos: every text starts with the bos token.
        end_token_ids: every id that ends generation according to the Hugging Face files.
        chat_template: Jinja text without `{% generation %}` markers, or None for a base model.
    """

    pre: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    bos_token_id: int | None
    eos_token_id: int
    eot_token_id: int | None
    pad_token_id: int | None
    add_bos: bool
    end_token_ids: frozenset[int]
    chat_template: str | None


def read_tokenizer_section(model_folder: Path, config: dict[str, Any]) -> TokenizerSection:
    """Read and check the tokenizer of a model folder against `config`, the contents of its config.json.

    Raises:
        ExportError: llama.cpp would tokenize, stop or render differently from Hugging Face.
    """
    tokenizer = read_json_object(model_folder / "tokenizer.json")
    settings = read_json_object(model_folder / "tokenizer_config.json")
    generation_path = model_folder / "generation_config.json"
    generation = read_json_object(generation_path) if generation_path.is_file() else {}

    pre = pre_tokenizer_label(tokenizer)
    tokens, types = _tokens_and_types(tokenizer)
    merges = _merges(tokenizer["model"], tokens)
    ids = _special_ids(tokens, settings, {"config.json": config, "generation_config.json": generation})
    end_ids = frozenset(_as_ids(generation.get("eos_token_id")) + _as_ids(config.get("eos_token_id")))
    eos = ids["eos"]
    assert eos is not None
    eot = tokens.index("<|im_end|>") if "<|im_end|>" in tokens else None
    eot = eot if eot in end_ids else None
    for end_id in sorted(end_ids - {eos, eot}):
        if tokens[end_id] not in END_OF_GENERATION_TEXTS:
            raise ExportError(
                f"eos_token_id names {end_id} ({tokens[end_id]!r}) beside {eos}, but llama.cpp would not stop there: "
                "it stops at the eos token and at texts such as <|endoftext|> and <|im_end|>. "
                f"Remove {end_id} from eos_token_id."
            )
    return TokenizerSection(
        pre=pre,
        tokens=tokens,
        token_types=types,
        merges=merges,
        bos_token_id=ids["bos"],
        eos_token_id=eos,
        eot_token_id=eot,
        pad_token_id=ids["pad"],
        add_bos=adds_bos(tokenizer, None if ids["bos"] is None else tokens[ids["bos"]]),
        end_token_ids=end_ids,
        chat_template=_chat_template(model_folder, settings),
    )


def strip_generation_markers(template: str) -> str:
    """Remove `{% generation %}` and `{% endgeneration %}`, which only transformers knows; the rendering stays the same.

    A block tag also eats white space around it (`-`, and transformers' trim_blocks and lstrip_blocks): so does this.
    """

    def trim_left(match: re.Match[str]) -> str:
        white, left, right = match.groups()
        on_own_line = "\n" in white or match.start() == 0
        if left == "-":
            white = ""
        elif left != "+" and on_own_line:
            white = white.rstrip(" \t")
        return f"{white}\0{right}\0"

    def trim_right(match: re.Match[str]) -> str:
        right, white = match.groups()
        if right == "-":
            return ""
        return white if right == "+" else re.sub(r"\A(\r\n|\r|\n)", "", white)

    # every left side first, on the text as written; a zero character marks where a tag stood
    marked = re.sub(r"(\s*)\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}", trim_left, template)
    return re.sub(r"\0([-+]?)\0(\s*)", trim_right, marked)


def _tokens_and_types(tokenizer: dict[str, Any]) -> tuple[list[str], list[int]]:
    model = tokenizer.get("model") or {}
    _refuse_other_models(model)
    by_id: dict[int, str] = {}
    added = {int(entry["id"]): entry for entry in tokenizer.get("added_tokens") or []}
    for text, token_id in [
        *model["vocab"].items(),
        *((entry["content"], token_id) for token_id, entry in added.items()),
    ]:
        if by_id.setdefault(token_id, text) != text:
            raise ExportError(f"tokenizer.json gives id {token_id} to two tokens, {by_id[token_id]!r} and {text!r}.")
    missing = set(range(len(by_id))) - by_id.keys()
    if missing or not by_id:
        raise ExportError(
            f"tokenizer.json has {len(by_id):,} tokens and none with id {min(missing, default=0)}; "
            "ids must run from 0 without a gap."
        )
    tokens = [by_id[token_id] for token_id in range(len(by_id))]
    if len(set(tokens)) != len(tokens):
        twice = next(text for token_id, text in enumerate(tokens) if tokens.index(text) != token_id)
        raise ExportError(f"tokenizer.json has two ids for the token {twice!r}; llama.cpp refuses such a vocabulary.")
    types = [_token_type(text, added.get(token_id)) for token_id, text in enumerate(tokens)]
    _refuse_foreign_bytes(tokens, types)
    return tokens, types


def _refuse_other_models(model: dict[str, Any]) -> None:
    if model.get("type") != "BPE" or not model.get("vocab") or not model.get("merges"):
        raise ExportError(
            f"tokenizer.json holds a {model.get('type')} model; a byte-level BPE with a vocabulary and merges is "
            "needed. Train one: hf-tinylm tokenizer train"
        )
    names = (
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
    )
    for name in names:
        if model.get(name):
            raise ExportError(
                f"tokenizer.json sets {name}={model[name]!r} in its BPE model, which llama.cpp does not do."
            )


def _token_type(text: str, added: dict[str, Any] | None) -> int:
    """gguf.TokenType of a token; `added` is its entry in added_tokens, if it has one."""
    if not text:
        raise ExportError("tokenizer.json has an empty token, which llama.cpp renames.")
    if added is None or not added.get("special"):
        if text in END_OF_GENERATION_TEXTS or text in RETYPED_TEXTS:
            raise ExportError(
                f"the token {text!r} is not special, but llama.cpp treats that text as a control token"
                f"{' and stops there' if text in END_OF_GENERATION_TEXTS else ''}. Make it special, or rename it."
            )
    elif text in ALWAYS_PLAIN_TEXTS:
        raise ExportError(f"the special token {text!r} is one that llama.cpp always reads from plain text. Rename it.")
    if added is None:
        return NORMAL
    flags = [name for name in ("lstrip", "rstrip", "single_word", "normalized") if added.get(name)]
    if flags:
        raise ExportError(
            f"the added token {text!r} has {' and '.join(flags)} set, which llama.cpp does not do. "
            f"Add it as AddedToken({text!r}, {', '.join(f'{name}=False' for name in flags)})."
        )
    return CONTROL if added.get("special") else USER_DEFINED


def _refuse_foreign_bytes(tokens: list[str], types: list[int]) -> None:
    alphabet = byte_of_character().keys()
    ordinary = {text for text, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    for text in ordinary:
        if not alphabet >= set(text):
            raise ExportError(
                f"the token {text!r} is not written in the byte-level alphabet, so llama.cpp cannot decode it."
            )
    absent = alphabet - ordinary
    if absent:
        raise ExportError(
            f"{len(absent)} of the 256 byte tokens are missing (the first is {min(absent)!r}), so some text cannot be "
            "encoded. Train with the full byte alphabet: hf-tinylm tokenizer train"
        )


def _merges(model: dict[str, Any], tokens: list[str]) -> list[str]:
    known = set(tokens)
    pairs: dict[str, None] = {}
    for merge in model["merges"]:
        parts = merge.split(" ") if isinstance(merge, str) else list(merge)
        if len(parts) != 2 or not known.issuperset([*parts, "".join(parts)]):
            raise ExportError(
                f"tokenizer.json has the merge {merge!r}, whose two parts and result must be three tokens."
            )
        text = " ".join(parts)
        if text in pairs:
            raise ExportError(f"tokenizer.json has the merge {merge!r} twice, so its rank is ambiguous.")
        pairs[text] = None
    return list(pairs)


def _special_ids(
    tokens: list[str], settings: dict[str, Any], configs: dict[str, dict[str, Any]]
) -> dict[str, int | None]:
    """The ids of bos, eos and pad, agreed by tokenizer_config.json and by every file of `configs` that names them."""
    id_of = {text: token_id for token_id, text in enumerate(tokens)}
    ids: dict[str, int | None] = {}
    for role in ("bos", "eos", "pad"):
        text = settings.get(f"{role}_token")
        text = text.get("content") if isinstance(text, dict) else text
        if text is not None and text not in id_of:
            raise ExportError(f"tokenizer_config.json names {role}_token {text!r}, which is not in tokenizer.json.")
        if text is None and role == "eos":
            raise ExportError(
                "tokenizer_config.json names no eos_token; llama.cpp would end generation at token 11. Name one."
            )
        ids[role] = None if text is None else id_of[text]
        for file_name, config in configs.items():
            named = _as_ids(config.get(f"{role}_token_id"))
            _refuse_out_of_range(named, len(tokens), f"{file_name}: {role}_token_id")
            # bos and pad may be left unnamed where nothing uses them; what is named must agree
            if (named or (role == "eos" and config)) and ids[role] not in named:
                raise ExportError(
                    f"{file_name} has {role}_token_id {config.get(f'{role}_token_id')}, but the tokenizer's "
                    f"{role}_token is {text!r} (id {ids[role]}). Make them agree."
                )
    return ids


def _refuse_out_of_range(ids: Iterable[int], tokens: int, what: str) -> None:
    for token_id in ids:
        if not 0 <= token_id < tokens:
            raise ExportError(f"{what} is {token_id}; the tokenizer has ids 0 to {tokens - 1}.")


def _as_ids(value: Any) -> list[int]:
    return [] if value is None else [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _chat_template(model_folder: Path, settings: dict[str, Any]) -> str | None:
    import jinja2

    path = model_folder / "chat_template.jinja"
    template = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if template is None:
        return None
    if not isinstance(template, str):
        raise ExportError("tokenizer_config.json has several named chat templates; a GGUF file holds one. Keep one.")
    template = strip_generation_markers(template)
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ExportError(
            f"the chat template does not parse ({error}, line {error.lineno}); llama.cpp would not start."
        ) from error
    return template


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object of a model folder.

    Raises:
        ExportError: the file is missing or holds something else.
    """
    try:
        value = read_json(path)
    except ConfigError as error:
        raise ExportError(
            f"{error} A model folder with config.json, weights, tokenizer.json and tokenizer_config.json is needed."
        ) from error
    if not isinstance(value, dict):
        raise ExportError(f"{path} holds no JSON object.")
    return value
