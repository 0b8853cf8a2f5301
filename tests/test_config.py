"""What a user may write in a YAML file or on a command line, and what each mistake is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hf_tinylm.config import SECTIONS, load_config, parse_overrides, save_config
from hf_tinylm.config_files import find_config
from hf_tinylm.errors import ConfigError
from hf_tinylm.planning.writing import write_with_overrides
from hf_tinylm.sections import RunConfig, SourceSection

CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"
SHIPPED = pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)


def load_text(folder: Path, text: str, *overrides: str) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(str(path), list(overrides))


def message_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides)
    return " ".join(str(caught.value).split())


# --- values


@pytest.mark.parametrize(
    ("text", "value"),
    [("6e-4", 6e-4), ("6E-4", 6e-4), ("0.0006", 6e-4), (".5", 0.5), ("1_0e-5", 1e-4), ("1", 1.0), ("1.5e+0", 1.5)],
)
def test_every_usual_spelling_of_a_rate_is_a_float_in_yaml_and_on_the_command_line(
    tmp_path: Path, text: str, value: float
) -> None:
    from_yaml = load_text(tmp_path, f"training: {{learning_rate: {text}}}").training.learning_rate
    from_command_line = load_config(None, ["--learning_rate", text]).training.learning_rate
    assert type(from_yaml) is type(from_command_line) is float
    assert from_yaml == from_command_line == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(("text", "value"), [("4_000_000", 4_000_000), ("4e6", 4_000_000), ("010", 10), ("+5", 5)])
def test_every_usual_spelling_of_a_count_is_an_integer(tmp_path: Path, text: str, value: int) -> None:
    from_yaml = load_text(tmp_path, f"training: {{train_tokens: {text}}}").training.train_tokens
    from_command_line = load_config(None, [f"--train_tokens={text}"]).training.train_tokens
    assert type(from_yaml) is type(from_command_line) is int
    assert from_yaml == from_command_line == value


def test_a_choice_a_number_and_null_are_told_apart(tmp_path: Path) -> None:
    config = load_text(
        tmp_path,
        "training: {train_tokens: epoch, bf16: auto, save_minutes: null}\nmodel: {initializer_range: 0.02}",
    )
    assert (config.training.train_tokens, config.training.bf16, config.training.save_minutes) == ("epoch", "auto", None)
    assert config.model.initializer_range == 0.02
    assert load_config(None, ["--save_minutes", "null", "--bf16", "false"]).training.save_minutes is None


@pytest.mark.parametrize("text", ["2026_11_29", "007", "1e3", "true", "run #3", "a: b", "[x", "2026-11-29"])
def test_text_on_the_command_line_is_taken_as_it_is_typed(text: str) -> None:
    assert load_config(None, ["--run_name", text]).training.run_name == text


@pytest.mark.parametrize("text", ["2026-11-29", "no", "on", "1:30", "v1", "null value"])
def test_text_in_yaml_that_older_yaml_would_change_stays_text(tmp_path: Path, text: str) -> None:
    assert load_text(tmp_path, f"training: {{run_name: {text}}}").training.run_name == text


@pytest.mark.parametrize("number", ["2026_11_29", "7", "1e3", "true"])
def test_a_number_where_text_is_needed_asks_for_quotes_instead_of_changing_its_spelling(
    tmp_path: Path, number: str
) -> None:
    message = message_of(tmp_path, f"training: {{run_name: {number}}}")
    assert "training.run_name=" in message
    assert "must be text or null. Put it in quotes." in message
    assert load_text(tmp_path, f'training: {{run_name: "{number}"}}').training.run_name == number


@pytest.mark.parametrize(
    ("section", "key", "value", "needed"),
    [
        ("training", "seed", "soon", "a whole number"),
        ("training", "seed", "1.5", "a whole number"),
        ("training", "seed", "true", "a whole number"),
        ("training", "seed", "null", "a whole number"),
        ("training", "seed", "[1]", "a whole number"),
        ("training", "seed", "9999999999999999999999", "a whole number"),
        ("training", "learning_rate", "fast", "a number"),
        ("training", "learning_rate", ".nan", "a number"),
        ("training", "learning_rate", "1e999", "a number"),
        ("training", "bf16", "yes", "true or false or auto"),
        ("training", "bf16", "1", "true or false or auto"),
        ("training", "train_tokens", "epochs", "a whole number or epoch"),
        ("training", "report_to", "{a: b}", "a list"),
        ("model", "qk_norm", "1", "true or false"),
        ("model", "attn_implementation", "magic", "sdpa or eager"),
        ("data", "window_order", "shuffled", "permutation or random"),
        ("data", "shards", "{}", "text or null"),
        ("data", "shards", '""', "text or null"),
        ("export", "gguf", "[f16, q9]", "f32 or f16"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_is_needed(
    tmp_path: Path, section: str, key: str, value: str, needed: str
) -> None:
    message = message_of(tmp_path, f"{section}: {{{key}: {value}}}")
    assert message.startswith(f"{section}.{key}")
    assert f"must be {needed}" in message


# --- keys


def test_every_key_has_one_section() -> None:
    keys = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
    assert sorted(keys) == sorted(set(keys))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("training: {learning_rat: 1}", "Unknown key in training: learning_rat. Did you mean learning_rate?"),
        ("model: {hiden_size: 1}", "Unknown key in model: hiden_size. Did you mean hidden_size?"),
        ("trainin: {}", "Did you mean training?"),
        (
            "data: {sources: [{name: a, path: b, split: c, licens: d}]}",
            "data.sources[0]: licens. Did you mean licence?",
        ),
        ("data: {sources: [{name: a}]}", "data.sources[0]: the key path is missing"),
        ("training: {7: 1}", "Unknown key in training: 7"),
    ],
)
def test_a_mistyped_key_in_yaml_is_told_the_nearest_key(tmp_path: Path, text: str, told: str) -> None:
    assert told in message_of(tmp_path, text)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("--learning_rte", "Unknown key: learning_rte. Did you mean learning_rate?"),
        ("--training.sed", "Unknown key in section training: sed. Did you mean seed?"),
        ("--trainig.seed", "Unknown section: trainig. Did you mean training?"),
        ("--model.seed", "Unknown key in section model: seed"),
        ("--", "Unknown key: ."),
    ],
)
def test_a_mistyped_key_on_the_command_line_is_told_the_nearest_key(argument: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [argument, "1"])
    assert told in str(caught.value)


def test_a_key_given_twice_in_a_file_is_an_error(tmp_path: Path) -> None:
    assert "seed is given twice" in message_of(tmp_path, "training:\n  seed: 1\n  seed: 2\n")
    assert "training is given twice" in message_of(tmp_path, "training: {seed: 1}\ntraining: {seed: 2}\n")


# --- command line


def test_an_override_needs_no_section_and_accepts_one(tmp_path: Path) -> None:
    text = "training: {seed: 1, warmup_steps: 3}"
    for argument in (["--seed", "7"], ["--training.seed", "7"], ["--seed=7"], ["--training.seed=7"]):
        training = load_text(tmp_path, text, *argument).training
        assert (training.seed, training.warmup_steps) == (7, 3)


def test_hyphens_and_underscores_are_the_same_in_a_key() -> None:
    assert load_config(None, ["--learning-rate", "1e-3"]).training.learning_rate == 1e-3


def test_the_last_of_two_equal_overrides_wins_with_or_without_section() -> None:
    assert load_config(None, ["--training.seed", "1", "--seed", "2"]).training.seed == 2
    assert load_config(None, ["--seed", "1", "--training.seed", "2"]).training.seed == 2


def test_only_a_truth_value_may_stand_alone() -> None:
    assert load_config(None, ["--qk_norm", "--seed", "3"]).model.qk_norm is True
    for argument in (["--output_dir", "--seed", "3"], ["--learning_rate"], ["--gguf"]):
        with pytest.raises(ConfigError, match=r"needs a value after it"):
            load_config(None, argument)


@pytest.mark.parametrize("given", [["f32", "f16"], ["[f32, f16]"]])
def test_a_list_is_given_as_words_or_as_yaml(given: list[str]) -> None:
    assert load_config(None, ["--gguf", *given, "--seed", "3"]).export.gguf == ["f32", "f16"]


def test_a_list_of_one_and_of_none() -> None:
    assert load_config(None, ["--gguf", "f16"]).export.gguf == ["f16"]
    assert load_config("demo", ["--gguf", "[]"]).export.gguf == []


def test_sources_can_be_given_on_the_command_line() -> None:
    config = load_config(None, ["--sources", "{name: a, path: a.txt}", "{name: b, path: b.txt, max_documents: 5}"])
    assert config.data.sources == [SourceSection("a", "a.txt"), SourceSection("b", "b.txt", max_documents=5)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["seed", "3"], "Unexpected argument 'seed'"),
        (["--output_dir", "my", "run"], "takes one value and got 2: 'my run'. Put it in quotes."),
        (["--seed", "1", "2"], "takes one value and got 2"),
        (["--seed", "[1"], "--seed '[1' is not valid YAML"),
    ],
)
def test_an_argument_that_fits_nowhere_is_told_why(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, arguments)
    assert told in str(caught.value)


def test_negative_numbers_are_values_and_not_keys() -> None:
    assert parse_overrides(["--seed", "-1"]) == {"seed": -1}


# --- what no run can have


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--hidden_size", "100"], "hidden_size=100 is not a multiple of num_attention_heads=8"),
        (["--num_key_value_heads", "3"], "num_attention_heads=8 is not a multiple of num_key_value_heads=3"),
        (["--hidden_size", "72"], "head_dim=9 is odd"),
        (["--head_dim", "7"], "head_dim=7 is odd"),
        (["--global_batch_tokens", "10_000"], "10,000 is not a multiple of sequence_length=1,024. Use 10,240."),
        (["--max_position_embeddings", "512"], "max_position_embeddings=512 is below sequence_length=1,024"),
        (["--learning_rate", "0"], "learning_rate=0.0 must be above 0"),
        (["--train_tokens", "-5"], "train_tokens=-5 must be above 0"),
        (["--initializer_range", "0"], "initializer_range=0.0 must be above 0"),
        (["--save_steps", "0"], "save_steps=0 must be above 0"),
        (["--validation_fraction", "0.6"], "validation_fraction=0.6 must be 0.0 to 0.5"),
        (["--weight_decay", "-1"], "weight_decay=-1.0 must be 0.0 or more"),
        (["--adam_beta2", "1"], "adam_beta2=1.0 must be 0.0 to 0.999999"),
        (["--cpu_threads", "9223372036854775807"], "cpu_threads=9223372036854775807 must be 1 to 65536"),
        (["--rope_theta", "1e300"], "rope_theta=1e+300 must be 1.0 to 1000000000000.0"),
        (["--rms_norm_eps", "1e30"], "rms_norm_eps=1e+30 must be 0.0 to 1.0"),
        (["--rms_norm_eps", "0"], "rms_norm_eps=0.0 must be above 0"),
        (["--initializer_range", "2"], "initializer_range=2.0 must be 0.0 to 1.0"),
        (["--cpu_threads", "0"], "cpu_threads=0 must be 1 to 65536"),
        (["--seed", "4294967296"], "seed=4294967296 must be 0 to 4294967295"),
        (["--sources", "{name: a, path: b}", "{name: a, path: c}"], "Two sources are named 'a'"),
        (["--sources", "{name: a, path: b, max_documents: 0}"], "max_documents=0 of source 'a' must be above 0"),
        (["--epochs", "2", "--train_tokens", "1000"], "both say how long the run is"),
        (["--epochs", "0"], "epochs=0.0 must be above 0"),
        (["--batch_growth", "200000", "1048576"], "batch_growth has [200000] in it; pairs [TOKENS, BATCH] are needed"),
        (
            ["--batch_growth", "[[200000, 524288]]"],
            "from 524,288 (at 0 tokens) to 524,288 (at 200,000); both",
        ),
        (["--batch_growth", "[9, 1048576]", "[9, 2097152]"], "to 2,097,152 (at 9); both must rise"),
        (["--batch_growth", "[[-1, 1048576]]"], "to 1,048,576 (at -1); both must rise"),
        (["--batch_growth", "[[1, 2, 3]]"], "batch_growth has [1, 2, 3] in it"),
        (["--batch_growth", "[[a, 2]]"], "batch_growth[0][0]='a' must be a whole number"),
    ],
)
def test_an_impossible_value_is_named_with_what_is_possible(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, arguments)
    assert told in str(caught.value)


def test_a_head_size_of_its_own_frees_the_width_from_the_heads() -> None:
    assert load_config(None, ["--hidden_size", "100", "--head_dim", "16"]).model.head_dim == 16


# --- files


def test_a_missing_config_lists_the_bundled_names() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("no-such.yaml")
    message = str(caught.value)
    assert "no-such.yaml does not exist" in message
    for path in CONFIGS.glob("*.yaml"):
        assert path.stem in message


def test_a_bundled_config_is_found_by_name_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("demo") == find_config("demo.yaml") == CONFIGS / "demo.yaml"
    for not_a_name in ("demo.txt", "configs/demo", "../configs/demo", "", "."):
        with pytest.raises(ConfigError, match="does not exist"):
            find_config(not_a_name)


def test_a_file_of_the_user_wins_over_a_bundled_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo.yaml").write_text("training: {seed: 7}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_config("demo.yaml").training.seed == 7


@SHIPPED
def test_a_saved_config_reads_back_to_the_same_values(tmp_path: Path, path: Path) -> None:
    config = load_config(str(path))
    save_config(config, tmp_path / "copy.yaml")
    assert load_config(str(tmp_path / "copy.yaml")) == config


def test_text_that_looks_like_something_else_survives_saving(tmp_path: Path) -> None:
    for text in ("1e-3", "4_000", "true", "null", "2026-11-29", "no", "~", "a: b", "# x", "ü\n\t'\"", "[", ".5e3"):
        config = RunConfig()
        config.training.run_name = text
        save_config(config, tmp_path / "copy.yaml")
        assert load_config(str(tmp_path / "copy.yaml")) == config


def test_sections_may_be_empty(tmp_path: Path) -> None:
    assert load_text(tmp_path, "model:\ntraining:\n  # all defaults\n") == RunConfig()


HOSTILE = {
    "empty": (b"", "holds no sections"),
    "a list": (b"- a\n- b\n", "holds no sections"),
    "a number as section": (b"training: 3\n", "section training is 3; keys are needed"),
    "a list as section": (b"training: [1]\n", "section training is [1]; keys are needed"),
    "unclosed": (b"training: {seed: 1\n", "is not valid YAML"),
    "two documents": (b"training: {seed: 1}\n---\ntraining: {seed: 2}\n", "is not valid YAML"),
    "not UTF-8": (b"training: {run_name: \xff\xfe}\n", "cannot be read as UTF-8 text"),
    "a NUL": (b"training: {run_name: 'a\x00b'}\n", "is not valid YAML"),
    "code": (b"training: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
    "a list as key": (b"training: {[a, b]: 1}\n", "is not valid YAML"),
    "a number of 5,000 digits": (b"training: {seed: " + b"9" * 5_000 + b"}\n", "is not valid YAML"),
    "1,500 brackets": (b"training: " + b"[" * 1_500, "nested too deep"),
    "a list in itself": (b"training: &a [*a]\n", "section training is [[[...]]]; keys are needed"),
    "a merge": (b"training: {<<: {seed: 1}}\n", "Unknown key in training: <<"),
}


@pytest.mark.parametrize(("content", "told"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_one_clear_error(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert told in str(caught.value)


def test_a_small_file_that_expands_without_end_is_a_short_error(tmp_path: Path) -> None:
    """Each line names the one before ten times: ten to the ninth items if anyone walked them."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    text = "training:\n" + "".join(f"  {level}\n" for level in levels)
    assert len(message_of(tmp_path, text)) < 2_000
    text = "training:\n  report_to: " + "\n".join(levels).replace("a0: ", "", 1).replace("\n", "\n  ") + "\n"
    assert len(message_of(tmp_path, text)) < 2_000
    bomb = "model: &b {x: &x [1,1,1,1,1,1,1,1,1,1], y: &y [*x,*x,*x,*x,*x,*x,*x,*x,*x,*x]}\n"
    assert len(message_of(tmp_path, bomb + "training: {seed: *y}\n")) < 2_000


def test_a_folder_given_as_config_is_told_apart_from_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("value", ["a\0b", "runs/\udcff"], ids=["zero byte", "bytes that are not UTF-8"])
def test_text_that_no_file_can_record_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"output_dir=.* must be text or null\. It holds a zero byte or half"):
        load_config(None, ["--output_dir", value])


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("max_steps", "train_tokens"),
        ("num_train_epochs", "epochs"),
        ("gradient_accumulation_steps", "global_batch_tokens"),
        ("block_size", "sequence_length"),
        ("n_head", "num_attention_heads"),
    ],
)
def test_a_key_of_another_trainer_is_told_ours_and_not_one_of_similar_letters(key: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"Unknown key: {key}. Did you mean {ours}?"):
        load_config(None, [f"--{key}", "4"])


def test_a_chat_run_that_evaluates_on_nothing_is_refused(tmp_path: Path) -> None:
    source = "data: {conversations: [{name: a, path: a.jsonl}]}\n"
    (tmp_path / "chat.yaml").write_text(source + "training: {eval_steps: 5}\n")
    with pytest.raises(ConfigError, match=r"eval_steps=5 validates on test_conversations, and there are none"):
        load_config(str(tmp_path / "chat.yaml"))
    assert load_config(str(tmp_path / "chat.yaml"), ["--eval_steps", "null"]).training.eval_steps is None


