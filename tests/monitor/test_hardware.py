"""Sensors that are there, missing or broken, and the energy that their samples add up to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_tinylm.cli import main
from hf_tinylm.monitor.hardware import energy, hardware_lines, hardware_state
from hf_tinylm.monitor.run import Run
from hf_tinylm.monitor.sensors import GPUs, Sensors

HOUR = 3_600.0


class NVMLError(Exception):
    pass


class FakeNVML:
    """The calls of nvidia-ml-py that are used; `broken` names those that raise."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *broken: str) -> None:
        self.broken, self.closed = broken, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name in self.broken:
                raise NVMLError("Not Supported")
            return {
                "nvmlDeviceGetHandleByUUID": arguments and arguments[0],
                "nvmlDeviceGetName": b"Card",
                "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=3),
                "nvmlDeviceGetPowerUsage": 217_500,
                "nvmlDeviceGetTemperature": 63,
                "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=14 * 10**9, total=16 * 10**9),
            }.get(name)

        return call


def trace(began: float, hours: float, watts: float, **more: Any) -> list[dict[str, Any]]:
    """Samples every 30 seconds that swing around `watts` by 40, as a card under load does."""
    count = round(hours * HOUR / 30)
    return [
        {
            **{"time": began + 30 * place, "interval_seconds": 30.0, "cpu_percent": 12.0},
            "gpus": [{"power_watts": watts + (40 if place % 2 else -40)}],
            **(more if place == 0 else {}),
        }
        for place in range(count + 1)
    ]


