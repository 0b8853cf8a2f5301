"""The errors that users meet, each with the exit code that a command ends with.

    TinyLMError                   1
    ├── ConfigError               2   a setting, a key, a path or a file that was given is wrong
    │   ├── DataError             2   a source, a shard or a pack cannot be used
    │   ├── TokenizerError        2   a tokenizer cannot be trained, loaded or used here
    │   └── MissingExtraError     2   an optional engine is not installed
    ├── ContractError             2   what is asked contradicts what a run folder records
    ├── DisagreementError         2   processes of one run were started differently, or one failed at its start
    ├── CheckpointError           1   a checkpoint is missing, damaged or does not fit
    ├── PreparationError          1   writing a pack was cut short (a worker process died); run it again to go on
    ├── TrainingError             1   the run itself failed (a loss that is not finite, a full disk)
    ├── ExportError               1   a model cannot be written in the asked form
    ├── VerificationError         1   a written file does not do what its model does
    └── RunStopped                3   a run ended early after a clean save: a budget did it (128 + n: signal n)

Every message is one line that says what was given, what was needed and what to type next.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import select
import sys
from collections.abc import Callable


class TinyLMError(Exception):
    """Base of every error that a user can cause or meet."""

    exit_code = 1


class ConfigError(TinyLMError, ValueError):
    """A setting, key, path or file that was given is wrong."""

    exit_code = 2


class DataError(ConfigError):
    """A source, shard or pack cannot be used."""


class TokenizerError(ConfigError):
    """A tokenizer cannot be trained, loaded or used here."""


class MissingExtraError(ConfigError):
    """An optional engine is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed. Run: pip install 'hf-tinylm[{extra}]'"
        )


class ContractError(TinyLMError):
    """What is asked contradicts what a run folder records."""

    exit_code = 2


class DisagreementError(TinyLMError):
    """Processes of one run were started differently, or one of them failed at its start; all of them end with it."""

    exit_code = 2


class CheckpointError(TinyLMError):
    """A checkpoint is missing, damaged or does not fit the run."""


class PreparationError(TinyLMError):
    """Writing a pack was cut short; what is finished is kept, and the same command goes on."""


class TrainingError(TinyLMError):
    """The run itself failed."""


class ExportError(TinyLMError):
    """A model cannot be written in the asked form."""


class RunStopped(TinyLMError):
    """A run ended before its last update, on request and after a clean save.

    Exit code 3 when a budget of updates, time or money ended it, 128 + n for signal n (130 SIGINT, 143 SIGTERM).
    """

    exit_code = 3

    def __init__(self, message: str, exit_code: int = exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class VerificationError(TinyLMError):
    """A written file does not do what its model does."""


def exit_with_error_line(command: Callable[[], int | None]) -> int:
    """Run `command` and return its exit code; a `TinyLMError` becomes one line on stderr and its own code.

    So does a path that the system refuses (no permission, no space). Any other exception is a fault of ours and keeps
    its traceback. What the encoding of the output cannot spell is escaped, as on stderr.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a Latin-1 or ASCII terminal must not end a command over a model's é
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return command() or 0
    except TinyLMError as error:
        kind = "stopped" if isinstance(error, RunStopped) else "error"
        with contextlib.suppress(OSError):  # Ctrl-C ends `| tee log` too: nobody reads, and the exit code still speaks
            print(f"{kind}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return error.exit_code
    except BrokenPipeError:
        if not _nobody_reads_output():
            raise
        return 141  # as for a program that SIGPIPE ends: `| head` has read enough
    except Exception as error:
        refused = _what_the_system_refused(error)
        if refused is None:
            raise
        with contextlib.suppress(OSError):
            print(f"error: {refused}", file=sys.stderr, flush=True)
        return 1
    finally:
        _let_go_of_closed_streams()


# Refusals of a disk, which can meet any write, also one whose error names no file; and what to do about each.
_MAKE_ROOM = "Make room, or give a folder on another disk, then run the same command again"
_ELSEWHERE = "Give a path on another disk"
_OF_DISKS = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EFBIG: f"{_ELSEWHERE}, or raise the limit on file sizes (ulimit -f)",
    errno.EROFS: _ELSEWHERE,
    errno.EIO: f"Check the disk. {_ELSEWHERE}",
}
# What libraries written in Rust say: tokenizers raises a bare Exception, safetensors its SafetensorError.
_IN_RUST = re.compile(r"\(os error (\d+)\)")


def _what_the_system_refused(error: Exception) -> str | None:
    """The line for an exception that is the system's word on a path or a disk; None for any other."""
    code, file = None, None
    if isinstance(error, OSError):  # of two names, as in a copy, the second is the one that is written
        code, file = error.errno, error.filename2 or error.filename
    elif type(error).__name__ in ("Exception", "SafetensorError") and (found := _IN_RUST.search(str(error))):
        code = int(found[1])
    if code is None or (file is None and code not in _OF_DISKS):
        return None
    advice = f" {_OF_DISKS[code]}." if code in _OF_DISKS else ""
    return f"{file or 'the disk that is written to'}: {os.strerror(code)}.{advice}"


def _nobody_reads_output() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    if not hasattr(select, "poll"):
        return True
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in pipe.poll(0))


def _let_go_of_closed_streams() -> None:
    """Point streams that nobody reads any more at nothing: flushed at exit they would turn the exit code into 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (AttributeError, ValueError):
            continue  # none, or closed by its owner
