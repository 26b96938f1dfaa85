"""Caches of sequences: what a sequence takes of the memory, and what it leaves to the next one."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.readable import readable_bytes
from polybasic.chain.formats.plan import Plan, Tree, Window
from polybasic.chain.kernels.cuda.graphs import Graphs
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.torch.executor import TorchExecutor
from polybasic.deploy.runtime.drafters.expansion import ExpandingDrafter
from polybasic.deploy.runtime.drafters.head import EagleDrafter
from polybasic.deploy.runtime.drafters.history import History
from polybasic.deploy.runtime.drafters.interface import Drafter, IdleDrafter, NoDrafter
from polybasic.deploy.runtime.drafters.model import ModelDrafter
from polybasic.deploy.runtime.drafters.ngram import NgramDrafter
from polybasic.deploy.runtime.graphs.device_passes import DevicePasses
from polybasic.deploy.runtime.hardware import available_bytes
from polybasic.deploy.runtime.models import Models
from polybasic.deploy.runtime.remote.session import Session
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.lazy_rows import SharedRows
from polybasic.deploy.runtime.rounds.noise import Noise
from polybasic.deploy.runtime.rounds.pace import PromptPace
from polybasic.deploy.runtime.rounds.verifier import SPARE_ROWS, Verifier

SEQUENCES_BY_DEFAULT = 16
"""Most at a time, on a CPU; where rounds are captured on a GPU there is one."""
MIN_KEPT = 16
"""Sequences, running or over, whose caches are kept where these take memory by need."""
MIN_COPIED_TOKENS = 16
"""Of another sequence's caches; fewer are read again."""
SOON_READ = 128
"""Tokens that are not worth caches of their own: a pass or two read them again."""


