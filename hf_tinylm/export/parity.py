"""Does a GGUF file do in llama.cpp what its model folder does in Hugging Face? Ids, numbers, text, ends and template.

Every comparison is against transformers in float32 on the CPU; agreement of the most likely token alone is not taken as
proof (a file with wrong rotary rows still agrees on most repetitive text).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, VerificationError
from ..gguf_plan import FILE_TYPE_NUMBERS, GGUFType
from .llamacpp import LlamaCppServer, chosen_threads
from .logits import every_logit_is_available, raw_logits
from .quality import Quality, QualityLimits, limits_of, log_softmax, measure_quality

# Largest difference of a log-probability or logit (nats) of files that hold the model's own numbers, nearly or exactly;
# the other types are held to limits of what they cost (`quality.DEFAULT_LIMITS`).
LOGIT_LIMITS: dict[GGUFType, float] = {"f32": 1e-3, "f16": 0.1}
GPT2_LIMIT = 2e-2  # of f32: ggml looks gelu_new up in a table of float16 values
RANDOM_STRINGS = 5_000
GREEDY_TOKENS = 64
# Below this, float32 probabilities lose digits before their logarithm is taken, so only "also tiny" is required.
SMALLEST_LOGPROB = -80.0

HOSTILE_STRINGS = (
    "", " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\r", "\r\n", "\r\n\r\n", "\t", "\t\t", " \t \n \r\n ", "a\tb",
    "a\r\nb", "hello world", "Hello, World!", " leading", "trailing ", "two  spaces", "three   spaces",
    "x\n  indented\n\tcode\n", "1", "12", "123", "1234567890", "3.14159", "1,000,000", "2024-02-29T23:59:60Z", "0x1F",
    "x1y22z333", "²³¹", "½¾", "Ⅷ", "٣٤٥", "don't", "DON'T", "Don'T", "we'll we'Ll WE'LL they've I'm he'd you're",
    "it's'd'll", "'s", "''", "'", "rock'n'roll", "’s", "'st", "안녕하세요", "안녕 하세요.",
    "한국어 문장을 조금 넣는다.", "ㅋㅋㅋ", "가각간", "가각", "日本語のテキスト", "你好，世界！", "ไทย", "हिन्दी",
    "العربية", "עברית", "Ελληνικά", "Привет, мир", "naïve café Zürich Straße", "e\u0301 n\u0303 a\u030a", "\u0301",
    "a\u0301\u0302\u0303\u0304b", "🙂", "🙂🙂", " 🙂 ", "👩‍👩‍👧‍👦", "👍🏽", "🇰🇷🇺🇸", "❤️", "☃\ufe0f",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "𐍈", "𠀀", "\U0010ffff", "\ufffd", "\ufeffbom", "\x00", "a\x00b", "\x01\x02\x1f\x7f",
    "\x0b\x0c", "\x1c\x1d\x1e", "\x85", "\xa0", "a\xa0b", "\u2003x", "\u200b", "\u200dx", "\u2028\u2029", "\u3000",
    "a\u00adb", "\u202eabc\u202c", "...", "!!!???", "--- *** ===", "$100 + €50 = £?", "a_b-c/d\\e",
    "<tag attr=\"1\">", "{{x}} {% y %}", "[INST]", "def f(x):\n    return x ** 2  # square\n",
    "for (int i=0;i<10;++i){a[i]+=1;}", "https://example.org/a?b=c&d=%20#e", "a@b.co", "<|", "|>", "<|endoftext",
    "endoftext|>", "< |endoftext|>", "<s>", "</s>", "<unk>", "<pad>", "[PAD]", "<|eot_id|>", "<|end|>", "a" * 300,
    " " * 65, "\n" * 33, "9" * 70, "ab" * 100, "!" * 50, "가" * 60,
    "The quick brown fox jumps over the lazy dog. " * 5,
)  # fmt: skip

_TEXT_PROMPT = (
    "In the morning of 3 May, Dr Kim's two dogs ran 12 miles north; nobody knew why, and few asked. 한국어도 조금."
)

_CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "안녕하세요 🙂\n\nWhat's  up?\t"}],
    [
        {"role": "user", "content": " leading and trailing \n"},
        {"role": "assistant", "content": "One.\nTwo <b>&amp;</b> \"three\" 'four' \\n"},
        {"role": "user", "content": "{{ x }} {% if %} <|im_end|>"},
    ],
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "4"},
    ],
)


@dataclass
class ParityReport:
    """What was compared and how it ended; `failures` has one line for each thing that differs.

    Attributes:
        token_mismatches: strings with at least one different id, of `strings` compared.
        max_logit_difference: largest difference of log-probabilities (nats) over whole vocabularies at `positions`
            positions, and of raw logits at `raw_positions` more where llama-cpp-python is installed.
        logit_limit: what it may be; None for a quantized file, which is held to `quality_limits` instead.
        greedy_equal: `greedy_tokens` greedy ids were the same, up to the first that ends generation; None for a
            quantized file, whose text may differ.
        ties: greedy positions where llama.cpp took another token, whose logit Hugging Face has within `logit_limit` of
            the best; they do not count as different, and the comparison goes on from Hugging Face's choice.
        ends_equal: llama.cpp stops at every id at which Hugging Face does, and at no ordinary token.
        template_equal: conversations render to the same text; None for a model without a chat template.
    """

    gguf: str
    model: str
    file_type: GGUFType = "f32"
    token_mismatches: int = 0
    strings: int = 0
    max_logit_difference: float = 0.0
    logit_limit: float | None = None
    positions: int = 0
    raw_positions: int = 0
    greedy_equal: bool | None = None
    greedy_tokens: int = 0
    ties: int = 0
    ends_equal: bool = True
    template_equal: bool | None = None
    quality: Quality | None = None
    quality_limits: QualityLimits | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing differs."""
        return not self.failures

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values; a difference that is not a number becomes null."""
        difference = self.max_logit_difference if math.isfinite(self.max_logit_difference) else None
        quality = None if self.quality is None else self.quality.to_json()
        return {"ok": self.ok, **asdict(self), "max_logit_difference": difference, "quality": quality}


def verify_gguf(
    gguf: Path,
    model_folder: Path,
    random_strings: int = RANDOM_STRINGS,
    threads: int = 0,
    text: Path | None = None,
    limits: Mapping[str, float] | None = None,
    reference: Reference | None = None,
) -> ParityReport:
    """Compare a GGUF file in llama.cpp with its stock model folder in transformers.

    Args:
        text: what the predictions are compared on; bundled prose by default.
        limits: fields of `QualityLimits` in place of the defaults of the file's type.
        reference: the loaded model folder, for several files of one model.

    Raises:
        MissingExtraError: xllamacpp is not installed.
        ConfigError: the file, folder or text does not exist.
        VerificationError: llama.cpp does not load the file, or dies while it runs.
    """
    gguf, model_folder = Path(gguf), Path(model_folder)
    if not (model_folder / "config.json").is_file():
        raise ConfigError(f"{model_folder} has no config.json. Give the model folder that the file was made from.")
    if not gguf.is_file():
        raise ConfigError(f"{gguf} does not exist. Give a GGUF file.")
    file_type, architecture, has_template = _read_metadata(gguf)
    limit = GPT2_LIMIT if (architecture, file_type) == ("gpt2", "f32") else LOGIT_LIMITS.get(file_type)
    report = ParityReport(str(gguf), str(model_folder), file_type, logit_limit=limit)
    reference = reference or Reference(model_folder)
    with LlamaCppServer(gguf, context_length=max(256, reference.context), threads=threads) as server:
        _compare_tokens(report, server, reference, [*HOSTILE_STRINGS, *random_unicode_strings(random_strings)])
        ends = _compare_ends(report, server, reference)
        prompts = reference.prompts()
        _compare_logprobs(report, server, reference, prompts)
        if report.logit_limit is not None:
            if every_logit_is_available():
                _compare_raw_logits(report, gguf, reference, prompts, threads or chosen_threads(gguf))
            for prompt in prompts[:2]:
                _compare_greedy(report, server, reference, prompt, ends)
        _compare_templates(report, server, reference, has_template)
        if not report.failures:  # the cost of a file that is wrong says nothing
            _compare_quality(report, gguf, server, reference, text, limits_of(file_type, limits))
    return report


def random_unicode_strings(count: int, seed: int = 0) -> list[str]:
    """Seeded strings of 1 to 40 characters, in short runs of one kind: a script, spaces, digits, symbols, emoji."""
    generator = random.Random(seed)
    pools: list[Sequence[int]] = [
        range(0x20, 0x7F), range(0x20, 0x7F), range(0x00, 0x20), range(0x7F, 0x250), range(0x300, 0x370),
        range(0x370, 0x530), range(0x590, 0x700), range(0x900, 0xE80), range(0x1100, 0x1200), range(0x1E00, 0x2000),
        range(0x2000, 0x2070), range(0x2070, 0x2C00), range(0x3000, 0x3100), range(0x4E00, 0xA000),
        range(0xAC00, 0xD7A4), range(0xFE00, 0xFE10), range(0xFF00, 0xFFF0), range(0x1D400, 0x1D800),
        range(0x1F300, 0x1FAFF), range(0x20000, 0x2A6E0),
    ]  # fmt: skip
    pools += [
        [ord(letter) for letter in letters] for letters in (" \t\n\r", " \n'.,0123sStTlLmMdDrReEvV", "0123456789")
    ]
    strings = []
    for _ in range(count):
        length = generator.randint(1, 40)
        text = ""
        while len(text) < length:
            text += "".join(map(chr, generator.choices(generator.choice(pools), k=generator.randint(1, 6))))
        strings.append(text[:length])
    return strings


class Reference:
    """The Hugging Face side: tokenizer, float32 model and the ids that end its generation."""

    def __init__(self, model_folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
        self.tokenizer.model_max_length = 10**9  # no warning: the strings compared are never fed to the model
        self.model = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, local_files_only=True
        ).eval()
        self.tokens = len(self.tokenizer)
        self.context = min(512, int(self.model.config.max_position_embeddings))
        ends = self.model.generation_config.eos_token_id
        self.end_ids = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        added = self.tokenizer.added_tokens_decoder
        self.added_texts = [token.content for token in added.values()]
        self.special_ids = {token_id for token_id, token in added.items() if token.special}

    def encode(self, texts: list[str], parse_special: bool, add_special: bool = False) -> list[list[int]]:
        """Ids of each text; with `parse_special` false the texts of special tokens are ordinary text."""
        encoded = self.tokenizer(texts, add_special_tokens=add_special, split_special_tokens=not parse_special)
        return [list(row) for row in encoded["input_ids"]]

    def prompts(self) -> list[list[int]]:
        """Non-repetitive prompts that leave room for the greedy tokens: one of text, three of distinct random ids."""
        longest = max(1, min(48, self.context - GREEDY_TOKENS))
        ordinary = sorted(set(range(self.tokens)) - self.special_ids)
        generator = random.Random(1)
        rows = [self.encode([_TEXT_PROMPT], parse_special=False)[0]]
        rows += [generator.sample(ordinary, min(longest, len(ordinary))) for _ in range(3)]
        return [row[:longest] for row in rows]

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits (positions, V) in float64; padding rows of the embedding, which no file has, are left out."""
        import torch

        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0, :, : self.tokens].double().numpy()

    def greedy(self, prompt: list[int], count: int, ends: set[int]) -> tuple[list[int], np.ndarray]:
        """At most `count` greedy ids up to one of `ends`, and the logits (ids, V) that each was chosen from."""
        import torch
        from transformers import GenerationConfig

        rows = self.model.config.vocab_size
        self.model.generation_config = GenerationConfig()  # generate() fills what is left open from here
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
            suppress_tokens=list(range(self.tokens, rows)) or None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        with torch.inference_mode():
            output = self.model.generate(torch.tensor([prompt]), generation_config=settings)
        ids = output.sequences[0, len(prompt) :].tolist()
        return ids, torch.cat(output.logits)[:, : self.tokens].double().numpy()


