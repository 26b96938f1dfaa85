"""A model that lacks a token or two of its cache reads them in the pass over its tree."""

from typing import Any

import pytest

from polybasic.chain.formats.plan import Flush, Ngram, Plan, Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.deploy import Chain, load_chain
from polybasic.deploy.runtime.rounds import stages
from polybasic.deploy.runtime.rounds.passes import VerifierPass
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.noisy_chain import write_noisy_chain

PROMPT = [3, 5, 9, 7, 3, 5, 9, 8, 3, 5]
TREE, FLUSH = Tree(depth=2, top_k=2, rows=6), {"target": Flush(length=2)}
NGRAMS = Plan(
    members=("target", "near"), tree=TREE, flush=FLUSH, ngram=Ngram(num_tokens=5, min_match=1)
)
DRAFTS = Plan(members=("target", "near", "copy"), tree=TREE, flush=FLUSH)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    folder = write_noisy_chain(tmp_path_factory.mktemp("models"))
    return load_chain(folder, dtype="float32", context_tokens=100, share_caches=False)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[VerifierPass]:
    """The passes of the little model."""
    read: list[VerifierPass] = []

    def made(verifier: Any, *given: Any, **named: Any) -> VerifierPass:
        reading = VerifierPass(verifier, *given, **named)
        if verifier.name == "near":
            read.append(reading)
        return reading

    monkeypatch.setattr(stages, "VerifierPass", made)
    return read


def answer(chain: Chain, plan: Plan, sampling: Sampling) -> list[int]:
    return [token for piece in chain.stream_ids(PROMPT, 60, sampling, plan) for token in piece]


@pytest.mark.processor
@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, seed=2)])
def test_it_proposes_what_it_does_after_a_pass_of_its_own(
    chain: Chain,
    read: list[VerifierPass],
    sampling: Sampling,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = answer(chain, NGRAMS, sampling)
    passes, _ = [*read], read.clear()
    monkeypatch.setattr(stages, "FEW_UNREAD", 0)
    assert answer(chain, NGRAMS, sampling) == together
    begun, *apart = [reading for reading in read if reading.is_prompt]
    assert begun.rows == PROMPT
    assert [reading.rows for reading in passes if reading.is_prompt] == [PROMPT]
    joined = [reading for reading in passes if reading.logits_from]
    assert len(joined) == len(apart) > 0
    assert len(passes) == len(read) - len(apart)
    assert sum(len(reading.rows) for reading in passes) == sum(
        len(reading.rows) for reading in read
    )
    assert any(isinstance(reading.rows, DraftTree) for reading in joined)


def test_a_model_that_drafts_has_read_all_before(chain: Chain, read: list[VerifierPass]) -> None:
    answer(chain, DRAFTS, Sampling(1.0, seed=2))
    assert not any(reading.logits_from for reading in read)
    assert sum(reading.is_prompt for reading in read) > 1