class Slot:
    """Caches of one sequence at a time, over a chain's models.

    An intermediate whose layers have the shapes of the model right above it shares that model's.

    Args:
        share_caches: False gives every verifying member a cache of its own.
        graphs: passes are captured with these caches; None if the host runs all passes.
        paces: of prompts, by verifying member, which all slots share.

    Attributes:
        verifiers: by name, the target first.
        drafters: over caches that are allocated when they are first used.
        session: of a target that runs elsewhere; None where it runs here.
        tokens: of the latest sequence: what the caches hold are rows of its leading tokens.
        is_free: whether no sequence uses it.
        num_reserved: rows that its sequence is about to write, those that it holds included; 0
            where none runs.
    """

    def __init__(
        self,
        models: Models,
        share_caches: bool,
        graphs: Graphs | None,
        paces: Mapping[str, PromptPace],
    ) -> None:
        capacity = models.context_tokens + SPARE_ROWS
        self.caches: dict[str, KeyValueCache] = {}
        above: Executor | None = None
        for name, decoder in models.decoders.items():
            fits = above is not None and above.config.cache_shape == decoder.config.cache_shape
            self.caches[name] = (
                next(reversed(self.caches.values()))
                if share_caches and fits
                else models.cache_of(decoder, capacity)
            )
            above = decoder
        feature_layers = _feature_layers(models, self.caches)
        self.verifiers: dict[str, Verifier] = {}
        for name, decoder in models.decoders.items():
            passes = None
            if graphs is not None and isinstance(decoder, TorchExecutor) and decoder.runs_on_device:
                passes = DevicePasses(name, decoder, self.caches[name], graphs)
            layers = feature_layers.get(name, ())
            self.verifiers[name] = Verifier(
                name, decoder, self.caches[name], passes, None, layers, paces[name]
            )
        self.drafters = Drafters(models, capacity, self.caches)
        self.session = None if models.remote is None else Session(models.remote)
        self.tokens: list[int] = []
        self.is_free = True
        self.num_reserved = 0

    def hold(self, tokens: list[int], num_held: int) -> None:
        """Set the next sequence, whose first `num_held` tokens are those of the latest one."""
        for cache in self.caches.values():
            cache.truncate(min(cache.length, num_held))
        for drafter in self.drafters.made:
            observed = drafter.num_observed
            drafter.rewind(num_held if observed is None else min(observed, num_held))
        self.tokens = tokens

    def fill_unread(self, tokens: list[int]) -> None:
        """Hold tokens that nothing has read: what costs depend on is their number.

        Afterwards it is to be cleared.
        """
        for cache in self.caches.values():
            cache.fill(len(tokens))
        for drafter in self.drafters.made:
            drafter.fill(len(tokens))
        self.tokens = tokens

    def clear(self) -> None:
        """Forget all tokens."""
        self.hold([], 0)
        if self.session is not None:
            self.session.end()

    def give_back(self) -> None:
        """Return the memory of rows that are not committed, see `KeyValueCache.give_back`."""
        for cache in self.caches.values():
            cache.give_back()
        for drafter in self.drafters.made:
            drafter.give_back()

    def drop(self) -> None:
        """Forget all tokens, and return the memory of their rows."""
        self.clear()
        self.give_back()

    def leave(self) -> None:
        """Take no more rows; what the caches hold may be read again."""
        self.is_free, self.num_reserved = True, 0

    @property
    def num_needed(self) -> int:
        """Rows of each cache that hold what was read, or soon will, without provisional ones, and
        without shared ones, which are not the sequence's alone."""
        own = [cache.length - cache.num_shared for cache in self._all_caches]
        return max([self._num_reserved_alone, *own])

    @property
    def num_rows(self) -> int:
        """The same with those that take memory though nothing needs them."""
        own = [cache.num_written - cache.num_shared for cache in self._all_caches]
        return max([self._num_reserved_alone, *own])

    @property
    def _num_reserved_alone(self) -> int:
        """Those about to be written that are not shared in the cache of the first model."""
        first = self._first_cache
        num_shared = 0 if first is None else first.num_shared
        return max(self.num_reserved - num_shared, 0)

    @property
    def _first_cache(self) -> KeyValueCache | None:
        """That of the first model; None where no model verifies here."""
        return next(iter(self.caches.values()), None)

    @property
    def _all_caches(self) -> list[KeyValueCache]:
        return [cache for cache in self._caches_by_member.values() if not cache.is_view]

    @property
    def _caches_by_member(self) -> dict[str, KeyValueCache]:
        return self.caches | {drafter.name: drafter.cache for drafter in self.drafters.made}

    def num_known(self, tokens: list[int]) -> int:
        """Leading ones of which the cache of the first model holds rows."""
        first = self._first_cache
        return 0 if first is None else min(num_common(self.tokens, tokens), first.length)

    def num_unread(self, num_tokens: int, members: Collection[str]) -> int:
        """Of so many tokens of its sequence, those that one of these members has to read still."""
        made = self._caches_by_member
        held = (made[member].length if member in made else 0 for member in members)
        return num_tokens - min(held, default=num_tokens)

    def reads_for_itself(self, member: str) -> bool:
        """Whether a model below the target reads all tokens: one with a cache of its own."""
        if member in self.caches:
            return self.caches[member] is not self._first_cache
        models = self.drafters.models
        return member not in models.sharing_makers and not models.drafters[member].weights.is_head

    def num_shareable(self, tokens: list[int], members: Sequence[str]) -> int:
        """Leading ones whose rows take no memory again, of any of these members, where another slot
        takes them over."""
        num_known, made = self.num_known(tokens), self._caches_by_member
        if any(member not in made for member in members):
            return 0
        caches = [made[member] for member in members if not made[member].is_view]
        return min(cache.num_shareable(num_known) for cache in caches)

    def copy_from(self, other: "Slot", num_tokens: int) -> None:
        """Take over the rows of another one's first tokens."""
        self.clear()
        for name, cache in self.caches.items():
            if cache.length == 0:
                cache.copy_from(other.caches[name], num_tokens)
        self.drafters.copy_from(other.drafters, num_tokens)
        self.tokens = other.tokens[:num_tokens]

    @property
    def num_bytes(self) -> int:
        """Of the verifying members' caches."""
        blocks = {id(cache): cache.block for cache in self.caches.values()}
        return sum(block.nbytes for block in blocks.values())


