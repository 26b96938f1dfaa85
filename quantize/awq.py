"""The target in 4 bits: AWQ with autoawq, written as an ordinary AutoAWQ checkpoint.

autoawq 0.2.9 is archived and stays behind this module. Under transformers 5 and on a CPU it needs:
- its import kept from turning on every DeprecationWarning of the process;
- models loaded by us, without a cache (its own loader trusts remote code);
- its tqdm bar replaced by ours;
- its clip search as a matrix product: the broadcast product there is thirty times slower and stops
  at out features that are no multiple of 64;
- its scale search over fewer tokens;
- its folder written by us (it writes mode 0600).
The rounding to 4 bits is its own.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn
from transformers import PreTrainedModel

from polybasic.chain.awq import GROUP_SIZE, QUANTIZATION_CONFIG
from polybasic.chain.checkpoint import checkpoint_files, copy_files, model_files
from polybasic.chain.digests import weights_digest
from polybasic.chain.errors import UserError
from polybasic.chain.files import read_json, whole_folder, write_json
from polybasic.chain.lineage import ORIGIN_KEY, QUANTIZED_FROM_KEY
from polybasic.quantize.calibration import calibration_samples
from polybasic.quantize.models import load_target, tracked
from polybasic.quantize.settings import QuantizeSettings

try:
    with warnings.catch_warnings(record=True) as _import_warnings:
        from awq.models._config import AwqConfig
        from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
        from awq.quantize import quantizer as autoawq
except ImportError as error:
    raise UserError(
        "autoawq cannot be imported", str(error), "pip install 'polybasic[quantize]'"
    ) from error
for _warning in _import_warnings:
    if "AutoAWQ is officially deprecated" not in str(_warning.message):
        warnings.warn_explicit(
            _warning.message, _warning.category, _warning.filename, _warning.lineno
        )

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Families whose layers autoawq and transformers 5 agree on; the tests quantize each."""

_PACKED_OUT_MULTIPLE = 32  # autoawq packs so; the format itself needs a multiple of 8
_VALUE_PROJECTIONS = ("v_proj", "qkv_proj")
_SEARCH_TOKENS = 2048  # enough to tell 20 grid points apart; the channel means use all samples
_CLIP_ROWS = 1024  # output features at a time, bounds the memory of the clip search
_SHARD_SIZE = "5GB"


def quantize_target(
    target: Path,
    samples: Sequence[Sequence[int]],
    settings: QuantizeSettings,
    seed: int,
    out: Path,
) -> None:
    """Write the target's 4-bit copy to the folder `out`, whole or not at all.

    Keys and values stay on the target's scale, so that both can share one cache: AWQ's scaling
    between v_proj and o_proj is left out. The scales of the other linears are folded into norms
    and up projections. Linears of the decoder layers are quantized, all else is float16. The config
    records the digest of the weights that the copy was made from.

    Args:
        target: checkpoint folder.
        samples: token-id rows of any length; `calibration_samples` chooses and cuts them.
        settings: number and length of the calibration samples.
        seed: of that choice; the search itself draws nothing.
        out: folder to write; an older one of this name is replaced.

    Raises:
        UserError: an unsupported or quantized target, linears that do not divide into groups,
            too little data, token ids outside of the vocabulary, a full disk.
    """
    config = read_json(target / "config.json", "model config")
    _check_config(config, settings, target)
    _check_token_ids(samples, config["vocab_size"], target)
    rows = calibration_samples(
        samples, settings.num_calibration_samples, settings.calibration_tokens, seed
    )
    model = load_target(target)
    _check_shapes(model, target)
    _search_and_round(model, rows)
    with whole_folder(out) as folder:
        _write_checkpoint(model, config, target, folder)


class _Quantizer(autoawq.AwqQuantizer):
    """autoawq's search with its two slow loops shortened, and with its inputs checked."""

    def init_quant(self, **limits: int) -> tuple[list[nn.Module], dict[str, Any], Tensor]:
        """autoawq's own capture of the first layer's inputs [samples, tokens, hidden size]."""
        layers, layer_arguments, inputs = super().init_quant(**limits)
        assert inputs.shape[:2] == (self.max_calib_samples, self.max_calib_seq_len)
        assert layer_arguments.get("past_key_values") is None
        # captured from the first layer and for all samples: valid for each layer and any subset
        # only if it is the plain causal mask, for which transformers passes none
        if layer_arguments.get("attention_mask") is not None:
            raise UserError(
                "calibration samples exceed the attention window",
                f"quantize.calibration_tokens {self.max_calib_seq_len}",
                "lower it below the model's sliding window",
            )
        return layers, layer_arguments, inputs

    def _compute_best_scale(
        self,
        x: Tensor,
        w_mean: Tensor,
        x_mean: Tensor,
        module2inspect: nn.Module,
        linears2scale: list[nn.Linear],
        fp16_output: Tensor,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """autoawq's grid search, over every n-th sample."""
        num_samples, num_tokens = x.shape[:2]
        step = min(num_samples, max(1, num_samples * num_tokens // _SEARCH_TOKENS))
        some_x, some_output = x[::step].contiguous(), fp16_output[::step].contiguous()
        with _state_dict_of_copies(module2inspect):
            return super()._compute_best_scale(
                some_x, w_mean, x_mean, module2inspect, linears2scale, some_output, kwargs
            )

    @torch.no_grad()
    def _compute_best_clip(
        self,
        w: Tensor,
        input_feat: Tensor,
        n_grid: int = 20,
        max_shrink: float = 0.5,
        n_sample_token: int = 512,
    ) -> Tensor:
        """autoawq's search for the best clipping bound [O, G, 1] of each group of w [O, I]."""
        x_TI = input_feat.reshape(-1, input_feat.shape[-1]).to(w.device)
        x_TI = x_TI[:: max(1, len(x_TI) // n_sample_token)]
        x_GTg = x_TI.unflatten(1, (-1, self.group_size)).transpose(0, 1)
        bounds = []
        for rows_OI in w.split(_CLIP_ROWS):
            rows_OGg = rows_OI.unflatten(1, (-1, self.group_size))
            largest = rows_OGg.abs().amax(dim=2, keepdim=True)
            best, least_error = largest.clone(), torch.full_like(largest, torch.inf)
            for step in range(int(max_shrink * n_grid)):
                bound = largest * (1 - step / n_grid)
                rounded = self.pseudo_quantize_tensor(rows_OGg.clamp(-bound, bound))[0]
                change_GgO = (rounded - rows_OGg).permute(1, 2, 0)
                error = torch.bmm(x_GTg, change_GgO).square().mean(dim=1).t().unsqueeze(2)
                is_better = error < least_error
                least_error = torch.where(is_better, error, least_error)
                best = torch.where(is_better, bound, best)
            bounds.append(best)
        return torch.cat(bounds)


@contextmanager
def _state_dict_of_copies(module: nn.Module) -> Iterator[None]:
    """Let `module.state_dict()` return copies.

    autoawq's search keeps the weights by `state_dict()` and `.cpu()`, which on a CPU are views,
    then scales the weights in place: what it restores would be the first scales' weights.
    """
    state_dict = module.state_dict
    module.state_dict = lambda: {  # type: ignore[method-assign, assignment]
        name: tensor.clone() for name, tensor in state_dict().items()
    }
    try:
        yield
    finally:
        del module.state_dict


def _search_and_round(model: PreTrainedModel, rows: list[list[int]]) -> None:
    """Replace the linears of the model's layers by autoawq's packed ones, in place."""
    model_type = model.config.model_type
    family = _keeping_values(AWQ_CAUSAL_LM_MODEL_MAP[model_type])
    wrapper = family(model, model_type, False, model.config, AwqConfig(), None)
    # a cache captured with the first layer's arguments would grow with every search step
    model.config.use_cache = False
    expected = _last_layer_output(model, family.get_model_layers(model)[-1], rows[0])
    autoawq.tqdm = _layer_bar
    wrapper.quantize(
        quant_config={"w_bit": 4, "q_group_size": GROUP_SIZE, "zero_point": True},
        calib_data=rows,
        max_calib_samples=len(rows),
        max_calib_seq_len=len(rows[0]),
        quantizer_cls=_Quantizer,
    )
    # autoawq walks the layers itself: a transformers that calls them otherwise (a mask or a rotary
    # table that it misses) would calibrate on wrong activations without a word
    deviation = (wrapper.quantizer.inps[0].cpu() - expected).norm() / expected.norm()
    if not deviation < 1e-3:
        raise UserError(
            "autoawq misreads this model",
            f"model_type {model_type}, its layers' output deviates by {deviation:.1e}",
            "install the versions of constraints.txt",
        )


def _keeping_values(family: Any) -> Any:
    """autoawq's class of a model family, without scalings that change the values in the cache."""

    class KeepingValues(family):
        @staticmethod
        def get_layers_for_scaling(
            module: nn.Module, input_feat: dict[str, Tensor], module_kwargs: dict[str, Any]
        ) -> list[dict[str, Any]]:
            values = [
                linear
                for name, linear in module.named_modules()
                if name.rpartition(".")[2] in _VALUE_PROJECTIONS
            ]
            assert values, "no value projection found"
            scalings = family.get_layers_for_scaling(module, input_feat, module_kwargs)
            return [
                scaling
                for scaling in scalings
                if not any(scaling["prev_op"] is linear for linear in values)
            ]

    return KeepingValues


def _layer_bar(layers: Iterable[int], desc: str) -> Iterator[int]:
    layers = list(layers)
    return tracked(layers, "quantize layers", len(layers))


@torch.no_grad()
def _last_layer_output(model: PreTrainedModel, layer: nn.Module, row: list[int]) -> Tensor:
    outputs: list[Any] = []
    handle = layer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    model(torch.tensor([row]))
    handle.remove()
    output = outputs[0]
    return output[0][0] if isinstance(output, tuple) else output[0]


def _write_checkpoint(
    model: PreTrainedModel, config: dict[str, Any], target: Path, folder: Path
) -> None:
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors[name] = tensor.half() if tensor.is_floating_point() else tensor
        if not torch.isfinite(tensors[name]).all():
            raise UserError(
                "weight does not fit float16",
                f"{name} in {target} reaches {tensor.abs().max():.3g}",
                "AutoAWQ's format needs float16; this target cannot be an intermediate",
            )
    if config.get("tie_word_embeddings", False):
        del tensors["lm_head.weight"]
    save_torch_state_dict(tensors, folder, max_shard_size=_SHARD_SIZE)
    dtype_key = "dtype" if "dtype" in config else "torch_dtype"
    quantized = {
        **config,
        dtype_key: "float16",
        "quantization_config": QUANTIZATION_CONFIG,
        ORIGIN_KEY: {QUANTIZED_FROM_KEY: weights_digest(target)},
    }
    write_json(folder / "config.json", quantized)
    copied = {*checkpoint_files(target)} - {*model_files(target)} | {"generation_config.json"}
    copy_files(target, folder, [name for name in copied if (target / name).is_file()])


def _check_config(config: dict[str, Any], settings: QuantizeSettings, target: Path) -> None:
    where = target / "config.json"
    if config.get("quantization_config"):
        raise UserError(
            "target is quantized already",
            f"quantization_config in {where}",
            "name the unquantized checkpoint",
        )
    if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            "unsupported architecture",
            f"model_type {config.get('model_type')!r} in {where}",
            f"quantizing supports {', '.join(SUPPORTED_MODEL_TYPES)}",
        )
    context_tokens = config.get("max_position_embeddings", settings.calibration_tokens)
    if settings.calibration_tokens > context_tokens:
        raise UserError(
            "calibration samples exceed the context",
            f"quantize.calibration_tokens {settings.calibration_tokens}, {where} has "
            f"max_position_embeddings {context_tokens}",
            "lower quantize.calibration_tokens",
        )


def _check_token_ids(rows: Sequence[Sequence[int]], vocab_size: int, target: Path) -> None:
    for row in rows:
        for token_id in row:
            if not 0 <= token_id < vocab_size:
                raise UserError(
                    "token id outside of the vocabulary",
                    f"{token_id}, {target} has {vocab_size} tokens",
                    "encode the conversations with the target's own tokenizer",
                )


def _check_shapes(model: PreTrainedModel, target: Path) -> None:
    for name, module in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(module, nn.Linear) and (
            module.in_features % GROUP_SIZE or module.out_features % _PACKED_OUT_MULTIPLE
        ):
            raise UserError(
                "linear does not divide into groups",
                f"{name}.weight [{module.out_features}, {module.in_features}] in {target}",
                f"out must be a multiple of {_PACKED_OUT_MULTIPLE} and in of {GROUP_SIZE}",
            )
