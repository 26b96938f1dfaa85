"""The tunable fields of data and of draft heads."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from polybasic.chain.base.settings import (
    Count,
    Factor,
    Settings,
    Share,
    Size,
    Temperature,
    Weight,
    Whole,
)
from polybasic.chain.formats.head_kinds.kind import MAX_POSITIONS
from polybasic.chain.formats.plan import TopK

_WITHOUT_EFFECT = {
    "log",
    "save_every_steps",
    "keep_every_steps",
    "num_processes",
    "features_folder",
}
_SOURCES = {"conversations", "regenerate", "self_prompted"}

TO_BE_GIVEN = "???"
"""Of a model or of conversations that a recipe leaves to the command line."""

SHIPPED = "shipped"
"""Names the conversations that come with polybasic: questions that were written for it, of the
tasks of Spec-Bench, code and chat, answered by SmolLM2-135M-Instruct; a group is of one topic."""

SELF_PROMPTED = "self-prompted"
"""Task of conversations whose questions the target wrote itself; none is held out."""

Beta = Annotated[Share, Field(lt=1)]
"""Share of a running mean that a step keeps."""

_LEAST_DRAFT_TOKENS = 64


def _is_size_or_share(value: float) -> float:
    """A whole number of tokens as an int, or a share below 1."""
    if 0 < value < 1:
        return value
    if value < _LEAST_DRAFT_TOKENS or value != int(value):
        raise ValueError(
            f"{value:g} is no size: give a whole number of tokens, {_LEAST_DRAFT_TOKENS} or more, "
            "or a share of the answers' tokens, between 0 and 1"
        )
    return int(value)


DraftVocabulary = Annotated[float, Field(le=1 << 20), AfterValidator(_is_size_or_share)]
"""How many tokens a head drafts among, or the share of the answers' tokens that they cover."""


