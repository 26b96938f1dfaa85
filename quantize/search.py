"""AWQ's search and rounding with autoawq, which only this module uses.

autoawq 0.2.9 is archived. Under transformers 5 and on a CPU it needs these changes:
- its import must not turn on every DeprecationWarning of the process;
- models are loaded by us, without a cache (its own loader trusts remote code);
- its tqdm bar is replaced by ours;
- its clip search becomes a matrix product: the broadcast product there is thirty times slower and
  fails if out features are not a multiple of 64;
- its scale search uses fewer tokens;
- each layer is called with the arguments that transformers passes: autoawq calls all layers like
  the first, but masks and rotary tables differ between layers with and without a sliding window;
- Gemma 3, which it does not know, is treated as Gemma 2; and the norms of both, which multiply by
  1 + weight, are scaled so that the small difference from -1 survives being stored.
The rounding to 4 bits is its own.
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.progress import tracked
from polybasic.chain.formats.families.table import FAMILIES
from polybasic.quantize.models import ONE_PLUS_NORMS, norm_factor

try:
    with warnings.catch_warnings(record=True) as _import_warnings:
        from awq.models._config import AwqConfig
        from awq.models.auto import AWQ_CAUSAL_LM_MODEL_MAP
        from awq.quantize import quantizer as autoawq
        from awq.quantize import scale as autoawq_scale
except ImportError as error:
    raise UserError(
        "autoawq cannot be imported", str(error), "pip install 'polybasic[quantize]'"
    ) from error
for _warning in _import_warnings:
    if "AutoAWQ is officially deprecated" not in str(_warning.message):
        warnings.warn_explicit(
            _warning.message, _warning.category, _warning.filename, _warning.lineno
        )

# the type that it checks for norms, to divide 1 + weight instead of weight
autoawq_scale.Gemma2RMSNorm = ONE_PLUS_NORMS

_VALUE_PROJECTIONS = ("v_proj", "qkv_proj")
_SEARCH_TOKENS = 2048  # enough to rank 20 grid points; the channel means use all samples
_CLIP_ROWS = 1024  # output features at a time, bounds the memory of the clip search


def search_and_round(model: PreTrainedModel, rows: list[list[int]], group_size: int) -> None:
    """Replace the linears of the model's layers by autoawq's packed ones, in place.

    Args:
        model: float32, of a family that has a name for autoawq.
        rows: calibration samples, token ids of one length.
        group_size: inputs that share a scale.

    Raises:
        UserError: autoawq does not run the layers as transformers does.
    """
    model_type = model.config.model_type
    known = AWQ_CAUSAL_LM_MODEL_MAP[FAMILIES[model_type].autoawq]
    wrapper = _keeping_values(known)(model, model_type, False, model.config, AwqConfig(), None)
    # a cache captured with the layers' arguments would grow with every search step
    model.config.use_cache = False
    autoawq.tqdm, autoawq.apply_scale = _layer_bar, _apply_scale
    wrapper.quantize(
        quant_config={"w_bit": 4, "q_group_size": group_size, "zero_point": True},
        calib_data=rows,
        max_calib_samples=len(rows),
        max_calib_seq_len=len(rows[0]),
        quantizer_cls=_Quantizer,
    )
    # autoawq runs the layers itself: if transformers calls them differently (a mask or a rotary
    # table that it misses), it would silently calibrate on wrong activations
    expected = wrapper.quantizer.last_output
    deviation = (wrapper.quantizer.inps[:1].cpu() - expected).norm() / expected.norm()
    if not deviation < 1e-3:
        raise UserError(
            "autoawq misreads this model",
            f"model_type {model_type}, its layers' output deviates by {deviation:.1e}",
            "install the versions of constraints.txt",
        )


class _Quantizer(autoawq.AwqQuantizer):
    """autoawq's search with its two slow loops shortened, and correct arguments for each layer.

    Attributes:
        layer_arguments: named arguments of each layer for one sample, which fit any number: the
            samples have one length and no padding.
        last_output: of the last layer for the first sample, before rounding [1, tokens, hidden].
    """

    layer_arguments: dict[nn.Module, dict[str, Any]]
    last_output: Tensor

    def init_quant(self, **limits: int) -> tuple[list[nn.Module], dict[str, Any], Tensor]:
        """autoawq's own capture of the first layer's inputs [samples, tokens, hidden size]."""
        layers, _, inputs = super().init_quant(**limits)
        assert inputs.shape[:2] == (self.max_calib_samples, self.max_calib_seq_len)
        self.layer_arguments, self.last_output = layer_calls(self.model, layers, self.calib_data[0])
        return layers, self.layer_arguments[layers[0]], inputs

    def _get_input_feat(
        self, layer: nn.Module, named_linears: dict[str, nn.Linear]
    ) -> dict[str, Tensor]:
        """autoawq's first use of a layer's arguments; the later ones read the same attribute."""
        device = next(layer.parameters()).device
        self.module_kwargs = {
            name: _on(device, value) for name, value in self.layer_arguments[layer].items()
        }
        return super()._get_input_feat(layer, named_linears)

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


@torch.no_grad()
def layer_calls(
    model: PreTrainedModel, layers: Iterable[nn.Module], row: list[int]
) -> tuple[dict[nn.Module, dict[str, Any]], Tensor]:
    """The arguments with which transformers calls each layer in a pass over one row of token ids.

    Returns:
        The named arguments of each layer, and the last layer's output [1, tokens, hidden size].
    """
    calls: dict[nn.Module, dict[str, Any]] = {}
    outputs: list[Tensor] = []

    def watch(layer: nn.Module, inputs: Any, arguments: dict[str, Any], output: Any) -> None:
        calls[layer] = arguments
        outputs[:] = [output[0] if isinstance(output, tuple) else output]

    handles = [layer.register_forward_hook(watch, with_kwargs=True) for layer in layers]
    model(torch.tensor([row], device=model.device), use_cache=False)
    for handle in handles:
        handle.remove()
    return calls, outputs[0].cpu()


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_on(device, item) for item in value)
    return value.to(device) if isinstance(value, Tensor) else value


def _apply_scale(
    layer: nn.Module,
    scalings: list[tuple[str, tuple[str, ...], Tensor]],
    input_feat_dict: dict[str, Tensor],
) -> None:
    """autoawq's folding of the chosen scales into norms and linears."""
    storable = [
        (before, linears, _storable_scales(layer.get_submodule(before), scales))
        for before, linears, scales in scalings
    ]
    autoawq_scale.apply_scale(layer, storable, input_feat_dict=input_feat_dict)


