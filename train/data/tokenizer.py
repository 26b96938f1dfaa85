"""A byte-level BPE tokenizer trained on conversations, with a chat template of its own."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
ROLE_TOKENS = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}

# Words keep their leading space; every digit is a token of its own, so that sums can be learned.
_WORDS = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

# A turn is its role's token, the text and END. Only what the assistant itself has to produce
# lies in the generation block: its text and its END.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "<|assistant|>{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{%- elif message['role'] in ('system', 'user') -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{%- else -%}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def train_tokenizer(
    conversations: Iterable[Sequence[Mapping[str, Any]]], vocab_size: int, context_tokens: int
) -> PreTrainedTokenizerFast:
    """Train a tokenizer on the texts of all turns.

    Any UTF-8 text can be encoded: all 256 bytes are in the vocabulary.

    Args:
        conversations: one sequence of {"role", "content"} messages each.
        vocab_size: upper bound, special tokens included; a small corpus yields fewer.
        context_tokens: what the tokenizer declares as its model's longest input.

    Returns:
        A fast tokenizer whose end-of-sequence token ends every turn.
    """
    specials = [PAD, BEGIN, END, *ROLE_TOKENS.values()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(conversations), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        additional_special_tokens=list(ROLE_TOKENS.values()),
        model_max_length=context_tokens,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _texts(conversations: Iterable[Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    for messages in conversations:
        for message in messages:
            yield message["content"]
