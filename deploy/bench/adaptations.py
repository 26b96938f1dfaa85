"""What adapting ready-made members to their target gained, from the records in the manifest."""

from typing import Any

from polybasic.chain.formats.manifest import Manifest


def adaptations(manifest: Manifest) -> list[dict[str, Any]]:
    """One entry for each member that was adapted; both measures are taken on held-out text.

    Returns:
        member; measure; before, after; is_kept, false where the member stayed as it was because
        adapting it gained nothing.
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
