"""Speeds of machines, for the hours of a dry run: published peaks, and what is reached of them."""

from dataclasses import dataclass

from polybasic.chain.errors import UserError

COMPUTE_UTILISATION = 0.35
"""Of a GPU's peak, in training: an assumption, the usual range of tuned code being 0.3 to 0.5
(PaLM, arXiv 2204.02311, table 3: 0.21 to 0.46)."""
MEMORY_UTILISATION = 0.9
"""Of a GPU's peak in passes over one row: an H200 was measured to read 4.3 of 4.8 TB/s."""
_GPU_LAYER_SECONDS = 0.45e-3
"""Eager passes wait for launches: 22 ms a token of a 7B model on an A800 (Wang et al., arXiv
2510.26527), 7 ms of which are reading; the rest over 32 layers."""


@dataclass(frozen=True)
class Hardware:
    """One kind of machine.

    Attributes:
        name: as `--hardware` takes it.
        description: for people.
        training_flops: bfloat16 operations a second that training reaches.
        float32_flops: float32 operations a second that the 4-bit search reaches.
        read_bytes_per_second: weights that a pass over one row reads.
        layer_seconds: what a decoder layer costs a token beside that, averaged over the systems of
            a report.
    """

    name: str
    description: str
    training_flops: float
    float32_flops: float
    read_bytes_per_second: float
    layer_seconds: float


def _gpu(name: str, description: str, bfloat16: float, float32: float, read: float) -> Hardware:
    return Hardware(
        name,
        description,
        training_flops=bfloat16 * COMPUTE_UTILISATION,
        float32_flops=float32 * COMPUTE_UTILISATION,
        read_bytes_per_second=read * MEMORY_UTILISATION,
        layer_seconds=_GPU_LAYER_SECONDS,
    )


CPU = Hardware("cpu", "two AVX-512 cores", 2.5e11, 2.5e11, 27e9, 0.15e-3)
"""Measured with the shipped recipe tiny."""
PROFILES = {
    profile.name: profile
    for profile in (
        CPU,
        # NVIDIA's data sheets: dense bfloat16, float32 without tensor cores, memory
        _gpu("a100-80gb", "one A100 80 GB (SXM)", 312e12, 19.5e12, 2.039e12),
        _gpu("h100-80gb", "one H100 80 GB (SXM)", 989e12, 67e12, 3.35e12),
        _gpu("h200", "one H200 (SXM)", 989e12, 67e12, 4.8e12),
        # NVIDIA's Ada whitepaper: bfloat16 with float32 accumulation
        _gpu("rtx-4090", "one RTX 4090", 165.2e12, 82.6e12, 1.008e12),
    )
}
_NAMES_IN_DEVICES = {"A100": "a100-80gb", "H100": "h100-80gb", "H200": "h200", "4090": "rtx-4090"}


def hardware_named(name: str) -> Hardware:
    """A profile by its name.

    Raises:
        UserError: there is none.
    """
    if name not in PROFILES:
        raise UserError("unknown hardware", f"--hardware {name}", f"known: {', '.join(PROFILES)}")
    return PROFILES[name]


def hardware_at_hand() -> tuple[Hardware, str]:
    """The profile that is nearest to this machine, and the reason for it."""
    import torch

    if not torch.cuda.is_available():
        return CPU, "no CUDA device here"
    device = torch.cuda.get_device_name()
    for part, name in _NAMES_IN_DEVICES.items():
        if part in device:
            return PROFILES[name], f"{device} here"
    return CPU, f"no profile for {device}"
