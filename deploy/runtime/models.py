"""The loaded members of a chain."""

from dataclasses import dataclass, field

import torch

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.decoder_config import EncoderConfig
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.deploy.runtime.drafters.expansion import MakeDrafter, MakeSharingDrafter
from polybasic.deploy.runtime.parallel.leader import Leader
from polybasic.deploy.runtime.remote.target import RemoteTarget
from polybasic.deploy.runtime.rounds.cache import KeyValueCache

CONTEXT_TOKENS_BY_DEFAULT = 8192


@dataclass
class Models:
    """The loaded members of a chain.

    Attributes:
        decoders: verifying members by name, the target first.
        drafters: heads and independent draft models, by name.
        drafts_for: by drafter, the verifying members that it can draft for.
        context_tokens: prompt and answer together.
        makers: by drafter, what makes it; those that are not named are made for a head of EAGLE's
            or for an independent model.
        sharing_makers: likewise of drafters that share the cache of the one model that they draft
            for.
        remote: the target where it runs elsewhere; then it is no decoder here.
        leader: of the processes that the verifying members are divided among; None if they are
            whole.
    """

    decoders: dict[str, Executor]
    drafters: dict[str, Executor] = field(default_factory=dict)
    drafts_for: dict[str, tuple[str, ...]] = field(default_factory=dict)
    context_tokens: int = CONTEXT_TOKENS_BY_DEFAULT
    makers: dict[str, MakeDrafter] = field(default_factory=dict)
    remote: RemoteTarget | None = None
    leader: Leader | None = None
    sharing_makers: dict[str, MakeSharingDrafter] = field(default_factory=dict)

    def cache_of(self, decoder: Executor, capacity: int) -> KeyValueCache:
        """A new cache of a verifying member."""
        if self.leader is not None:
            return self.leader.new_cache(decoder, capacity)
        return KeyValueCache.of(decoder, capacity)

    @property
    def num_parts(self) -> int:
        """Processes that each verifying member is divided among."""
        return 1 if self.leader is None else self.leader.num_parts

    @property
    def target(self) -> Executor:
        """The target's executor.

        Raises:
            UserError: it runs elsewhere.
        """
        if self.remote is not None:
            raise UserError(
                "the target runs elsewhere",
                f"{self.remote.name} at {self.remote.address}",
                "do this where its weights are",
            )
        return next(iter(self.decoders.values()))

    @property
    def here(self) -> Executor | None:
        """The largest model that runs here; None if none does."""
        return next(iter((self.decoders | self.drafters).values()), None)

    @property
    def encoder(self) -> EncoderConfig | None:
        """What reads the source of encoder-decoders; None of decoders alone."""
        return None if self.here is None else self.here.config.encoder

    @property
    def device(self) -> torch.device:
        """Of all models here."""
        return torch.device("cpu") if self.here is None else self.here.device

    @property
    def vocab_size(self) -> int:
        """Of all members."""
        if self.remote is not None:
            return self.remote.vocab_size
        return self.target.config.vocab_size

    @property
    def run_on_device(self) -> bool:
        """Whether whole rounds can be captured."""
        return self.remote is None and all(
            isinstance(decoder, TorchExecutor) and decoder.runs_on_device
            for decoder in self.decoders.values()
        )

    def close(self) -> None:
        """End what runs elsewhere for this chain; afterwards it answers nothing."""
        if self.leader is not None:
            self.leader.close()

    def drafters_of(self, name: str) -> list[str]:
        """The drafters that can draft for a verifying member."""
        return [drafter for drafter, names in self.drafts_for.items() if name in names]