def _read_metadata(gguf: Path) -> tuple[GGUFType, str, bool]:
    """The type of the file, its architecture, and whether it holds a chat template."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(gguf).fields
    except (ValueError, IndexError, OSError, UnicodeDecodeError) as error:
        raise VerificationError(f"{gguf} is not a whole GGUF file ({error}). Export it again.") from error
    number = fields["general.file_type"].contents() if "general.file_type" in fields else None
    for file_type, known in FILE_TYPE_NUMBERS.items():
        if known == number:
            return file_type, fields["general.architecture"].contents(), "tokenizer.chat_template" in fields
    raise VerificationError(
        f"{gguf} has general.file_type {number}; {', '.join(FILE_TYPE_NUMBERS)} can be compared with their model."
    )


def _compare_tokens(report: ParityReport, server: LlamaCppServer, reference: Reference, texts: list[str]) -> None:
    for special in reference.added_texts:
        texts += [special, f"a{special}b", f" {special} ", f"{special}{special}", special[:-1], f"\n{special}\n"]
    texts = list(dict.fromkeys(texts))
    wrong: dict[str, str] = {}
    for parse_special in (False, True):
        theirs, ours = server.tokenize(texts, parse_special), reference.encode(texts, parse_special)
        for text, got, wanted in zip(texts, theirs, ours, strict=True):
            if got != wanted:
                wrong.setdefault(
                    text, f"{text!r} (parse_special={parse_special}): llama.cpp {got[:12]}, Hugging Face {wanted[:12]}"
                )
    # with bos and eos allowed, neither side may add one
    few = list(HOSTILE_STRINGS[:24])
    for text, got, wanted in zip(few, server.tokenize(few, True, True), reference.encode(few, True, True), strict=True):
        if got != wanted:
            wrong.setdefault(text, f"{text!r} (add_special): llama.cpp {got[:12]}, Hugging Face {wanted[:12]}")
    report.strings, report.token_mismatches = len(texts), len(wrong)
    if wrong:
        report.failures.append(
            f"{len(wrong):,} of {len(texts):,} strings have other token ids, such as {next(iter(wrong.values()))}"
        )


def _compare_ends(report: ParityReport, server: LlamaCppServer, reference: Reference) -> set[int]:
    """Compare where generation ends; returns the ids at which either side stops."""
    theirs, ours = server.end_of_generation_ids(), reference.end_ids
    problems = []
    if not ours <= theirs:
        problems.append(f"Hugging Face stops at {sorted(ours - theirs)}, llama.cpp does not")
    if theirs - ours - reference.special_ids:
        problems.append(f"llama.cpp stops at the ordinary tokens {sorted(theirs - ours - reference.special_ids)}")
    if not ours:
        problems.append("generation_config.json names no eos_token_id")
    eos_text = server.special_texts()["eos_token"]
    if eos_text != reference.tokenizer.eos_token:
        problems.append(f"eos_token is {eos_text!r} in llama.cpp, {reference.tokenizer.eos_token!r} in Hugging Face")
    report.ends_equal = not problems
    report.failures += problems
    return ours | theirs


def _compare_logprobs(
    report: ParityReport, server: LlamaCppServer, reference: Reference, prompts: list[list[int]]
) -> None:
    differences = []
    for prompt in prompts:
        logits = reference.logits(prompt)
        for length in sorted({min(len(prompt), n) for n in (1, 2, 5, 12, 24, 48)}):
            ours = log_softmax(logits[length - 1])
            theirs = server.next_token_logprobs(prompt[:length], reference.tokens)
            differences.append(_largest_difference(ours, theirs))
    report.positions = len(differences)
    report.max_logit_difference = float(np.max(differences))  # NaN if any is
    _judge_logits(report, "log-probabilities", report.positions)


def _compare_raw_logits(
    report: ParityReport, gguf: Path, reference: Reference, prompts: list[list[int]], threads: int
) -> None:
    """Every position of the prompts; also sees a common shift of all logits, which the probabilities hide."""
    largest = 0.0
    for prompt, theirs in zip(prompts, raw_logits(gguf, prompts, reference.tokens, threads), strict=True):
        largest = float(np.maximum(largest, np.abs(reference.logits(prompt) - theirs).max()))
        report.raw_positions += len(prompt)
    report.max_logit_difference = float(np.maximum(report.max_logit_difference, largest))
    _judge_logits(report, "logits", report.raw_positions)


def _judge_logits(report: ParityReport, what: str, positions: int) -> None:
    # a NaN exceeds nothing and must pass nothing
    if report.logit_limit is not None and not report.max_logit_difference <= report.logit_limit:
        report.failures.append(
            f"{what} differ by up to {report.max_logit_difference:.4g} at {positions} positions; "
            f"the limit for this file type is {report.logit_limit:g}"
        )


def _compare_quality(
    report: ParityReport,
    gguf: Path,
    server: LlamaCppServer,
    reference: Reference,
    text: Path | None,
    limits: QualityLimits | None,
) -> None:
    report.quality = measure_quality(gguf, server, reference, text)
    if limits is not None:
        report.quality_limits = limits
        report.failures += report.quality.failures(limits)


def _largest_difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Largest absolute difference of two (V,) log-probability rows; both are first raised to SMALLEST_LOGPROB."""
    return float(np.abs(np.maximum(ours, SMALLEST_LOGPROB) - np.maximum(theirs, SMALLEST_LOGPROB)).max())


