"""Answers in batches against one token at a time; rounds in batches against one by one."""

import json
import random
from dataclasses import replace

import pytest
import torch

from polybasic.chain.errors import UserError
from polybasic.chain.formats.config import read_config
from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.torch.attend import attend_causally
from polybasic.chain.model.loading import load_decoder, load_head
from polybasic.deploy.drafters.head import EagleDrafter
from polybasic.train.data.chat import encode_prompt
from polybasic.train.features.head_shape import HeadShape
from polybasic.train.features.lm_head import LmHead
from polybasic.train.features.states import Features
from polybasic.train.features.target import load_target
from polybasic.train.head.acceptance import HeldoutBatch, TreeShape, heldout_batches, simulate
from polybasic.train.head.eagle2 import Eagle2Head
from polybasic.train.head.eagle3 import Eagle3Head
from polybasic.train.head.files import write_head
from polybasic.train.head.start import new_head, trained_weights
from polybasic.train.settings import HeadSettings
from tests.checkpoints import write_family

SHAPE = HeadShape(
    vocab_size=12,
    hidden_size=16,
    intermediate_size=24,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope={"rope_type": "default", "rope_theta": 100.0},
    context_tokens=64,
)


CPU = torch.device("cpu")
TASKS = ["a", "b"]
HEADS = {"eagle2": Eagle2Head, "eagle3": Eagle3Head}


def heldout(lengths, prompt_lengths):
    torch.manual_seed(3)
    width = max(lengths)
    return HeldoutBatch(
        token_ids=torch.randint(12, (len(lengths), width)),
        features=Features(
            states=torch.randn(len(lengths), width, 16, dtype=torch.double),
            layers=torch.randn(len(lengths), width, 48, dtype=torch.double),
        ),
        prompt_lengths=torch.tensor(prompt_lengths),
        lengths=torch.tensor(lengths),
        tasks=[TASKS[row % len(TASKS)] for row in range(len(lengths))],
    )


def children(head, lm_head, tokens, features, drafted, top_k):
    """Best continuations of committed tokens plus a drafted path, recomputed from the start.

    Args:
        lm_head: from the head's output to scores of the target's tokens.
        features: [C, H], as the head's rows have them.
    """
    inputs = list(features[: len(tokens) - 1])
    path = tokens + drafted
    for position in range(len(drafted) + 1):
        rows = torch.stack(inputs)[None]
        # rows are causal, so running all of them again equals drafting
        outputs, _ = head(
            torch.tensor([path[1 : len(inputs) + 1]]), rows, torch.arange(len(inputs))
        )
        output = outputs[0, -1]
        if position < len(drafted):
            inputs.append(output)
    log_probabilities = lm_head(head.projected(output)).log_softmax(-1)
    return list(zip(*(each.tolist() for each in log_probabilities.topk(top_k)), strict=True))


def one_round(head, lm_head, tokens, features, answer, tree):
    """Tokens gained by one round, by EAGLE-2's rules over plain lists."""
    beams, pool = [((), 0.0)], []
    for _ in range(tree.depth):
        grown = [
            ((*path, token), score + gain)
            for path, score in beams
            for gain, token in children(head, lm_head, tokens, features, list(path), tree.top_k)
        ]
        pool += grown
        beams = sorted(grown, key=lambda each: -each[1])[: tree.top_k]
    kept = {path for path, _ in sorted(pool, key=lambda each: -each[1])[: tree.rows - 1]}
    accepted = 0
    while accepted < min(tree.depth, len(answer)) and tuple(answer[: accepted + 1]) in kept:
        accepted += 1
    return min(accepted + 1, len(answer))


def played_one_by_one(head, lm_head, batch, tree):
    """Tokens of every round by task."""
    gained = {task: [] for task in TASKS}
    features = head.read(batch.features)
    for row, task in enumerate(batch.tasks):
        token_ids = batch.token_ids[row, : batch.lengths[row]].tolist()
        last = int(batch.prompt_lengths[row])
        while last < len(token_ids) - 1:
            tokens, answer = token_ids[: last + 1], token_ids[last + 1 :]
            gained[task].append(one_round(head, lm_head, tokens, features[row], answer, tree))
            last += gained[task][-1]
    return gained


def spread(head):
    """Weights so large that distributions are far from even."""
    for parameter in head.parameters():
        parameter.requires_grad_(False).mul_(3.0)
    return head


def check_rounds(head, lm_head, expected_lm_head, tree, **options):
    batch = heldout([14, 17, 9, 6], [5, 4, 3, 5])
    by_task = played_one_by_one(head, expected_lm_head, batch, tree)
    gained = [each for rounds in by_task.values() for each in rounds]
    found = simulate(head, lm_head, [batch], tree, **options)
    assert found.num_rounds == len(gained)
    assert found.accepted_length == pytest.approx(sum(gained) / len(gained))
    means = {task: sum(each) / len(each) for task, each in by_task.items()}
    assert found.by_task == pytest.approx(means)
    assert len(set(means.values())) == 2, "tasks must differ in the example"
    assert max(gained) > 1, "the example must accept something"


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("tree", [TreeShape(3, 3, 6), TreeShape(4, 2, 16), TreeShape(1, 4, 3)])
def test_simulation_equals_rounds_played_one_by_one(tree, softcap):
    torch.manual_seed(0)
    head = spread(Eagle2Head(SHAPE).double())
    lm_head = LmHead(torch.randn(12, 16, dtype=torch.double), softcap)
    check_rounds(head, lm_head, lm_head, tree)