class Slots:
    """The slots of an engine, made when they are needed, and which of them a sequence gets.

    Args:
        most: sequences at a time.
        reuses: whether leading tokens that were read before are not read again.
        cache_tokens: rows that the caches of all sequences hold together, where these take memory
            by need; None where each takes that of the whole context.
        kept_tokens: rows beyond which nothing is kept of sequences that are over; default: all.

    Attributes:
        made: the least recently used first.
        paces: of prompts, by verifying member.
    """

    def __init__(
        self,
        models: Models,
        most: int,
        share_caches: bool = True,
        graphs: Graphs | None = None,
        reuses: bool = False,
        cache_tokens: int | None = None,
        kept_tokens: int | None = None,
    ) -> None:
        self.models, self.most, self.reuses = models, most, reuses
        self.cache_tokens = cache_tokens
        self.kept_tokens = cache_tokens if kept_tokens is None else kept_tokens
        self._share_caches, self._graphs = share_caches, graphs
        self.paces = {name: PromptPace.of(decoder) for name, decoder in models.decoders.items()}
        self.first = Slot(models, share_caches, graphs, self.paces)
        self.made = [self.first]

    def take(self, tokens: list[int]) -> Slot:
        """A free slot, that which knows most of the leading tokens.

        Where caches take memory by need, one that holds another sequence is left as it is as long
        as there are others.

        Raises:
            BusyError: all are used.
            UserError: there is no memory for another one.
        """
        free = [slot for slot in self.made if slot.is_free]
        if len(self.made) - len(free) >= self.most:
            raise BusyError(
                "too many answers at a time",
                f"{self.most} are being generated, for which there are caches",
                "finish or close one, or load the chain for more (sequences)",
            )
        # of equal ones the least recently used, an empty one first
        free.sort(key=lambda slot: (-slot.num_known(tokens), len(slot.tokens) > 0))
        chosen = free[0] if free else None
        if chosen is None or (self.cache_tokens is not None and not _continues(chosen, tokens)):
            chosen = self._another(free)
        chosen.is_free = False
        self.made.remove(chosen)
        self.made.append(chosen)
        return chosen

    def _another(self, free: list[Slot]) -> Slot:
        """An empty slot, or else the one of the free ones that was least recently used.

        Raises:
            UserError: there is neither.
        """
        for slot in free:
            if not slot.tokens:
                return slot
        if not free:
            return self.make()
        if len(self.made) < max(self.most, MIN_KEPT):
            with suppress(UserError):  # no memory: one gives way
                return self.make()
        return next(slot for slot in self.made if slot.is_free)

    def fill(self, slot: Slot, tokens: list[int], may_reuse: bool = True) -> None:
        """Keep in a slot what is known of the leading tokens, all but the last at most.

        Where another sequence, busy or not, shares a longer beginning, its rows are copied.
        """
        num_held = 0
        if self.reuses and may_reuse:
            known = tokens[:-1]
            num_held = slot.num_known(known)
            nums = [other.num_known(known) for other in self.made]
            if max(nums) >= num_held + MIN_COPIED_TOKENS:
                num_held = max(nums)
                slot.copy_from(self.made[nums.index(num_held)], num_held)
        slot.hold(list(tokens), num_held)
        slot.num_reserved = len(tokens)

    def has_room(
        self, slot: Slot, num_rows: int, shared: list[int], members: Sequence[str]
    ) -> bool:
        """Whether a slot may come to hold so many rows beside those of sequences that run.

        Args:
            shared: leading tokens of its sequence, whose rows it takes over where all `members`,
                those that run it, have read them for another one.
        """
        if self.cache_tokens is None:
            return True
        others = [other for other in self.made if other.num_reserved and other is not slot]
        num_needed = sum(other.num_needed for other in others) + _num_shared(others)
        num_lacking = num_needed + num_rows - self.cache_tokens
        if num_lacking <= 0 or not self.reuses:
            return num_lacking <= 0
        return any(other.num_shareable(shared, members) >= num_lacking for other in others)

    def make_room(self) -> bool:
        """Drop what no sequence that runs needs, the least recently used first, until the caches
        hold what they may keep; whether they then hold no more than they may at all."""
        if self.cache_tokens is None or self.kept_tokens is None:
            return True
        num_rows = self.num_rows
        if num_rows > self.kept_tokens:
            for slot in self.made:
                slot.give_back()
            for slot in self.made:
                if not slot.num_reserved and self.num_rows > self.kept_tokens:
                    slot.drop()
            num_rows = self.num_rows
        return num_rows <= self.cache_tokens

    @property
    def num_rows(self) -> int:
        """Of the caches of all sequences that take memory, or are about to."""
        return sum(slot.num_rows for slot in self.made) + _num_shared(self.made)

    def num_fitting(self, share: float = 1.0) -> int:
        """Sequences at a time for which there are caches: all where these take memory by need, else
        those made, and as many more as this share of the free memory holds."""
        available, size = available_bytes(self.models.device), self.first.num_bytes
        if self.cache_tokens is not None or available is None or not size:
            return self.most
        return min(self.most, len(self.made) + int(available * share) // size)

    def make(self) -> Slot:
        """Allocate another slot.

        Raises:
            UserError: there is no memory for it.
        """
        device, size = self.models.device, self.made[0].num_bytes
        available = available_bytes(device)
        if self.cache_tokens is None and available is not None and size > available:
            raise _no_memory(size, f"{readable_bytes(available)} available")
        try:
            slot = Slot(self.models, self._share_caches, self._graphs, self.paces)
        except OSError as error:
            raise _no_memory(size, f"the system says {error.strerror}") from error
        self.made.append(slot)
        return slot


def _num_shared(slots: Sequence[Slot]) -> int:
    """Rows of each cache that may be held by several sequences, those of each file once."""
    by_name: dict[str, set[SharedRows]] = {}
    for slot in slots:
        for name, cache in slot.caches.items():
            by_name.setdefault(name, set()).update(cache.shared)
    return max(
        (sum(rows.end - rows.first for rows in each) for each in by_name.values()), default=0
    )


def _continues(slot: Slot, tokens: list[int]) -> bool:
    """Whether little of what a slot holds is lost to a sequence: half of it at most, or few
    tokens."""
    num_known, num_held = slot.num_known(tokens), slot.num_known(slot.tokens)
    return num_held - num_known <= max(num_known, SOON_READ)


def _no_memory(size: int, why: str) -> UserError:
    return UserError(
        "not enough memory for another answer",
        f"{readable_bytes(size)} for its caches, {why}",
        "finish or close one, or load the chain for fewer tokens (context_tokens)",
    )


class BusyError(UserError):
    """All of an engine's sequences are in use."""


class Drafters:
    """Drafters of one sequence over a chain's draft models, whose caches are allocated once.

    Args:
        capacity: rows of their caches.
        caches: of the verifying members by name, which some drafters share.
    """

    def __init__(self, models: Models, capacity: int, caches: Mapping[str, KeyValueCache]) -> None:
        self.models, self.capacity, self.caches = models, capacity, caches
        self._made: dict[str, ExpandingDrafter] = {}

    @property
    def made(self) -> list[ExpandingDrafter]:
        """Those whose caches are allocated."""
        return list(self._made.values())

    def of(
        self,
        plan: Plan,
        noise: Noise | None = None,
        kept: str | None = None,
        history: History | None = None,
    ) -> Drafter:
        """The drafter of a request that runs by this plan, and draws with this noise.

        Args:
            kept: a drafter that observes where the plan has none.
            history: that is copied from, too, where the plan copies.
        """
        drafter: Drafter | None = None
        if plan.members[-1] in self.models.drafters:
            name = plan.members[-1]
            drafter = self.named(name, plan.tree, plan.windows.get(name), noise)
        elif kept is not None:
            drafter = IdleDrafter(self._make(kept, Tree(depth=1, top_k=1, rows=2)))
        if plan.ngram is not None:
            return NgramDrafter(plan.ngram, plan.tree, drafter, history)
        return drafter or NoDrafter()

    def named(
        self, name: str, tree: Tree, window: Window | None = None, noise: Noise | None = None
    ) -> ExpandingDrafter:
        """A drafter over the draft model of this name, with such trees and such a window."""
        return self._make(name, tree).drafting(tree, window, noise)

    def exchange(self, name: str) -> None:
        """Draft with the model that now has this name, which reads all tokens anew."""
        if name in self._made:
            drafter = self._made[name]
            drafter.model = self.models.drafters[name]
            drafter.cache.truncate(0)

    def copy_from(self, other: "Drafters", num_tokens: int) -> None:
        """Take over what another sequence's drafters know of its first tokens."""
        for name, theirs in other._made.items():
            ours = self._make(name, theirs.tree)
            ours.copy_from(theirs, num_tokens)

    def _make(self, name: str, tree: Tree) -> ExpandingDrafter:
        if name not in self._made:
            model = self.models.drafters[name]
            make = EagleDrafter if model.weights.is_head else ModelDrafter
            made: ExpandingDrafter
            if name in self.models.sharing_makers:
                (verifying,) = self.models.drafts_for[name]
                made = self.models.sharing_makers[name](model, tree, self.caches[verifying])
            else:
                made = self.models.makers.get(name, make)(model, tree, self.capacity)
            made.name = name
            self._made[name] = made
        return self._made[name]


def num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])


def _feature_layers(models: Models, caches: dict[str, KeyValueCache]) -> dict[str, tuple[int, ...]]:
    """By verifying member: the layers that EAGLE-3 heads read.

    Of members that share a cache, one hands its states to the heads of another.
    """
    found: dict[str, tuple[int, ...]] = {}
    for drafter, head in models.drafters.items():
        layers = head.weights.feature_layers
        verified = [caches[name] for name in models.drafts_for[drafter] if name in caches]
        for name, cache in caches.items():
            if not layers or not any(cache is other for other in verified):
                continue
            if found.setdefault(name, layers) != layers:
                raise UserError(
                    "heads of one model read different layers",
                    f"{layers} by {drafter}, {found[name]} by another head of {name} or of a "
                    "model with the same cache",
                    "package a chain with one of these heads",
                )
    return found
