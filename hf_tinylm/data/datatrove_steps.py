"""Steps that end datatrove pipelines in our shards: on one machine, or with its Ray and Slurm executors on many.

    pipeline = [JsonlReader("crawl/"), GopherQualityFilter(), WriteParts("parts", "runs/tokenizer")]
    LocalPipelineExecutor(pipeline, tasks=64, workers=8, logging_dir="logs/parts").run()
    LocalPipelineExecutor([WritePack("pack.yaml")], tasks=1, logging_dir="logs/pack").run()

where pack.yaml has the source `{name: web, path: parts, format: parts}`. The bits of the shards are those that
`hf-tinylm prepare` writes of the same documents in one process, in shuffled packs however tasks share the documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from ..config import load_config
from ..errors import DataError, MissingExtraError
from ..files import atomic_folder, write_json
from ..sections import SourceSection
from ..tokenization.encoder import FastEncoder
from ..tokenization.load import load_backend, separator_id, tokenizer_sha256, vocabulary_size
from .encoding import ChunkEncoder, EngineMismatch
from .hub import row_chunks
from .pipeline_parts import TASK_FILE, task_folder
from .prepare import prepare
from .staging import Stage, task_facts

try:
    from datatrove.data import Document
    from datatrove.pipeline.base import PipelineStep
except ImportError as error:
    raise MissingExtraError("datatrove", "scale", "a datatrove pipeline") from error


class WriteParts(PipelineStep):
    """The last step of a pipeline: encode the documents of each task into a folder of its own, whole or absent.

    Args:
        folder: where the tasks write; all machines must see it, and so must `prepare`.
        tokenizer_path: folder or name of the tokenizer of the pack.
        engine: "tokenizers" to keep tiktoken out, which is faster and gives the same ids.
        utf8: what to do with half a surrogate pair in a text, as in a source.
    """

    type = "💽 - WRITER"
    name = "hf-tinylm parts"

    def __init__(
        self,
        folder: str,
        tokenizer_path: str,
        engine: Literal["tiktoken", "tokenizers"] | None = None,
        utf8: Literal["strict", "replace", "skip"] = "strict",
    ) -> None:
        super().__init__()
        self.folder, self.tokenizer_path, self.engine = str(folder), str(tokenizer_path), engine
        self.source = SourceSection("documents", self.folder, utf8=utf8)

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> None:
        """Encode `data`, the documents of one task.

        Raises:
            DataError: a document cannot be encoded.
        """
        tokenizer = load_backend(self.tokenizer_path)
        encoder, size = FastEncoder(tokenizer, self.engine), vocabulary_size(tokenizer)
        chunks = ChunkEncoder([self.source], encoder, size, separator_id(tokenizer))
        folder = task_folder(Path(self.folder), rank, world_size)
        with self.track_time("task"), atomic_folder(folder, replace=True) as temporary:
            stage = Stage(temporary, chunks.dtype, self.source)
            rows = ({"text": document.text} for document in data or ())
            for chunk in row_chunks(f"task {rank}", rows, ["text"]):
                try:
                    stage.add(chunk, chunks.encode(chunk, 0, first=stage.chunks == 0))
                except EngineMismatch as mismatch:
                    raise DataError(f"{mismatch} Give engine='tokenizers' to WriteParts.") from mismatch
            stage.close_part(done=True)
            write_json(temporary / TASK_FILE, task_facts(tokenizer_sha256(tokenizer), encoder.engine))
        self.stat_update("documents", value=stage.documents)
        self.stat_update("tokens", value=stage.ids)


class WritePack(PipelineStep):
    """A pipeline of one task: `hf-tinylm prepare` with a configuration, by path or name, and its `--key value`s."""

    type = "💽 - WRITER"
    name = "hf-tinylm pack"

    def __init__(self, config: str, overrides: Sequence[str] = ()) -> None:
        super().__init__()
        self.config, self.overrides = str(config), list(overrides)

    def run(self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1) -> None:
        """Write the pack.

        Raises:
            DataError: there is more than one task.
        """
        if world_size != 1:
            raise DataError(f"a pack is written by one task, and this pipeline has {world_size}. Give tasks=1.")
        with self.track_time("pack"):
            manifest = prepare(load_config(self.config, self.overrides), progress=False)
        self.stat_update("tokens", value=manifest["ids"])
