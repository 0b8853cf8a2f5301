"""Every published figure of a preset as a number in this file, against the shipped YAML and the planner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hf_tinylm.config import load_config, nearest_multiple
from hf_tinylm.errors import ConfigError
from hf_tinylm.planning import ModelShape, UpdatePlan, plan_of_config, plan_updates, uniform_loss
from hf_tinylm.planning.optimizer import checkpoint_bytes
from hf_tinylm.sections import RunConfig

CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"


@dataclass(frozen=True)
class Figures:
    """What was published for one preset."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    length: int
    qk_norm: bool
    parameters: int
    tokens: int
    tokens_per_update: int
    updates: int
    last_update: int
    rate: float
    last_rate: float
    warmup: int
    checkpoint_gigabytes: float
    gguf_megabytes: int


PRESETS = {
    "llama-100m": Figures(
        *(32_000, 768, 12, 12, 4, 2_048, 1_024, False, 100_092_672),
        *(2_000_000_000, 262_144, 7_630, 103_424, 6e-4, 6e-5, 500, 1.20, 200),
    ),
    "llama-126m": Figures(
        *(32_768, 768, 16, 12, 4, 2_048, 1_024, False, 125_854_464),
        *(5_000_000_000, 524_288, 9_537, 389_632, 5e-4, 5e-5, 1_000, 1.51, 252),
    ),
    "llama-304m": Figures(
        *(32_768, 1_024, 24, 16, 4, 2_816, 2_048, False, 304_137_216),
        *(10_000_000_000, 524_288, 19_074, 254_976, 5e-4, 5e-5, 1_000, 3.65, 608),
    ),
    "tot-345m": Figures(
        *(32_000, 960, 32, 15, 5, 2_560, 1_024, True, 345_359_296),
        *(600_000_000, 524_288, 1_145, 214_528, 5e-4, 5e-5, 100, 4.14, 691),
    ),
}
PUBLISHED = pytest.mark.parametrize(("name", "figures"), PRESETS.items(), ids=PRESETS)
SHIPPED = pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)


# The fast recipe beside a preset, with the rate that four times AdamW's makes.
SPEEDRUNS = {
    **{"speedrun-tinystories-10m": 6e-3, "speedrun-llama-100m": 2.4e-3, "speedrun-llama-126m": 2e-3},
    **{"speedrun-llama-304m": 2e-3, "speedrun-tot-345m": 2e-3, "speedrun-gpt2-30m": 4e-3},
    **{"speedrun-gpt2-124m-fineweb-edu": 2.4e-3, "speedrun-gpt2-124m-fineweb": 2.4e-3},
}


def shape_of(config: RunConfig) -> ModelShape:
    return ModelShape.from_config(config.model, config.tokenizer.vocab_size)


def plan_of(config: RunConfig, world_size: int = 1) -> UpdatePlan:
    return plan_of_config(config.training, config.data.sequence_length, 10_000_000, world_size)


@PUBLISHED
def test_a_preset_has_the_published_shape(name: str, figures: Figures) -> None:
    config = load_config(name)
    model = config.model
    assert config.tokenizer.vocab_size == figures.vocab
    assert (model.hidden_size, model.num_hidden_layers) == (figures.hidden, figures.layers)
    assert (model.num_attention_heads, model.num_key_value_heads) == (figures.heads, figures.kv_heads)
    assert (model.intermediate_size, config.data.sequence_length) == (figures.ffn, figures.length)
    assert (model.qk_norm, model.head_dim, model.tie_word_embeddings) == (figures.qk_norm, 64, True)


@PUBLISHED
def test_a_preset_has_the_published_number_of_parameters_and_file_sizes(name: str, figures: Figures) -> None:
    shape = shape_of(load_config(name))
    assert shape.parameters == figures.parameters
    assert shape.decayed_parameters + shape.undecayed_parameters == figures.parameters
    assert round(checkpoint_bytes(shape) / 1e9, 2) == figures.checkpoint_gigabytes
    assert round(shape.gguf_f16_bytes / 1e6) == figures.gguf_megabytes


@PUBLISHED
def test_a_preset_spends_its_budget_to_the_token(name: str, figures: Figures) -> None:
    plan = plan_of(load_config(name))
    assert (plan.train_tokens, plan.global_batch_tokens) == (figures.tokens, figures.tokens_per_update)
    assert (plan.updates, plan.last_update_tokens) == (figures.updates, figures.last_update)
    assert (plan.updates - 1) * plan.global_batch_tokens + plan.last_update_tokens == figures.tokens


@PUBLISHED
def test_a_preset_has_the_published_optimizer_settings(name: str, figures: Figures) -> None:
    training = load_config(name).training
    assert training.learning_rate == figures.rate
    assert training.learning_rate * training.min_lr_ratio == pytest.approx(figures.last_rate)
    assert training.warmup_steps == figures.warmup
    assert (training.adam_beta1, training.adam_beta2) == (0.9, 0.95)
    assert (training.weight_decay, training.max_grad_norm) == (0.1, 1.0)


