"""A chat in the terminal: what is typed, what is answered, and the few commands that begin with a slash."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..contract import DONE_FILE
from ..errors import ConfigError, RunStopped
from ..files import read_record

if TYPE_CHECKING:
    from ..evaluation.chat import ChatEngine, Conversation

HELP = """/reset       forget the conversation; the system prompt stays
/seed N      draw the following replies from seed N
/help        this list
/exit        end (Ctrl-D does too; Ctrl-C stops a reply)"""


@contextlib.contextmanager
def open_engine(path: str, device: str, tokenizer_path: str | None) -> Iterator[tuple[ChatEngine, list[str]]]:
    """The engine for a model folder, a name on the Hub, or a GGUF file, and lines that say what it is.

    Raises:
        ConfigError: there is no such model, or it is none that chats here.
    """
    if path.endswith(".gguf") or Path(path).is_file():
        from ..export.llamacpp_chat import LlamaCppChat

        if device not in ("auto", "cpu"):
            raise ConfigError(f"--device {device} is for model folders; a GGUF file runs in llama.cpp on the CPU.")
        with LlamaCppChat(Path(path)) as engine:
            yield engine, [f"llama.cpp on cpu: {path} ({engine.facts.file_type}, {origin(Path(path))})"]
        return
    import transformers

    from ..evaluation.chat import TransformersChat
    from ..model_folder import find_model_folder
    from ..modeling.factory import load_model
    from ..tokenization.load import find_tokenizer, load_tokenizer

    folder = find_model_folder(path)
    model = load_model(folder)
    model.to(chosen_device(device))  # type: ignore[arg-type]
    tokenizer = load_tokenizer(tokenizer_path or find_tokenizer(folder))
    lines = [f"transformers {transformers.__version__} on {model.device}: {path} ({origin(folder)})"]
    if tokenizer.chat_template is None:
        lines.append(
            "note: its tokenizer has no chat template; a model that never saw a conversation answers anything."
        )
    yield TransformersChat(model, tokenizer), lines


def chosen_device(name: str) -> str:
    """A device of torch by name; `auto` is the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: this machine has no such device.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=name)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises AssertionError
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {name} cannot be used here ({reason}). Give cpu, or cuda on a GPU.") from error
    return name


def origin(path: Path) -> str:
    """The run and the update that a model folder or GGUF file comes from, as the files beside it say."""
    state = read_record(path / "trainer_state.json") if (path / "trainer_state.json").is_file() else {}
    if "step" in state:  # transformers' own Trainer writes a file of that name with other keys
        return f"run {path.resolve().parent.name}, update {state['step']:,}"
    done = path.resolve().parent / DONE_FILE
    if done.is_file():
        return f"run {done.parent.name}, update {read_record(done, 'updates')['updates']:,}, finished"
    return "not in the folder of a run"


def reply_once(conversation: Conversation, text: str) -> None:
    """Print the reply to one message."""
    if not text.strip():
        raise ConfigError("the message is empty. Give one: --prompt TEXT, or on stdin.")
    conversation.ask(text, _print_piece, _notice)
    print()


def talk(conversation: Conversation, read_line: Callable[[str], str] = input) -> None:
    """Answer what is typed until /exit or the end of the input.

    Raises:
        RunStopped: Ctrl-C while nothing was being written.
    """
    with contextlib.suppress(ImportError):  # Windows has none; elsewhere it makes arrow keys work in `input`
        import readline  # noqa: F401
    print("/help lists the commands.")
    while True:
        try:
            line = read_line("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            raise RunStopped("the chat has ended (Ctrl-C).", exit_code=130) from None
        if line in ("/exit", "/quit"):
            return
        try:
            _act(conversation, line)
        except ConfigError as error:
            _notice(str(error))


def _act(conversation: Conversation, line: str) -> None:
    """Do what a line that begins with a slash says, or answer the line."""
    if line.startswith("/"):
        _notice(_command(conversation, line))
    elif line:
        try:
            conversation.ask(line, _print_piece, _notice)
            print()
        except KeyboardInterrupt:
            print()
            _notice("stopped; the message and its reply are forgotten.")


def _command(conversation: Conversation, line: str) -> str:
    """Do what a line that begins with a slash says; what to tell the user."""
    name, _, argument = line.partition(" ")
    if name == "/reset":
        conversation.reset()
        return "The conversation is forgotten."
    if name == "/seed":
        if not argument.strip().isdecimal():
            return f"/seed {argument!r} is no whole number."
        conversation.reseed(int(argument))
        return f"The next reply is drawn from seed {conversation.drawing.seed}."
    return HELP if name == "/help" else f"{name} is not known.\n{HELP}"


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)


def _notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
