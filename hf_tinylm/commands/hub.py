"""`hf-tinylm push`: publish a run, a model, a GGUF file or a pack of shards on the Hub."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from .options import add_command, print_result, takes_json


def register(commands: Any) -> None:
    """Add these commands to the parser."""
    push = add_command(
        commands,
        "push",
        push_folder,
        "publish a run, a model folder, a GGUF file or a pack of shards on the Hugging Face Hub, private unless told",
        "hf-tinylm push runs/my --repo_id USER/my-model",
    )
    push.add_argument("path", help="a run's folder (final folder and GGUF files), a model folder, shards, a GGUF file")
    push.add_argument("--repo_id", required=True, help="USER/NAME; a bare NAME is under the user of the access token")
    push.add_argument("--public", action="store_true", help="everyone may read it (default: private)")
    push.add_argument("--message", default="Upload with hf_tinylm", help="of the commit")
    push.add_argument("--dry_run", action="store_true", help="list what would be uploaded, and upload nothing")
    takes_json(push)


def push_folder(options: argparse.Namespace) -> None:
    """Upload, and print the address and the real visibility."""
    from ..export.dataset_card import dataset_card
    from ..export.hub import collect, open_destination, push

    path = Path(options.path)
    upload = collect(path)
    with tempfile.TemporaryDirectory() as temporary:
        if upload.kind == "dataset" and "README.md" not in upload.files:
            card = Path(temporary) / "README.md"
            card.write_text(dataset_card(path, options.repo_id.rpartition("/")[2]), encoding="utf-8")
            upload.files["README.md"] = card
        found: dict[str, Any] = {
            "kind": upload.kind,
            "files": {name: file.stat().st_size for name, file in sorted(upload.files.items())},
            "bytes": upload.size,
        }
        if not options.dry_run:
            destination = open_destination(options.repo_id, upload.kind, private=not options.public)
            visibility = " --public" if options.public else ""
            again = f"hf-tinylm push {path} --repo_id {destination.repo_id}{visibility}"
            found["url"] = push(upload, destination, again, options.message)
            found["private"] = destination.private
    print_result(options, found, lambda: _lines(found))


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"  {size:>15,} bytes  {name}" for name, size in found["files"].items()]
    if "url" not in found:
        return [f"would upload {len(lines)} files of {found['bytes']:,} bytes as a {found['kind']}:", *lines]
    return [f"{found['url']} ({'private' if found['private'] else 'public'}): {len(lines)} files", *lines]
