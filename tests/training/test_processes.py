"""Two and three processes: the same numbers as one, and resumes that continue bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hf_tinylm.training.metrics import read_rows
from hf_tinylm.training.processes import wait_for_threads

# Run by every process of a launch; one launch runs all cases of a test, because importing torch is slow.
DRIVER = """
import json, os, shutil, sys
from pathlib import Path
import numpy as np, torch
from safetensors.torch import load_file
from hf_tinylm.sections import ModelSection
from hf_tinylm.data.windows import TokenWindows
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.training.arguments import LMTrainingArguments
from hf_tinylm.training.checkpoint import list_checkpoints
from hf_tinylm.training.metrics import read_rows
from hf_tinylm.training.trainer import LMTrainer

torch.set_num_threads(1)
RANK, T = int(os.environ.get("RANK", "0")), 32
OUT = Path(sys.argv[1])

def stream(ids, seed=0):
    walk = np.cumsum(np.random.default_rng(seed).integers(0, 3, ids))
    return ((walk % 997) + 4).astype(np.uint16)


class Ragged:
    # targets masked as a function of the window: processes hold unequal numbers of them
    sequence_length = T

    def __init__(self, order):
        self.windows, self.order = TokenWindows([stream(1500), stream(700, 1)], T, order, 7), order

    def __len__(self):
        return len(self.windows)

    def batch(self, ks):
        batch = self.windows.batch(ks)
        kept = torch.from_numpy(np.asarray(ks, dtype=np.int64) * 7919 % T)
        mask = torch.arange(T)[None, :] > kept[:, None]
        return {**batch, "shift_labels": batch["shift_labels"].masked_fill(mask, -100)}

    source_names = ["low", "high"]

    def target_sources(self, ks):
        return self.windows.gather(ks)[:, 1:] // 500


