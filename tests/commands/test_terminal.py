"""A chat in the terminal remembers, forgets, answers to its commands, and ends as it should."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from hf_tinylm.commands.terminal import chosen_device, origin, reply_once, talk
from hf_tinylm.errors import ConfigError, RunStopped
from hf_tinylm.evaluation.chat import Conversation
from hf_tinylm.tokenization.chat import Drawing


class Echo:
    """Answers with its seed and the number of messages it saw; "stop" is interrupted in the middle of the reply."""

    context = 40

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self.seen.append(list(messages))
        return [0] * sum(len(message["content"].split()) + 1 for message in messages)

    def reply(self, ids: list[int], drawing: Drawing, emit: Callable[[str], None] | None = None) -> tuple[str, bool]:
        if emit is not None:
            emit("so ")
        if self.seen[-1][-1]["content"] == "stop":
            raise KeyboardInterrupt
        text = f"so s{drawing.seed}m{len(self.seen[-1])}"
        if emit is not None:
            emit(text.removeprefix("so "))
        return text, True


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(Echo(), "Be brief.", Drawing(max_new_tokens=10, seed=7))


def typed(*lines: str | type[BaseException]) -> Callable[[str], str]:
    rest: Iterator[str | type[BaseException]] = iter([*lines, EOFError])

    def read_line(prompt: str) -> str:
        line = next(rest)
        if isinstance(line, str):
            return line
        raise line

    return read_line


def test_replies_stream_and_the_history_and_seeds_go_on(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(conversation, typed("one", "", "two", "/seed 100", "three", "/reset", "four", "/exit", "never"))
    # system and the messages so far: 2, then 4, 6, and 2 again after /reset
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("so")] == [
        *("so s7m2", "so s8m4", "so s100m6", "so s100m2")
    ]
    engine = conversation.engine
    assert isinstance(engine, Echo)
    assert engine.seen[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "so s7m2"},
        {"role": "user", "content": "two"},
    ]


def test_a_stopped_reply_leaves_nothing_behind(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    talk(conversation, typed("one", "stop", "two"))
    shown = capsys.readouterr()
    assert "forgotten" in shown.err
    assert shown.out.splitlines()[-2:] == ["so s8m4", ""]


def test_ctrl_c_at_the_prompt_ends_with_130_and_ctrl_d_with_0(conversation: Conversation) -> None:
    talk(conversation, typed())
    with pytest.raises(RunStopped) as end:
        talk(conversation, typed(KeyboardInterrupt))
    assert end.value.exit_code == 130


def test_the_oldest_rounds_are_left_out_with_a_notice_and_a_message_too_long_is_refused(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    # System 3 ids, a round 5 and 3: the fourth message would be id 28 to 32, and a reply needs 10 of 40.
    long = "w w w w"
    talk(conversation, typed(long, long, long, long, "w " * 27, "short"))
    shown = capsys.readouterr()
    assert [line for line in shown.out.splitlines() if line.startswith("so")] == [
        *("so s7m2", "so s8m4", "so s9m6", "so s10m6", "so s11m8")
    ]
    assert "40 tokens: its oldest round is left out" in shown.err
    assert "the message takes 31 tokens with the system prompt; the model reads 40" in shown.err


def test_an_unknown_command_lists_the_known_ones(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(conversation, typed("/rest", "/seed x", "/seed 99999999999"))
    error = capsys.readouterr().err
    assert "/rest is not known" in error
    assert "/reset " in error
    assert "'x' is no whole number" in error
    assert "must be from 0" in error


def test_one_reply_is_all_that_is_printed(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    reply_once(conversation, "Hello")
    assert capsys.readouterr().out == "so s7m2\n"
    with pytest.raises(ConfigError, match="empty"):
        reply_once(conversation, " \n")
    with pytest.raises(ConfigError, match="seed=-1"):
        Conversation(Echo(), drawing=Drawing(seed=-1))


def test_a_model_is_shown_with_its_run_and_update(tmp_path: Path) -> None:
    run = tmp_path / "talk"
    checkpoint = run / "checkpoint-00000040"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"step": 40}))
    assert origin(checkpoint) == "run talk, update 40"
    assert origin(run / "final") == "not in the folder of a run"
    (run / "DONE.json").write_text(json.dumps({"updates": 1200}))
    assert origin(run / "final") == origin(run / "talk-F16.gguf") == "run talk, update 1,200, finished"


def test_a_device_that_is_not_there_is_named() -> None:
    assert chosen_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="--device tpuu cannot be used here"):
        chosen_device("tpuu")


def test_a_checkpoint_of_another_trainer_is_in_no_run_of_ours(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"global_step": 500, "epoch": 1.0}')
    assert origin(tmp_path) == "not in the folder of a run"