def _is_server(url: str) -> str:
    """Refuse what names no server, and passwords: recipes are published with what they make."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError("give the URL of a server, like http://localhost:8000/v1")
    _ = parts.port  # raises ValueError where it is none
    if parts.username is not None:
        raise ValueError("a URL with a user or password; set OPENAI_API_KEY in its place")
    return url


class RegenerateSettings(Settings):
    """Answers of the target in place of the ready-made ones, for heads and 4-bit copies."""

    endpoint: Annotated[str, AfterValidator(_is_server)] | None = Field(
        None,
        min_length=1,
        description="base URL of an OpenAI-compatible server of the target, up to /v1; null: "
        "the target answers through this runtime",
    )
    model: str | None = Field(
        None, min_length=1, description="as the server names it; null: the only one that it lists"
    )
    num_parallel: Count = Field(
        16,
        description="answers under way at a time, at the endpoint or in each process; in processes "
        "no more than memory has caches for",
    )
    num_retries: Whole = Field(4, description="of a request, each after twice the wait")
    timeout_seconds: Factor = Field(600.0, description="of one request")
    max_new_tokens: Count = Field(1024, description="of one answer")
    temperature: Temperature = Field(0.0, le=2, description="0 is greedy")
    graphs: bool = Field(
        True, description="through this runtime on a GPU: capture CUDA graphs; same answers"
    )


class DataSettings(Settings):
    """Where conversations come from and how they are split."""

    conversations: str = Field(
        TO_BE_GIVEN,
        description="a .json or .jsonl file (also .gz, .zst) of rows with conversations, as "
        "ShareGPT has them, or messages, as OpenAI does, a hub id, or 'shipped' (questions that "
        "come with polybasic, which SmolLM2-135M-Instruct has answered; with data.regenerate the "
        "target does)",
    )
    limit: Count | None = Field(None, description="read at most this many conversations")
    num_heldout: Count = Field(
        48, description="conversations never trained on, chosen by hash of their first turn"
    )
    max_tokens: Count = Field(512, ge=16, description="longer conversations are cut here")
    regenerate: RegenerateSettings | None = Field(
        None, description="let the target answer again before heads learn; null: answers as given"
    )
    self_prompted: Count | None = Field(
        None,
        description="so many questions more, which the target writes itself and answers through "
        "this runtime (regenerate); none of them is held out",
    )

    def decisive(self) -> dict[str, Any]:
        """JSON content of all but where conversations and answers come from, which their digest
        stands for."""
        return self.model_dump(mode="json", exclude=_SOURCES)

    @model_validator(mode="after")
    def _what_is_asked_is_answered(self) -> "DataSettings":
        is_here = self.regenerate is not None and self.regenerate.endpoint is None
        if self.self_prompted is not None and not is_here:
            raise ValueError(
                f"self_prompted {self.self_prompted} needs answers through this runtime: set "
                "regenerate, for example regenerate.temperature to 0, and leave its endpoint null"
            )
        return self


class HeadSettings(Settings):
    """A draft head. Objective and defaults are those of EAGLE-2's own training code."""

    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="of passes; master weights stay float32; auto: the faster one here, by "
        "measured products",
    )

    kind: Literal[
        "eagle2", "eagle3", "block", "medusa", "hydra", "early_exit", "steering", "none"
    ] = Field(
        "eagle2",
        description="eagle2 continues the verifier's last states; eagle3 fuses those of three "
        "layers and has an output projection of its own; block gives all positions of a draft in "
        "one pass; medusa has a small head for each position, hydra such heads that read the "
        "tokens before theirs; early_exit drafts with the model's own first layers; steering "
        "biases those of the smaller model that drafts; none: there is no head, n-grams draft",
    )
    features_from: Literal["target", "intermediate"] = Field(
        "target", description="whose states and distribution the head learns; both verify it"
    )
    feature_layers: tuple[Whole, Whole, Whole] | None = Field(
        None,
        description="of an eagle3 head: the layers whose inputs it reads; null: 2, half of them, "
        "and the third from the end",
    )
    normed_features: bool = Field(
        False,
        description="of an eagle3 head: norm what it reads of each layer and what it drafts on "
        "from, as EAGLE-3.1 does",
    )
    start: Literal["random", "auto"] = Field(
        "random",
        description="weights of a new head. auto: those of the verifier's last layer, and the "
        "linear map that comes closest to what enters it, where an eagle2 head has a layer of that "
        "form; else random ones",
    )
    num_layers: Count = Field(2, le=16, description="of a block head")
    num_positions: Count = Field(
        16,
        ge=2,
        le=MAX_POSITIONS,
        description="that a block, medusa or hydra head gives at once: its deepest draft; of a "
        "steering: tokens that a vector is held for in training",
    )
    markov_rank: Whole = Field(
        64,
        multiple_of=16,
        description="of a block head: of the bigrams that correct each position by the token "
        "before it; 0: none",
    )
    anchor_share: Share = Field(
        0.1,
        gt=0,
        description="of a block head: of the answers' positions, those that a step drafts from",
    )
    exit_layer: Size | None = Field(
        None, description="of an early exit: how many layers it runs; null: an eighth of them"
    )
    adapter_rank: Whole = Field(
        64,
        multiple_of=16,
        description="of an early exit: rank of the adapter behind these layers; 0: none; of a "
        "steering: rank of the map from states to vectors",
    )
    draft_vocab_size: DraftVocabulary | None = Field(
        None,
        description="draft among so many of the tokens that the target's answers use most; a share "
        "below 1: as many as cover that share of what the answers hold; null: all",
    )
    num_steps: Count = Field(800_000, description="optimizer steps")
    batch_size: Count = Field(
        4, description="conversations of one step, those of all processes together"
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: for the matrices between states, and AdamW for the rest; it learns the "
        "same in fewer steps",
    )
    learning_rate: Factor = Field(3e-5, description="AdamW's")
    matrix_learning_rate: Factor = Field(0.02, description="Muon's")
    muon_iterations: Count = Field(3, description="Newton-Schulz iterations of a Muon step")
    warmup_steps: Whole = Field(2000, description="linear; then linear decay to num_steps")
    adam_betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Weight = 0.01
    clip_grad_norm: Factor = 0.5
    feature_noise: Weight = Field(
        0.1,
        description="uniform noise on the features, of this half-width in units of each channel's "
        "root mean square",
    )
    unroll_steps: Count = Field(
        3, le=8, description="steps over the head's own features; 1 is EAGLE-2's own training"
    )
    step_decay: Factor = Field(
        1.0,
        le=1,
        description="weight of an unrolled step, or a position, over that of the one before; "
        "Medusa's own training has 0.8",
    )
    feature_loss_weight: Weight = Field(
        1.0,
        description="smooth-L1 between features in units of their channels' root mean squares; 0 "
        "for all kinds but eagle2 and block",
    )
    token_loss: Literal["cross_entropy", "forward_kl", "reverse_kl", "total_variation"] = Field(
        "cross_entropy",
        description="between the head's distribution and the verifier's; total_variation is one "
        "minus the rate of acceptance",
    )
    token_loss_weight: Weight = 0.1
    features: Literal["online", "offline"] = Field(
        "online",
        description="online: taken as the batches come; offline: written to a folder first",
    )
    num_conversations: Count | None = Field(
        None,
        description="of the training's conversations, the first ones; null: all. Offline features "
        "of few are soon made, and serve in every epoch",
    )
    features_folder: str | None = Field(
        None,
        min_length=1,
        description="of offline features, which other runs may share; null: `features` in the "
        "output folder",
    )
    pack: bool = Field(
        False,
        description="rows of data.max_tokens tokens with several conversations in each, which do "
        "not see each other; batch_size then counts rows",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        1,
        description="DeepSpeed ZeRO stage of AdamW's state, which Muon has whole in each process; "
        "3: stage 2 for the head, and the frozen target is partitioned over the processes",
    )
    num_processes: Count = Field(1, description="one a GPU; on a CPU they share the cores")
    eval_every_steps: Count = 1000
    eval_answer_tokens: Count = Field(
        96, ge=2, description="of the target's greedy answers that the evaluation drafts for"
    )
    eval_conversations: Count | None = Field(
        None,
        description="held-out conversations, from all over the file, that it drafts for; null: all",
    )
    eval_tree_depth: Count = Field(7, le=16, description="of the simulated draft tree")
    eval_tree_top_k: TopK = Field(4, description="beams of the simulated tree")
    eval_tree_rows: Count = Field(16, ge=2, le=64, description="rows of it, root included")
    patience: Count | None = Field(
        None,
        description="evaluations in a row without a longer accepted length that end the training; "
        "null: none do",
    )
    save_every_steps: Count = Field(1000, description="an interrupted run loses at most these")
    keep_every_steps: Count | None = Field(
        None, description="checkpoints of these steps stay, beside the last one; null: none"
    )
    log: Literal["none", "wandb", "tensorboard"] = Field(
        "none", description="beside metrics.jsonl, which is always written"
    )
    intermediate_size: Size | None = Field(None, description="of the head's MLP; default: target's")

    @property
    def drafts_by_place(self) -> bool:
        """Whether there is a small head for each place of a path."""
        return self.kind in ("medusa", "hydra")

    @property
    def num_levels(self) -> int:
        """Tokens of a path that the loss counts, of heads without anchors."""
        if self.kind in ("early_exit", "steering"):
            return 1
        return self.num_positions if self.drafts_by_place else self.unroll_steps

    def decisive(self) -> dict[str, Any]:
        """JSON content of what the trained head follows from, but for the rounding of sums.

        The other settings may change without the head being trained again.
        """
        return self.model_dump(mode="json", exclude=_WITHOUT_EFFECT)

    @model_validator(mode="after")
    def _warmup_ends(self) -> "HeadSettings":
        if self.warmup_steps >= self.num_steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} must be below num_steps {self.num_steps}"
            )
        return self

    @model_validator(mode="after")
    def _kind_has_these_settings(self) -> "HeadSettings":
        if self.kind == "none":
            return self
        if self.kind not in ("eagle2", "block") and self.feature_loss_weight:
            raise ValueError(
                f"a head of kind {self.kind} has no feature loss: set feature_loss_weight to 0, "
                f"not {self.feature_loss_weight}"
            )
        if self.kind == "early_exit" and self.zero_stage == 3:
            raise ValueError(
                "an early exit is evaluated with whole layers, and zero_stage 3 partitions them; "
                "use 1 or 2"
            )
        if self.kind != "early_exit" and self.exit_layer is not None:
            raise ValueError("exit_layer is of an early exit; leave it null")
        if self.kind == "steering" and (not self.adapter_rank or self.draft_vocab_size):
            raise ValueError(
                "a steering has a rank and drafts what the smaller model does: set adapter_rank "
                f"above {self.adapter_rank}, and draft_vocab_size to null"
            )
        has_mlp = not self.drafts_by_place and self.kind not in ("early_exit", "steering")
        if not has_mlp and self.intermediate_size is not None:
            raise ValueError(f"a head of kind {self.kind} has no MLP: leave intermediate_size null")
        if not self.feature_loss_weight and not self.token_loss_weight:
            raise ValueError(
                "feature_loss_weight and token_loss_weight are both 0: nothing would be learned"
            )
        if self.kind != "eagle3" and self.feature_layers is not None:
            raise ValueError("feature_layers are read by a head of kind eagle3; leave them null")
        if self.kind != "eagle3" and self.normed_features:
            raise ValueError("normed_features is of a head of kind eagle3; leave it false")
        if self.keep_every_steps is not None and self.keep_every_steps % self.save_every_steps:
            raise ValueError(
                f"keep_every_steps {self.keep_every_steps} must be a multiple of "
                f"save_every_steps {self.save_every_steps}"
            )
        if self.features == "online" and self.features_folder is not None:
            raise ValueError("features_folder is of offline features; leave it null")
        return self

    @model_validator(mode="after")
    def _processes_have_shares(self) -> "HeadSettings":
        if self.zero_stage == 3 and self.num_processes == 1:
            raise ValueError(
                "zero_stage 3 shards the target over several processes; "
                "raise num_processes or use 1 or 2"
            )
        if self.batch_size % self.num_processes:
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of num_processes "
                f"{self.num_processes}"
            )
        return self


class LoraSettings(Settings):
    """A low-rank adapter on every matrix of a draft head (Hu et al., arXiv 2106.09685)."""

    rank: Size = 16
    alpha: Factor = Field(32.0, description="the update is scaled by alpha / rank")


class DraftSettings(Settings):
    """Where the draft head comes from."""

    model: str = Field(
        "train",
        min_length=1,
        description="'train' (from random weights), or a folder or hub id of a head in EAGLE's, "
        "Medusa's or Hydra's layout, which is taken as it is unless `adapt` says otherwise",
    )
    adapt: Literal["none", "lora", "full"] = Field(
        "none",
        description="train that head further for the target at hand: lora: a LoRA on it, full: all "
        "of its weights",
    )
    lora: LoraSettings = LoraSettings()

    @model_validator(mode="after")
    def _there_is_a_head_to_adapt(self) -> "DraftSettings":
        if self.adapt != "none" and self.model == "train":
            raise ValueError(
                f"adapt: {self.adapt} needs a ready head; name one in model, or use none"
            )
        return self
