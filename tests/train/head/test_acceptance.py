"""Simulated rounds against the runtime's; answers in batches against one token at a time."""

import json
from dataclasses import replace
from itertools import accumulate, chain

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.lineage import weights_digest
from polybasic.chain.formats.plan import Plan, Tree
from polybasic.deploy import load_chain
from polybasic.deploy.runtime.rounds.sampling import Sampling
from polybasic.deploy.runtime.rounds.stages import HostStage, Stage
from polybasic.train.data.chat import encode_prompt
from polybasic.train.features.states import Features
from polybasic.train.features.target import load_target
from polybasic.train.head.acceptance import HeldoutBatch, TreeShape, heldout_batches, simulate
from polybasic.train.head.files import write_head
from polybasic.train.head.start import new_head, trained_weights
from polybasic.train.settings import HeadSettings
from tests.checkpoints import write_family
from tests.conftest import VOCAB_SIZE

CPU = torch.device("cpu")
TREE = TreeShape(depth=5, top_k=3, rows=7)
DRAFTED = torch.tensor([token for token in range(VOCAB_SIZE) if token % 4])
PROMPTS = [[7, 7], [5, 9, 2, 40], list(range(3, 40))]
TASKS = ["b", "a", "b"]
ANSWER_TOKENS = 30
"""With the longest prompt of `CONVERSATIONS` more than the families' sliding window of 24."""


def heldout(target, head, sequences):
    """Prompts with their answers, where rounds begin with the last token of a prompt."""
    token_ids = pad_sequence([torch.tensor(each) for each in sequences], batch_first=True)
    return HeldoutBatch(
        token_ids,
        target.features(token_ids, feature_layers=head.shape.feature_layers),
        torch.tensor([len(prompt) - 1 for prompt in PROMPTS]),
        torch.tensor([len(each) for each in sequences]),
        TASKS,
    )


def learn_answers(head, target):
    """As few steps as leave some drafts wrong."""
    ends = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "eos_token_id": None}
    answers = [target.model.generate(torch.tensor([prompt]), **ends)[0] for prompt in PROMPTS]
    batch = heldout(target, head, [answer.tolist() for answer in answers])
    source, wanted = head.source(batch.features)[:, :-2], batch.token_ids[:, 2:].repeat(3, 1, 1)
    drafted = slice(None) if head.draft_token_ids is None else head.draft_token_ids
    optimizer = torch.optim.Adam([each for each in head.parameters() if each.requires_grad], 3e-3)
    for _ in range(25):
        outputs = torch.stack(head.unroll(batch.token_ids[:, 1:-1], head.fuse(source), 3))
        logits = torch.full((*wanted.shape, VOCAB_SIZE), -30.0)
        logits[..., drafted] = head.projection(target.lm_head)(head.projected(outputs))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 2), wanted.flatten()).backward()
        optimizer.step()


def served(folder, plan):
    """Of each prompt with its answer: the tokens, and those that each round of it gained."""
    loaded = load_chain(folder, dtype="float32")
    loaded.stop_tokens = frozenset()
    sequences, rounds = [], []
    for prompt in PROMPTS:
        pieces = loaded.stream_ids(prompt, ANSWER_TOKENS, Sampling(), plan)
        answer = [token for piece in pieces for token in piece]
        gains = pieces.statistics.accepted_lengths["target"]
        # a round that the limit of tokens might cut drafts less
        ends = [end for end in accumulate(gains) if end <= ANSWER_TOKENS - TREE.depth]
        sequences.append(prompt + answer[: ends[-1]])
        rounds.append(gains[: len(ends)])
    return sequences, rounds


@pytest.mark.parametrize("size", [None, len(DRAFTED)])
@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_rounds_are_those_of_the_runtime(kind, size, tiny_chain_parts, tmp_path, monkeypatch):
    monkeypatch.setattr(HostStage, "start", Stage.start)  # the first token is of a round, too
    parts, plan = tiny_chain_parts, Plan(members=("target", "draft"), tree=Tree(**vars(TREE)))
    target = load_target(parts.target, CPU, dtype=torch.float32)
    layers = (0, 1, 1) if kind == "eagle3" else None
    settings = HeadSettings(
        kind=kind, feature_layers=layers, feature_loss_weight=0, dtype="float32"
    )
    drafted, shape = None if size is None else DRAFTED, target.head_shape(settings)
    head = new_head(shape, target.embedding, settings, 0, None, None, None, drafted)
    learn_answers(head, target)
    write_head(parts.draft, head, trained_weights(head), weights_digest(parts.target), "float32")
    parts.package(tmp_path / "chain", parts=[replace(parts.parts[1], kind=kind)], plan=plan)
    sequences, rounds = served(tmp_path / "chain", plan)
    batch = heldout(target, head, sequences)

    def simulated(batch, **options):
        return simulate(head, target.lm_head, [batch], TREE, **options)

    found, gains = simulated(batch), list(chain.from_iterable(rounds))
    assert found.num_rounds == len(gains)
    assert found.accepted_length == sum(gains) / len(gains) > 2
    assert len(set(gains)) > 2, "of the drafts some are right, not all"
    by_depth = [sum(gain > depth for gain in gains) / len(gains) for depth in range(1, 6)]
    assert found.accepted_by_depth == pytest.approx(by_depth, abs=1e-4)
    of_b = rounds[0] + rounds[2]
    assert found.by_task == {"a": sum(rounds[1]) / len(rounds[1]), "b": sum(of_b) / len(of_b)}
    for missing in range(1, 8):
        cut = simulated(replace(batch, lengths=batch.lengths - missing))
        left = [gain for each in rounds for gain in without_the_last(missing, each)]
        assert cut.num_rounds == len(left)
        assert cut.accepted_length == sum(left) / len(left)
    # the example tells right features and vocabularies from wrong ones
    later = Features(
        *(each if each is None else each.roll(1, 1) for each in vars(batch.features).values())
    )
    assert simulated(replace(batch, features=later)) != found
    if kind == "eagle2":
        assert (simulated(batch, trimmed=False) == found) == (size is None)


