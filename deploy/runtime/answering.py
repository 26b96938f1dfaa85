"""A target without a chain: answers in its own distribution, several at a time."""

from collections.abc import Iterable
from pathlib import Path

import torch

from polybasic.chain.formats.bare import ALONE
from polybasic.chain.formats.checkpoints.config import ConfigFile, read_config
from polybasic.chain.formats.package import TARGET_NAME
from polybasic.chain.formats.tokenizer import load_tokenizer
from polybasic.chain.kernels.product_times import DTYPES, name_of
from polybasic.chain.model.loading import load_decoder, serving_dtype
from polybasic.deploy.runtime.batching import ActiveSequence
from polybasic.deploy.runtime.defaults import read_default_sampling, read_stop_tokens
from polybasic.deploy.runtime.engine import Engine
from polybasic.deploy.runtime.hardware import device_named
from polybasic.deploy.runtime.models import Models
from polybasic.deploy.runtime.request import Request
from polybasic.deploy.runtime.rounds.verifier import SPARE_ROWS
from polybasic.deploy.runtime.rounds.warping import Sampling


class LoneTarget:
    """A loaded target; answers that are made at the same time share its passes.

    Args:
        checkpoint: its folder.
        tokenizer: folder of its tokenizer.
        context_tokens: of a prompt with its answer; caches are allocated for so many.
        sequences: answers at a time, at most. A single one is drafted for by n-grams; with several
            a pass over the rows of all costs no less than their drafts would save.
        device: default: cuda if there is one, else cpu.
        dtype: name of that of passes; default: `answering_dtype`.
        graphs: as `polybasic.deploy.load_chain`.

    Attributes:
        sequences: answers at a time, as many as half of the free memory has caches for.
        sampling: what the checkpoint's generation_config.json says, as servers read it.

    Raises:
        UserError: an unsupported architecture, a missing weight, or no tokenizer.
    """

    def __init__(
        self,
        checkpoint: Path,
        tokenizer: Path,
        context_tokens: int,
        sequences: int = 1,
        device: torch.device | None = None,
        dtype: str | None = None,
        graphs: bool = True,
    ) -> None:
        device = device or device_named()
        config = read_config(checkpoint)
        in_dtype = DTYPES[dtype or answering_dtype(config)]
        num_positions = context_tokens + SPARE_ROWS
        decoder = load_decoder(config, in_dtype, device, num_positions)
        models = Models({TARGET_NAME: decoder}, context_tokens=context_tokens)
        self._engine = Engine(models, graphs=graphs, sequences=sequences)
        self.sequences = min(sequences, self._engine.slots.num_fitting(share=0.5))
        self._plan = ALONE if self.sequences == 1 else ALONE.model_copy(update={"ngram": None})
        loaded = load_tokenizer(tokenizer, "target's tokenizer")
        self._backend = loaded.backend_tokenizer
        self._stop_tokens = read_stop_tokens(config, loaded.eos_token_id)
        self.sampling = read_default_sampling(checkpoint)

    def begin(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: Sampling,
        stop_tokens: Iterable[int] = (),
    ) -> ActiveSequence:
        """Take a sequence for an answer, which `step` makes; close it when it is over.

        Args:
            token_ids: of the prompt.
            max_new_tokens: of the answer.
            sampling: how tokens are drawn.
            stop_tokens: that end it beside the checkpoint's own.

        Raises:
            UserError: a prompt that does not fit the context with its answer, or more than
                `sequences` answers at a time.
        """
        stops = self._stop_tokens | frozenset(stop_tokens)
        request = Request(token_ids, max_new_tokens, sampling, stops, self._plan)
        self._engine.check(request)
        return self._engine.begin(request, runs_ahead=True)

    def step(self) -> None:
        """Run one pass, for all answers that wait for it."""
        self._engine.step()

    def text(self, tokens: list[int]) -> str:
        """The text of a whole answer, without special tokens."""
        return self._backend.decode(tokens)


def answering_dtype(config: ConfigFile) -> str:
    """Name of the dtype in which a target alone answers fast here: its own, or float32.

    Raises:
        UserError: its own is none.
    """
    return name_of(serving_dtype(config, device_named()))
