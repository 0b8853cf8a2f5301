"""A tokenizer and a model small enough to reason about: the bytes, four special tokens, and two rows of padding."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_tinylm.evaluation.likelihood import CausalLMEngine
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.modeling.model import TinyLMForCausalLM
from hf_tinylm.sections import ModelSection
from hf_tinylm.tokenization.encoder import FastEncoder

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TOKENS = 260  # four specials and 256 bytes
ROWS = 272  # twelve rows of padding


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(SPECIALS + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        additional_special_tokens=SPECIALS[1:3],
    )
    assert len(tokenizer) == TOKENS
    return tokenizer


@pytest.fixture
def padded_model() -> LlamaForCausalLM:
    """A random stock Llama of 24 positions whose padding rows, if they were allowed, would win nearly every draw."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=ROWS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=24,
            initializer_range=0.2,
            attention_dropout=0.5,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=3,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            model.lm_head.bias = torch.nn.Parameter(torch.zeros(ROWS))
            model.lm_head.bias[TOKENS:] = 30.0
            model.lm_head.bias[0] = -30.0  # practically never ends by itself
    return model.eval()


@pytest.fixture(scope="session")
def byte_model() -> TinyLMForCausalLM:
    """A random model of ours for `byte_tokenizer`, 96 positions, a padded embedding, sharp opinions."""
    shape = ModelSection(32, 2, 4, 2, 48, pad_vocab_to_multiple_of=16)
    model = new_model(shape, TOKENS, 96, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)
    return model.eval()


@pytest.fixture
def byte_engine(byte_model: TinyLMForCausalLM, byte_tokenizer: PreTrainedTokenizerFast) -> CausalLMEngine:
    return CausalLMEngine(byte_model, FastEncoder(byte_tokenizer))
