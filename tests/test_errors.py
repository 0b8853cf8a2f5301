"""Each error ends a command with its documented exit code and one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_tinylm import errors
from hf_tinylm.errors import TinyLMError, exit_with_error_line

EXIT_CODES = {
    "TinyLMError": 1,
    "ConfigError": 2,
    "DataError": 2,
    "TokenizerError": 2,
    "MissingExtraError": 2,
    "ContractError": 2,
    "DisagreementError": 2,
    "CheckpointError": 1,
    "PreparationError": 1,
    "TrainingError": 1,
    "ExportError": 1,
    "VerificationError": 1,
    "RunStopped": 3,
}


def every_error() -> dict[str, type[TinyLMError]]:
    found, queue = {}, [TinyLMError]
    while queue:
        kind = queue.pop()
        if kind.__module__ == errors.__name__:
            found[kind.__name__] = kind
        queue.extend(kind.__subclasses__())
    return found


def test_every_error_has_the_exit_code_that_is_documented() -> None:
    assert {name: kind.exit_code for name, kind in every_error().items()} == EXIT_CODES


def test_every_error_stands_in_the_tree_that_the_module_draws() -> None:
    for name, code in EXIT_CODES.items():
        lines = [line for line in (errors.__doc__ or "").splitlines() if name in line]
        assert len(lines) == 1
        assert str(code) in lines[0].split()


def test_a_users_error_is_one_line_on_stderr_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise errors.DataError("runs/a:\n  is  empty.\nGive text.")

    assert exit_with_error_line(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: runs/a: is empty. Give text.\n"


def test_a_path_that_the_system_refuses_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise PermissionError(13, "Permission denied", "/proc/1/run.json")

    assert exit_with_error_line(command) == 1
    assert capsys.readouterr().err == "error: /proc/1/run.json: Permission denied.\n"


def test_a_run_that_was_stopped_says_so_and_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise errors.RunStopped("SIGTERM ended the run.", 143)

    assert exit_with_error_line(command) == 143
    assert capsys.readouterr().err == "stopped: SIGTERM ended the run.\n"


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (3, 3)])
def test_a_command_that_ends_well_gives_its_own_code(
    result: int | None, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_with_error_line(lambda: result) == code
    assert capsys.readouterr().err == ""


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    def command() -> int:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        exit_with_error_line(command)


def test_a_wrong_setting_is_also_a_value_error_and_a_failed_run_is_not() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert not issubclass(errors.TrainingError, ValueError)


def test_a_missing_engine_names_the_command_that_installs_it() -> None:
    message = str(errors.MissingExtraError("xllamacpp", "gguf-verify", "Verifying a GGUF file"))
    assert "Verifying a GGUF file needs the package xllamacpp" in message
    assert "pip install 'hf-tinylm[gguf-verify]'" in message


def test_a_reader_that_has_enough_ends_a_command_quietly_and_another_broken_pipe_is_a_fault() -> None:
    code = """
import os, sys
from hf_tinylm.errors import exit_with_error_line
def command():
    for _ in range(100_000):
        print("a line")
sys.exit(exit_with_error_line(command))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 141

    other = """
from hf_tinylm.errors import exit_with_error_line
def command():
    raise BrokenPipeError
exit_with_error_line(command)
"""
    done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "the disk that is written to: No space left on device. Make room"),
        (OSError(28, "No space", "from.json", None, "to.json"), "to.json: No space left on device. Make room"),
        (OSError(122, "Disk quota exceeded"), "the disk that is written to: Disk quota exceeded. Make room"),
        (OSError(27, "File too large"), "the disk that is written to: File too large. Give a path on another disk"),
        (OSError(30, "Read-only file system", "a"), "a: Read-only file system. Give a path on another disk"),
        (OSError(5, "Input/output error"), "the disk that is written to: Input/output error. Check the disk"),
        (Exception("No space left on device (os error 28)"), "the disk that is written to: No space left on device. "),
    ],
)
def test_a_refusal_of_a_disk_is_one_line_whichever_library_met_it(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> int:
        raise error

    assert exit_with_error_line(command) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: {line}")
    assert told.count("\n") == 1


def test_a_disk_that_refuses_safetensors_or_tokenizers_is_one_line(tmp_path: Path) -> None:
    code = """
import resource, sys
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from hf_tinylm.errors import exit_with_error_line
large = Tokenizer(models.BPE())
large.add_tokens([f"token {number}" for number in range(200)])
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
print(exit_with_error_line(lambda: save_file({"a": np.zeros(9_999)}, "model.safetensors")))
print(exit_with_error_line(lambda: large.save("tokenizer.json")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    line = "error: the disk that is written to: File too large. Give a path on another disk, or raise the limit"
    assert done.stdout == "1\n1\n", done.stderr
    assert [told[: len(line)] for told in done.stderr.splitlines()] == [line, line]


@pytest.mark.parametrize("error", [OSError("a library's own words"), RuntimeError("(os error 28)"), OSError(9, "Bad")])
def test_an_error_of_the_system_that_names_no_file_and_no_disk_is_a_fault(error: Exception) -> None:
    def command() -> int:
        raise error

    with pytest.raises(type(error)):
        exit_with_error_line(command)


def test_text_that_the_output_cannot_spell_is_escaped() -> None:
    code = "from hf_tinylm.errors import exit_with_error_line as run\nrun(lambda: print('caf\\u00e9 \\U0001f642'))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\xe9 \\U0001f642\n", "")