DRAFTED = torch.tensor([0, 1, 4, 5, 7, 8, 11])


def over_all_tokens(projection):
    """A projection of the draft vocabulary as one of all twelve tokens, most of them impossible."""

    def scores(states):
        logits = torch.full((*states.shape[:-1], 12), float("-inf"), dtype=states.dtype)
        logits[..., DRAFTED] = projection(states)
        return logits

    return scores


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
def test_trimmed_heads_draft_among_their_tokens_alone(kind):
    torch.manual_seed(0)
    shape = replace(SHAPE, kind=kind, draft_vocab_size=len(DRAFTED))
    head = spread(HEADS[kind](shape, draft_token_ids=DRAFTED).double())
    lm_head, tree = LmHead(torch.randn(12, 16, dtype=torch.double)), TreeShape(3, 3, 6)
    if kind == "eagle3":
        rows = head.lm_head.weight
    else:
        rows = lm_head.weight[DRAFTED]
        check_rounds(head, lm_head, lm_head, tree, trimmed=False)
    check_rounds(head, lm_head, over_all_tokens(LmHead(rows)), tree)


def test_an_eagle3_head_drafts_by_its_own_norm_and_projection():
    torch.manual_seed(0)
    head = spread(Eagle3Head(replace(SHAPE, kind="eagle3")).double())
    unread = LmHead(torch.full((12, 16), float("nan"), dtype=torch.double))
    check_rounds(head, unread, LmHead(head.lm_head.weight), TreeShape(3, 3, 6))


@torch.no_grad()
def served(folder, draft, tree, num_rounds):
    """A text that takes a drafted path each round, as the runtime drafts: tokens and gains."""
    decoder = load_decoder(read_config(folder), torch.float32, CPU, 256)
    head = load_head(read_config(draft), decoder, 256)
    decoder.feature_layers = head.feature_layers
    drafter = EagleDrafter(head, Tree(depth=tree.depth, top_k=tree.top_k, rows=tree.rows), 256)
    choice = random.Random(0)
    tokens, gains, num_observed = [choice.randrange(250) for _ in range(6)], [], 0
    for _ in range(num_rounds):
        caches = [torch.zeros(4, 256, decoder.config.head_dim) for _ in decoder.layers]
        attend = attend_causally(0, len(tokens) - 1)
        states = decoder.forward(torch.tensor(tokens[:-1]), caches, attend)
        drafter.observe(states[num_observed:])
        num_observed = len(tokens) - 1
        drafted = drafter.draft(tokens, tree.depth)
        row = choice.randrange(len(drafted))
        children = drafted.children()[row]
        other = choice.choice([token for token in range(250) if token not in children])
        tokens += [*drafted.paths()[row], other]
        gains.append(drafted.depths()[row] + 1)
    return tokens, gains


@pytest.mark.parametrize(("kind", "size"), [("eagle2", None), ("eagle2", 64), ("eagle3", 64)])
def test_rounds_are_those_of_the_runtime(kind, size, tmp_path):
    target, tree = target_of(tmp_path / "target", "llama3"), TreeShape(4, 3, 10)
    settings = HeadSettings(kind=kind, feature_loss_weight=0, dtype="float32")
    drafted = None if size is None else torch.arange(1, 1 + 3 * size, 3)
    shape = target.head_shape(settings)
    head = new_head(
        shape, target.embedding, settings, 0, None, None, target.lm_head, draft_token_ids=drafted
    )
    write_head(tmp_path / "draft", head, trained_weights(head), "ab" * 32, "float32")
    tokens, gains = served(tmp_path / "target", tmp_path / "draft", tree, 12)
    token_ids = torch.tensor([tokens])
    batch = HeldoutBatch(
        token_ids,
        target.features(token_ids, feature_layers=shape.feature_layers),
        torch.tensor([5]),
        torch.tensor([len(tokens)]),
        ["path"],
    )
    found = simulate(head, target.lm_head, [batch], tree)
    assert found.num_rounds == len(gains)
    assert found.accepted_length == sum(gains) / len(gains) > 1.5
    if kind == "eagle2" and size is not None:
        assert simulate(head, target.lm_head, [batch], tree, trimmed=False) != found


class Oracle(Eagle2Head):
    """Predicts that each token is followed by the next in the vocabulary."""

    def forward(self, token_ids, features, positions, past=None, mask=None):
        _, cache = super().forward(token_ids, features, positions, past, mask)
        return torch.nn.functional.one_hot((token_ids + 1) % 12, 16) * 20.0, cache


def test_perfect_head_gains_the_whole_depth_and_the_targets_token():
    torch.manual_seed(0)
    token_ids = (torch.arange(5 + 1 + 4 * 8) % 12)[None]
    batch = HeldoutBatch(
        token_ids,
        Features(torch.zeros(1, 38, 16)),
        torch.tensor([5]),
        torch.tensor([38]),
        ["count"],
    )
    found = simulate(Oracle(SHAPE), LmHead(torch.eye(12, 16)), [batch], TreeShape(7, 4, 16))
    assert found.num_rounds == 4
    assert found.by_task == {"count": 8}
    assert found.accepted_length == 8
    assert found.accepted_by_depth == [1.0] * 7
    shallow = simulate(Oracle(SHAPE), LmHead(torch.eye(12, 16)), [batch], TreeShape(7, 4, 3))
    assert shallow.accepted_by_depth[:3] == [1.0, 1.0, 0.0], "two rows beside the root"


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
ANSWER_TOKENS = 30
"""With the longest prompt more than the families' sliding window of 24."""


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