def test_micro_batches_of_the_presets_with_a_published_layout() -> None:
    plan = plan_of(load_config("llama-100m"))
    assert (plan.accumulation_of(0), plan.per_device_train_batch_size, plan.sequence_length) == (32, 8, 1_024)
    plan = plan_of(load_config("llama-304m"))
    assert (plan.accumulation_of(0), plan.per_device_train_batch_size, plan.sequence_length) == (64, 4, 2_048)


@SHIPPED
def test_every_shipped_config_can_be_planned_and_outlasts_its_warmup(path: Path) -> None:
    config = load_config(str(path))
    for world_size in (1, 2, 4):
        micro_step = config.training.per_device_train_batch_size * config.data.sequence_length * world_size
        if world_size > 1 and micro_step > config.training.global_batch_tokens:
            continue  # a batch of one micro-batch is for one process
        plan = plan_of(config, world_size)
        assert plan.updates > config.training.warmup_steps
        assert 1 <= plan.last_update_tokens <= plan.global_batch_tokens
        micro_steps = plan.accumulation_of(0) * plan.per_device_train_batch_size * world_size
        assert micro_steps * plan.sequence_length == plan.global_batch_tokens
    assert shape_of(config).parameters > (40_000 if path.stem.startswith("adopt") else 1_000_000)
    assert config.data.sources or config.data.conversations


@SHIPPED
def test_every_shipped_config_keeps_its_files_in_a_folder_of_its_own_name(path: Path) -> None:
    config = load_config(str(path))
    if config.data.conversations:  # a stage takes its tokenizer from the model that it starts from
        expected = "runs/demo/chat" if path.stem == "sft-demo" else f"runs/{path.stem}"
        assert config.training.output_dir == expected
        return
    folders = [config.tokenizer.tokenizer_path, config.data.shards, config.training.output_dir]
    if "gpt2" in path.stem:  # its tokenizer is the published one, by its name on the Hub
        assert folders.pop(0) == "openai-community/gpt2"
    own = "adopt" if path.stem.startswith("adopt-") else path.stem  # three phases that read each other's files
    if path.stem in SPEEDRUNS:  # on the tokenizer and the shards of the preset that it is compared with
        assert folders.pop() == f"runs/{own}/pretrain"
        own = own.removeprefix("speedrun-")
    assert {str(folder).rsplit("/", 1)[0] for folder in folders} == {f"runs/{own}"}
    assert len(set(folders)) == len(folders)


def test_the_published_presets_are_all_shipped() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} >= {"demo", *PRESETS, *SPEEDRUNS}
    assert {f"speedrun-{name}" for name in PRESETS} <= set(SPEEDRUNS)


@pytest.mark.parametrize(("name", "rate"), SPEEDRUNS.items(), ids=SPEEDRUNS)
def test_a_speedrun_is_its_preset_but_for_optimizer_and_rate(name: str, rate: float) -> None:
    preset, ours = load_config(name.removeprefix("speedrun-")), load_config(name)
    recipe = {"optim": "muon", "embedding_lr_ratio": 3.0, "gain_lr_ratio": 3.0, "lr_schedule": "wsd"}
    recipe |= {"decay_fraction": 0.4, "min_lr_ratio": 0.0}
    assert all(getattr(load_config("speedrun-10m").training, key) == value for key, value in recipe.items())
    training = replace(preset.training, output_dir=f"runs/{name}/pretrain", learning_rate=rate, **recipe)
    assert ours == replace(preset, training=training)
    assert rate == pytest.approx(4 * preset.training.learning_rate)


def test_decay_groups_of_the_100m_preset() -> None:
    shape = shape_of(load_config("llama-100m"))
    assert (shape.decayed_parameters, shape.undecayed_parameters) == (100_073_472, 19_200)


def test_qk_norm_adds_two_gains_of_head_size_per_layer() -> None:
    without = shape_of(load_config("tot-345m", ["--qk_norm", "false"]))
    assert without.parameters == 345_355_200
    assert shape_of(load_config("tot-345m")).undecayed_parameters - without.undecayed_parameters == 4_096


def test_decay_groups_of_a_model_counted_by_hand() -> None:
    """Vocabulary 101, width 32, 2 layers, 4 heads over 2, inner width 64: 21,664 in matrices, 160 gains."""
    shape = ModelShape(101, 32, 2, 4, 2, 64, head_dim=8)
    embedding, attention, feed_forward = 101 * 32, 32 * 32 + 2 * 32 * 16 + 32 * 32, 3 * 32 * 64
    assert shape.decayed_parameters == embedding + 2 * (attention + feed_forward) == 21_664
    assert shape.undecayed_parameters == 160


def test_an_untied_model_counts_its_output_projection() -> None:
    tied = shape_of(load_config("llama-100m"))
    untied = shape_of(load_config("llama-100m", ["--tie_word_embeddings", "false"]))
    assert untied.parameters - tied.parameters == 32_000 * 768


