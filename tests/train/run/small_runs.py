"""Targets and settings of training runs that take seconds."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from polybasic.train.settings import DataSettings, HeadSettings

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATA = DataSettings(num_heldout=4, max_tokens=64)
SETTINGS = HeadSettings(
    num_steps=12,
    warmup_steps=2,
    batch_size=4,
    learning_rate=5e-3,
    token_loss_weight=1.0,
    eval_every_steps=4,
    save_every_steps=3,
    eval_answer_tokens=12,
    eval_tree_depth=3,
    dtype="bfloat16",
)
RUN = """
import sys
from contextlib import nullcontext
from pathlib import Path
from polybasic.train.run.training import train_head
from polybasic.train.settings import DataSettings, HeadSettings
target, conversations, data, settings, out = sys.argv[1:]
train_head(
    Path(target), conversations, DataSettings.model_validate_json(data),
    HeadSettings.model_validate_json(settings), 0, Path(out),
)
"""


def metrics(out):
    """The lines that a run has logged."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def write_target(folder, hidden_size):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["Count on from 12.", "user assistant"], trainer)
    tokenizer = FastTokenizer(tokenizer_object=inner, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=2,
        max_position_embeddings=128,
        rope_theta=1234.0,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder
