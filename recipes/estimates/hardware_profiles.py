"""Speeds of machines, for the hours of a dry run: published peaks, and what is reached of them."""

import re
from dataclasses import dataclass, replace

from polybasic.chain.base.errors import UserError

COMPUTE_UTILISATION = 0.35
"""Of a GPU's peak, in training: an assumption, the usual range of tuned code being 0.3 to 0.5
(PaLM, arXiv 2204.02311, table 3: 0.21 to 0.46)."""
MEMORY_UTILISATION = 0.9
"""Of a GPU's peak in passes over one row: an H200 was measured to read 4.3 of 4.8 TB/s."""
_GPU_LAYER_SECONDS = 0.45e-3
"""Eager passes wait for launches: 22 ms a token of a 7B model on an A800 (Wang et al., arXiv
2510.26527), 7 ms of which are reading; the rest over 32 layers."""
_GPU_ALL_REDUCE_SECONDS = 20e-6
"""Of some rows' states over the GPUs of a host by NVLink: an assumption. Kernels made for it take 4
to 12 microseconds over two to eight H100 (SGLang's pull request 2904), NCCL some more."""


@dataclass(frozen=True)
class Hardware:
    """One kind of device, or some of it.

    Attributes:
        name: as `--hardware` takes it.
        description: for people.
        training_flops: bfloat16 operations a second that training reaches.
        float32_flops: float32 operations a second that the 4-bit search reaches.
        read_bytes_per_second: weights that a pass over one row reads.
        layer_seconds: what a decoder layer costs a token beside that, averaged over the systems of
            a report.
        all_reduce_seconds: of one sum of few rows over the devices.
        memory_bytes: of one device; None where it is the host's.
        num_devices: of them; all other figures are of one.
        trains_in_float32: models that are stored in two bytes, for want of fast products in them.
    """

    name: str
    description: str
    training_flops: float
    float32_flops: float
    read_bytes_per_second: float
    layer_seconds: float
    all_reduce_seconds: float
    memory_bytes: float | None = None
    num_devices: int = 1
    trains_in_float32: bool = False


def _gpu(
    name: str, description: str, bfloat16: float, float32: float, read: float, memory: float
) -> Hardware:
    return Hardware(
        name,
        description,
        training_flops=bfloat16 * COMPUTE_UTILISATION,
        float32_flops=float32 * COMPUTE_UTILISATION,
        read_bytes_per_second=read * MEMORY_UTILISATION,
        layer_seconds=_GPU_LAYER_SECONDS,
        all_reduce_seconds=_GPU_ALL_REDUCE_SECONDS,
        memory_bytes=memory,
    )


CPU = Hardware("cpu", "two AVX-512 cores", 2.5e11, 2.5e11, 27e9, 0.15e-3, 0.5e-3)
"""Measured with a target of 20 M parameters, and gloo between two processes of one machine."""
CPU_AVX2 = replace(
    CPU,
    name="cpu-avx2",
    description="two AVX2 cores",
    training_flops=6.4e10,
    float32_flops=6.4e10,
    read_bytes_per_second=21e9,
    trains_in_float32=True,
)
"""An AMD EPYC of the first generation at 2.0 GHz: 32e9 multiply-adds a second in float32."""
PROFILES = {
    profile.name: profile
    for profile in (
        CPU,
        CPU_AVX2,
        # NVIDIA's data sheets: dense bfloat16, float32 without tensor cores, memory
        _gpu("a100-80gb", "one A100 80 GB (SXM)", 312e12, 19.5e12, 2.039e12, 80e9),
        _gpu("h100-80gb", "one H100 80 GB (SXM)", 989e12, 67e12, 3.35e12, 80e9),
        _gpu("h200", "one H200 (SXM)", 989e12, 67e12, 4.8e12, 141e9),
        # NVIDIA's Ada whitepaper: bfloat16 with float32 accumulation
        _gpu("rtx-4090", "one RTX 4090", 165.2e12, 82.6e12, 1.008e12, 24e9),
    )
}
_NAMES_IN_DEVICES = {"A100": "a100-80gb", "H100": "h100-80gb", "H200": "h200", "4090": "rtx-4090"}


def hardware_named(name: str) -> Hardware:
    """A profile by its name, or several devices of it: 4xh100-80gb.

    Raises:
        UserError: there is none.
    """
    found = re.fullmatch(r"(?:([1-9]\d{0,3})x)?(.*)", name)
    if found is None or found[2] not in PROFILES:
        known = ", ".join(PROFILES)
        raise UserError(
            "unknown hardware", f"--hardware {name}", f"known: {known}; 4xh100-80gb is four of them"
        )
    profile, num_devices = PROFILES[found[2]], int(found[1] or 1)
    if num_devices == 1:
        return profile
    description = f"{num_devices} devices, each {profile.description}"
    return replace(profile, name=name, description=description, num_devices=num_devices)


def hardware_at_hand() -> tuple[Hardware, str]:
    """The profile that is nearest to this machine, and the reason for it."""
    import torch

    from polybasic.chain.kernels.product_times import multiplies_fast

    reason = "no CUDA device here"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        for part, name in _NAMES_IN_DEVICES.items():
            if part in device:
                return PROFILES[name], f"{device} here"
        reason = f"no profile for {device}"
    return CPU if multiplies_fast(torch.bfloat16) else CPU_AVX2, reason
