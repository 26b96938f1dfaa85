"""Log-probabilities of tokens, by the target's own logits.

#   R = rows, V = vocabulary
"""

from dataclasses import dataclass

from torch import Tensor

MAX_LOGPROBS = 20
"""Most probable tokens that are named beside each one; as OpenAI's API."""


@dataclass(frozen=True)
class TokenLogprobs:
    """How probable a token was, before bias, penalties, temperature and truncation.

    Attributes:
        token: id.
        logprob: natural logarithm of its probability.
        top: ids and log-probabilities of the most probable tokens, best first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs_of(logits: Tensor, tokens: list[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of the token that follows each row.

    Args:
        logits: [R, V].
        tokens: R.
        num_top: most probable ones that are named beside it, at most V.
    """
    values = logits.float().log_softmax(-1)
    own = values[list(range(len(tokens))), tokens].tolist()
    best = values.topk(num_top, dim=-1)
    rows = zip(tokens, own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprobs(token, logprob, list(zip(ids, logprobs, strict=True)))
        for token, logprob, ids, logprobs in rows
    ]
