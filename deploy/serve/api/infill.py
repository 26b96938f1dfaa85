"""Filling in the middle: what stands between a text before it and one behind it.

Models of code have learnt it by marks of their vocabularies; `suffix` of completions and the
/infill of llama.cpp, which editors ask, both become a prompt of these.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import Field
from tokenizers import Tokenizer

from polybasic.deploy.serve.api.costs import costs
from polybasic.deploy.serve.api.fields import Fields
from polybasic.deploy.serve.api.protocol import CompletionRequest, Texts
from polybasic.deploy.serve.api.replies import Reply

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
_FILE_MARKS = ("<|file_sep|>", "<file_sep>")
_ENDS = ("<|fim_pad|>", "<|repo_name|>", "<repo_name>", *_FILE_MARKS)
_MOST_FILES = 256


@dataclass(frozen=True)
class Infilling:
    """How prompts of a vocabulary ask for a middle.

    Attributes:
        marks: ids before the text before, before the text behind, and after it.
        stops: ids that end a middle, beside the checkpoint's own.
        file_mark: id before another file; None where there is none.
    """

    marks: tuple[int, int, int]
    stops: list[int]
    file_mark: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Infilling | None":
        """None where the vocabulary has no marks."""
        for names in _MARKS:
            before, behind, middle = map(tokenizer.token_to_id, names)
            if before is not None and behind is not None and middle is not None:
                stops = _ids(tokenizer, _ENDS)
                of_files = _ids(tokenizer, _FILE_MARKS)
                return cls((before, behind, middle), stops, of_files[0] if of_files else None)
        return None

    def prompt(self, before: Sequence[int], behind: Sequence[int]) -> list[int]:
        """Token ids that ask for what stands between two texts."""
        first, second, third = self.marks
        return [first, *before, second, *behind, third]


def _ids(tokenizer: Tokenizer, names: Iterable[str]) -> list[int]:
    ids = (tokenizer.token_to_id(name) for name in names)
    return [token for token in ids if token is not None]


class OtherFile(Fields):
    """That may help, of /infill."""

    filename: str
    text: str


class InfillRequest(Fields):
    """Of /infill, as llama.cpp takes it."""

    input_prefix: str = Field("", description="what stands before")
    input_suffix: str = Field("", description="what stands behind")
    prompt: str = Field("", description="of the present line, after `input_prefix`")
    input_extra: list[OtherFile] = Field([], max_length=_MOST_FILES)
    n_predict: int | None = Field(None, ge=-1, description="of an answer at most; -1: any number")
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    model: str | None = None

    IGNORED = frozenset(
        """samplers cache_prompt t_max_prompt_ms t_max_predict_ms n_indent response_fields id_slot
        n_cache_reuse""".split()  # noqa: SIM905
    )
    NEUTRAL: ClassVar[dict[str, tuple[Any, ...]]] = {"stream": (False,)}

    def completion(self, prompt: list[int], stops: list[int], most: int) -> CompletionRequest:
        """The same as a completion.

        Args:
            prompt: token ids.
            stops: ids that end it.
            most: tokens of an answer that fit.
        """
        named = ("model", "temperature", "top_k", "top_p", "min_p", "stop")
        given: dict[str, Any] = {name: getattr(self, name) for name in named}
        if self.seed is not None and self.seed >= 0:
            given["seed"] = self.seed
        asked = self.n_predict or most
        num = min(asked, most) if asked > 0 else most
        return CompletionRequest(prompt=prompt, stop_token_ids=stops, max_tokens=num, **given)


def infilled(reply: Reply) -> dict[str, Any]:
    """The answer of a completion as llama.cpp shapes it."""
    [choice] = reply.choices
    assert choice.statistics is not None, "an answer that has ended"
    by = {"stop": "eos", "stop_string": "word", "length": "limit"}
    usage = reply.usage()
    return {
        "index": 0,
        "content": choice.text,
        "tokens": [],
        "stop": True,
        "stop_type": by[choice.statistics.stopped_by or "length"],
        "truncated": False,
        "tokens_predicted": usage["completion_tokens"],
        "tokens_evaluated": usage["prompt_tokens"],
        "tokens_cached": choice.statistics.num_cached_tokens,
        **costs([choice.statistics]),
    }
