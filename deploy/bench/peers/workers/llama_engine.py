"""llama.cpp by its C interface: python -m workers.llama_engine MODEL.gguf --threads 2.

Nothing but passes and the choice of tokens is timed: no HTTP, no text. With `--lookup` it drafts
what followed the last tokens before, with `--draft` by another model; a drafted token is kept where
the model chooses it too, as llama.cpp's own programs do.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .lines import Lines, PeerQuestion, PeerReply
from .llama_library import instruction_sets, library_path, load_library, origin
from .llama_model import LlamaModel

Choose = Callable[[int], int]
"""A row of the last pass -> the token that follows it."""


class PromptLookup:
    """Drafts what followed the last tokens when they came first, the longest run that did.

    Args:
        num_drafted: tokens at most.
        longest: run that is looked for.
    """

    def __init__(self, num_drafted: int, longest: int) -> None:
        self.num_drafted, self.longest = num_drafted, longest

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """int [tokens of the sequence] -> int [drafted]."""
        for length in range(min(self.longest, len(tokens) - 1), 0, -1):
            runs = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            [places] = np.nonzero((runs == tokens[-length:]).all(axis=1))
            if len(places):
                begin = int(places[0]) + length
                return tokens[begin : begin + self.num_drafted]
        return tokens[:0]


class Llama:
    """A model, and what drafts for it.

    Args:
        draft: file of a draft model.
        lookup: tokens that prompt lookup drafts; 0 for none.
        ngram: most tokens that it looks for.
        num_drafted: tokens that the draft model drafts.
    """

    def __init__(
        self,
        model: Path,
        threads: int,
        context: int,
        dtype: str,
        draft: Path | None = None,
        lookup: int = 0,
        ngram: int = 2,
        num_drafted: int = 8,
    ) -> None:
        used = instruction_sets(load_library(library_path()))
        self.dtype = dtype
        self.version = f"llama.cpp of {origin()} ({used})"
        self.model = LlamaModel(model, threads, context)
        self.drafter = None if draft is None else LlamaModel(draft, threads, context)
        self.lookup = PromptLookup(lookup, ngram) if lookup and draft is None else None
        self.num_drafted = num_drafted

    def answer(self, question: PeerQuestion) -> PeerReply:
        begin = time.perf_counter()
        choose: Choose = self.model.best
        free: Callable[[], None] = _nothing
        if question.temperature:
            choose, free = self.model.sampler(question.temperature, question.seed)
        prompt, tokens = question.prompt, list(question.prompt)
        self.model.cut(0)
        if self.drafter is not None:
            self.drafter.cut(0)
        self.model.read(prompt, rows=1)
        tokens.append(choose(0))
        first_seconds = time.perf_counter() - begin
        end = len(prompt) + question.max_new_tokens
        while len(tokens) < end and tokens[-1] not in question.stop:
            drafted = self._draft(tokens, end - len(tokens) - 1)
            self.model.read([tokens[-1], *drafted], rows=len(drafted) + 1)
            for row in range(len(drafted) + 1):
                tokens.append(choose(row))
                if tokens[-1] in question.stop or drafted[row : row + 1] != tokens[-1:]:
                    break
            self.model.cut(len(tokens) - 1)
        seconds = time.perf_counter() - begin
        free()
        return PeerReply(tokens[len(prompt) :], seconds, 1, first_seconds)

    def _draft(self, tokens: list[int], most: int) -> list[int]:
        if most <= 0:
            return []
        if self.lookup is not None:
            copied: list[int] = self.lookup(np.array(tokens)).tolist()
            return copied[:most]
        drafter, drafted = self.drafter, list[int]()
        if drafter is None:
            return []
        drafter.cut(min(drafter.length, len(tokens) - 1))
        unread = tokens[drafter.length :]
        for _ in range(min(self.num_drafted, most)):
            drafter.read(unread, rows=1)
            drafted.append(drafter.best(0))
            unread = drafted[-1:]
        return drafted


def _nothing() -> None:
    """Greedy answers leave nothing to free."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens")
    parser.add_argument("--dtype", required=True, help="to say")
    parser.add_argument("--lookup", type=int, default=0, help="tokens that prompt lookup drafts")
    parser.add_argument("--ngram", type=int, default=2, help="most tokens that it looks for")
    parser.add_argument("--draft", type=Path, help="file of a draft model")
    parser.add_argument("--num-drafted", type=int, default=8, help="tokens of --draft")
    arguments = parser.parse_args()
    lines = Lines()
    lines.serve(Llama(**vars(arguments)))


if __name__ == "__main__":
    main()
