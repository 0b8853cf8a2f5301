"""Every key of a run's configuration, with its type, default and meaning. `config.py` reads and checks them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from .gguf_plan import GGUFType

Optim = Literal["adamw", "muon"]
LRSchedule = Literal["cosine", "constant", "linear", "wsd"]
DecayShape = Literal["linear", "cosine", "sqrt"]


@dataclass
class ModelSection:
    """Shape of the model. Parameter names and file format are those of stock Llama (with `qk_norm`: Qwen3), or GPT-2.

    GPT-2 learns a position for each place, so `max_position_embeddings` must be given; it has no key/value heads of
    their own, no QK-norm and no rotation.
    """

    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None  # None: as many as attention heads
    intermediate_size: int = 768
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qk_norm: bool = False
    tie_word_embeddings: bool = True
    max_position_embeddings: int | None = None  # None: sequence_length
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float | Literal["auto"] = "auto"  # auto: sqrt(2 / (5 * hidden_size))
    attention_dropout: float = 0.0
    pad_vocab_to_multiple_of: int = 1
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2", "flex_attention"] = "sdpa"
    architecture: Literal["llama", "gpt2"] = "llama"
    layer_norm_epsilon: float = 1e-5  # of gpt2


@dataclass
class TokenizerSection:
    """Byte-level BPE tokenizer. `sample_bytes` caps the text that merges are counted on."""

    tokenizer_path: str | None = None
    vocab_size: int = 32_000
    sample_bytes: int = 1_000_000_000
    max_word_bytes: int = 64
    min_frequency: int = 2


@dataclass
class SourceSection:
    """One source of text.

    `path` is a file, a glob, a folder, `bundled:NAME`, or a `datasets` name with `config`, `split` and, to stay at one
    commit, `revision`. A filter drops the documents that it does not allow; how many is in the manifest. Format
    `tokens` is a `.bin` file of uint16 ids that the tokenizer `encoded_with` wrote, documents between separators; it
    must be the tokenizer of the pack. Format `parts` is the folder that a datatrove pipeline wrote its documents to.
    """

    name: str
    path: str
    licence: str = "unknown"
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "tokens", "parts", "datasets"] = "auto"
    splitter: str | None = None  # None: one document per text file; paragraphs_N: about N bytes each; lines
    text_column: str = "text"
    config: str | None = None
    split: str = "train"
    revision: str | None = None  # branch, tag or commit of a dataset on the Hub; None: what main is now
    max_documents: int | None = None
    encoded_with: str | None = None  # tokenizer folder or name; for format tokens
    utf8: Literal["strict", "replace", "skip"] = "strict"  # a line or value that is not UTF-8; counted in any case
    min_characters: int | None = None
    max_characters: int | None = None
    language_column: str | None = None
    allowed_languages: list[str] = field(default_factory=list)  # values of language_column that are used
    licence_column: str | None = None
    allowed_licences: list[str] = field(default_factory=list)  # values of licence_column that are used
    tokens: int | None = None  # ids taken of it, separators included; more than it holds: repeated; None: all, once
    epochs: float | None = None  # how often its training documents are taken, such as 0.5 or 3
    weight: float | None = None  # its part of what pack_tokens leaves to the sources with a weight


@dataclass
class ConversationSource:
    """One source of conversations: rows with a list of messages, each with `role` and `content`.

    `path` is a JSONL, Parquet or Arrow file, a glob, a folder, `bundled:NAME` (of the folder recipes), or a `datasets`
    name with `config` and `split`.
    """

    name: str
    path: str
    licence: str = "unknown"
    config: str | None = None
    split: str = "train"
    messages_column: str = "messages"
    filter_column: str | None = None
    allowed_values: list[str] = field(default_factory=list)  # values of filter_column that are used
    epochs: float | None = None  # how often its conversations are taken, such as 0.5 or 3; None without share: once
    share: float | None = None  # its part of the supervised tokens of all sources, such as 0.2; repeated if too few


@dataclass
class DataSection:
    """Where the shards are, what they are made of, and how windows are cut from them."""

    shards: str | None = None
    sequence_length: int = 1024
    window_order: Literal["permutation", "random"] = "permutation"
    document_attention: bool = False  # true: targets attend only inside their document, and positions restart there
    validation_fraction: float = 0.01
    near_duplicates: Literal["minhash"] | None = None  # drop documents that nearly equal another one (extra scale)
    shard_ids: int = 2**24
    num_workers: int | None = None  # encoding processes; None: one per core; 1, or little text: this process alone
    shuffle: bool | None = None  # documents of all sources in a seeded order; None: with several sources or budgets
    shuffle_seed: int = 42
    pack_tokens: int | None = None  # ids of the whole pack, for sources with a weight; None: no source is repeated
    sources: list[SourceSection] = field(default_factory=list)
    conversations: list[ConversationSource] = field(default_factory=list)  # what recipes/sft.py trains on
    test_conversations: list[ConversationSource] = field(default_factory=list)  # and what its test loss is over
    assistant_only_loss: bool = True  # false: every token of a conversation is a target, prompts too
    packing: bool = True  # several whole conversations in a window; false: one, padded
    truncation: Literal["drop", "left", "turns"] = "drop"  # of a conversation longer than sequence_length


@dataclass
class TrainingSection:
    """The run. `global_batch_tokens` is the source of truth for the batch; accumulation steps follow from it."""

    output_dir: str | None = None
    mirror_dir: str | None = None  # folder on another disk that gets copies of the rows and events as they are written
    stage_dir: str | None = None  # local folder that shards and the first checkpoint are copied to, once per host
    train_tokens: int | Literal["epoch"] = "epoch"
    epochs: float = 1.0  # passes over the data when train_tokens is epoch
    global_batch_tokens: int = 524_288
    batch_growth: list[list[int]] = field(default_factory=list)  # [[TOKENS, BATCH], ...]: the batch from then on
    per_device_train_batch_size: int = 8
    per_device_eval_batch_size: int | None = None  # None: as in training
    optim: Optim = "adamw"  # muon: torch.optim.Muon for hidden matrices, AdamW for embedding, head and norm gains
    learning_rate: float = 6e-4
    embedding_lr_ratio: float = 1.0  # of muon: AdamW's rates, as multiples of learning_rate
    head_lr_ratio: float = 1.0  # of an untied head
    gain_lr_ratio: float = 1.0
    muon_momentum: float = 0.95
    muon_momentum_warmup_steps: int = 0  # updates over which it rises from 0.85
    muon_ns_steps: int = 5  # Newton-Schulz steps
    lr_schedule: LRSchedule = "cosine"  # after the warmup; wsd: stable until the last decay_fraction of the updates
    decay_fraction: float = 0.2
    decay_shape: DecayShape = "linear"  # sqrt: 1 - sqrt(share of the decay that is done)
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # of matrix products; auto: what the device is fast at
    bf16: bool | Literal["auto"] = "auto"  # Hugging Face's words for precision: bf16, or fp32 when false
    fp16: bool = False  # with a gradient scaler, for GPUs without bf16
    torch_compile: bool | Literal["auto"] = "auto"  # auto: on a CPU or GPU, for runs long enough to win it back
    loss_kernel: Literal["auto", "torch"] = "auto"  # auto: a kernel where there is a right one; see docs/speed.md
    gradient_checkpointing: bool = False
    use_cpu: bool = False
    cpu_threads: int | None = None  # None: OMP_NUM_THREADS when above 1, else the cores over the processes of this host
    logging_steps: int = 1
    source_loss: bool = False  # the training loss of each source in metrics.jsonl; that of validation always is
    noise_scale: bool = True  # measure how much of each update is signal: keys noise_scale ... of metrics.jsonl
    eval_steps: int | None = None
    sample_steps: int | None = None  # write what the model makes of a file of prompts into events.jsonl; None: never
    save_steps: int | None = None
    save_minutes: float | None = 30.0
    save_total_limit: int | None = 3  # newest checkpoints kept; milestones and the best one stay besides
    save_best: bool = False  # also save whenever a validation is the best so far
    milestone_steps: int | None = None  # checkpoints at multiples of this are never removed
    save_in_background: bool = True
    resume_from_checkpoint: str | None = None  # a checkpoint folder, or auto
    init_from: str | None = None  # start a new run from the weights of a checkpoint or model folder
    init_optimizer: bool = False  # and from the optimizer's moments of that checkpoint
    branch_from: str | None = None  # go on from another run's checkpoint with its windows, to another end of the rates
    nonfinite: Literal["stop", "skip"] = "stop"  # what a loss or gradient that is not finite does
    nonfinite_limit: int = 10  # skipped updates after which the run stops all the same
    stop_after_updates: int | None = None  # budgets of one invocation: end after a save, exit code 3
    max_hours: float | None = None
    max_cost: float | None = None
    price_per_hour: float | None = None  # money per hour of wall time, any currency
    price_per_kwh: float | None = None  # and per kWh at the GPUs, as measured
    note: str | None = None  # kept in run.json: why this run
    expect: str | None = None  # and what is expected of it
    preflight: bool = True  # of recipes/pretrain.py: checks before the first update; a resume repeats the cheap ones
    sensor_seconds: float | None = 30.0  # between two rows of hardware.jsonl; null: no sensor is read
    peak_flops: float | None = None  # FLOP/s of one device at the run's precision, for mfu; None: published ones
    report_to: list[str] = field(default_factory=list)
    run_name: str | None = None
    seed: int = 42


@dataclass
class EvaluationSet:
    """Another pack whose validation split is scored at every validation, such as that of the run that is branched from.

    It must be of the same tokenizer. Of its files only those of that split are read.
    """

    name: str
    shards: str


@dataclass
class EvaluationSection:
    """Validation inside training: the same fixed windows every time."""

    eval_tokens: int = 1_048_576  # of the run's own validation split, and of each of eval_sets
    eval_sets: list[EvaluationSet] = field(default_factory=list)
    sample_prompts: str | None = None  # file of prompts for sample_steps, one a line; None: the bundled one


@dataclass
class ExportSection:
    """What is written after the last update."""

    gguf: list[GGUFType] = field(default_factory=list)  # K-quants (q4_k_m ...) need the extra quantize
    verify: bool = False
    licence: str | None = None  # of the weights, as the Hub spells it: apache-2.0; None: the card says none was chosen
    push_to_hub: bool = False  # upload final folder, GGUF files and card at the end; checked before the first update
    hub_model_id: str | None = None  # USER/NAME; None: the name of the run under the user of the access token
    hub_private_repo: bool = True  # an existing public repository stops a private push


@dataclass
class RunConfig:
    """A whole run: what `hf-tinylm` commands and recipes read."""

    model: ModelSection = field(default_factory=ModelSection)
    tokenizer: TokenizerSection = field(default_factory=TokenizerSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection)
    export: ExportSection = field(default_factory=ExportSection)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, in the order of the sections."""
        return dataclasses.asdict(self)
