"""How a tokenizer cuts text before merging, and the name under which llama.cpp does exactly the same, if there is one.

llama.cpp does not read a split from the file: it knows a list of splits by name, and a wrong name loads without a word
and tokenizes differently. Only splits that were compared with it string by string are listed here.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

from ..errors import ExportError
from ..tokenization.special import QWEN2_SPLIT

# Source: pre_tokenizer of tokenizer.json, huggingface.co/meta-llama/Meta-Llama-3-8B.
LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"\p{N}|", r"\p{N}{1,3}|")

Step = tuple[str, ...]


def _split(regex: str) -> Step:
    return ("Split", regex, "Isolated", "invert=false")


def _byte_level(use_regex: bool) -> Step:
    return ("ByteLevel", "add_prefix_space=false", f"use_regex={json.dumps(use_regex)}")


# Steps of a pre_tokenizer and llama.cpp's name for them. Its name decides more: under llama-bpe a piece that is a token
# is taken whole, whatever the merges say.
# Source: llama.cpp, src/llama-vocab.cpp, llm_tokenizer_bpe and llama_vocab::impl::load; tokenizer.json of
# Qwen/Qwen2-0.5B, meta-llama/Meta-Llama-3-8B, HuggingFaceTB/SmolLM2-135M and openai-community/gpt2.
PRE_TOKENIZERS: dict[tuple[Step, ...], str] = {
    (_split(QWEN2_SPLIT), _byte_level(False)): "qwen2",
    (_split(LLAMA3_SPLIT), _byte_level(False)): "llama-bpe",
    (("Digits", "individual_digits=true"), _byte_level(True)): "smollm",
    (_byte_level(True),): "gpt-2",
}


def pre_tokenizer_label(tokenizer: dict[str, Any]) -> str:
    """llama.cpp's name of the split of a tokenizer.json.

    Raises:
        ExportError: saying what the tokenizer does and what llama.cpp would do instead.
    """
    if tokenizer.get("normalizer") is not None:
        raise ExportError(
            f"tokenizer.json has the normalizer {json.dumps(tokenizer['normalizer'], ensure_ascii=False)[:200]}; "
            "llama.cpp applies none to a byte-level BPE, so ids would differ. Train a tokenizer without one: "
            "hf-tinylm tokenizer train"
        )
    steps = tuple(_as_step(step) for step in sequence_of(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    label = PRE_TOKENIZERS.get(steps)
    if label is None:
        given, nearest = _shown(steps), _nearest(steps)
        raise ExportError(
            f"tokenizer.json splits text by {given or 'nothing'}; llama.cpp reproduces exactly only "
            f"{', '.join(PRE_TOKENIZERS.values())}. The nearest is {PRE_TOKENIZERS[nearest]}: {_shown(nearest)}. "
            "Train a tokenizer with one of them: hf-tinylm tokenizer train"
        )
    whole_words = bool((tokenizer.get("model") or {}).get("ignore_merges"))
    if whole_words != (label == "llama-bpe"):
        raise ExportError(
            f"tokenizer.json has ignore_merges={json.dumps(whole_words)} in its BPE model; llama.cpp does "
            f"{json.dumps(not whole_words)} for the split {label}, so some words would get other ids."
        )
    decoders = [step.get("type") for step in sequence_of(tokenizer.get("decoder"), "decoders")]
    if decoders != ["ByteLevel"]:
        raise ExportError(f"tokenizer.json decodes by {decoders or 'nothing'}; ByteLevel is needed.")
    return label


def adds_bos(tokenizer: dict[str, Any], bos_token: str | None) -> bool:
    """Whether a tokenizer.json puts its bos token before every text; any other added token is refused.

    transformers writes a TemplateProcessing that adds nothing by itself, which is the same as none.
    """
    found = False
    for step in sequence_of(tokenizer.get("post_processor"), "processors"):
        kind = step.get("type")
        if kind == "ByteLevel" or (kind == "TemplateProcessing" and not step.get("special_tokens")):
            continue
        pieces = (
            [next(iter(piece.items())) for piece in step.get("single") or []] if kind == "TemplateProcessing" else []
        )
        shape = [(name, value.get("id")) for name, value in pieces]
        if bos_token is None or shape != [("SpecialToken", bos_token), ("Sequence", "A")]:
            raise ExportError(
                f"tokenizer.json adds special tokens around every text ({kind}: {shape}); llama.cpp adds at most the "
                f"bos token {bos_token!r} in front. Remove the post_processor."
            )
        found = True
    return found


def sequence_of(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The steps of a tokenizer component, which is absent, single or a Sequence."""
    if step is None:
        return []
    return list(step.get(key, [])) if step.get("type") == "Sequence" else [step]


def _as_step(step: dict[str, Any]) -> Step:
    """What a step does, without settings that leave ids alone (offsets) and with defaults written out."""
    kind = str(step.get("type"))
    if kind == "Split":
        pattern = step.get("pattern")
        regex = pattern.get("Regex") if isinstance(pattern, dict) else None
        text = str(regex) if regex is not None else f"the plain text {json.dumps(pattern, ensure_ascii=False)}"
        return (kind, text, str(step.get("behavior")), f"invert={json.dumps(bool(step.get('invert')))}")
    defaults = {"ByteLevel": {"add_prefix_space": True, "use_regex": True}, "Digits": {"individual_digits": False}}
    settings = {**defaults.get(kind, {}), **{name: value for name, value in step.items() if name != "type"}}
    settings.pop("trim_offsets", None)
    return (kind, *(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(settings.items())))


def _nearest(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The known split that has the same kinds of steps, else the one that is spelled most like `steps`."""

    def likeness(known: tuple[Step, ...]) -> tuple[bool, float]:
        same_kinds = [step[0] for step in known] == [step[0] for step in steps]
        return same_kinds, difflib.SequenceMatcher(None, _shown(steps), _shown(known)).ratio()

    return max(PRE_TOKENIZERS, key=likeness)


def _shown(steps: tuple[Step, ...]) -> str:
    return " then ".join(f"{name}({', '.join(settings)})" for name, *settings in steps)