def train(name, order="permutation", width=192, sgd=False, **fields):
    shape = dict(hidden_size=width, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
    section = ModelSection(intermediate_size=2 * width, attention_dropout=fields.pop("dropout", 0.1), **shape)
    model = new_model(section, 1001, T, seed=1)
    values = dict(use_cpu=True, learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, global_batch_tokens=6 * T,
                  per_device_train_batch_size=1, train_tokens=12 * 6 * T - 50, eval_strategy="steps", eval_steps=4,
                  eval_tokens=1024, save_strategy="steps", save_steps=1, report_to="none", disable_tqdm=True)
    trainer = LMTrainer(model, LMTrainingArguments(output_dir=str(OUT / name), **{**values, **fields}), Ragged(order),
                        TokenWindows([stream(1500, 2)], T, "sequential", 0))
    if sgd:
        trainer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer.train()
    return trainer


def barrier(trainer):
    trainer.accelerator.wait_for_everyone()


def untimed(rows):
    clocks = ("seconds", "data_seconds", "tokens_per_second", "flops_per_second", "wall_seconds")
    return [{k: v for k, v in row.items() if k not in clocks} for row in rows]


def resume_everywhere(name, stops, **fields):
    whole = train(name, **fields)
    problems = []
    for stop in stops:
        copy = OUT / f"{name}-{stop}"
        if RANK == 0:
            shutil.copytree(OUT / name, copy)
            for later in list_checkpoints(copy)[stop:]:
                shutil.rmtree(later)
        barrier(whole)
        again = train(copy.name, resume_from_checkpoint="auto", **fields)
        barrier(again)
        if RANK == 0:
            for file in sorted((OUT / name / "checkpoint-00000012").glob("*.safetensors")):
                first, second = load_file(file), load_file(copy / file.parent.name / file.name)
                if first.keys() != second.keys() or not all(torch.equal(first[k], second[k]) for k in first):
                    problems.append(f"{file.name} after a resume at {stop}")
            if untimed(read_rows(OUT / name / "metrics.jsonl")) != untimed(read_rows(copy / "metrics.jsonl")):
                problems.append(f"rows after a resume at {stop}")
            shutil.rmtree(copy)
        barrier(again)
    return problems
"""


def launch(tmp_path: Path, body: str, processes: int, timeout: float) -> Any:
    """Run DRIVER and `body` in `processes` processes; what the main one assigned to `result`."""
    script = tmp_path / "driver.py"
    ending = "if RANK == 0:\n    (OUT / 'result.json').write_text(json.dumps(result))\n"
    ending += "if torch.distributed.is_initialized():\n    torch.distributed.destroy_process_group()\n"
    script.write_text(DRIVER + body + "\n" + ending)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable] if processes == 1 else command
    variables = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, str(script), str(tmp_path)], env=variables, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    try:
        _, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, errors[-6000:]
    return json.loads((tmp_path / "result.json").read_text())


def test_a_process_ends_only_when_its_other_threads_rest() -> None:
    ended = []
    busy = threading.Thread(target=lambda: ended.append(hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)))
    busy.start()  # native code without Python's lock, as the threads of a process group run
    wait_for_threads(seconds=60)
    assert ended
    busy.join()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)

    endless = threading.Thread(target=work)
    endless.start()
    wait_for_threads(seconds=0.2)  # and does not wait for ever
    assert endless.is_alive()
    stop.set()
    endless.join()


def test_two_processes_with_unequal_targets_equal_one(tmp_path: Path) -> None:
    """One SGD step of rate 1.0 without clipping: weights within 1e-6, as only the order of float32 sums differs."""
    body = (
        "t = train('run', sgd=True, learning_rate=1.0, dropout=0.0, train_tokens=6 * T, warmup_steps=0,\n"
        "          min_lr_ratio=1.0, max_grad_norm=0.0, source_loss=True)\n"
        "barrier(t)\n"
        "row = read_rows(OUT / 'run' / 'metrics.jsonl')[0] if RANK == 0 else {}\n"
        "result = {'loss': row.get('loss'), 'targets': row.get('supervised_tokens'), 'norm': row.get('grad_norm')}\n"
        "result['sources'] = row.get('loss_by_source')\n"
        "torch.Tensor.bfloat16 = torch.Tensor.float  # Muon's; in 8 bits, sums in another order show\n"
        "train('muon', dropout=0.0, train_tokens=18 * T, optim='muon', eval_strategy='no')\n"
        "train('grown', sgd=True, learning_rate=0.5, dropout=0.0, train_tokens=30 * T - 5, eval_strategy='no',\n"
        "      batch_growth=[[12 * T, 24 * T]], max_grad_norm=0.0)\n"
    )
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        found.append(launch(folder, body, processes, timeout=90))
    one, two = (load_file(tmp_path / n / "run" / "checkpoint-00000001" / "model.safetensors") for n in ("1", "2"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6
    one, two = (load_file(tmp_path / n / "muon" / "checkpoint-00000003" / "model.safetensors") for n in ("1", "2"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 5e-6
    one, two = (load_file(tmp_path / n / "grown" / "checkpoint-00000003" / "model.safetensors") for n in ("1", "2"))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-6
    one, two = (read_rows(tmp_path / n / "grown" / "metrics.jsonl") for n in ("1", "2"))
    assert [row["supervised_tokens"] for row in one] == [row["supervised_tokens"] for row in two]
    targets = [k * 7919 % 32 + 1 for k in range(6)]
    assert found[0]["targets"] == found[1]["targets"] == sum(targets)
    assert sum(targets[:3]) != sum(targets[3:])
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], abs=1e-6)
    assert found[0]["norm"] == pytest.approx(found[1]["norm"], rel=1e-5)
    assert found[0]["sources"] == pytest.approx(found[1]["sources"], abs=1e-6)
    low, high = found[0]["sources"]["low"], found[0]["sources"]["high"]
    assert abs(low - high) > 1e-3
    assert min(low, high) < found[0]["loss"] < max(low, high)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_resume_bit_for_bit_mid_epoch_at_its_border_and_at_the_end(
    tmp_path: Path, processes: int
) -> None:
    """67 windows an epoch, 6 an update: update 6 is mid-epoch, 11 ends at its border, 12 is the last. About 6 MB."""
    body = (
        "result = resume_everywhere('permutation', (5, 11, 6), order='permutation')\n"
        "result += resume_everywhere('random', (5, 11, 6), order='random')\n"
        "result += resume_everywhere('muon', (5,), optim='muon', muon_momentum_warmup_steps=9)\n"
    )
    assert launch(tmp_path, body, processes, timeout=170) == []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_compiled_run_resumes_bit_for_bit(tmp_path: Path, processes: int) -> None:
    body = "result = resume_everywhere('compiled', (5,), width=32, torch_compile=True)\n"
    assert launch(tmp_path, body, processes, timeout=170) == []


@pytest.mark.slow
def test_the_published_arithmetic_holds_to_the_token_on_a_scaled_run(tmp_path: Path) -> None:
    """2,000,000,000 tokens in updates of 262,144, all divided by 1,024: 7,630 updates, the last of 101 targets."""
    body = (
        "import dataclasses\n"
        "class Plain(Ragged):\n"
        "    def batch(self, ks):\n"
        "        return self.windows.batch(ks)\n"
        "Ragged = Plain\n"
        "t = train('run', width=8, dropout=0.0, train_tokens=1_953_125, global_batch_tokens=256,\n"
        "          per_device_train_batch_size=8, warmup_steps=500, eval_strategy='no', save_strategy='no')\n"
        "rows = read_rows(OUT / 'run' / 'metrics.jsonl')\n"
        "result = [t.plan.updates, t.plan.last_update_tokens, len(rows), rows[-1]['supervised_tokens'],\n"
        "          rows[-2]['supervised_tokens'], rows[-1]['learning_rate']]\n"
    )
    updates, last, rows, tokens, before, rate = launch(tmp_path, body, 1, timeout=170)
    assert (updates, last, rows) == (7_630, 101, 7_630)
    assert (tokens, before) == (1_953_125, 1_953_125 - 101)
    assert rate == pytest.approx(1e-4)


def test_a_loss_that_is_not_finite_on_one_process_stops_all(tmp_path: Path) -> None:
    body = (
        "from hf_tinylm.errors import TrainingError\n"
        "class Poisoned(Ragged):\n"
        "    def batch(self, ks):\n"
        "        batch = super().batch(ks)\n"
        "        if int(ks[0]) == 3:  # the second process's first window of update 1\n"
        "            batch['input_ids'] = batch['input_ids'].clamp(max=1000)\n"
        "            globals()['POISON'] = True\n"
        "        return batch\n"
        "Ragged = Poisoned\n"
        "POISON = False\n"
        "from hf_tinylm.modeling import model as m\n"
        "plain = m.TinyLMForCausalLM.forward\n"
        "def forward(self, *args, **kwargs):\n"
        "    output = plain(self, *args, **kwargs)\n"
        "    if POISON and self.training:\n"
        "        output.loss = output.loss * float('nan')\n"
        "    return output\n"
        "m.TinyLMForCausalLM.forward = forward\n"
        "try:\n"
        "    train('run')\n"
        "    result = 'no error'\n"
        "except TrainingError as error:\n"
        "    result = str(error)\n"
    )
    message = launch(tmp_path, body, 2, timeout=90)
    assert message.startswith("Update 1 has loss nan")
    assert "3, 4, 5" in message
    assert not list((tmp_path / "run").glob("checkpoint-*"))
