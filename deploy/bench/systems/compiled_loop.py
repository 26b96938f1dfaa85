"""generate() of transformers with a static cache and compiled decoding."""

from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedModel

from polybasic.chain.base.errors import UserError
from polybasic.deploy.bench.systems.generate_loops import GenerateLoop
from polybasic.deploy.bench.systems.system import TimedAnswer
from polybasic.deploy.runtime.rounds.sampling import Sampling

_MAX_ANSWERS = 3
"""To one request, while answers are repeated because something was compiled for them."""


class CompiledLoop(GenerateLoop):
    """generate() with a static cache and compiled decoding; no time that it returns has a compile.

    One graph serves all answers that fit the cache. A longer one makes transformers compile anew,
    and is then repeated.

    Args:
        model, stop_tokens: as for `GenerateLoop`.
        cache_tokens: prompt and answer together at most.
    """

    def __init__(
        self,
        name: str,
        description: str,
        model: PreTrainedModel,
        stop_tokens: frozenset[int],
        cache_tokens: int,
    ) -> None:
        compile_config = CompileConfig()
        # by itself transformers compiles on accelerators alone
        compile_config._compile_all_devices = True  # type: ignore[assignment]
        settings = {
            "cache_implementation": "static",
            "max_cache_len": cache_tokens,
            "compile_config": compile_config,
        }
        super().__init__(name, description, model, stop_tokens, settings)

    def compile(self, prompt: list[int]) -> bool:
        """Whether transformers compiles this model here; what it compiles is kept for answers.

        Raises:
            RuntimeError: compiling failed.
        """
        before = _num_compiled()
        # the pass that gives the first token is not compiled; on a GPU, the second compiled one is
        # recorded as a graph
        super().answer(prompt, 5, Sampling(), 5)
        return _num_compiled() > before

    def answer(
        self,
        prompt: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        min_new_tokens: int = 0,
    ) -> TimedAnswer:
        """See `GenerateLoop`.

        Raises:
            UserError: it compiles for each answer.
        """
        for _ in range(_MAX_ANSWERS):
            before = _num_compiled()
            answer = super().answer(prompt, max_new_tokens, sampling, min_new_tokens)
            if _num_compiled() == before:
                return answer
        raise UserError(
            "transformers compiles for each answer",
            f"{self.name}, prompt of {len(prompt)} tokens",
            f"compare without {self.name}",
        )


def _num_compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    return counters["stats"]["unique_graphs"]