def test_a_trace_of_two_days_gives_the_energy_and_the_money_of_the_published_run(tmp_path: Path) -> None:
    """49.2 hours at 217.5 W are 10.70 kWh; a pause of a night between its halves adds nothing."""
    night = 1e9 + 24.6 * HOUR + 9 * HOUR
    rows = [*trace(1e9, 24.6, 217.5, first=True), *trace(night, 24.6, 217.5)]
    (tmp_path / "hardware.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"time": 2e9, "gp')
    (tmp_path / "events.jsonl").touch()
    read = Run(tmp_path).hardware
    assert len(read) == 2 * 2_953
    kwh, hours = energy(read)
    assert kwh == pytest.approx(10.70, abs=0.005)
    assert kwh == pytest.approx(49.2 * 0.2175, rel=1e-9)
    assert hours == pytest.approx(49.2)
    state = hardware_state(read, price_per_kwh=0.30, now=night + 24.6 * HOUR + 89)
    assert state is not None
    assert state["energy_cost"] == pytest.approx(3.21, abs=0.005)
    assert state["stale"] is False
    assert "10.70 kWh at the GPUs in 49.2 measured hours, cost 3.21" in "\n".join(hardware_lines(state))
    later = hardware_state(read, now=night + 24.6 * HOUR + 91)
    assert later is not None
    assert (later["stale"], later["energy_cost"]) == (True, None)
    assert "1 min 31 s ago (stale)" in hardware_lines(later)[0]


def test_nothing_is_counted_over_a_restart_a_clock_that_went_back_or_a_missing_sensor() -> None:
    def at(when: float, watts: float | None, **more: Any) -> dict[str, Any]:
        return {"time": when, "interval_seconds": 30.0, "gpus": [{"power_watts": watts}], **more}

    assert energy([at(0, 360.0), at(30, 360.0), at(60, 360.0)]) == (pytest.approx(0.006), pytest.approx(1 / 60))
    assert energy([at(0, 360.0), at(30, 360.0), at(60, 360.0, first=True)])[0] == pytest.approx(0.003)
    assert energy([at(0, 360.0), at(30, 360.0), at(10, 360.0)])[0] == pytest.approx(0.003)
    assert energy([at(0, 360.0), at(30, None), at(60, 360.0)]) == (None, 0.0)
    two = [{**at(0, 100.0), "gpus": [{"power_watts": 100.0}, {"power_watts": 260.0}]} for _ in range(2)]
    assert energy([two[0], {**two[1], "time": 30}])[0] == pytest.approx(0.003)  # both cards
    assert energy([at(0, 360.0)]) == (None, 0.0)
    assert energy([]) == (None, 0.0)


def test_every_field_of_a_card_is_read_in_its_unit() -> None:
    told: list[str] = []
    assert GPUs(["GPU-1"], told.append, FakeNVML()).read() == [
        {
            **{"name": "Card", "utilization_percent": 97, "power_watts": 217.5, "temperature_celsius": 63},
            **{"memory_used_bytes": 14 * 10**9, "memory_total_bytes": 16 * 10**9},
        }
    ]
    assert told == []


@pytest.mark.parametrize(
    ("broken", "field", "words"),
    [
        ("nvmlDeviceGetPowerUsage", "power_watts", "GPU sensor power cannot be read: NVMLError: Not Supported."),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes", "GPU sensor memory cannot"),
        ("nvmlDeviceGetHandleByUUID", "name", "GPU sensor device cannot"),
    ],
)
def test_a_sensor_that_fails_is_null_and_told_once(broken: str, field: str, words: str) -> None:
    told: list[str] = []
    cards = GPUs(["GPU-1"], told.append, FakeNVML(broken))
    for _ in range(3):
        assert cards.read()[0][field] is None
    assert len(told) == 1
    assert words in told[0]


def test_without_driver_package_or_gpu_there_are_no_cards_and_at_most_one_word() -> None:
    told: list[str] = []
    assert GPUs(["GPU-1"], told.append, FakeNVML("nvmlInit")).read() == []
    assert told == ["GPU sensors are not read: NVMLError: Not Supported."]
    assert GPUs([], told.append, FakeNVML("nvmlInit")).read() == []
    assert len(told) == 1


def test_the_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    told: list[str] = []
    GPUs(["GPU-1"], told.append)
    assert told == ["GPU sensors are not read: nvidia-ml-py is not installed. pip install 'hf-tinylm[gpu]'"]


def test_the_thread_writes_rows_with_a_time_until_it_is_stopped(tmp_path: Path) -> None:
    sensors = Sensors(tmp_path, 0.01, ["GPU-1"], FakeNVML("nvmlDeviceGetTemperature"))
    sensors.start()
    deadline = time.monotonic() + 10
    (tmp_path / "events.jsonl").touch()
    while len(Run(tmp_path).hardware) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    sensors.stop()
    rows = Run(tmp_path).hardware
    assert len(rows) >= 3
    assert [row.get("first") for row in rows[:2]] == [True, None]
    assert abs(rows[0]["time"] - time.time()) < 60
    assert 0 < rows[0]["memory_used_bytes"] < rows[0]["memory_total_bytes"]
    assert rows[0]["disk_free_bytes"] > 0
    assert rows[0]["gpus"][0]["power_watts"] == 217.5
    assert len(sensors.notices()) == 1  # the temperature, once for all rows
    assert "sensors" not in [thread.name for thread in threading.enumerate()]


def test_a_full_disk_ends_the_sensors_with_a_word_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "hardware.jsonl").mkdir()  # a file that cannot be opened
    sensors = Sensors(tmp_path, 0.01)
    sensors.start()
    sensors.stop()
    assert sensors.notices()[0].startswith("No more sensors are recorded in this invocation")


def test_tail_shows_the_hardware_with_its_age(
    write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(price_per_kwh=0.5)
    assert main(["tail", str(folder)]) == 0
    assert "hardware      no sample: hardware.jsonl is not there" in capsys.readouterr().out
    rows = trace(time.time() - HOUR - 1_000, 1, 1_000.0)
    (folder / "hardware.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["tail", str(folder), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)["hardware"]
    assert state["stale"] is True
    assert state["age_seconds"] == pytest.approx(1_000, abs=30)
    assert state["energy_cost"] == pytest.approx(0.5)
    assert main(["tail", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "CPU 12%, memory unknown, disk free size unknown; 16 min" in shown
    assert "GPU, utilization unknown, 960 W, temperature unknown, memory unknown" in shown
