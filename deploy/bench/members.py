"""What single members gained: heads with a draft vocabulary, and members adapted to their target.

Accepted lengths are those of training, from the manifest; costs of drafts are measured here.
"""

import statistics
from dataclasses import replace
from typing import Any

import torch

from polybasic.chain.formats.checkpoints.decoder_config import HeadConfig
from polybasic.chain.formats.head_kinds.table import HEAD_KINDS
from polybasic.chain.formats.manifest import Manifest
from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.executor import Executor
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.drafters.head import EagleDrafter
from polybasic.deploy.runtime.rounds.verifier import SPARE_ROWS, Verifier

_NUM_TURNS, _NUM_WARM_UPS = 20, 3
_TOKENS_A_ROUND = 4
"""Observed states that the first pass of a timed draft reads, as after a round."""


def draft_vocabularies(chain: Chain, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """One entry for each head of the chain that drafts only part of the vocabulary.

    Args:
        chain: drafts have the shape of its plan's tree.
        prompts: drafts are timed after the longest of them, which has at least two tokens.

    Returns:
        member; num_tokens that it can draft of vocab_size; coverage, the share of the tokens of
        the target's answers that are among them; part and whole: accepted_length (tokens a round,
        simulated) and seconds_per_pass (median), drafting among these tokens and among all. None
        if training did not record it, and over all tokens for a head with a projection of its own.
    """
    prompt = max(prompts, key=len)
    entries = []
    for member in chain.manifest.drafters:
        head = chain.engine.models.drafters[member.name]
        if not head.weights.is_head or head.weights.draft_token_ids is None:
            continue
        training = chain.manifest.training.get(member.name, {})
        verifier = chain.engine.verifiers[member.drafts_for[0]]
        seconds = _seconds_per_pass(head, verifier, chain.plan.tree, prompt)
        entries.append(
            {
                "member": member.name,
                "num_tokens": head.weights.num_draft_tokens,
                "vocab_size": head.config.vocab_size,
                "coverage": training.get("draft_vocabulary_coverage"),
                "part": {
                    "accepted_length": training.get("simulated_accepted_length"),
                    "seconds_per_pass": seconds["part"],
                },
                "whole": {
                    "accepted_length": training.get("untrimmed_accepted_length"),
                    "seconds_per_pass": seconds.get("whole"),
                },
            }
        )
    return entries


def adaptations(manifest: Manifest) -> list[dict[str, Any]]:
    """One entry for each ready-made member that was adapted, from the records in the manifest.

    Returns:
        member; measure, taken on held-out text; before, after; is_kept, false if the member was
        left unchanged because adapting it gained nothing.
    """
    entries = []
    for name, record in manifest.training.items():
        if "initial_accepted_length" in record:
            entries.append(
                {
                    "member": name,
                    "measure": "tokens a round, simulated",
                    "before": record["initial_accepted_length"],
                    "after": record["simulated_accepted_length"],
                    "is_kept": record["best_step"] > 0,
                }
            )
    for name, record in manifest.quality.items():
        if "distillation_is_kept" in record:
            entries.append(
                {
                    "member": name,
                    "measure": "share of its tokens that the target keeps",
                    "before": record["distillation_acceptance_before"],
                    "after": record["distillation_acceptance_after"],
                    "is_kept": record["distillation_is_kept"],
                }
            )
    return entries


def _seconds_per_pass(
    head: Executor, verifier: Verifier, tree: Tree, prompt: list[int]
) -> dict[str, float]:
    """Medians over turns; each turn drafts once in each way."""
    capacity = len(prompt) + SPARE_ROWS
    drafters = {"part": EagleDrafter(head, tree, capacity)}
    config = head.config
    if not (isinstance(config, HeadConfig) and HEAD_KINDS[config.kind].has_lm_head):
        lm_head = verifier.decoder.weights.lm_head
        weights = replace(head.weights, lm_head=lm_head, draft_token_ids=None)
        drafters["whole"] = EagleDrafter(head.over(weights), tree, capacity)
    taken: dict[str, list[float]] = {name: [] for name in drafters}
    with torch.inference_mode():
        verifier.cache.truncate(0)
        states = verifier.read(prompt[:-1])
        newest = states[-_TOKENS_A_ROUND:]
        for drafter in drafters.values():
            drafter.observe(states)
            drafter.draft(prompt, tree.depth)
        for turn in range(_NUM_WARM_UPS + _NUM_TURNS):
            for name, drafter in drafters.items():
                drafter.rewind(len(states) - len(newest))
                drafter.observe(newest)
                drafter.clock.reset()
                drafter.draft(prompt, tree.depth)
                if turn >= _NUM_WARM_UPS:
                    taken[name].append(drafter.clock.seconds / drafter.clock.num_passes)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}
