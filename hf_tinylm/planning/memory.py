"""Peak memory of one process while it trains, by part, from what autograd really keeps in this package's model.

Per token and layer, with D the hidden size, Q = heads x head_dim, K = key/value heads x head_dim, F the intermediate
size and H the heads. Under bfloat16 autocast the residual stream and the norms stay float32 and products are bfloat16:

    input of each of two norms                             4D + 4D     float32
    normalised values, for the gain's gradient             4D + 4D     float32
    what the projections read (one copy for all of them)   2D + 2D     bfloat16
    queries; attention's output, which o_proj reads        2Q + 2Q     bfloat16
    keys and values, not repeated for grouped queries      2K + 2K     bfloat16
    log-sum-exp of attention; 1/rms of each norm           4H + 8      float32
    gate, silu(gate), up, their product                    8F          bfloat16

In float32 every element takes 4 bytes, and what the projections read is the norm's own output. Rotated queries and keys
are float32 but die when attention has cast them. Attention by `sdpa` keeps no T x T matrix, unless documents are kept
apart: then a mask for each layer, and keys and values repeated; `eager` keeps one for each head. A CPU and a
CUDA device run the same autocast rules over these operations (both list sdpa and matrix products as bfloat16), so they
keep the same tensors; they differ in what is around them: a GPU process has its context, a CPU process the
interpreter, blocks that its heap does not give back, and the checkpoint's copy, which on a GPU machine is in the host.

A compiled pass keeps no normalised values and no silu(gate): the backward pass computes them again on its way.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..sections import Optim
from .optimizer import checkpoint_bytes, moment_bytes
from .shape import ModelShape

# Logits that the loss holds at once (modeling.projected_loss). Fewer would read the whole projection more often for
# each row; more would be memory without use.
CHUNK_ELEMENTS = 2**25
# CUDA context, cuBLAS workspace and kernels outside torch's allocator: 0.4 to 0.5 GB on current drivers.
GPU_FRAMEWORK_BYTES = 450_000_000
# Interpreter, torch, transformers and this package, before any model: measured with torch 2.13 for CPUs.
CPU_FRAMEWORK_BYTES = 525_000_000
# Share of the memory that comes and goes within an update which glibc's heap holds beyond it, between blocks in use:
# measured over models of 4M to 44M parameters in both precisions, 0.28 to 0.55.
CPU_HEAP_SHARE = 0.45
# The same of a compiled pass, whose buffers are fewer and larger; and the compiler's own graphs and code in the
# process: fitted to runs of 10M, 22M and 100M parameters.
COMPILED_HEAP_SHARE = 0.35
COMPILER_BYTES = 200_000_000


@dataclass(frozen=True)
class MemorySettings:
    """What decides memory besides the shape. `tokens` are those of a pass: `rows_of_pass` x sequence_length."""

    tokens: int
    sequence_length: int
    bf16: bool
    checkpointing: bool = False
    eager_attention: bool = False
    document_attention: bool = False
    on_cpu: bool = False
    optim: Optim = "adamw"
    compiled: bool = False


def peak_memory(shape: ModelShape, settings: MemorySettings) -> dict[str, int]:
    """Bytes by part while the loss of an update's last pass is computed; their sum is the peak.

    On a CPU this is resident memory of the process with a checkpoint being written; on a GPU, memory of the device.
    """
    parts = {
        "weights": 4 * shape.parameters,
        "gradients": 4 * shape.parameters,
        "moments": moment_bytes(shape, settings.optim),
        "bf16_weights": 2 * _multiplied_parameters(shape) if settings.bf16 else 0,
        "activations": activation_bytes(shape, settings),
        "loss": max(loss_bytes(shape, settings), _layer_gradients(shape, settings)),
    }
    if not settings.on_cpu:
        return {**parts, "framework": GPU_FRAMEWORK_BYTES}
    coming_and_going = sum(parts[name] for name in ("gradients", "bf16_weights", "activations", "loss"))
    return {
        **parts,
        "checkpoint_copy": checkpoint_bytes(shape, settings.optim),
        "heap": round((COMPILED_HEAP_SHARE if settings.compiled else CPU_HEAP_SHARE) * coming_and_going),
        "framework": CPU_FRAMEWORK_BYTES + (COMPILER_BYTES if settings.compiled else 0),
    }


def activation_bytes(shape: ModelShape, settings: MemorySettings) -> int:
    """Bytes that the forward pass leaves for the backward pass, the loss apart."""
    width, layers = shape.hidden_size, shape.num_hidden_layers
    layer = _layer_bytes(shape, settings)
    around = 12 * width  # the last norm's input, its normalised values, and its output
    # Checkpointed layers keep their input alone; one at a time is computed again.
    kept = layers * 4 * width + layer if settings.checkpointing else layers * layer
    return settings.tokens * (kept + around)


def loss_bytes(shape: ModelShape, settings: MemorySettings) -> int:
    """What `modeling.projected_loss` holds: a chunk of logits, their softmax, and the gradients of what it multiplied.

    A chunk is in the dtype of the products, with a float32 copy where that is bfloat16, and its log-softmax in float32.
    The gradient of the projection is float32 and exists twice for a moment, when the backward pass scales it. The
    gradient of the hidden states is in the dtype of the products, as is a copy of them where that is bfloat16.
    """
    each = _element(settings) if settings.compiled else (10 if settings.bf16 else 8)  # compiled: no copy of a chunk
    chunk = min(CHUNK_ELEMENTS, settings.tokens * shape.vocab_size) * each
    projection = 4 * shape.vocab_size * shape.hidden_size
    return max(chunk, projection) + projection + 4 * settings.tokens * shape.hidden_size


def _layer_bytes(shape: ModelShape, settings: MemorySettings) -> int:
    """Bytes per token that one layer keeps; the table above."""
    element = _element(settings)
    width, inner, query = shape.hidden_size, shape.intermediate_size, shape.attention_width
    key_value = shape.num_key_value_heads * shape.head_dim
    if shape.architecture == "gpt2":
        # Both norms' inputs, means and deviations; what the projections read; queries, keys, values and their result;
        # gelu_new, written out, keeps five values of each inner channel; autocast on a GPU takes its cube in float32.
        scores = shape.num_attention_heads * (4 if not settings.eager_attention else settings.sequence_length * 8)
        gelu = 5 * element if settings.on_cpu or not settings.bf16 else 18
        return 8 * width + 16 + 2 * element * width + element * 4 * width + scores + gelu * inner
    norms = (8 if settings.compiled else 16) * width + 8
    read = 2 * element * width
    attention = element * (2 * query + 2 * key_value)
    if shape.qk_norm:
        # Each head's input as float32, its normalised values for the gain, and 1/rms.
        attention += (4 + element) * (query + key_value)
        attention += 4 * (shape.num_attention_heads + shape.num_key_value_heads)
    if settings.eager_attention or settings.document_attention:
        attention += element * 2 * (query - key_value)  # keys and values are repeated for every query head
    if settings.eager_attention:
        # Probabilities over T keys, in float32 for the softmax and in the dtype of the products for the next one.
        attention += shape.num_attention_heads * settings.sequence_length * (4 + (element if settings.bf16 else 0))
    else:
        attention += 4 * shape.num_attention_heads
        attention += element * settings.sequence_length if settings.document_attention else 0  # a mask for each layer
    return norms + read + attention + (3 if settings.compiled else 4) * element * inner


def _layer_gradients(shape: ModelShape, settings: MemorySettings) -> int:
    """What one layer's backward pass needs at a time: gradients of three feed-forward values and two residuals."""
    return settings.tokens * (3 * _element(settings) * shape.intermediate_size + 8 * shape.hidden_size)


def _multiplied_parameters(shape: ModelShape) -> int:
    """Weights that take part in a matrix product: autocast keeps a bfloat16 copy of each until the backward pass."""
    looked_up_only = 0 if shape.tie_word_embeddings else shape.parts["embedding"]
    return shape.decayed_parameters - looked_up_only


def _element(settings: MemorySettings) -> int:
    return 2 if settings.bf16 else 4