@torch.no_grad()
def _storable_scales(before: nn.Module, scales: Tensor) -> Tensor:
    """The scales nearest to `scales` that a norm's weight can hold in float16 and in bfloat16.

    A norm that multiplies by 1 + weight holds a large scale as a weight just above -1, where
    bfloat16's steps of 0.004 can be a tenth of what is left.
    """
    if not isinstance(before, ONE_PLUS_NORMS):
        return scales
    factor = norm_factor(before)
    stored = 1 + (factor / scales.to(factor) - 1).bfloat16().half().float()
    # no scaling where the weight would become -1, which would switch the channel off
    return torch.where(stored * factor > 0, factor / stored, torch.ones_like(factor)).to(scales)


@contextmanager
def _state_dict_of_copies(module: nn.Module) -> Iterator[None]:
    """Let `module.state_dict()` return copies.

    autoawq's search saves the weights by `state_dict()` and `.cpu()`, which on a CPU are views, and
    then scales the weights in place: it would restore the weights of the first scales.
    """
    state_dict = module.state_dict
    module.state_dict = lambda: {  # type: ignore[method-assign, assignment]
        name: tensor.clone() for name, tensor in state_dict().items()
    }
    try:
        yield
    finally:
        del module.state_dict


def _keeping_values(family: Any) -> Any:
    """autoawq's class of a model family, without scalings that would change cached values."""

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
    return tracked(list(layers), "quantize layers")