def test_padded_rows_are_part_of_the_shape() -> None:
    shape = shape_of(load_config("llama-100m", ["--vocab_size", "50_257", "--pad_vocab_to_multiple_of", "64"]))
    assert shape.vocab_size == 50_304
    assert shape_of(load_config("llama-100m", ["--vocab_size", "50_304", "--pad_vocab_to_multiple_of", "64"])) == shape


def test_the_last_update_takes_what_is_left() -> None:
    plan = plan_updates(2_000_000_000, 262_144, 1_024, 8, 1)
    assert plan.tokens_of_update(0) == plan.tokens_of_update(7_628) == 262_144
    assert plan.tokens_of_update(7_629) == 103_424
    assert plan.tokens_before(7_629) + 103_424 == plan.tokens_before(7_630) == 2_000_000_000


def test_a_budget_that_divides_ends_with_a_full_update() -> None:
    plan = plan_updates(2_516_582_400, 524_288, 1_024, 16, 1)
    assert (plan.updates, plan.last_update_tokens) == (4_800, 524_288)


def test_a_budget_below_one_update_is_one_partial_update() -> None:
    plan = plan_updates(1_000, 4_096, 256, 4, 1)
    assert (plan.updates, plan.last_update_tokens) == (1, 1_000)


def test_updates_of_huge_budgets_are_counted_exactly() -> None:
    plan = plan_updates(10**18 * 262_144 + 1, 262_144, 1_024, 8, 1)
    assert (plan.updates, plan.last_update_tokens) == (10**18 + 1, 1)


@pytest.mark.parametrize(("millions", "updates"), [(300, 22_889), (1_000, 76_294)])
def test_updates_at_twenty_tokens_per_parameter(millions: int, updates: int) -> None:
    assert plan_updates(20 * millions * 10**6, 262_144, 1_024, 8, 1).updates == updates


def test_an_epoch_is_every_available_token_once() -> None:
    training = load_config(None, ["--global_batch_tokens", "8_192", "--per_device_train_batch_size", "2"]).training
    assert training.train_tokens == "epoch"
    assert plan_of_config(training, 1_024, 20_000).train_tokens == 20_000
    with pytest.raises(ConfigError, match="train_tokens=0 is nothing to train on"):
        plan_of_config(training, 1_024, 0)


def test_more_processes_share_an_update_and_do_not_enlarge_it() -> None:
    one, four = plan_updates(10**6, 16_384, 256, 4, 1), plan_updates(10**6, 16_384, 256, 4, 4)
    assert (one.windows_of(0), one.windows_of_process(0), one.accumulation_of(0)) == (64, 64, 16)
    assert (four.windows_of(0), four.windows_of_process(0), four.accumulation_of(0)) == (64, 16, 4)
    assert one.updates == four.updates


def test_a_batch_that_is_no_whole_number_of_micro_steps_is_refused_with_the_nearest_that_is() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_updates(10**6, 16_384, 256, 12, 2)
    message = str(caught.value)
    assert "global_batch_tokens=16,384" in message
    assert "6,144 tokens of one micro-step (12 rows x 256 tokens x 2 processes)" in message
    assert "Use 18,432" in message
    assert plan_updates(10**6, 18_432, 256, 12, 2).accumulation_of(0) == 3


@pytest.mark.parametrize(("value", "expected"), [(1, 8), (11, 8), (12, 16), (16, 16), (1_000_001, 1_000_000)])
def test_the_nearest_multiple_is_never_zero(value: int, expected: int) -> None:
    assert nearest_multiple(value, 8) == expected


@pytest.mark.parametrize(
    ("name", "plain", "palm", "causal"),
    [
        ("llama-126m", 755_126_784, 906_121_728, 830_624_256),
        ("llama-304m", 1_824_823_296, 2_428_803_072, 2_126_813_184),
    ],
)
def test_flops_per_token_in_the_three_conventions(name: str, plain: int, palm: int, causal: int) -> None:
    """6N, 6N + 12 x layers x hidden x T and 6N + 6 x layers x hidden x T."""
    config = load_config(name)
    shape, length = shape_of(config), config.data.sequence_length
    assert shape.flops_per_token() == plain
    assert shape.flops_per_token_with_attention(length) == palm
    assert shape.flops_per_token_causal(length) == causal


def test_palms_convention_for_gpt2_size() -> None:
    """For 124,475,904 parameters at T = 1,024: 747M + 113M = 860M."""
    attention = 12 * 12 * 768 * 1_024
    assert round(6 * 124_475_904 / 1e6) == 747
    assert round(attention / 1e6) == 113
    shape = ModelShape(1_000, 768, 12, 12, 12, 2_048, head_dim=64)
    assert shape.flops_per_token_with_attention(1_024) - shape.flops_per_token() == attention


@pytest.mark.parametrize(("vocab_size", "nats"), [(32_000, 10.3735), (50_257, 10.8249), (50_304, 10.8258)])
def test_the_loss_of_even_chances(vocab_size: int, nats: float) -> None:
    assert uniform_loss(vocab_size) == pytest.approx(nats, abs=5e-5)
