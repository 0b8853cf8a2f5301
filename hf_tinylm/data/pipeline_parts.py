"""Where the tasks of a datatrove pipeline write their parts, and whether all have.

FOLDER/task-00000-of-00008/  parts, as `staging` describes them, and last:
                             task.json  the tokenizer and the engine that encoded them
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import DataError
from ..sections import SourceSection

TASK_FILE = "task.json"
_TASK = re.compile(r"task-(\d{5,})-of-(\d{5,})")
# Settings of a source that say how to read its text; for parts the pipeline has said it.
_OF_TEXT = ("splitter", "max_documents", "min_characters", "max_characters", "language_column", "licence_column")


def task_folder(folder: Path, rank: int, world_size: int) -> Path:
    """Where task number `rank` of `world_size` writes."""
    return folder / f"task-{rank:05d}-of-{world_size:05d}"


def task_files(source: SourceSection) -> list[Path]:
    """The files of a source of parts, sorted.

    Raises:
        DataError: the folder is missing, a task is, or a setting of the source has no meaning for parts.
    """
    folder, plain = Path(source.path).expanduser(), SourceSection("", "")
    for name in _OF_TEXT:
        if getattr(source, name) != getattr(plain, name):
            raise DataError(
                f"source {source.name}: {name} is for text, and {folder} is encoded already. Leave it out, and filter "
                f"in the pipeline."
            )
    tasks = [(int(m[1]), int(m[2])) for path in folder.glob("task-*") if (m := _TASK.fullmatch(path.name))]
    sizes = {size for _, size in tasks}
    if len(sizes) != 1:
        found = "has tasks of pipelines of different sizes" if sizes else "holds no parts of a pipeline"
        raise DataError(f"source {source.name}: {folder} {found}. Give the folder of one WriteParts step.")
    missing = sorted(set(range(sizes.pop())) - {rank for rank, _ in tasks})
    if missing:
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise DataError(
            f"source {source.name}: {folder} lacks task {shown} of {len(missing) + len(tasks)}. Run the pipeline to "
            f"its end."
        )
    return sorted(path for path in folder.glob("task-*/*") if path.is_file())
