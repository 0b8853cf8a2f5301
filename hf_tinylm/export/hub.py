"""Publish a finished folder on the Hugging Face Hub: checked before, verified after, nothing lost when it fails.

Source of the calls: https://huggingface.co/docs/huggingface_hub/package_reference/hf_api
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..contract import DONE_FILE
from ..data.shards import load_shards
from ..errors import ConfigError, ExportError, VerificationError
from ..files import read_record, sha256_of_file
from ..sections import ExportSection

Kind = Literal["model", "dataset"]
T = TypeVar("T")

# What a model repository holds. Everything else in a folder (logs, optimizer, caches) stays at home.
_MODEL_FILES = (
    *("README.md", "*.png", "config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "Modelfile"),
    *("*.gguf", "eval/*.json"),
)
_SHARD_FILES = (
    *("README.md", "manifest.json", "dataset_dict.json"),
    *(f"{split}/{name}" for split in ("train", "validation") for name in ("*.arrow", "*.json")),
)
_TEXT_SUFFIXES = (".json", ".md", ".jinja", ".txt", "")
_TOKEN = re.compile(rb"hf_[A-Za-z0-9]{20,}")
_RETRIES = 5
_FIRST_WAIT = 1.0  # seconds; doubled after each attempt


@dataclass(frozen=True)
class Destination:
    """A repository that exists, may be written, and has the asked visibility."""

    repo_id: str
    kind: Kind
    private: bool

    @property
    def address(self) -> str:
        """Where people find it."""
        from huggingface_hub import constants

        prefix = "datasets/" if self.kind == "dataset" else ""
        return f"{constants.ENDPOINT}/{prefix}{self.repo_id}"


@dataclass
class Upload:
    """Files to publish, by their path in the repository."""

    kind: Kind
    files: dict[str, Path] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self.files.values())


def open_destination(repo_id: str, kind: Kind = "model", private: bool = True) -> Destination:
    """Find out before long work, not after it, that a repository can be written and is as private as asked.

    A missing repository is created with the asked visibility. An existing one keeps its own; a private push into a
    public one is refused, since the creation-time switch of the Hub does nothing to it.

    Raises:
        ConfigError: there is no token, it is refused, or it may not write there; or the visibility is another one.
        ExportError: the Hub cannot be reached.
    """
    api = _api()
    owner = _owner(repo_id)
    user = _ask(lambda: api.whoami(), f"asking who the token of this machine belongs to, to publish {repo_id}")
    writable = {user["name"], *(org["name"] for org in user.get("orgs", []))}
    if owner is None:
        repo_id = f"{user['name']}/{repo_id}"
    elif owner not in writable:
        raise ConfigError(
            f"{repo_id} belongs to {owner}, and the token is of {user['name']}, who may write to "
            f"{', '.join(sorted(writable))}. Give another --repo_id, or log in as a member: hf auth login."
        )
    _ask(lambda: api.create_repo(repo_id, repo_type=kind, private=private, exist_ok=True), f"creating {repo_id}")
    found = _ask(lambda: api.repo_info(repo_id, repo_type=kind), f"reading the visibility of {repo_id}")
    if private and not found.private:
        raise ConfigError(
            f"{repo_id} exists and is public, but a private push was asked. Make it private in its settings, give "
            "another --repo_id, or publish it: --public."
        )
    return Destination(repo_id, kind, bool(found.private))


def collect(path: Path) -> Upload:
    """The files of what `path` is: a run's folder (final folder and GGUF files), a model's folder, shards, a GGUF file.

    A pack is read in full, and the weights of a finished run are compared with what it recorded when it ended.

    Raises:
        ConfigError: `path` is none of these, one of its files holds an access token, or it is damaged.
    """
    if path.is_file() and path.suffix == ".gguf":
        found = Upload("model", {path.name: path, **_beside_gguf(path)})
    elif (path / "manifest.json").is_file() and (path / "dataset_dict.json").is_file():
        load_shards(path, verify=True)
        found = Upload("dataset", dict(_matching(path, _SHARD_FILES)))
    elif (path / "final" / "config.json").is_file():
        _refuse_other_weights(path)
        beside = {file.name: file for file in sorted(path.glob("*.gguf"))}
        scores = {f"eval/{file.name}": file for file in sorted((path / "eval").glob("*.json"))}
        modelfile = {"Modelfile": path / "Modelfile"} if (path / "Modelfile").is_file() else {}
        found = Upload("model", {**dict(_matching(path / "final", _MODEL_FILES)), **beside, **modelfile, **scores})
    elif (path / "config.json").is_file() and list(path.glob("*.safetensors")):
        if (path / "manifest.json").is_file():
            raise ConfigError(
                f"{path} is a checkpoint. Write it as a model first: hf-tinylm export {path} --output_dir DIR"
            )
        found = Upload("model", dict(_matching(path, _MODEL_FILES)))
    else:
        raise ConfigError(
            f"{path} is no run with a final folder, no model folder, no folder of shards and no GGUF file. "
            "Give one of these: hf-tinylm push runs/NAME --repo_id USER/NAME"
        )
    _refuse_tokens(found)
    return found


def push(upload: Upload, destination: Destination, again: str, message: str = "Upload with hf_tinylm") -> str:
    """Upload all files in one commit, compare sizes and hashes with what the Hub then holds; the address.

    Connections that break and answers of an overloaded server are tried again, with growing pauses; files that arrived
    are not sent twice.

    Args:
        again: the command that repeats this push, told when it fails.

    Raises:
        ExportError: the upload failed; everything is as it was on this machine.
        VerificationError: the Hub holds other bytes than these.
    """
    from huggingface_hub import CommitOperationAdd

    if upload.kind != destination.kind:
        raise ConfigError(f"{destination.repo_id} is a {destination.kind} repository; a {upload.kind} was given.")
    api = _api()

    def commit() -> Any:
        operations = [CommitOperationAdd(name, str(path)) for name, path in upload.files.items()]
        return api.create_commit(
            destination.repo_id, operations, commit_message=message, repo_type=destination.kind, num_threads=2
        )

    try:
        _ask(commit, f"uploading {len(upload.files)} files ({upload.size:,} bytes) to {destination.repo_id}")
    except (ConfigError, ExportError) as error:
        raise type(error)(f"{error} Everything is still here; try again: {again}") from error
    _compare(upload, destination)
    return destination.address


def destination_of(export: ExportSection, name: str) -> Destination | None:
    """Where a run is published at its end, found out and checked at its beginning; None when it is not."""
    if not export.push_to_hub:
        return None
    return open_destination(export.hub_model_id or name, private=export.hub_private_repo)


def push_run(run: Path, destination: Destination | None) -> None:
    """Publish the finished run, if it is to be.

    Raises:
        ExportError: the upload failed; the run is finished all the same.
    """
    if destination is not None:
        visibility = "" if destination.private else " --public"
        again = f"hf-tinylm push {run} --repo_id {destination.repo_id}{visibility}"
        address = push(collect(run), destination, again)
        print(f"{address} ({'private' if destination.private else 'public'})", flush=True)


def _compare(upload: Upload, destination: Destination) -> None:
    """Read back what the Hub holds of each file."""
    api = _api()
    info = _ask(
        lambda: api.repo_info(destination.repo_id, repo_type=destination.kind, files_metadata=True),
        f"reading back the files of {destination.repo_id}",
    )
    held = {file.rfilename: file for file in info.siblings or []}
    for name, path in upload.files.items():
        there = held.get(name)
        same = there is not None and there.size == path.stat().st_size
        if same and there is not None and there.lfs is not None:
            same = there.lfs.sha256 == sha256_of_file(path)
        if not same:
            raise VerificationError(
                f"{destination.repo_id} holds other bytes of {name} than {path}. Push it again; if it stays so, delete "
                "the file there first."
            )


def _ask(call: Callable[[], T], doing: str) -> T:
    """The answer of the Hub; overload and broken connections are waited out, refusals become one line."""
    # HTTPError is that of the client library which this release of the Hub's own library uses.
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    wait = _FIRST_WAIT
    for attempt in range(1, _RETRIES + 1):
        try:
            return call()
        except LocalTokenNotFoundError as error:
            raise ConfigError(f"{doing}: there is no access token. Log in first: hf auth login.") from error
        except OfflineModeIsEnabled as error:
            raise ConfigError(f"{doing}: HF_HUB_OFFLINE is set. Unset it.") from error
        except HfHubHTTPError as error:
            status = error.response.status_code if error.response is not None else 0
            if status in (401, 403):
                raise ConfigError(
                    f"{doing}: the Hub answered {status}; the token is missing, expired or may not do this. "
                    "Log in with a token that may write: hf auth login."
                ) from error
            if status and status < 500 and status not in (408, 429):
                raise ExportError(f"{doing}: the Hub answered {status}: {_safe(error)}") from error
            told = f"the Hub answered {status}"
        except (HTTPError, OSError) as error:
            told = f"the connection failed ({type(error).__name__})"
        if attempt < _RETRIES:
            print(f"{doing}: {told}; next try in {wait:g} s ({attempt} of {_RETRIES})", file=sys.stderr, flush=True)
            time.sleep(wait)
            wait *= 2
    raise ExportError(f"{doing}: {told}, {_RETRIES} times.")


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="hf_tinylm")


def _owner(repo_id: str) -> str | None:
    """The namespace of `OWNER/NAME`, None for a bare name."""
    parts = repo_id.split("/")
    if len(parts) > 2 or not all(re.fullmatch(r"[\w.-]+", part) for part in parts):
        raise ConfigError(f"repo_id {repo_id!r} is no name of a repository. Give it as USER/NAME.")
    return parts[0] if len(parts) == 2 else None


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            yield path.relative_to(folder).as_posix(), path


def _beside_gguf(path: Path) -> dict[str, Path]:
    return {name: path.parent / name for name in ("README.md", "Modelfile") if (path.parent / name).is_file()}


def _refuse_other_weights(run: Path) -> None:
    """The weights of the final folder must be those that DONE.json names."""
    recorded = read_record(run / DONE_FILE).get("final_weights_sha256") if (run / DONE_FILE).is_file() else None
    for name, digest in (recorded or {}).items():
        file = run / "final" / name
        if not file.is_file() or sha256_of_file(file) != digest:
            raise ConfigError(
                f"{file} is not what the run recorded in {DONE_FILE}: it is damaged or was changed. Restore it, or "
                f"publish it as a model of its own: hf-tinylm push {run / 'final'} --repo_id USER/NAME"
            )


def _refuse_tokens(upload: Upload) -> None:
    """No file that people read may hold an access token."""
    from huggingface_hub import get_token

    own = (get_token() or "").encode()
    for name, path in upload.files.items():
        if path.suffix in _TEXT_SUFFIXES and name != "tokenizer.json":
            content = path.read_bytes()
            if _TOKEN.search(content) or (own and len(own) > 8 and own in content):
                raise ConfigError(f"{path} holds an access token of the Hub. Remove it before it is published.")


def _safe(error: Exception) -> str:
    """An error's text without anything that looks like a token."""
    return _TOKEN.sub(b"hf_***", str(error).encode()).decode()
