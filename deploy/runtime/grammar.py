"""Grammars that answers have to match: JSON of a schema, regular expressions, choices, Lark.

llguidance computes which tokens may follow; see `polybasic.deploy.runtime.rounds.constraint`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from polybasic.chain.base.errors import UserError
from polybasic.deploy.runtime.rounds.constraint import Constraint, refusal

_JSON: Any = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}
"""Options of llguidance. Of unbounded whitespace small models may write nothing else."""
ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of whatever is an object."""
_MOST_CHARACTERS = 1 << 16
"""Which are compiled in less than a second."""
_NUM_KEPT = 16
"""Grammars that stay compiled."""


@dataclass(frozen=True)
class Grammar:
    """What an answer has to match as a whole.

    Attributes:
        text: as llguidance reads it; made by the methods below.

    Raises:
        UserError: a grammar that is none, or that asks for what llguidance has no answer to.
    """

    text: str

    def __post_init__(self) -> None:
        from llguidance import LLMatcher

        if len(self.text) > _MOST_CHARACTERS:
            size = f"{len(self.text):,} characters"
            raise refusal(f"{size}, of at most {_MOST_CHARACTERS:,}, as llguidance reads it")
        is_error, messages = LLMatcher.validate_grammar_with_warnings(self.text)
        if is_error:
            raise refusal(messages[0])

    @classmethod
    def json_schema(cls, schema: Any) -> "Grammar":
        """JSON of a schema: an object of JSON, true, or the text of either."""
        from llguidance import LLMatcher

        try:
            content = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps({} if content is True else content)
            if not text.startswith("{"):
                raise refusal(f"a schema is an object of JSON, not {text[:40]}")
            return cls(LLMatcher.grammar_from_json_schema(text, overrides=_JSON))
        except (TypeError, ValueError, RecursionError) as error:
            raise refusal(f"the schema is no JSON that can be read: {error}") from error

    @classmethod
    def json_object(cls) -> "Grammar":
        """Any object of JSON."""
        return cls.json_schema(ANY_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """A regular expression, in the syntax of Rust's regex without look-around."""
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_regex(pattern))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Grammar":
        """One of these texts."""
        if not texts or not all(texts):
            raise refusal("a choice is among texts that are not empty, at least one")
        return cls.lark("start: " + " | ".join(json.dumps(text) for text in texts))

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """A context-free grammar in Lark's syntax, as llguidance reads it; it begins at `start`."""
        from llguidance import LLMatcher

        return cls(LLMatcher.grammar_from_lark(text))


def json_rule(schema: dict[str, Any]) -> str:
    """What stands for JSON of a schema in a grammar in Lark's syntax."""
    return f"%json {json.dumps(schema | {'x-guidance': _JSON})}"


class Vocabulary:
    """A tokenizer's tokens as grammars read them, and the latest grammars compiled for them.

    Made once: it takes a second.

    Args:
        tokenizer: of transformers, with a fast backend.
        stop_tokens: ids that end an answer.
        vocab_size: of the models, which may be padded.
    """

    def __init__(self, tokenizer: Any, stop_tokens: frozenset[int], vocab_size: int) -> None:
        from llguidance.hf import from_tokenizer

        self._stop_tokens, self._vocab_size = stop_tokens, vocab_size
        if not stop_tokens:
            raise UserError(
                "no stop token",
                "the chain's tokenizer",
                "package a target that has one: an answer of a grammar has an end",
            )
        eos_token = sorted(stop_tokens)
        try:
            self._tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_token)
        except ValueError as error:
            raise UserError(
                "tokenizer that grammars cannot read",
                f"the chain's ({str(error)[:200]})",
                "ask without a grammar, or package a target of another tokenizer",
            ) from error
        self._matcher = lru_cache(_NUM_KEPT)(self._compiled)

    def rule(self, text: str) -> str:
        """What stands for a text in a grammar in Lark's syntax: an added token has a number."""
        first, *others = self._tokens.tokenize_str(text)
        is_added = not others and self._tokens.is_special_token(first)
        return f"<[{first}]>" if is_added else json.dumps(text)

    def constraint(
        self, grammar: Grammar, num_prompt_tokens: int = 0, overwrites: bool = False
    ) -> Constraint:
        """For one answer; see `Constraint` for the arguments.

        Raises:
            UserError: the grammar is too large.
        """
        matcher = self._matcher(grammar).deep_copy()
        return Constraint(
            matcher, self._stop_tokens, self._vocab_size, num_prompt_tokens, overwrites
        )

    def _compiled(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, grammar.text, log_level=0)
        if matcher.is_error():
            raise refusal(matcher.get_error())
        return matcher
