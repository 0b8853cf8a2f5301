"""`precision: auto` as a function of the device, on devices that this machine does not have."""

from __future__ import annotations

import pytest

from hf_tinylm.config import load_config
from hf_tinylm.errors import ConfigError
from hf_tinylm.sections import TrainingSection
from hf_tinylm.training import arguments
from hf_tinylm.training.arguments import precision_of, training_arguments
from hf_tinylm.training.device import DeviceFacts, choose_precision, cpu_has_bf16, device_facts

DEVICES = {
    "GTX 1080 Ti": (DeviceFacts("cuda", "GTX 1080 Ti", (6, 1)), "fp32", "no tensor cores"),
    "V100": (DeviceFacts("cuda", "V100", (7, 0)), "fp16", "float16 only"),
    "T4": (DeviceFacts("cuda", "T4", (7, 5)), "fp16", "compute capability 7.5"),
    "A100": (DeviceFacts("cuda", "A100", (8, 0)), "bf16", "compute capability 8.0"),
    "RTX 4090": (DeviceFacts("cuda", "RTX 4090", (8, 9)), "bf16", "bfloat16"),
    "H200": (DeviceFacts("cuda", "H200", (9, 0)), "bf16", "bfloat16"),
    "RTX 5070 Ti": (DeviceFacts("cuda", "RTX 5070 Ti", (12, 0)), "bf16", "compute capability 12.0"),
    "MI300X": (DeviceFacts("cuda", "MI300X", bf16=True), "bf16", "instructions of its own"),
    "Apple": (DeviceFacts("mps", "MPS"), "fp32", "MPS"),
    "TPU": (DeviceFacts("xla", "XLA (TPU)", bf16=True), "bf16", "matrix unit"),
    "XLA on a CPU": (DeviceFacts("xla", "XLA (CPU)"), "fp32", "no TPU"),
    "CPU with AMX": (DeviceFacts("cpu", "CPU AVX512 with bf16", bf16=True), "bf16", "instructions of its own"),
    "older CPU": (DeviceFacts("cpu", "CPU AVX2"), "fp32", "no instructions"),
}


@pytest.mark.parametrize(("facts", "precision", "why"), DEVICES.values(), ids=DEVICES)
def test_each_device_gets_its_precision_and_is_told_why(facts: DeviceFacts, precision: str, why: str) -> None:
    found, reason = choose_precision(facts)
    assert found == precision
    assert facts.name in reason
    assert why in reason


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ({}, "fp16"),
        ({"precision": "bf16"}, "bf16"),
        ({"precision": "fp32"}, "fp32"),
        ({"bf16": True}, "bf16"),
        ({"bf16": False}, "fp32"),
        ({"fp16": True}, "fp16"),
    ],
)
def test_what_is_asked_wins_over_the_device(
    keys: dict[str, object], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "device_facts", lambda use_cpu: DeviceFacts("cuda", "T4", (7, 5)))
    assert precision_of(TrainingSection(**keys), use_cpu=False)[0] == precision  # type: ignore[arg-type]


@pytest.mark.parametrize("has_bf16", [True, False])
def test_the_choice_reaches_the_arguments_and_is_said_at_the_start(
    has_bf16: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "device_facts", lambda use_cpu: DeviceFacts("cpu", "CPU X", bf16=has_bf16))
    args = training_arguments(load_config(None, ["--output_dir", "runs/x", "--use_cpu", "--cpu_threads", "1"]))
    assert (args.bf16, args.fp16) == (has_bf16, False)
    assert f"precision {'bf16' if has_bf16 else 'fp32'}: CPU X" in capsys.readouterr().err


def test_this_cpu_is_described_by_its_instructions() -> None:
    facts = device_facts(use_cpu=True)
    assert (facts.kind, facts.capability, facts.bf16) == ("cpu", None, cpu_has_bf16())


def test_two_words_for_the_precision_are_refused() -> None:
    for word in (["--bf16", "true"], ["--bf16", "false"], ["--fp16", "true"]):
        with pytest.raises(ConfigError, match="Leave out bf16 and fp16"):
            load_config(None, ["--precision", "fp32", *word])
    assert load_config(None, ["--precision", "fp32"]).training.precision == "fp32"
