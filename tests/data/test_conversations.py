"""Conversations from files: what is read, what is left out and why, how it is cut, mixed and kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_tinylm.config import load_config
from hf_tinylm.data.conversations import Conversations, load_conversations, open_conversations
from hf_tinylm.data.renderings import Rendering, check_masks, render_source
from hf_tinylm.errors import ConfigError, DataError
from hf_tinylm.sections import ConversationSource
from hf_tinylm.tokenization.chat import ChatRenderer

ChatFile = Callable[..., Path]
SHORT = [("user", "hi"), ("assistant", "yo")]
SHORT_IDS = len("Suser\nhiE\nSassistant\nyoE\n")


def source(path: Path, **fields: Any) -> ConversationSource:
    return ConversationSource(fields.pop("name", path.stem), str(path), **fields)


def texts(chats: Conversations, tokenizer: Any) -> list[str]:
    """Inputs of each conversation and its last target as text, S and E for control tokens, [ ] around targets."""
    found = []
    for i in range(len(chats)):
        inputs, targets = chats.inputs_and_targets(i)
        shown, inside = "", False
        for place, id_ in enumerate([*inputs.tolist(), None]):
            supervised = place > 0 and targets[place - 1] != -100
            shown += "[" if supervised and not inside else "]" if inside and not supervised else ""
            inside = supervised
            last = id_ if id_ is not None else (int(targets[-1]) if targets[-1] != -100 else None)
            if last is not None:
                shown += {1: "S", 2: "E"}.get(last) or tokenizer.decode([last])
        found.append(shown + ("]" if inside else ""))
    return found


def test_targets_are_the_replies_or_everything(chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path) -> None:
    path = chat_file("short.jsonl", [SHORT])
    for assistant_only_loss, expected in (
        (True, "Suser\nhiE\nSassistant\n[yoE]"),
        (False, "S[user\nhiE\nSassistant\nyoE\n]"),
    ):
        chats = load_conversations([source(path)], byte_chat_tokenizer, 64, assistant_only_loss, cache=tmp_path)
        assert texts(chats, byte_chat_tokenizer) == [expected]
        assert chats.targets.tolist() == [3 if assistant_only_loss else SHORT_IDS - 1]
        assert chats.positions.tolist() == [SHORT_IDS - 1]


THREE = [("system", "be"), ("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second")]


@pytest.mark.parametrize(
    ("truncation", "length", "expected", "dropped"),
    [
        ("drop", 60, [], {"too_long": 1}),
        ("left", 60, ["m\nbeE\nSuser\naE\nSassistant\n[firstE]\nSuser\nbE\nSassistant\n[secondE]"], {}),
        ("left", 30, ["t[E]\nSuser\nbE\nSassistant\n[secondE]"], {}),
        ("left", 5, ["c[ondE]"], {}),
        ("turns", 60, ["Ssystem\nbeE\nSuser\naE\nSassistant\n[firstE]\nSuser\nbE"], {}),
        ("turns", 40, ["Ssystem\nbeE\nSuser\naE\nSassistant\n[firstE]"], {}),
        ("turns", 20, [], {"no_supervised_token": 1}),
        ("turns", 5, [], {"no_supervised_token": 1}),
    ],
)
def test_a_long_conversation_is_cut_as_asked(
    chat_file: ChatFile,
    byte_chat_tokenizer: Any,
    tmp_path: Path,
    truncation: Any,
    length: int,
    expected: list[str],
    dropped: dict[str, int],
) -> None:
    """`left` may begin inside a reply, which then loses its first token as a target; no policy loses the end of one."""
    path = chat_file("three.jsonl", [THREE])

    def load() -> Conversations:
        return load_conversations([source(path)], byte_chat_tokenizer, length, truncation=truncation, cache=tmp_path)

    if not expected:
        with pytest.raises(DataError, match=rf"sequence_length={length} \(elsewhere called max_length\)") as caught:
            load()
        assert all(f"{count} {why}" in str(caught.value) for why, count in dropped.items())
        return
    chats = load()
    assert texts(chats, byte_chat_tokenizer) == expected
    assert chats.positions.max() <= length
    assert chats.facts["three"]["truncated"] == 1
    assert chats.facts["three"]["dropped"] == dropped


def test_a_conversation_that_just_fits_is_whole(chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path) -> None:
    path = chat_file("short.jsonl", [SHORT])
    chats = load_conversations([source(path)], byte_chat_tokenizer, SHORT_IDS - 1, cache=tmp_path)
    assert chats.facts["short"]["dropped"] == {}
    with pytest.raises(DataError, match="1 too_long"):
        load_conversations([source(path)], byte_chat_tokenizer, SHORT_IDS - 2, cache=tmp_path)


def test_a_row_whose_reply_is_cut_off_is_dropped_beside_a_good_one(
    chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path
) -> None:
    path = chat_file("mixed.jsonl", [[("user", "hello " * 40), ("assistant", "world")], SHORT])
    for truncation, kept, dropped in (
        ("drop", 1, {"too_long": 1}),
        ("turns", 1, {"no_supervised_token": 1}),
        ("left", 2, {}),
    ):
        chats = load_conversations(
            [source(path)],
            byte_chat_tokenizer,
            32,
            truncation=truncation,
            cache=tmp_path,  # type: ignore[arg-type]
        )
        assert (len(chats), chats.facts["mixed"]["dropped"]) == (kept, dropped)
        assert chats.targets.min() > 0


def test_malformed_rows_are_counted_with_their_reason_and_the_first_place(
    byte_chat_tokenizer: Any, tmp_path: Path
) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}], "source": "x"}
    rows: list[Any] = [
        {"messages": None},
        {"text": "no messages"},
        good,
        {"messages": [{"role": "bot", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": None}]},
        {"messages": [{"role": "bot", "content": "y"}]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    chats = load_conversations([source(path)], byte_chat_tokenizer, 64, cache=tmp_path)
    facts = chats.facts["rows"]
    assert facts["dropped"] == {"no_messages": 2, "unknown_role": 2, "null_content": 1}
    assert (facts["rows"], facts["documents"]) == (6, 1)
    assert (
        f"2 unknown_role (a message has another role than system, user, assistant; first at {path} line 4)"
        in (facts["first_faults"])
    )
    path.write_text(json.dumps(rows[0]) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"none of the 1 rows of .* is a conversation"):
        load_conversations([source(path)], byte_chat_tokenizer, 64, cache=tmp_path)
    path.write_text("{broken\n", encoding="utf-8")
    with pytest.raises(DataError, match="line 1 is not valid JSON"):
        load_conversations([source(path)], byte_chat_tokenizer, 64, cache=tmp_path)
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(DataError, match=r"text.txt holds no rows"):
        load_conversations([source(tmp_path / "text.txt")], byte_chat_tokenizer, 64, cache=tmp_path)


def test_parquet_and_another_column_give_the_same_as_jsonl(
    chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path
) -> None:
    import datasets

    path = chat_file("chats.jsonl", [SHORT, THREE])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    table = datasets.Dataset.from_list([{"turns": row["messages"], "source": "x"} for row in rows])
    table.to_parquet(str(tmp_path / "chats.parquet"))
    first = render_source(source(path), byte_chat_tokenizer, tmp_path)
    second = render_source(source(tmp_path / "chats.parquet", messages_column="turns"), byte_chat_tokenizer, tmp_path)
    assert first.sha256 == second.sha256


def test_a_filter_takes_the_rows_with_an_allowed_value(byte_chat_tokenizer: Any, tmp_path: Path) -> None:
    import datasets

    messages = [{"role": role, "content": content} for role, content in SHORT]
    rows = [{"messages": messages, "kind": kind} for kind in ("a", "b", "c", "a")] + [
        {"messages": messages, "kind": None}
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("rows.jsonl", "rows.parquet"):
        chosen = source(tmp_path / name, filter_column="kind", allowed_values=["a", "c"])
        assert len(render_source(chosen, byte_chat_tokenizer, tmp_path)) == 3
        assert len(render_source(source(tmp_path / name), byte_chat_tokenizer, tmp_path)) == 5
    with pytest.raises(ConfigError, match="A filter needs both: filter_column: NAME"):
        load_config(None, ["--conversations", "[{name: a, path: x, filter_column: kind}]"])


def test_a_cache_that_cannot_be_written_is_named_with_what_moves_it(
    chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path
) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match=r"the cache .*taken.* cannot be written \(.*HF_DATASETS_CACHE=DIR"):
        render_source(source(chat_file("chats.jsonl", [SHORT])), byte_chat_tokenizer, tmp_path / "taken")


def test_a_rendering_is_kept_and_made_afresh_when_rows_change_or_the_cache_is_damaged(
    chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = chat_file("chats.jsonl", [SHORT, THREE]), tmp_path / "cache"
    rendered: list[Any] = []
    plain = ChatRenderer.render
    monkeypatch.setattr(
        ChatRenderer,
        "render",
        lambda self, *a, **k: rendered.append(a) or plain(self, *a, **k),  # type: ignore[func-returns-value]
    )
    first = render_source(source(path), byte_chat_tokenizer, cache)
    again = render_source(source(path), byte_chat_tokenizer, cache)
    assert len(rendered) == 2
    assert first.sha256 == again.sha256
    (file,) = cache.glob("*/ids.bin")
    content = bytearray(file.read_bytes())
    content[40] ^= 1
    file.write_bytes(content)
    assert render_source(source(path), byte_chat_tokenizer, cache).sha256 == first.sha256
    assert len(rendered) == 4
    shutil.copy(chat_file("other.jsonl", [SHORT]), path)
    assert render_source(source(path), byte_chat_tokenizer, cache).sha256 != first.sha256


@pytest.mark.parametrize(
    "spoil",
    [
        lambda ids, mask, end: mask.__setitem__(end, False),  # the end token outside the span
        lambda ids, mask, end: mask.__setitem__(end + 1, True),  # the newline behind it inside
        lambda ids, mask, end: mask.__setitem__(end - 3, True),  # the last of the header inside
        lambda ids, mask, end: mask.__setitem__(slice(None), False),
        lambda ids, mask, end: mask.__setitem__(5, True),  # a user's token
        lambda ids, mask, end: ids.__setitem__(7, 1),  # a control token inside a message
        lambda ids, mask, end: ids.__setitem__(7, 2),
        lambda ids, mask, end: mask.__setitem__(end - 2, False),  # the first of the reply outside
    ],
)
def test_a_wrong_mask_is_found_before_training(
    chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path, spoil: Callable[..., None]
) -> None:
    rendering = render_source(source(chat_file("c.jsonl", [THREE, SHORT, SHORT])), byte_chat_tokenizer, tmp_path)
    renderer = ChatRenderer(byte_chat_tokenizer)
    check_masks(rendering, renderer, "c")
    ids, mask = np.array(rendering.ids), np.array(rendering.supervised)
    begin = int(rendering.starts[1])
    spoil(ids[begin:], mask[begin:], SHORT_IDS - 2)
    with pytest.raises(DataError, match="source c: the mask of conversation 2 is wrong"):
        check_masks(replace(rendering, ids=ids, supervised=mask), renderer, "c")


def test_replies_of_every_kind_pass_the_check(chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path) -> None:
    kinds = [
        [("assistant", ""), ("user", "\n"), ("assistant", "\n\nx"), ("assistant", "<|im_end|>")],
        [("system", "assistant\n"), ("user", "assistant\nx"), ("assistant", "y")],
        *([SHORT] * 5000),  # more than are looked at together
    ]
    rendering: Rendering = render_source(source(chat_file("k.jsonl", kinds)), byte_chat_tokenizer, tmp_path)
    check_masks(rendering, ChatRenderer(byte_chat_tokenizer), "kinds")


def test_sources_are_mixed_by_epochs_and_shares(chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path) -> None:
    persona = chat_file("persona.jsonl", [[("user", "who"), ("assistant", f"{i:03}")] for i in range(40)])
    general = chat_file("general.jsonl", [[("user", "what"), ("assistant", "abcdefg")] for i in range(200)])

    def load(share: float, seed: int = 0) -> Conversations:
        sources = [source(persona, epochs=2.5), source(general, share=share)]
        return load_conversations(sources, byte_chat_tokenizer, 64, seed=seed, cache=tmp_path)

    chats = load(0.2)
    counts = np.bincount(chats.begin[chats.source == 0])
    assert sorted(counts[counts > 0].tolist()) == [2] * 20 + [3] * 20
    assert chats.facts["persona"]["supervised_tokens"] == 100 * 4
    assert chats.facts["general"]["supervised_tokens"] in range(100, 100 + 8)  # a fifth of 500, whole conversations
    assert len(set(chats.begin[chats.source == 1].tolist())) == 13
    assert load(0.2).sha256 == chats.sha256
    assert load(0.2, seed=1).sha256 != chats.sha256
    repeated = load(0.9)
    assert repeated.facts["general"]["supervised_tokens"] in range(3600, 3608)
    assert repeated.facts["general"]["passes"] == pytest.approx(450 / 200)


@pytest.mark.parametrize(
    ("conversations", "told"),
    [
        ("[{name: a, path: x}, {name: a, path: y}]", "Two sources are named 'a'"),
        ("[{name: a, path: x, share: 1.5}, {name: b, path: y}]", "add up to 1.5; below 1 is needed"),
        ("[{name: a, path: x, share: 0.5}]", "a source without a share"),
        ("[{name: a, path: x, share: 0.5, epochs: 2}]", "has epochs and share"),
        ("[{name: a, path: x, epochs: 0}]", "epochs=0.0 of source 'a' must be above 0"),
        ("[{name: a, path: x, role: y}]", "Unknown key in data.conversations"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(conversations: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(None, ["--conversations", conversations])


def test_a_configuration_gives_windows_a_report_and_an_identity(
    chat_file: ChatFile, byte_chat_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    path = chat_file("c.jsonl", [SHORT] * 9)
    settings = ["--sequence_length", "64", "--global_batch_tokens", "64", "--conversations"]
    data = open_conversations(load_config(None, [*settings, f"[{{name: c, path: {path}}}]"]), byte_chat_tokenizer)
    assert (len(data.train), data.test) == (5, None)
    assert data.lines() == [
        f"train: 9 conversations in 5 windows, {9 * (SHORT_IDS - 1) / 320:.1%} of their positions used; 27 supervised "
        "targets",
        "  c: 9 of 9 rows (1 passes), 27 supervised targets; dropped: none; truncated: 0",
    ]
    other = open_conversations(
        load_config(None, [*settings, f"[{{name: c, path: {path}}}]", "--assistant_only_loss", "false"]),
        byte_chat_tokenizer,
    )
    assert other.identity["conversations_sha256"] != data.identity["conversations_sha256"]
    with pytest.raises(ConfigError, match=r"data\.conversations is empty"):
        open_conversations(load_config(None, []), byte_chat_tokenizer)
