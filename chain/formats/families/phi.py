"""Phi-3. It has no biases, whatever its config says."""

from polybasic.chain.formats.families.family import Family, all_alike

PHI3 = Family(
    "phi3",
    lambda read: {"has_fused_projections": True},
    all_alike,
    autoawq="phi3",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    rope_types=("default",),
)