# --- bases


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def test_a_file_with_a_base_states_only_what_differs(tmp_path: Path) -> None:
    write(tmp_path, lower="base: middle.yaml\ntraining: {seed: 3}\nmodel:\ndata: {sources: [{name: a, path: a.txt}]}")
    write(tmp_path, middle="base: llama-100m\ntraining: {seed: 2, optim: muon}\nmodel: {qk_norm: true}")
    config, published = load_config(str(tmp_path / "lower.yaml"), ["--warmup_steps", "7"]), load_config("llama-100m")
    assert config.data.sources == [SourceSection("a", "a.txt")]  # a list is replaced whole
    assert (config.training.seed, config.training.optim, config.training.warmup_steps) == (3, "muon", 7)
    assert config.model == dataclasses.replace(published.model, qk_norm=True)
    assert config.training == dataclasses.replace(published.training, seed=3, optim="muon", warmup_steps=7)
    assert (config.tokenizer, config.evaluation) == (published.tokenizer, published.evaluation)


def test_a_base_is_looked_for_beside_its_file_and_then_among_the_bundled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    write(tmp_path, demo="training: {seed: 1}")
    write(tmp_path / "mine", named="base: demo", beside="base: ../demo.yaml", whole=f"base: {tmp_path}/demo.yaml")
    monkeypatch.chdir(tmp_path)  # where a demo.yaml lies, which is nobody's base by that name
    assert load_config("mine/named.yaml") == load_config(str(CONFIGS / "demo.yaml"))
    assert load_config("mine/beside.yaml") == load_config("mine/whole.yaml") == load_config("demo.yaml")


