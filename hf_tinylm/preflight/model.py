"""Checks of the model: its size and weights, what a position may see, what its gradients reach."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..modeling.loss import IGNORE_INDEX, count_targets
from ..modeling.model import TinyLMForCausalLM
from ..planning import uniform_loss
from .checks import Finding, rule
from .subject import PROBE_LENGTH, Subject

MODEL_RUNS = ("ids", "weights")  # what every check needs that runs the model
LOSS_TARGETS = 2_048  # targets of the initial loss
STARTING_ROWS = 8  # windows of the loss with the weights of init_from
HALF = 8  # half the tokens of a row in the checks of attention
NEW_TOKENS = 8
# A leak of the future moves logits by percents of what a change does at its own position; rounding by 1e-7.
LEAK = 1e-4
# Standard errors of a mean over targets that chance may be off.
SIGMAS = 5.0


@rule("parameters", "the model that was built is not the one that the configuration describes", on_resume=True)
def parameters(subject: Subject) -> Finding:
    """As many parameters as the plan counts, a tied one once."""
    planned = subject.planned_shape.parameters
    built = sum({id(p): p.numel() for p in subject.trainer.model.parameters()}.values())
    return Finding(built == planned, f"{built:,}", f"{planned:,}")


@rule("weights", "the initialisation is broken, or a weight was changed or cast before the run", on_resume=True)
def weights(subject: Subject) -> Finding:
    """Every weight is a finite float32."""
    named = dict(subject.trainer.model.named_parameters())
    bad = [name for name, p in named.items() if p.dtype != torch.float32 or not bool(torch.isfinite(p).all())]
    value = f"{len(bad)} of {len(named)} tensors are not: {', '.join(bad[:3])}" if bad else f"{len(named)} tensors"
    return Finding(not bad, value, "all finite float32")


@rule(
    "starting weights",
    "init_from names no model, one of another shape or tokenizer, or a copy of it was cut short",
    needs=("weights",),
)
def starting_weights(subject: Subject) -> Finding:
    """A copy of the model takes up the weights of `init_from` as the run will, and has a loss with them."""
    args, expected = subject.trainer.args, "fresh, or as in init_from, with a finite loss"
    if args.init_from is None or subject.resumed:
        return Finding(True, "those of the checkpoint" if subject.resumed else "fresh", expected)
    model = subject.probe()
    found = subject.trainer.record.take_up(args.init_from, model, subject.optimizer(model))
    with torch.no_grad(), subject.exact():
        loss = float(model.eval()(**subject.sample(STARTING_ROWS, PROBE_LENGTH), return_logits=False).loss)
    value = f"{args.init_from}: SHA-256 {found['init_weights_sha256'][:12]}..., moments {found['moments']}; "
    value += f"loss {loss:.4f} (ln V = {uniform_loss(subject.model_config.num_tokens):.4f})"
    return Finding(math.isfinite(loss), value, expected)


@rule(
    "initial loss",
    "a fresh model knows nothing: lower, and it sees its targets; higher, and its first weights are too large",
    needs=MODEL_RUNS,
)
def initial_loss(subject: Subject) -> Finding:
    """The loss of the first windows is that of random logits: ln V + variance / 2.

    Logits of a normalised hidden state have the variance hidden_size x initializer_range^2.
    """
    length = min(subject.trainer.plan.sequence_length, 256)
    batch = subject.sample(max(2, LOSS_TARGETS // length), length)
    model = subject.probe().eval()
    with torch.no_grad(), subject.exact():
        loss = float(model(**batch, return_logits=False).loss)
    config = subject.model_config
    variance = config.hidden_size * config.initializer_range**2
    error = math.sqrt(variance / max(1, int(count_targets(batch["shift_labels"]))))
    expected, tolerance = uniform_loss(config.num_tokens) + variance / 2, variance / 4 + SIGMAS * error + 0.02
    words = f"{expected:.4f} +- {tolerance:.4f} (ln V = {uniform_loss(config.num_tokens):.4f})"
    return Finding(abs(loss - expected) <= tolerance, round(loss, 4), words)


@rule(
    "causality",
    "a position sees later ones (mask missing or shifted): the loss falls fast, and generated text is noise",
    needs=MODEL_RUNS,
)
def causality(subject: Subject) -> Finding:
    """A change at one position leaves the logits before it untouched, and not those after it; with padding too."""
    ids = _ids(subject)
    changed = ids.clone()
    middle = ids.shape[1] // 2
    changed[:, middle] = (ids[:, middle] + 1) % subject.model_config.num_tokens
    model = subject.probe()
    padding = torch.ones_like(ids)
    padding[:, -1] = 0  # which needs an explicit mask
    leaks = []
    for inputs in ({}, {"attention_mask": padding}):
        difference = (subject.logits(model, changed, **inputs) - subject.logits(model, ids, **inputs)).abs()
        before, after = float(difference[:, :middle].max()), float(difference[:, middle:-1].max())
        leaks.append(before / after if after > 0 else math.inf)
    leak = max(leaks)
    return Finding(leak <= LEAK, f"earlier logits move by {leak:.1e} of what later ones do", f"at most {LEAK:.0e}")


@rule(
    "masks",
    "padding or a neighbouring document takes part in attention: results depend on what else is in the batch",
    needs=MODEL_RUNS,
)
def masks(subject: Subject) -> Finding:
    """Padding on the left, and another document in front whose positions end there, change nothing."""
    row = _ids(subject)[:1]
    half = row.shape[1] // 2
    other, own = row[:, :half], row[:, half:]
    model = subject.probe()
    alone = subject.logits(model, own)
    first, second = torch.arange(half, device=row.device), torch.arange(own.shape[1], device=row.device)
    mask = torch.cat((torch.zeros_like(other), torch.ones_like(own)), dim=1)
    padded = subject.logits(model, row, attention_mask=mask, position_ids=torch.cat((first * 0, second))[None])
    packed = subject.logits(model, row, position_ids=torch.cat((first, second))[None])
    scale = float(alone.abs().max())
    found = [float((logits[:, half:] - alone).abs().max()) / scale for logits in (padded, packed)]
    value = f"logits move by {found[0]:.1e} with padding and {found[1]:.1e} in a pack"
    return Finding(max(found) <= subject.tolerance, value, f"at most {subject.tolerance:.0e} of the largest")


@rule(
    "gradients",
    "a layer is cut off (detach, no_grad, a tensor made anew) or a parameter is frozen: it would never learn",
    needs=MODEL_RUNS,
)
def gradients(subject: Subject) -> Finding:
    """After one backward pass every parameter has a finite gradient that is not zero everywhere."""
    model = subject.probe()
    with subject.precision():
        model(**subject.sample(2)).loss.backward()
    named = dict(model.named_parameters())
    bad = [name for name, p in named.items() if p.grad is None or not _alive(p.grad)]
    if bad:
        return Finding(False, f"{len(bad)} of {len(named)} have none: {', '.join(bad[:3])}", "every parameter has one")
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in named.values() if p.grad is not None]))
    return Finding(True, f"all {len(named)} tensors have one, norm {norm:.4g}", "every parameter has one")


@rule(
    "precision",
    "the model loses digits where it must not: a norm, softmax or loss computed in half precision",
    needs=MODEL_RUNS,
)
def precision(subject: Subject) -> Finding:
    """The loss in the precision of the run is the loss in float32, to 1%."""
    args = subject.trainer.args
    if not (args.bf16 or args.fp16):
        return Finding(True, "float32, nothing to compare", "float32")
    model, batch = subject.probe().eval(), subject.sample(4)
    with torch.no_grad():
        with subject.trainer.accelerator.autocast():
            low = float(model(**batch, return_logits=False).loss)
        with subject.exact():
            full = float(model(**batch, return_logits=False).loss)
    name = "bf16" if args.bf16 else "fp16"
    return Finding(abs(low - full) <= 0.01 * abs(full), f"{low:.5f} in {name}", f"{full:.5f} (float32) +- 1%")


@rule("generation", "generation does not stop, or its cache gives another text than the model itself", needs=MODEL_RUNS)
def generation(subject: Subject) -> Finding:
    """Greedy generation ends in time, gives tokens that exist, and takes the most likely one by the whole model too."""
    model = subject.probe().eval()
    prompt = _ids(subject)[:1, :HALF]
    room = max(1, min(NEW_TOKENS, int(subject.model_config.max_position_embeddings) - prompt.shape[1]))
    with subject.exact():
        output: Any = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=room, do_sample=False,
            suppress_tokens=list(range(subject.model_config.num_tokens, subject.model_config.vocab_size)) or None,
        )  # fmt: skip
    new = output[0, prompt.shape[1] :]
    exist = bool(((new >= 0) & (new < subject.model_config.num_tokens)).all())
    words = f"at most {room} tokens that exist, each the most likely"
    if not 1 <= len(new) <= room or not exist:
        return Finding(False, f"{len(new)} new tokens, the highest id {int(new.max()) if len(new) else None}", words)
    logits = subject.logits(model, output[:, :-1])[0, prompt.shape[1] - 1 :]
    short = float((logits.max(dim=-1).values - logits.gather(1, new[:, None])[:, 0]).max()) / float(logits.abs().max())
    return Finding(short <= subject.tolerance, f"{len(new)} tokens, at most {short:.1e} below the most likely", words)


def _ids(subject: Subject) -> torch.Tensor:
    """Ids (B, 16) of the first windows, or as many as a window has."""
    return subject.sample(2, 2 * HALF)["input_ids"]


def _alive(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(gradient).all()) and bool((gradient != 0).any())


def reference_loss(model: TinyLMForCausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy over the targets of a batch from logits alone, by log-softmax and a look-up; with gradient."""
    inputs, labels = {name: tensor for name, tensor in batch.items() if name != "shift_labels"}, batch["shift_labels"]
    logits = model(**inputs, use_cache=False).logits[..., : model.config.num_tokens].float()
    supervised = labels != IGNORE_INDEX
    chosen = logits.log_softmax(dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -chosen[supervised].mean()


RULES = (parameters, weights, starting_weights, initial_loss, causality, masks, gradients, precision, generation)
