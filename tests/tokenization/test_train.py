"""Training: exact vocabulary, full alphabet, fixed special ids, bounded and repeatable."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys

import pytest
from transformers import PreTrainedTokenizerFast

from hf_tinylm.errors import TokenizerError
from hf_tinylm.tokenization.load import tokenizer_sha256
from hf_tinylm.tokenization.train import train_tokenizer

HELLO = ["hello world"] * 50


def test_every_byte_and_every_character_comes_back_although_training_saw_few() -> None:
    tokenizer, _ = train_tokenizer(HELLO, 268)
    rng = random.Random(0)
    characters = [chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)])) for _ in range(2000)]
    for text in ("hello Zürich\r\n\t🙂\x00", "".join(map(chr, range(256))), "".join(characters)):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        assert len(ids) > 1


def test_special_tokens_have_fixed_ids_and_bytes_follow(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", "!", '"', "#"]
    assert tokenizer.convert_ids_to_tokens(list(range(7))) == expected
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token) == (
        0,
        3,
        None,
        None,
    )


def test_nothing_is_put_before_a_text(tokenizer: PreTrainedTokenizerFast) -> None:
    with_special = tokenizer("Emma was there").input_ids
    assert with_special == tokenizer("Emma was there", add_special_tokens=False).input_ids
    assert not {0, 1, 2, 3} & set(with_special)
    assert tokenizer("").input_ids == []


def test_the_vocabulary_is_as_large_as_asked(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == 2048
    assert max(tokenizer.get_vocab().values()) == 2047


def test_too_little_text_for_the_vocabulary_is_an_error_with_both_numbers() -> None:
    # "hello" takes 4 merges and " world" 5.
    with pytest.raises(TokenizerError, match=r"vocab_size=32,000 .* only 269 tokens .*--vocab_size 269"):
        train_tokenizer(HELLO, 32_000)
    assert len(train_tokenizer(HELLO, 269)[0]) == 269


def test_a_vocabulary_without_room_for_bytes_is_refused() -> None:
    with pytest.raises(TokenizerError, match=r"vocab_size=259 .* 260"):
        train_tokenizer(HELLO, 259)
    assert len(train_tokenizer(HELLO, 260)[0]) == 260


def test_merges_are_those_of_a_plain_count_of_pairs() -> None:
    """Byte-pair encoding by hand on words whose pairs never tie."""
    words = {"abab": 11, "abc": 7, "zz": 5}
    texts = [word for word, count in words.items() for _ in range(count)]
    pieces = {word: list(word) for word in words}
    expected = []
    for _ in range(3):
        counts: dict[tuple[str, str], int] = {}
        for word, parts in pieces.items():
            for pair in itertools.pairwise(parts):
                counts[pair] = counts.get(pair, 0) + words[word]
        best = max(counts, key=lambda pair: counts[pair])
        assert sorted(counts.values())[-1] != sorted([*counts.values(), 0])[-2], "a tie would make the order arbitrary"
        expected.append(list(best))
        for word, parts in pieces.items():
            joined: list[str] = []
            for part in parts:
                if joined and (joined[-1], part) == best:
                    joined[-1] += part
                else:
                    joined.append(part)
            pieces[word] = joined
    tokenizer, _ = train_tokenizer(texts, 263)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"] == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello world", ["Hello", " world"]),
        ("1234", ["1", "2", "3", "4"]),
        ("don't WE'LL", ["don", "'t", " WE", "'LL"]),
        ("a  b", ["a", " ", " b"]),
        ("x;\n\n y", ["x", ";\n\n", " y"]),
        ("a\r\n\tb", ["a", "\r\n", "\tb"]),
        ("end   ", ["end", "   "]),
        ("你好 世界", ["你好", " 世界"]),
    ],
)
def test_words_are_split_as_qwen2_splits_them(text: str, words: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pieces] == words


def test_long_words_are_cut_and_counted_and_ordinary_ones_are_not() -> None:
    texts = ["b" * 64, "short words only " * 10, "x" * 1000, "한" * 43 + " " + "a" * 64, " " * 200]
    # Longer than 64 bytes: the 1,000 letters, the 43 x 3 = 129 bytes and the run of spaces; not the 64 letters, which
    # with the space before them are 65 bytes: one more.
    _, report = train_tokenizer(texts, 262, max_word_bytes=64)
    assert report["words_cut"] == 4
    tokenizer, _ = train_tokenizer(["y" * 10_000] * 3, 261, max_word_bytes=2)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    assert merges[0] == ["y", "y"]
    with pytest.raises(TokenizerError, match="only 261 tokens"):  # words of 2 bytes hold one merge
        train_tokenizer(["y" * 10_000] * 3, 262, max_word_bytes=2)


def test_cutting_is_for_training_only() -> None:
    tokenizer, _ = train_tokenizer(["y" * 8] * 3, 261, max_word_bytes=2)
    assert len(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("y" * 8)) == 1


def test_the_sample_is_capped_in_bytes_and_never_cuts_a_character() -> None:
    def endless():  # type: ignore[no-untyped-def]
        while True:
            yield "é" * 33 + " ab"

    _, report = train_tokenizer(endless(), 262, sample_bytes=1001)
    assert (report["capped"], report["bytes"] <= 1001, report["documents"]) == (True, True, 15)
    _, whole = train_tokenizer(HELLO, 262, sample_bytes=550)
    assert (whole["capped"], whole["bytes"], whole["documents"]) == (False, 550, 50)


def test_another_process_learns_the_same_tokenizer(documents: list[str]) -> None:
    program = (
        "import json, sys\n"
        "from hf_tinylm.tokenization.load import tokenizer_sha256\n"
        "from hf_tinylm.tokenization.train import train_tokenizer\n"
        "print(tokenizer_sha256(train_tokenizer(json.load(sys.stdin), 1024)[0]))"
    )
    sample = documents[:40] + documents[-1:]
    other = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(sample), capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == tokenizer_sha256(train_tokenizer(sample, 1024)[0])


def test_an_empty_document_is_not_the_end_of_the_corpus() -> None:
    texts = ["some words here and there " * 40, "", "other words come after it " * 40]
    _, report = train_tokenizer(texts, 270)
    assert (report["documents"], report["bytes"]) == (2, 2 * 40 * 26)