def without_the_last(num, rounds):
    """The tokens that rounds gain along an answer that ends so many tokens earlier."""
    starts = accumulate(rounds[:-1], initial=0)
    left = [sum(rounds) - num - start for start in starts]
    return [min(pair) for pair in zip(rounds, left, strict=True) if min(pair) > 0]


QUESTIONS = ["hi", "the rain in the north is old", "a hat, or the hat that is on the train?"]
CONVERSATIONS = [
    {
        "task": task,
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "it is"},
        ],
    }
    for question, task in zip(QUESTIONS, ("greeting", None, "riddle"), strict=True)
]


def target_of(folder, family, generation_config=None, **changes):
    write_family(folder, family, dtype=torch.float32, **changes)
    path = folder / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation_config is not None:
        path.write_text(json.dumps(generation_config))
    return load_target(folder, CPU)


@torch.no_grad()
def answered_alone(target, ends):
    """Prompt and greedy answer of each question, every token from a pass over all before it."""
    sequences = []
    for row in CONVERSATIONS:
        tokens = encode_prompt(target.tokenizer, row["messages"][:1])
        for _ in range(ANSWER_TOKENS):
            logits = target.model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] in ends:
                break
        sequences.append(tokens)
    return sorted(sequences, key=len)


def answered_together(target):
    (batch,) = heldout_batches(target, CONVERSATIONS, 200, ANSWER_TOKENS)
    sequences = [
        row[:length].tolist() for row, length in zip(batch.token_ids, batch.lengths, strict=True)
    ]
    return sorted(sequences, key=len), batch


SAMPLED = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "repetition_penalty": 1.5,
    "max_length": 12,
}


@pytest.mark.parametrize("family", ["llama3", "mistral", "phi3", "gemma2", "gemma3"])
def test_answers_in_a_batch_are_those_of_each_prompt_alone(family, tmp_path):
    target = target_of(tmp_path / family, family, {**SAMPLED, "eos_token_id": [700, 701]})
    ends = {700, 701, target.tokenizer.eos_token_id}
    found, batch = answered_together(target)
    assert found == answered_alone(target, ends)
    assert target.model.generation_config.repetition_penalty == 1.5, "left as it was"
    assert batch.tasks == ["greeting", "other", "riddle"], "as the prompts' lengths order them"
    assert batch.features.layers is None
    for row, length in enumerate(batch.lengths):
        alone = target.features(batch.token_ids[row : row + 1, :length])
        states = batch.features.states[row, :length]
        torch.testing.assert_close(states, alone.states[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["generation config", "config", "tokenizer"])
def test_answers_end_at_each_end_token_wherever_it_is_named(where, tmp_path):
    endless = target_of(tmp_path / "endless", "llama3", {"eos_token_id": None}, eos_token_id=None)
    endless.tokenizer.eos_token = None
    whole, batch = answered_together(endless)
    assert (batch.lengths - batch.prompt_lengths).tolist() == [ANSWER_TOKENS] * 3
    stop = whole[0][-ANSWER_TOKENS + 4]  # among the first tokens of the shortest prompt's answer
    own = {"generation config": {"eos_token_id": [700, stop]}}.get(where, {})
    changes = {"eos_token_id": [stop, 701] if where == "config" else None}
    target = target_of(tmp_path / "ending", "llama3", own, **changes)
    target.tokenizer.eos_token = None
    if where == "tokenizer":
        target.tokenizer.eos_token = target.tokenizer.convert_ids_to_tokens(stop)
    found, batch = answered_together(target)
    assert found == answered_alone(target, {stop})
    shortest = int((batch.lengths - batch.prompt_lengths).min())
    assert shortest <= 5
    assert stop in found[0][-shortest:]


def test_answers_without_two_tokens_are_refused(tmp_path):
    target = target_of(tmp_path / "silent", "llama3")
    with pytest.raises(UserError, match=r"nothing to evaluate on: 3 held-out prompts"):
        heldout_batches(target, CONVERSATIONS, 200, 1)
    with pytest.raises(UserError, match=r"nothing to evaluate on: 0 held-out prompts"):
        heldout_batches(target, CONVERSATIONS, 3, 10)
