"""The next batches, read by a thread while the present ones are computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetched(Generic[T]):
    """Calls a pure function, and meanwhile what is likely to be asked next.

    Args:
        function: depends on its arguments alone, so that a value read ahead is the value.
    """

    def __init__(self, function: Callable[..., T]) -> None:
        self.function = function
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._key: tuple[Hashable, ...] | None = None
        self._value: Future[T] | None = None

    def __call__(self, *key: Hashable) -> T:
        """`function(*key)`, waited for if it is being read ahead; whatever it raises is raised here."""
        value, self._value = self._value, None
        if value is not None and self._key == key:
            return value.result()
        return self.function(*key)

    def ahead(self, *key: Hashable) -> None:
        """Begin `function(*key)` in the background."""
        self._key, self._value = key, self._thread.submit(self.function, *key)

    def close(self) -> None:
        """Drop what was read ahead, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
