"""The loss of a head, against the verifier's states and the distribution that they give.

Shapes: S = unrolled steps, N = assistant tokens of a batch, C = tokens of a chunk of them,
H = hidden size, V = vocabulary, D = draft vocabulary (all of V, or a part), K = positions that a
head gives at once.

In a token loss p is the verifier's distribution over all V tokens and q the head's over its D. Of
p only the D entries are read, and not renormalised: what a head cannot draft cannot be accepted.
With m, the sum of these entries:

    cross_entropy    -sum p log q          least at q = p / m; a token counts by its m
    forward_kl       cross_entropy minus its least value; the same gradient
    reverse_kl       sum q log (q / p)     over V as over D, for q is 0 elsewhere; at least -log m
    total_variation  1 - sum min(p, q)     over V as over D; at least 1 - m
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.settings import HeadSettings

_CHUNK_BYTES = 16 << 20  # of logits at a time: what a CPU's cache holds
_CHUNK_BYTES_ELSEWHERE = 512 << 20  # a GPU would wait for its host
_CHUNK_TOKENS = 128  # but not less


@dataclass(frozen=True)
class UnrolledLoss:
    """The loss and its parts; `total` is the only one with a gradient."""

    total: Tensor
    feature: Tensor
    """0 where it is weighted 0."""
    token: Tensor
    agreement: Tensor
    """[S], the share of tokens for which head and verifier have the same argmax, by step."""
    acceptance: Tensor
    """[S], the mean of sum min(p, q), the chance that a token sampled from the head is kept."""


def step_weights(is_label: Tensor, num_steps: int) -> Tensor:
    """Which rows count in which step.

    Row t of step 1 counts if the token that it predicts (t+2) is the assistant's. Later steps
    count where the whole draft, from its first token on, is the assistant's.

    Args:
        is_label: bool [B, R], whether the token predicted by a row is the assistant's.
        num_steps: S.

    Returns:
        bool [S, B, R].
    """
    weights = [is_label]
    for _ in range(1, num_steps):
        earlier = F.pad(weights[-1][:, :-1], (1, 0))
        weights.append(is_label & earlier)
    return torch.stack(weights)


def unrolled_loss(
    outputs: list[Tensor],
    taught: Features,
    teacher: LmHead,
    student: LmHead,
    is_label: Tensor,
    settings: HeadSettings,
    draft_token_ids: Tensor | None = None,
    token_counts: Tensor | None = None,
    scales: Tensor | None = None,
    eager: bool = False,
) -> UnrolledLoss:
    """Smooth-L1 between states plus a token loss between the distributions that they give.

    Each part is a mean over the tokens that count in a step, then a mean over the steps, in which
    step s weighs `step_decay ** (s - 1)`. No more than a chunk of logits is held at a time.

    Args:
        outputs: S tensors [B, R, H] that `student` can read, in one dtype.
        taught: the verifier's of the same rows, [B, R, ...].
        teacher: the verifier's lm_head [V, H], frozen, in the dtype of its states.
        student: the head's [D, H], in the dtype of `outputs`; its weight gets a gradient if it
            requires one. The teacher itself for an EAGLE-2 head that drafts all tokens.
        is_label: bool [B, R], whether the token predicted by a row is the assistant's.
        settings: of the run, whose losses and weights are read; a loss that is weighted 0 gets no
            gradient.
        draft_token_ids: int64 [D], the student's tokens, ascending; None: all V.
        token_counts: [S], what each step's sum is divided by; default: as many tokens as count
            in it. A process that has a share of a batch passes its part of the batch's count.
        scales: float32 [H], units of the states' channels, in which their distance is taken;
            default: 1.
        eager: hold all logits and leave the gradient to autograd: the reference.
    """
    num_steps = len(outputs)
    counted = step_weights(is_label, num_steps)[:, is_label].float()  # [S, N]
    counts = counted.sum(dim=1) if token_counts is None else token_counts.float()
    means = counted / torch.where(counts > 0, counts, 1.0)[:, None]
    decays = settings.step_decay ** torch.arange(num_steps, device=means.device)
    shares = means * (decays / decays.sum())[:, None]
    hiddens = torch.stack([output[is_label] for output in outputs])
    loss = TOKEN_LOSSES[settings.token_loss]
    lesson = Lesson(teacher, draft_token_ids, taught[is_label], means, shares, loss, scales)
    return _compare(hiddens, hiddens, student, lesson, settings, eager)


class PredictedStates(NamedTuple):
    """What a head predicts at one position of its drafts.

    Attributes:
        hiddens: [N, H], compared with the verifier's states.
        read: what `student` reads of them, [N, H] or wider.
        taught: the verifier's, [N, ...].
        student: of this position.
    """

    hiddens: Tensor
    read: Tensor
    taught: Features
    student: LmHead


def positions_sum(
    predicted: Iterable[PredictedStates],
    weights: Tensor,
    token_counts: Tensor,
    teacher: LmHead,
    draft_token_ids: Tensor | None,
    settings: HeadSettings,
    scales: Tensor | None = None,
) -> UnrolledLoss:
    """The sum over positions of weighted losses, each a mean over the tokens that count there.

    Agreement and acceptance are by position.

    Args:
        predicted: by position, of the tokens that count there.
        weights: float [K], of the positions.
        token_counts: [K], what the sum of each position is divided by: below 1 where processes
            share a token.
        teacher, draft_token_ids, settings, scales: as `unrolled_loss`.
    """
    losses = []
    for position, weight, count in zip(predicted, weights, token_counts.float(), strict=True):
        means = (1 / torch.where(count > 0, count, 1.0)).expand(1, len(position.hiddens))
        loss = TOKEN_LOSSES[settings.token_loss]
        shares = means * weight
        lesson = Lesson(teacher, draft_token_ids, position.taught, means, shares, loss, scales)
        losses.append(
            _compare(
                position.hiddens[None], position.read[None], position.student, lesson, settings
            )
        )
    return UnrolledLoss(
        total=torch.stack([term.total for term in losses]).sum(),
        feature=torch.stack([term.feature for term in losses]).sum(),
        token=torch.stack([term.token for term in losses]).sum(),
        agreement=torch.cat([term.agreement for term in losses]),
        acceptance=torch.cat([term.acceptance for term in losses]),
    )


def _compare(
    hiddens: Tensor,
    read: Tensor,
    student: LmHead,
    lesson: "Lesson",
    settings: HeadSettings,
    eager: bool = False,
) -> UnrolledLoss:
    """The loss of predicted states, and of what `student` makes of them.

    Args:
        hiddens: [S, N, H], compared with the verifier's states.
        read: what `student` reads of them, [S, N, H] or wider.
        student, settings, eager: as `unrolled_loss`.
        lesson: what they are held against.
    """
    states, shares = lesson.taught.states, lesson.shares
    feature = torch.zeros((), device=shares.device)
    if settings.feature_loss_weight:
        away = hiddens.float() - states.float()
        away = away if lesson.scales is None else away / lesson.scales
        distance = F.smooth_l1_loss(away, torch.zeros_like(away), reduction="none")
        feature = (distance.mean(dim=-1) * shares).sum()
    if not settings.token_loss_weight:
        read, student = read.detach(), student.detach()
    form = _eager_token_loss if eager else _chunked_token_loss
    token, agreement, acceptance = form(read, student, lesson)
    return UnrolledLoss(
        total=settings.feature_loss_weight * feature + settings.token_loss_weight * token,
        feature=feature.detach(),
        token=token.detach(),
        agreement=agreement.detach(),
        acceptance=acceptance.detach(),
    )


@dataclass(frozen=True)
class Distributions:
    """Of head and verifier for the same tokens.

    Attributes:
        log_student: float32 [S, C, D], log q.
        student: [S, C, D], q.
        log_teacher: float32 [C, D], log p; None where only the most probable tokens are known.
        teacher: [C, D], p; 0 of tokens that are not known.
        teacher_mass: [C, 1], the sum of p over the D tokens.
        overlap: [S, C], the sum of min(p, q).
    """

    log_student: Tensor
    student: Tensor
    log_teacher: Tensor | None
    teacher: Tensor
    teacher_mass: Tensor
    overlap: Tensor


@dataclass(frozen=True)
class TokenLoss:
    """A loss between two distributions, twice.

    Attributes:
        eager: its value [S, C], in operations that autograd follows.
        chunked: its value [S, C] and its gradient in the head's logits [S, C, D]. May overwrite
            `log_student` and `student`.
    """

    eager: Callable[[Distributions], Tensor]
    chunked: Callable[[Distributions], tuple[Tensor, Tensor]]


def _cross_entropy(of: Distributions) -> Tensor:
    return -(of.log_student * of.teacher).sum(dim=-1)


def _cross_entropy_chunked(of: Distributions) -> tuple[Tensor, Tensor]:
    value = -of.log_student.mul_(of.teacher).sum(dim=-1)
    return value, of.student.mul_(of.teacher_mass).sub_(of.teacher)


def _least_cross_entropy(of: Distributions) -> Tensor:
    """At q = p / m, [C]."""
    entropy = torch.special.entr(of.teacher).sum(dim=-1)
    return entropy - torch.special.entr(of.teacher_mass[:, 0])


def _forward_kl(of: Distributions) -> Tensor:
    return _cross_entropy(of) - _least_cross_entropy(of)


def _forward_kl_chunked(of: Distributions) -> tuple[Tensor, Tensor]:
    value, gradient = _cross_entropy_chunked(of)
    return value - _least_cross_entropy(of), gradient


def _reverse_kl(of: Distributions) -> Tensor:
    assert of.log_teacher is not None, "infinite where the verifier is taken to give 0"
    return (of.student * (of.log_student - of.log_teacher)).sum(dim=-1)


def _reverse_kl_chunked(of: Distributions) -> tuple[Tensor, Tensor]:
    assert of.log_teacher is not None, "infinite where the verifier is taken to give 0"
    terms = of.log_student.sub_(of.log_teacher).mul_(of.student)
    value = terms.sum(dim=-1)
    return value, terms.sub_(of.student.mul_(value[:, :, None]))


def _total_variation(of: Distributions) -> Tensor:
    return 1 - of.overlap


def _total_variation_chunked(of: Distributions) -> tuple[Tensor, Tensor]:
    # q where more of it is more overlap; lt_ writes ones and zeros without a bool tensor, and
    # where q = p the slope is that of p: none
    rising = of.log_student.copy_(of.student).lt_(of.teacher).mul_(of.student)
    gradient = of.student.mul_(rising.sum(dim=-1, keepdim=True)).sub_(rising)
    return 1 - of.overlap, gradient


TOKEN_LOSSES = {
    "cross_entropy": TokenLoss(_cross_entropy, _cross_entropy_chunked),
    "forward_kl": TokenLoss(_forward_kl, _forward_kl_chunked),
    "reverse_kl": TokenLoss(_reverse_kl, _reverse_kl_chunked),
    "total_variation": TokenLoss(_total_variation, _total_variation_chunked),
}
"""By their names in `train.token_loss`."""


@dataclass(frozen=True)
class Lesson:
    """What a head's logits are held against, and how much each token counts.

    Attributes:
        teacher: the verifier's lm_head.
        draft_token_ids: int64 [D], or None for all V tokens.
        taught: the verifier's, [N, ...].
        means: float32 [S, N], by which a sum over tokens becomes each step's mean.
        shares: float32 [S, N], by which a sum over steps and tokens becomes a part of the loss.
        loss: between the distributions.
        scales: float32 [H], units of the states' channels; None: 1.
    """

    teacher: LmHead
    draft_token_ids: Tensor | None
    taught: Features
    means: Tensor
    shares: Tensor
    loss: TokenLoss
    scales: Tensor | None = None

    def compare(
        self, logits: Tensor, rows: slice, buffers: Tensor | None = None
    ) -> tuple[Distributions, Tensor, Tensor]:
        """Of logits [S, C, D] of some rows: distributions, agreement and acceptance [S].

        Args:
            logits: the head's.
            rows: of the N.
            buffers: float32 [3, S, C, D] to write to, where autograd does not look on: fresh
                memory costs a CPU more than what is done with it.
        """
        best, log_teacher, teacher, mass = self._taught(self.taught[rows])
        first, second, third = (None, None, None) if buffers is None else buffers
        log_student = torch.log_softmax(logits, dim=-1, dtype=torch.float32, out=first)
        student = torch.exp(log_student, out=second)
        overlap = torch.minimum(student, teacher, out=third).sum(dim=-1)
        of = Distributions(log_student, student, log_teacher, teacher, mass, overlap)
        means = self.means[:, rows]
        agrees = self._agrees(log_student, best)
        return of, (agrees * means).sum(dim=1), (overlap * means).sum(dim=1)

    def _taught(self, taught: Features) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """The verifier's best token [C], and log p [C, D], p [C, D], its sum [C, 1] of the D.

        Where the most probable tokens are known, p is 0 for the others: an unlikely token is one
        that no draft gains by, and the whole vocabulary need not be gone through.
        """
        if taught.top_token_ids is None or taught.top_log_probs is None:
            log_teacher = self.teacher(taught.states).log_softmax(dim=-1, dtype=torch.float32)
            best = log_teacher.argmax(dim=-1)
            if self.draft_token_ids is None:
                return best, log_teacher, log_teacher.exp(), torch.ones_like(log_teacher[:, :1])
            log_teacher = log_teacher[:, self.draft_token_ids]
            teacher = log_teacher.exp()
            return best, log_teacher, teacher, teacher.sum(dim=-1, keepdim=True)
        token_ids, probs = taught.top_token_ids.long(), taught.top_log_probs.float().exp()
        columns, is_drafted = self._columns(token_ids)
        num = len(self.teacher.weight if self.draft_token_ids is None else self.draft_token_ids)
        # those that are not drafted share a column with one that is
        teacher = probs.new_zeros(len(probs), num).scatter_add_(1, columns, probs * is_drafted)
        return token_ids[:, 0], None, teacher, teacher.sum(dim=-1, keepdim=True)

    def _columns(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Of tokens, the columns of the D logits, and whether they are drafted at all."""
        if self.draft_token_ids is None:
            return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
        columns = torch.searchsorted(self.draft_token_ids, token_ids.contiguous())
        columns = columns.clamp(max=len(self.draft_token_ids) - 1)
        return columns, self.draft_token_ids[columns] == token_ids

    def _agrees(self, log_student: Tensor, best: Tensor) -> Tensor:
        """Whether [S, C, D] is largest at the verifier's best tokens [C]."""
        columns, is_drafted = self._columns(best)
        at_best = log_student.gather(2, columns.expand(log_student.shape[:2])[:, :, None])[:, :, 0]
        return (at_best == log_student.amax(dim=-1)) & is_drafted