def test_the_configuration_of_a_file_with_a_base_is_saved_without_it(tmp_path: Path) -> None:
    write(tmp_path, lower="base: upper.yaml\ntraining: {seed: 3}", upper="training: {warmup_steps: 9}")
    config = load_config(str(tmp_path / "lower.yaml"))
    assert "base" not in config.to_dict()
    (tmp_path / "elsewhere").mkdir()
    save_config(config, tmp_path / "elsewhere" / "saved.yaml")
    write_with_overrides(tmp_path / "lower.yaml", tmp_path / "elsewhere" / "edited.yaml", ["--weight_decay", "0.3"])
    (tmp_path / "upper.yaml").unlink()
    assert load_config(str(tmp_path / "elsewhere" / "saved.yaml")) == config
    edited = load_config(str(tmp_path / "elsewhere" / "edited.yaml")).training
    assert edited == dataclasses.replace(config.training, weight_decay=0.3)


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        ({"a": "base: [b.yaml]"}, "a.yaml: base=['b.yaml'] must be the path of a file or the name of a bundled config"),
        ({"a": "base:"}, "a.yaml: base=None must be the path of a file"),
        ({"a": "base: ''"}, "a.yaml: base='' must be the path of a file"),
        ({"a": "base: ."}, "a.yaml: its base '.' does not exist. Give a file, by its path from that folder, or the"),
        ({"a": "base: nobody"}, "its base 'nobody' does not exist"),
        ({"a": f"base: {'x' * 5_000}"}, "does not exist"),
        ({"a": "base: b.yaml\nbase: b.yaml", "b": ""}, "the key base is given twice"),
        ({"a": "training: {base: b.yaml}", "b": ""}, "Unknown key in training: base"),
        ({"a": "base: a.yaml"}, "a.yaml is based on "),
        ({"a": "base: b.yaml", "b": "base: c.yaml", "c": "base: ./b.yaml"}, "These bases never end: "),
        ({"a": "base: b.yaml", "b": "- c"}, "b.yaml holds no sections; the sections are model, "),
        ({"a": "base: b.yaml", "b": "training: 3"}, "b.yaml: section training is 3; keys are needed"),
        ({"a": "base: b.yaml", "b": "trainin: {}"}, "Unknown section in "),
        ({"a": "base: b.yaml", "b": "training: {sed: 1}"}, "is based on: Unknown key in training: sed. Did you mean"),
        ({"a": "base: b.yaml\ntraining: {seed: 1}", "b": "training: {seed: x}"}, "is based on: training.seed='x' must"),
        ({"a": "base: b.yaml\ntraining: {sed: 1}", "b": "training: {seed: 1}"}, "Unknown key in training: sed."),
    ],
)
def test_a_base_that_cannot_be_is_told_by_its_file(tmp_path: Path, texts: dict[str, str], told: str) -> None:
    write(tmp_path, **texts)
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "a.yaml"))
    assert told in " ".join(str(caught.value).split())


def test_a_cycle_of_bases_is_told_file_by_file(tmp_path: Path) -> None:
    write(tmp_path, a="base: b.yaml", b="base: c.yaml", c="base: b.yaml")
    with pytest.raises(ConfigError) as caught:
        load_config(str(tmp_path / "a.yaml"))
    a, b, c = (str(tmp_path / f"{name}.yaml") for name in "abc")
    assert str(caught.value).startswith(f"These bases never end: {a} is based on {b} is based on {c} is based on {b}.")


def test_no_configuration_takes_its_base_from_the_command_line() -> None:
    with pytest.raises(ConfigError, match="Unknown key: base"):
        load_config("demo", ["--base", "llama-100m"])
