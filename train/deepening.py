"""More layers for a model in training, which computes as before at first.

Few layers learn in fewer steps, each of them cheaper, what all of them need first: words, their
order, and to copy from the prompt. (As "stacking" in Gong et al., 2019, with copies that begin as
the identity, as in Chen et al., "Net2Net", 2016.)
"""

import copy

import torch
from transformers import LlamaForCausalLM


@torch.no_grad()
def deepen(model: LlamaForCausalLM, num_layers: int) -> None:
    """Put copies of a model's layers after each of them, in place, until there are `num_layers`.

    A copy adds nothing to the residual stream yet: what its attention and its MLP write with is 0.
    The parameters that were there stay the same objects.
    """
    layers = model.model.layers
    num_before, deepened = len(layers), []
    for index in range(num_layers):
        source = index * num_before // num_layers
        is_new = index > 0 and source == (index - 1) * num_before // num_layers
        layer = layers[source]
        if is_new:
            layer = copy.deepcopy(layer)
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        layer.self_attn.layer_idx = index
        deepened.append(layer)
    model.model.layers = torch.nn.ModuleList(deepened)
    model.config.num_hidden_layers = num_layers