def _eager_token_loss(
    hiddens: Tensor, student: LmHead, lesson: Lesson
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_ChunkedTokenLoss`."""
    logits = student(hiddens)
    of, agreement, acceptance = lesson.compare(logits, slice(None))
    return (lesson.loss.eager(of) * lesson.shares).sum(), agreement, acceptance


def _chunked_token_loss(
    hiddens: Tensor, student: LmHead, lesson: Lesson
) -> tuple[Tensor, Tensor, Tensor]:
    """See `_ChunkedTokenLoss`."""
    found: tuple[Tensor, Tensor, Tensor] = _ChunkedTokenLoss.apply(
        hiddens, student.weight, student.bigrams, student.softcap, lesson
    )
    return found


class _ChunkedTokenLoss(torch.autograd.Function):
    """A token loss of what a student reads, [S, N, ...], and agreement and acceptance by step, [S].

    The gradient in what is read and in the student's weights is known as soon as the loss is: chunk
    by chunk, and no [N, V] tensor outlives its chunk. Those of weights are summed over chunks in
    float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hiddens: Tensor,
        weight: Tensor,
        bigrams: Tensor | None,
        softcap: float | None,
        lesson: Lesson,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_steps, num_tokens, _ = hiddens.shape
        token = lesson.shares.new_zeros(())
        agreement, acceptance = lesson.shares.new_zeros(2, num_steps)
        of_hiddens, of_weight, of_bigrams = None, None, None
        student, H = LmHead(weight, softcap, bigrams), weight.shape[1]
        if ctx.needs_input_grad[0]:
            of_hiddens = torch.empty_like(hiddens)
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight, dtype=torch.float32)
        if ctx.needs_input_grad[2] and bigrams is not None:
            of_bigrams = torch.zeros_like(bigrams, dtype=torch.float32)
        num_logits = len(lesson.teacher.weight) + num_steps * len(weight)  # of one token
        most = _CHUNK_BYTES if hiddens.device.type == "cpu" else _CHUNK_BYTES_ELSEWHERE
        chunk = max(_CHUNK_TOKENS, most // (4 * num_logits))
        num_rows = num_steps * min(chunk, num_tokens)
        buffers = token.new_empty(3, num_rows, len(weight))
        for start in range(0, num_tokens, chunk):
            rows = slice(start, start + chunk)
            # two dimensions: for a slice of three, matmul repeats the weight S times
            read, shares = hiddens[:, rows].flatten(0, 1), lesson.shares[:, rows]
            logits = student(read).unflatten(0, (num_steps, -1))
            into = buffers[:, : len(read)].unflatten(1, (num_steps, -1))
            of, chunk_agreement, chunk_acceptance = lesson.compare(logits, rows, into)
            agreement += chunk_agreement
            acceptance += chunk_acceptance
            values, of_logits = lesson.loss.chunked(of)
            token += (values * shares).sum()
            of_capped = of_logits
            if softcap is not None:  # the slope of c * tanh(x / c)
                slope = 1 - (student.capped(read).float() / softcap).square()
                of_capped = of_logits * slope.unflatten(0, (num_steps, -1))
            of_logits, of_capped = (
                gradient.to(hiddens.dtype).flatten(0, 1) for gradient in (of_logits, of_capped)
            )
            scale = shares.flatten()[:, None]  # of rows of H columns, which cost less than of D
            scaled = (read * scale).to(read.dtype)
            if of_hiddens is not None:
                of_read = [of_capped @ weight]
                if bigrams is not None:
                    of_read.append(of_logits @ bigrams)
                of_hiddens[:, rows] = (torch.cat(of_read, 1) * scale).unflatten(0, (num_steps, -1))
            if of_weight is not None:
                of_weight += of_capped.T @ scaled[:, :H]
            if of_bigrams is not None:
                of_bigrams += of_logits.T @ scaled[:, H:]
        of_weights = [
            None if gradient is None else gradient.to(weight.dtype)
            for gradient in (of_weight, of_bigrams)
        ]
        ctx.save_for_backward(of_hiddens, *of_weights)
        ctx.mark_non_differentiable(agreement, acceptance)
        return token, agreement, acceptance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            None if each is None else each * grads[0].to(each.dtype) for each in ctx.saved_tensors
        )
        return *gradients, None, None
