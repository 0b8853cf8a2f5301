"""GPT-2 under the same loss, padding and optimizer: against stock, and against a plain one written out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

from hf_tinylm.config import load_config
from hf_tinylm.errors import ConfigError
from hf_tinylm.modeling.factory import load_model, meta_model, new_model
from hf_tinylm.modeling.stock import save_stock_model, stock_model
from hf_tinylm.planning import ModelShape
from hf_tinylm.planning.memory import MemorySettings, activation_bytes
from hf_tinylm.sections import ModelSection
from hf_tinylm.training.optimizer import adamw, parameter_groups

VOCABULARY, CONTEXT, HEADS, WIDTH = 101, 32, 4, 32
RATE, BETAS, EPSILON, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
Tensors = dict[str, torch.Tensor]


def section(**keys: Any) -> ModelSection:
    shape = {
        **{"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 96},
        **{"max_position_embeddings": CONTEXT, "initializer_range": 0.02},
    }
    return ModelSection(architecture="gpt2", **{**shape, **keys})


@pytest.fixture
def make_gpt2() -> Callable[..., Any]:
    """A small GPT-2; with `lively` its weights are large, its gains and biases differ by channel."""

    def make(lively: bool = True, **keys: Any) -> Any:
        model = new_model(section(**keys), VOCABULARY, CONTEXT, seed=1)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if lively and parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
                elif lively:
                    parameter.mul_(8)
        return model

    return make


@pytest.fixture
def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and targets, (6, 32) each; some positions have no target."""
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randint(0, VOCABULARY, (6, CONTEXT + 1), generator=generator)
    targets = drawn[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    return drawn[:, :-1], targets


def plain_logits(state: Tensors, ids: torch.Tensor, heads: int = HEADS) -> torch.Tensor:
    """GPT-2 from its paper: logits (B, T, V) of weights by their stock names."""
    embedding = state["transformer.wte.weight"]
    x = embedding[ids] + state["transformer.wpe.weight"][: ids.shape[1]]
    layers = 1 + max(int(name.split(".")[2]) for name in state if ".h." in name)
    future = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        centred = y - y.mean(-1, keepdim=True)
        unit = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return unit * state[f"{name}.weight"] + state[f"{name}.bias"]

    def project(y: torch.Tensor, name: str) -> torch.Tensor:
        return torch.matmul(y, state[f"{name}.weight"]) + state[f"{name}.bias"]

    for layer in range(layers):
        of = f"transformer.h.{layer}"
        parts = project(norm(x, f"{of}.ln_1"), f"{of}.attn.c_attn").chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
        weights = scores.float().masked_fill(future, -math.inf) if scores.dtype != torch.float64 else scores
        weights = weights.masked_fill(future, -math.inf).softmax(-1)
        x = x + project(torch.matmul(weights.to(value.dtype), value).transpose(1, 2).flatten(2), f"{of}.attn.c_proj")
        inner = project(norm(x, f"{of}.ln_2"), f"{of}.mlp.c_fc")
        inner = 0.5 * inner * (1 + torch.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + project(inner, f"{of}.mlp.c_proj")
    return torch.matmul(norm(x, "transformer.ln_f"), embedding.T)


def plain_gradients(state: Tensors, ids: torch.Tensor, targets: torch.Tensor, heads: int = HEADS) -> Tensors:
    """Gradient of the mean loss with respect to each of `state`."""
    own = {name: tensor.detach().clone().requires_grad_() for name, tensor in state.items()}
    logits = plain_logits(own, ids, heads)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    return {name: tensor.grad for name, tensor in own.items() if tensor.grad is not None}


def weights_of(model: Any) -> Tensors:
    """Its parameters by stock names, each once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain_step(state: Tensors, gradients: Tensors, moments: list[Tensors], step: int) -> None:
    """AdamW with clipping by the global norm, in float64 and in place. Source: arXiv 1711.05101, algorithm 2."""
    norm = math.sqrt(sum(float(gradient.double().pow(2).sum()) for gradient in gradients.values()))
    for name, weight in state.items():
        gradient = gradients[name].double() * min(1.0, CLIP / (norm + 1e-6))
        first = BETAS[0] * moments[0].get(name, 0.0) + (1 - BETAS[0]) * gradient
        second = BETAS[1] * moments[1].get(name, 0.0) + (1 - BETAS[1]) * gradient**2
        moments[0][name], moments[1][name] = first, second
        wide = weight.double() * (1 - RATE * (DECAY if weight.ndim > 1 else 0.0))
        unbiased = (first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step))
        weight.copy_(wide - RATE * unbiased[0] / (unbiased[1].sqrt() + EPSILON))


@pytest.mark.parametrize(
    ("rows", "parameters", "decayed"),
    [(50_257, 124_439_808, 124_318_464), (50_304, 124_475_904, 124_354_560), (50_432, 124_574_208, 124_452_864)],
)
def test_parameters_and_decay_groups_of_gpt2_small(rows: int, parameters: int, decayed: int) -> None:
    multiple = {50_257: 1, 50_304: 128, 50_432: 256}[rows]
    small = section(
        **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3_072},
        **{"max_position_embeddings": 1_024, "pad_vocab_to_multiple_of": multiple},
    )
    model = meta_model(small, 50_257, 1_024)
    groups = parameter_groups(model, DECAY)
    counts = [sum(p.numel() for p in group["params"]) for group in groups]  # type: ignore[attr-defined]
    assert (model.config.vocab_size, sum(counts), counts) == (rows, parameters, [decayed, 121_344])
    assert [group["weight_decay"] for group in groups] == [DECAY, 0.0]
    shape = ModelShape.from_config(small, 50_257)
    assert (shape.parameters, shape.decayed_parameters, shape.undecayed_parameters) == (parameters, decayed, 121_344)
    assert shape == model.config.shape
    stock = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": rows}
    assert ModelShape.from_model_config(stock) == shape
    if rows == 50_304:
        assert round(shape.flops_per_token() / 1e6) == 747
        assert round(shape.flops_per_token_with_attention(1_024) / 1e6) == 860


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_logits_equal_stock_gpt2_in_both_directions(attention: str, tmp_path: Path, windows: Any) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        **{"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 3, "n_head": 3, "n_positions": CONTEXT},
        **{"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": 0},
    )
    stock = GPT2LMHeadModel(config).eval()
    stock.save_pretrained(tmp_path / "stock")
    ours = load_model(tmp_path / "stock", attention)
    expected = stock(windows[0]).logits.detach()
    assert float(expected.std()) > 0.5
    assert float((ours(windows[0]).logits - expected).abs().max()) < 1e-5
    assert float((plain_logits(weights_of(ours), windows[0], heads=3) - expected).abs().max()) < 1e-5
    save_stock_model(ours, tmp_path / "again")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "again").eval()
    assert float((again(windows[0]).logits - expected).abs().max()) == 0.0


def test_padded_rows_have_no_probability_no_gradient_and_change_no_loss(make_gpt2: Any, windows: Any) -> None:
    ids, targets = windows
    unpadded, padded = make_gpt2(), make_gpt2(pad_vocab_to_multiple_of=64)
    with torch.no_grad():
        padded.load_state_dict(unpadded.state_dict() | {n: padded.state_dict()[n] for n in padded.vocabulary_weights})
        padded.transformer.wte.weight[:VOCABULARY] = unpadded.transformer.wte.weight
        padded.transformer.wte.weight[VOCABULARY:] = 30.0  # would win every position
    for model in (unpadded.train(), padded.train()):
        model(input_ids=ids, shift_labels=targets).loss.backward()
    one, two = (model.transformer.wte.weight.grad for model in (unpadded, padded))
    assert float(two[VOCABULARY:].abs().max()) == 0.0
    assert float((one - two[:VOCABULARY]).abs().max()) < 1e-7
    losses = [float(model(input_ids=ids, shift_labels=targets).loss) for model in (unpadded, padded)]
    losses += [float(model.eval()(input_ids=ids, shift_labels=targets).loss) for model in (unpadded, padded)]
    assert max(losses) - min(losses) < 1e-6
    logits = padded(ids).logits
    assert logits.shape[-1] == 128
    assert bool((logits[..., VOCABULARY:] == -math.inf).all())
    drawn = padded.generate(ids[:, :4], max_new_tokens=20, do_sample=True, temperature=50.0, top_k=0, eos_token_id=None)
    assert drawn.shape == (6, 24)
    assert int(drawn.max()) < VOCABULARY
    assert stock_model(padded).config.vocab_size == VOCABULARY


def test_two_updates_from_fresh_weights_equal_a_plain_reference(make_gpt2: Any, windows: Any) -> None:
    """Every tensor's gradient within 1e-5 in float32, and AdamW against a float64 step written out by hand."""
    ids, targets = windows
    model = make_gpt2(lively=False).train()
    optimizer = adamw(model, RATE, BETAS, EPSILON, DECAY)
    state, moments = weights_of(model), [{}, {}]
    for step in (1, 2):
        for half in (slice(0, 2), slice(2, 6)):  # two micro-batches of unequal size
            count = int((targets != -100).sum())
            model(input_ids=ids[half], shift_labels=targets[half], num_items_in_batch=count).loss.backward()
        expected = plain_gradients(state, ids, targets)
        assert set(expected) == {name for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            assert float((parameter.grad - expected[name]).abs().max()) < 1e-5, (step, name)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        plain_step(state, expected, moments, step)
        for name, parameter in model.named_parameters():
            assert float((parameter.detach() - state[name]).abs().max()) < 2e-7 + 1e-3 * RATE, (step, name)
    assert float(state["transformer.h.0.attn.c_attn.bias"].abs().max()) > 0.5 * RATE


def compared(one: Tensors, two: Tensors) -> tuple[float, float, float]:
    """Relative difference, relative difference of norms, and 1 - cosine of two gradients as one vector."""
    a, b = (torch.cat([each[name].double().flatten() for name in sorted(each)]) for each in (one, two))
    cosine = float(torch.dot(a, b) / (a.norm() * b.norm()))
    return float((a - b).norm() / b.norm()), abs(float(a.norm() / b.norm()) - 1), 1 - cosine


def bfloat16_gradients(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Ours, and those of stock GPT-2 of the same weights with plain cross-entropy, both under autocast."""
    stock = stock_model(model).train()
    with torch.autocast("cpu", torch.bfloat16):
        model(input_ids=inputs, shift_labels=targets).loss.backward()
        functional.cross_entropy(stock(inputs).logits.float().flatten(0, 1), targets.flatten()).backward()
    own, low = ({name: p.grad for name, p in each.named_parameters()} for each in (model, stock))
    return own, low


def test_a_bfloat16_gradient_is_that_of_a_plain_bfloat16_reference(make_gpt2: Any) -> None:
    """Stock GPT-2 and plain cross-entropy under autocast; 128 targets, a power of two, divide without rounding."""
    model = make_gpt2(lively=False).train()
    ids = torch.randint(0, VOCABULARY, (4, CONTEXT + 1), generator=torch.Generator().manual_seed(3))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    own, low = bfloat16_gradients(model, inputs, targets)
    difference, _, angle = compared(own, low)
    assert (difference <= 0.003, angle <= 4e-6) == (True, True), (difference, angle)
    difference, norm, angle = compared(own, plain_gradients(weights_of(model), inputs, targets))
    assert (norm <= 0.005, angle <= 2e-4) == (True, True), (norm, angle)
    assert difference > 1e-4  # bfloat16 was really in use


def test_a_bfloat16_gradient_is_not_scaled_by_a_rounded_count(make_gpt2: Any) -> None:
    """Stock divides by the count before it rounds: of 120 targets each gets 1/120 as bfloat16 has it, 0.3% off."""
    model = make_gpt2(lively=False).train()
    ids = torch.randint(0, VOCABULARY, (4, 31), generator=torch.Generator().manual_seed(3))
    inputs, targets = ids[:, :-1], ids[:, 1:]
    own, low = bfloat16_gradients(model, inputs, targets)
    plain = plain_gradients(weights_of(model), inputs, targets)
    (_, norm, angle), (_, stock_norm, _) = compared(own, plain), compared(low, plain)
    assert (norm <= 2e-4, stock_norm >= 1e-3, angle <= 2e-4) == (True, True, True), (norm, stock_norm, angle)


def test_on_trained_weights_it_is_as_near_to_the_reference_as_that_is_to_float64(make_gpt2: Any, windows: Any) -> None:
    ids, targets = windows
    model = make_gpt2(lively=False).train()
    optimizer = adamw(model, 1e-2, BETAS, EPSILON, DECAY)
    first = float(model(input_ids=ids, shift_labels=targets).loss)
    for _ in range(60):
        loss = model(input_ids=ids, shift_labels=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss) < 0.5 * first
    state = weights_of(model)
    exact = plain_gradients({name: tensor.double() for name, tensor in state.items()}, ids, targets)
    reference = plain_gradients(state, ids, targets)
    model(input_ids=ids, shift_labels=targets).loss.backward()
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    yardstick = compared(reference, exact)[0]
    assert yardstick < 1e-4
    assert compared(own, exact)[0] < 3 * yardstick
    logits = model.eval()(ids).logits
    expected = plain_logits(state, ids)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))  # teacher-forced, at every position
    assert torch.equal(logits.argmax(-1), stock_model(model)(ids).logits.argmax(-1))
    assert len(logits.argmax(-1).unique()) > 30


def test_positions_that_restart_keep_documents_apart(make_gpt2: Any, windows: Any) -> None:
    model, row = make_gpt2().eval(), windows[0][:2, :16]
    half = torch.arange(8).repeat(2)[None].expand(2, -1)
    packed = model(row, position_ids=half, use_cache=False).logits
    apart = torch.cat((model(row[:, :8]).logits, model(row[:, 8:]).logits), dim=1)
    assert float((packed - apart).abs().max()) < 1e-5
    assert float((model(row).logits[:, 8:] - apart[:, 8:]).abs().max()) > 0.1


def test_initial_weights_are_those_of_the_paper() -> None:
    deep = new_model(section(hidden_size=128, num_hidden_layers=8, intermediate_size=512), 1_001, CONTEXT, seed=1)
    for name, parameter in deep.named_parameters():
        if parameter.ndim > 1:
            expected = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05), name
        else:
            assert bool((parameter == float("ln" in name and "weight" in name)).all()), name
    auto = new_model(section(hidden_size=128, initializer_range="auto"), 1_001, CONTEXT, seed=1)
    assert float(auto.transformer.wte.weight.detach().std()) == pytest.approx(math.sqrt(2 / 640), rel=0.05)


@pytest.mark.parametrize("bf16", [False, True])
def test_planned_activations_are_what_the_forward_pass_keeps(bf16: bool, make_gpt2: Any) -> None:
    model = make_gpt2(hidden_size=64, intermediate_size=256, num_hidden_layers=3).train()
    ids = torch.randint(0, VOCABULARY, (16, CONTEXT))
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.numel() >= ids.numel():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    held = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (held.append(t), pack(t))[1], lambda t: t)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        model.transformer(ids)
    weights = 2 * sum(p.numel() for n, p in model.named_parameters() if p.ndim > 1 and ".h." in n) if bf16 else 0
    planned = activation_bytes(model.config.shape, MemorySettings(ids.numel(), CONTEXT, bf16, on_cpu=True))
    assert sum(kept.values()) - weights == pytest.approx(planned, rel=0.2)


def test_keys_that_mean_nothing_to_gpt2_and_a_missing_number_of_positions_are_refused() -> None:
    gpt2 = ["--architecture", "gpt2", "--hidden_size", "64", "--num_attention_heads", "4"]
    places = ["--max_position_embeddings", "128", "--sequence_length", "128", "--global_batch_tokens", "1024"]
    assert load_config(None, [*gpt2, *places]).model.architecture == "gpt2"
    for wrong, word in (
        (gpt2, "max_position_embeddings"),
        ([*gpt2, *places, "--qk_norm", "true"], "qk_norm"),
        ([*gpt2, *places, "--num_key_value_heads", "2"], "num_key_value_heads"),
        ([*gpt2, *places, "--head_dim", "8"], "head_dim"),
        ([*gpt2, *places, "--rope_theta", "5e5"], "rope_theta"),
        ([*gpt2, *places, "--attn_implementation", "flex_attention"], "flex_attention"),
        ([*gpt2[:-2], "--num_attention_heads", "3", *places], "num_attention_heads"),
    ):
        with pytest.raises(ConfigError, match=word):
            load_config(None, wrong)


def test_a_stock_gpt2_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    small = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "eos_token_id": 0}
    for key, value in (("activation_function", "gelu"), ("scale_attn_by_inverse_layer_idx", True)):
        GPT2LMHeadModel(GPT2Config(**small, bos_token_id=0, **{key: value})).save_pretrained(tmp_path / key)
        with pytest.raises(ConfigError, match=key):
            load_model(tmp_path / key)
