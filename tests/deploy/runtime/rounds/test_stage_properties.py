"""Any chain of tables that hypothesis can think of gives the target's law, exactly.

Vocabulary, tables, trees of one size or not, number of models, rule, block lengths, adaptive or
not, shared caches, warpers, stop tokens, prompt and length of the answer are drawn;
`tests/deploy/tables.py` runs the stages that serve through every outcome. With common noise each
answer is the target's, too.
"""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polybasic.chain.formats.plan import AdaptiveFlush, Flush, Rule, Tree
from polybasic.deploy.runtime.rounds.sampling import Sampling
from tests.deploy.tables import Case, TooManyOutcomes, departure, output_law, target_law

MAX_NUM_OUTCOMES = 800
"""Of an example; about a quarter of a second."""

SHARES = st.floats(0, 1)
ADAPTIVE = st.builds(
    AdaptiveFlush,
    break_even=st.floats(0.05, 0.95),
    acceptance=st.tuples(*[SHARES] * 8),
)
FLUSHES = st.builds(
    Flush,
    length=st.integers(1, 4),
    adaptive=st.none() | ADAPTIVE,
)
TREES = st.builds(
    Tree,
    depth=st.integers(1, 3),
    top_k=st.integers(1, 3),
    rows=st.integers(2, 7),
    least_probability=st.sampled_from([0.0, 0.2, 0.5]),
)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.floats(0.3, 2),
    top_k=st.none() | st.integers(1, 3),
    top_p=st.none() | st.floats(0.2, 1),
    min_p=st.none() | st.floats(0, 0.6),
    repetition_penalty=st.floats(0.5, 2),
    presence_penalty=st.floats(-1, 1),
    frequency_penalty=st.floats(-1, 1),
    logit_bias=st.dictionaries(st.integers(0, 1), st.floats(-2, 2)),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Chains of one to four verifying models."""
    flushes = [draw(FLUSHES) for _ in range(draw(st.integers(0, 3)))]
    caches = [0]
    for has_its_own in draw(st.tuples(*[st.booleans()] * len(flushes))):
        caches.append(caches[-1] + has_its_own)
    vocab_size = draw(st.integers(2, 3))
    rule: Rule = draw(st.sampled_from(["coupled", "block", "token"]))
    longest = {2: (6, 5, 5, 4), 3: (4, 4, 3, 3)}[vocab_size][len(flushes)]
    if rule == "coupled":
        longest = 4  # 81 outcomes
    tokens = st.integers(0, vocab_size - 1)
    return Case(
        flushes=tuple(flushes),
        num_tokens=draw(st.integers(longest - 1, longest)),
        rule=rule,
        vocab_size=vocab_size,
        caches=tuple(caches),
        stop_tokens=draw(st.frozensets(tokens, max_size=1)),
        sampling=draw(st.none() | SAMPLINGS),
        seed=draw(st.integers(0, 10**6)),
        likeness=draw(st.sampled_from([0, 1, 3])),
        tree=draw(TREES),
        prompt=tuple(draw(st.lists(tokens, min_size=1, max_size=3))),
    )


def test_output_law_is_the_targets() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=100,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(cases())
    def check(case: Case) -> None:
        try:
            if case.rule == "coupled":
                assert departure(case, max_num_outcomes=MAX_NUM_OUTCOMES) is None
            else:
                law = output_law(case, max_num_outcomes=MAX_NUM_OUTCOMES)
                assert law == target_law(case)
                seen["large"] += len(law) > 10
        except TooManyOutcomes:
            seen["too many outcomes"] += 1
            return
        seen[f"{len(case.flushes) + 1} levels"] += 1
        seen[case.rule] += 1
        seen["warped"] += case.sampling is not None
        seen["adaptive"] += any(flush.adaptive is not None for flush in case.flushes)
        seen["mixed caches"] += 1 < len(set(case.caches or ())) <= len(case.flushes)
        seen["stop token"] += bool(case.stop_tokens)
        seen["least probability"] += case.tree.least_probability > 0

    check()
    too_many = seen.pop("too many outcomes", 0)
    assert too_many <= 10, "examples that say nothing"
    # which examples are drawn depends on the constants of all modules that are loaded
    assert min(seen.values()) >= 3, seen
    assert len(seen) == 13
