"""Which source a target comes from: looked up in the rows of its shard, since the stream of ids does not say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ..errors import DataError
from .shards import Shard


class TargetSources:
    """Sources of positions in the token streams of shards.

    A lookup is a binary search in the offsets of a file's rows, which are read in place. One number per row is made
    when a file is first asked for; nothing is kept per id.

    Args:
        shards: files in the order of the streams.
        names: the sources of the pack; a source is known by its place in them.
    """

    def __init__(self, shards: Sequence[Shard], names: Sequence[str]) -> None:
        self.shards = list(shards)
        self.names = list(names)
        self._numbers: dict[int, np.ndarray] = {}

    def at(self, stream: int, positions: np.ndarray) -> np.ndarray:
        """Number of the source of each position (any shape) of a stream: int64 of that shape.

        Raises:
            DataError: the shard has a source that the pack does not list.
        """
        return self._of_rows(stream)[self.shards[stream].row_at(positions)]

    def _of_rows(self, stream: int) -> np.ndarray:
        """Number of the source of each row of a file, int64 (rows,)."""
        if stream not in self._numbers:
            shard = self.shards[stream]
            found = pa.compute.index_in(shard.sources, value_set=pa.array(self.names, pa.string()))
            if found.null_count:
                raise DataError(
                    f"shard {shard.name} has rows of a source that its manifest does not list; the sources are "
                    f"{', '.join(self.names)}. Write the pack again: hf-tinylm prepare."
                )
            self._numbers[stream] = found.to_numpy().astype(np.int64)
        return self._numbers[stream]