def _compare_greedy(
    report: ParityReport, server: LlamaCppServer, reference: Reference, prompt: list[int], ends: set[int]
) -> None:
    assert report.logit_limit is not None
    report.greedy_equal = report.greedy_equal is not False
    wanted, logits = reference.greedy(prompt, min(GREEDY_TOKENS, reference.context - len(prompt)), ends)
    done = 0
    while done < len(wanted):
        got = server.generate(prompt + wanted[:done], len(wanted) - done).ids
        agreed = next(
            (i for i, pair in enumerate(zip(got, wanted[done:], strict=False)) if pair[0] != pair[1]), len(got)
        )
        done += agreed
        if done >= len(wanted):
            break
        if agreed == len(got):
            report.failures.append(f"llama.cpp stopped after {done} greedy tokens, Hugging Face after {len(wanted)}")
            report.greedy_equal = False
            break
        row, other = logits[done], got[agreed]
        gap = float(row[wanted[done]] - row[other])
        if not gap <= report.logit_limit:
            report.failures.append(
                f"greedy token {done + 1} is {other} in llama.cpp and {wanted[done]} in Hugging Face, "
                f"which has their logits {gap:.4g} apart"
            )
            report.greedy_equal = False
            break
        report.ties += 1
        done += 1
    report.greedy_tokens += done


def _compare_templates(report: ParityReport, server: LlamaCppServer, reference: Reference, has_template: bool) -> None:
    import jinja2

    if has_template != bool(reference.tokenizer.chat_template):
        holder, other = ("file", "folder") if has_template else ("folder", "file")
        report.template_equal = False
        report.failures.append(f"the {holder} has a chat template and the {other} has none")
        return
    if not has_template:
        return
    report.template_equal = True
    rendered = 0
    for conversation in _CONVERSATIONS:
        for prompted in (False, True):
            try:
                ours = reference.tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=prompted
                )
            except jinja2.TemplateError:  # the template refuses this kind of conversation, such as a system turn
                continue
            rendered += 1
            theirs = server.apply_chat_template(conversation, prompted)
            if theirs != ours:
                report.template_equal = False
                report.failures.append(f"the chat template renders {theirs!r} in llama.cpp, {ours!r} in Hugging Face")
                return
    if not rendered:
        report.template_equal = False
        report.failures.append("the chat template renders none of the conversations it was tried on")
