"""The loopback Hub of the tests answers the real clients as the Hub does: pushes, downloads, streams, and faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Hub

ROUND_TRIP = """
import json, sys
import huggingface_hub as hub, datasets
from pathlib import Path
folder = Path(sys.argv[1])
api = hub.HfApi()
found = {"user": api.whoami()["name"]}
api.create_repo("tester/folder", private=True)
api.create_repo("tester/folder", exist_ok=True)
found["private"] = api.repo_info("tester/folder").private
api.upload_folder(repo_id="tester/folder", folder_path=folder)
copy = Path(hub.snapshot_download("tester/folder"))
files = [path for path in folder.rglob("*") if path.is_file()]
found["equal"] = [(copy / path.relative_to(folder)).read_bytes() == path.read_bytes() for path in files]
api.update_repo_settings("tester/folder", visibility="public")
found["private_now"] = api.repo_info("tester/folder").private
api.upload_file(repo_id="tester/folder", path_in_repo="second.txt", path_or_fileobj=b"second")
found["second"] = Path(hub.hf_hub_download("tester/folder", "second.txt")).read_text()
api.delete_file("second.txt", repo_id="tester/folder")
found["files"] = [api.file_exists("tester/folder", name) for name in ("second.txt", "README.md")]
found["other"] = api.repo_exists("tester/no")
rows = datasets.Dataset.from_dict({"text": [f"row {n}" for n in range(50)]})
datasets.DatasetDict({"train": rows, "test": rows.select(range(5))}).push_to_hub("tester/rows", private=True)
found["loaded"] = datasets.load_dataset("tester/rows", split="train")["text"] == rows["text"]
found["streamed"] = [row["text"] for row in datasets.load_dataset("tester/rows", split="test", streaming=True)]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_real_clients_push_and_read_back_the_same_bytes(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "README.md").write_text("# a card\n")
    (tmp_path / "sub" / "weights.safetensors").write_bytes(bytes(range(256)) * 1000)
    done = hub.run("-c", ROUND_TRIP, str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {
        **{"user": "tester", "private": True, "equal": [True, True], "private_now": False, "second": "second"},
        **{"files": [False, True], "other": False, "loaded": True, "streamed": [f"row {n}" for n in range(5)]},
    }
    assert hub.is_private("tester/rows")
    assert not hub.is_private("tester/folder", "models")


FAULTS = """
import io, json, sys
import huggingface_hub as hub
api, size = hub.HfApi(), 300_000
try:
    api.create_repo(sys.argv[1])
    content = bytes(size) + sys.argv[1].encode()
    api.upload_file(repo_id=sys.argv[1], path_in_repo="w.safetensors", path_or_fileobj=content)
    print("done")
except Exception as error:
    print(type(error).__name__, getattr(getattr(error, "response", None), "status_code", None))
"""


@pytest.mark.parametrize(
    ("name", "fault", "outcome"),
    [
        ("busy", {"match": "PUT /_lfs/", "status": 503, "times": 1}, "done"),
        ("cut", {"match": "PUT /_lfs/", "break_after": 100_000, "times": 1}, "done"),
        ("read-only", {"match": "/commit/", "status": 403}, "HfHubHTTPError 403"),
        ("stranger", {"match": "POST /api/repos/create", "status": 401}, "HfHubHTTPError 401"),
    ],
)
def test_faults_strike_the_requests_they_name(hub: Hub, name: str, fault: dict[str, object], outcome: str) -> None:
    hub.requests()
    with hub.faults(fault):
        done = hub.run("-c", FAULTS, f"tester/{name}")
    assert done.stdout.strip() == outcome, done.stderr
    assert {entry["status"] for entry in hub.requests()} & {fault.get("status", -1)}
