"""A thread that writes what the machine says of itself, every 30 seconds, into hardware.jsonl of the run's folder.

A sensor that is missing or fails gives null and is told once; a run never ends because of one.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ..errors import TrainingError
from ..training.metrics import JsonLines

HARDWARE = "hardware.jsonl"
_OF_CARD = (
    *("name", "utilization_percent", "power_watts", "temperature_celsius"),
    *("memory_used_bytes", "memory_total_bytes"),
)
INSTALL = "pip install 'hf-tinylm[gpu]'"


class GPUs:
    """The GPUs of a run, read through NVML.

    Args:
        wanted: UUIDs as torch gives them (without `GPU-`), in the run's order; none on a CPU.
        tell: called with a line on each kind of fault, once.
        library: the module `pynvml`, when it is not to be imported.
    """

    def __init__(self, wanted: Sequence[str], tell: Callable[[str], None], library: Any = None) -> None:
        self._tell, self._told, self._nvml = tell, set[str](), library
        self._handles: list[Any] = []
        if not wanted:
            return
        try:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
        except ImportError:
            self._fault("package", f"GPU sensors are not read: nvidia-ml-py is not installed. {INSTALL}")
            return
        except Exception as error:  # NVMLError has a class for each code, and none of them may end a run
            self._fault("driver", f"GPU sensors are not read: {_said(error)}.")
            return
        for name in wanted:
            self._handles.append(self._ask("device", partial(self._nvml.nvmlDeviceGetHandleByUUID, name)))

    def read(self) -> list[dict[str, Any]]:
        """One object for each GPU; what cannot be read is None."""
        return [self._read(handle) for handle in self._handles]

    def close(self) -> None:
        """Let go of the library."""
        if self._handles:
            with contextlib.suppress(Exception):  # there is nothing left that it could harm
                self._nvml.nvmlShutdown()
            self._handles = []

    def _read(self, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        if handle is None:
            return dict.fromkeys(_OF_CARD)
        memory = self._ask("memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        name = self._ask("name", lambda: nvml.nvmlDeviceGetName(handle))
        return {
            "name": name.decode() if isinstance(name, bytes) else name,
            "utilization_percent": self._ask("utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "power_watts": self._ask("power", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1_000),
            "temperature_celsius": self._ask(
                "temperature", lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "memory_used_bytes": None if memory is None else int(memory.used),
            "memory_total_bytes": None if memory is None else int(memory.total),
        }

    def _ask(self, what: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except Exception as error:  # NVMLError has a class for each code, and none of them may end a run
            self._fault(what, f"GPU sensor {what} cannot be read: {_said(error)}.")
            return None

    def _fault(self, what: str, words: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._tell(words)


class Sensors:
    """Samples in a thread of its own from `start` to `stop`. Call `notices` from the thread that writes events.

    Args:
        folder: the run's folder; its disk is the one that is watched.
        seconds: between two samples.
        gpus: what is read beside CPU, memory and disk.
    """

    def __init__(self, folder: Path, seconds: float, gpus: Sequence[str] = (), library: Any = None) -> None:
        self.folder, self.seconds = folder, seconds
        self._faults: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._file = JsonLines(folder / HARDWARE)
        self._wanted, self._library = gpus, library
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)

    def start(self) -> None:
        """Take the first sample at once, and the others in the background."""
        psutil.cpu_percent()  # the first call has nothing to compare with
        self._gpus = GPUs(self._wanted, self._faults.put, self._library)
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples; waits for the one in hand."""
        self._stop.set()
        self._thread.join()
        self._gpus.close()

    def notices(self) -> list[str]:
        """Faults that were not told yet."""
        found = []
        while not self._faults.empty():
            found.append(self._faults.get())
        return found

    def sample(self) -> dict[str, Any]:
        """What every sensor says now."""
        memory = self._ask("memory", psutil.virtual_memory)
        disk = self._ask("disk", lambda: shutil.disk_usage(self.folder))
        return {
            "time": round(time.time(), 3),
            "interval_seconds": self.seconds,
            "cpu_percent": self._ask("CPU", psutil.cpu_percent),
            "memory_used_bytes": None if memory is None else memory.total - memory.available,
            "memory_total_bytes": None if memory is None else memory.total,
            "disk_free_bytes": None if disk is None else disk.free,
            "gpus": self._gpus.read(),
        }

    def _ask(self, what: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (OSError, RuntimeError, psutil.Error) as error:
            self._gpus._fault(what, f"Sensor {what} cannot be read: {_said(error)}.")
            return None

    def _run(self) -> None:
        first = {"first": True}  # of this invocation: no energy is counted between it and the sample before it
        while True:
            try:
                self._file.append({**self.sample(), **first})
            except TrainingError as error:
                self._faults.put(f"No more sensors are recorded in this invocation: {error}")
                return
            first = {}
            if self._stop.wait(self.seconds):
                return


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": .")
