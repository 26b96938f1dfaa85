"""Every family in the runtime against transformers: logits, greedy output, 4 bits, refusals."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from polybasic.chain.base.errors import UserError
from polybasic.chain.formats.checkpoints.checkpoint import load_tensors
from polybasic.chain.formats.checkpoints.config import decoder_config, read_config
from polybasic.chain.formats.checkpoints.decoder_config import DecoderConfig, LayerKind
from polybasic.chain.formats.checkpoints.shapes import check_shapes
from polybasic.chain.formats.plan import Tree
from polybasic.chain.kernels.drafts import DraftTree
from polybasic.chain.kernels.executor import Executor
from polybasic.chain.kernels.rotary import inverse_frequency
from polybasic.chain.model.loading import load_decoder
from polybasic.chain.model.stored import StoredTensors
from polybasic.deploy.runtime.drafters.model import ModelDrafter
from polybasic.deploy.runtime.rounds.cache import KeyValueCache
from polybasic.deploy.runtime.rounds.verifier import Verifier
from tests.chain.family_cases import CASES, WINDOW, Folders, write_4bit
from tests.checkpoints import FAMILIES, VOCAB_SIZE, write_family

CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""Of the largest logit, in float32."""
CAPACITY = 128


@pytest.fixture(autouse=True, params=["native", "eager", "device"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with the kernels of CPUs, in eager PyTorch, and with weights as GPUs keep
    them, unless it says otherwise."""
    monkeypatch.setenv("POLYBASIC_KERNELS", request.param)
    return str(request.param)


on_one_path = pytest.mark.parametrize("kernels", ["eager"], indirect=True)
"""For what the kernels do not change: what is read of configs, and controls of the comparison."""


@cache
def reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Soft-capped attention is exact in transformers' eager code only."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Executor:
    return load_decoder(read_config(folder), dtype, CPU, CAPACITY)


def make_verifier(decoder: Executor) -> Verifier:
    config = decoder.config
    return Verifier(
        "target",
        decoder,
        KeyValueCache(config, config.num_layers, CAPACITY, decoder.dtype, decoder.device),
    )


def random_tokens(number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCAB_SIZE, (number,), generator=generator).tolist()


def consecutive_logits(decoder: Executor, ids: list[int], ends: list[int]) -> Tensor:
    """Logits of all rows, read in passes that end at `ends`."""
    verifier, logits = make_verifier(decoder), []
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        logits.append(verifier.logits(verifier.read(ids[first:end])))
        verifier.cache.keep(range(end - first))
    return torch.cat(logits)


# A branch, and a path of nine rows
TREE_PARENTS = [-1, 0, 0, 1, 2, 2, 5, 6, 7, 8, 9, 10]
KEPT = [0, 2, 5, 6, 7, 8, 9, 10, 11]


def tree_and_following(decoder: Executor, start: int) -> list[tuple[list[int], Tensor]]:
    """Prefixes and the logits after them: of a tree's rows, and of a block after a kept path.

    Args:
        start: length of the prompt before the tree.
    """
    prompt, tree = random_tokens(start), DraftTree(random_tokens(12), TREE_PARENTS)
    verifier = make_verifier(decoder)
    verifier.read(prompt)
    verifier.cache.keep(range(start))
    logits = verifier.logits(verifier.read_tree(tree))
    found = []
    for row in range(len(tree)):
        path = [row]
        while tree.parents[path[0]] >= 0:
            path.insert(0, tree.parents[path[0]])
        found.append((prompt + [tree.tokens[node] for node in path], logits[row]))
    verifier.cache.keep(KEPT)
    kept = prompt + [tree.tokens[node] for node in KEPT]
    following = verifier.logits(verifier.read([3, 4]))
    return [*found, ([*kept, 3], following[0]), ([*kept, 3, 4], following[1])]


@cache
def expected_logits(folder: Path, ids: tuple[int, ...]) -> Tensor:
    """Of all rows of a text, which every executor reads and every control of the comparison."""
    return reference(folder)(torch.tensor([ids])).logits[0].float()


@torch.inference_mode()
def largest_differences(decoder: Executor, folder: Path) -> dict[str, float]:
    """Of the logits of each kind of pass, relative to the largest logit."""
    ids = random_tokens(60)
    expected = expected_logits(folder, tuple(ids))
    largest = expected.abs().max()
    by_pass = {
        "prompt": [60],
        "tokens across the window's edge": [20, *range(21, 30), 60],
        "blocks across the window's edge": [20, 28, 40, 60],
    }
    differences = {
        name: consecutive_logits(decoder, ids, ends).float() - expected
        for name, ends in by_pass.items()
    }
    for start in (WINDOW - 5, WINDOW - 1, 40):
        rows = [
            logits.float() - expected_logits(folder, tuple(text))[-1]
            for text, logits in tree_and_following(decoder, start)
        ]
        differences[f"tree after {start}"] = torch.stack(rows)
    return {
        name: float(difference.abs().max() / largest) for name, difference in differences.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, folders: Folders) -> None:
    differences = largest_differences(load(folders(case)), folders(case))
    assert max(differences.values()) < TOLERANCE, differences


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3"])
def test_greedy_output_is_that_of_transformers(family: str, folders: Folders) -> None:
    model, verifier = reference(folders(family)), make_verifier(load(folders(family)))
    prompt = random_tokens(10)
    tokens = list(prompt)
    for _ in range(40):
        logits = verifier.logits(verifier.read(tokens[verifier.cache.length :])[-1:])
        verifier.cache.keep(range(len(tokens) - verifier.cache.length))
        tokens.append(int(logits.argmax()))
    model.generation_config.eos_token_id = None
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0
    )
    assert tokens == expected[0].tolist()


GEMMA_FEATURES: list[dict[str, Any]] = [
    {"layer_kinds": ()},
    {"has_post_norms": False},
    {"has_offset_norms": False},
    {"attention_scale": None},
    {"embedding_scale": None},
    {"activation": "silu"},
]
DROPPED: list[tuple[str, dict[str, Any]]] = [
    ("llama2", {"rms_norm_eps": 0.1}),
    ("llama3", {"layer_kinds": (LayerKind({"rope_type": "default", "rope_theta": 5e5}),) * 3}),
    ("mistral", {"layer_kinds": ()}),
    ("phi3", {"layer_kinds": ()}),
    ("qwen3", {"has_head_norms": False}),
    *((family, changes) for family in ("gemma2", "gemma3") for changes in GEMMA_FEATURES),
    ("gemma2", {"attention_softcap": None}),
    ("gemma2", {"logit_softcap": None}),
    ("gemma3", {"has_head_norms": False}),
]


@on_one_path
@pytest.mark.parametrize(("family", "changes"), DROPPED, ids=lambda value: str(value)[:40])
def test_a_dropped_feature_shows(
    family: str, changes: dict[str, Any], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_with(monkeypatch, lambda config: replace(config, **changes))
    differences = largest_differences(load(folders(family)), folders(family))
    assert max(differences.values()) > 100 * TOLERANCE


@on_one_path
@pytest.mark.parametrize(
    ("family", "change"), [("mistral", -1), ("phi3", 1), ("gemma2", -1), ("gemma3", 1)]
)
def test_a_window_off_by_one_shows(
    family: str, change: int, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(config: DecoderConfig) -> DecoderConfig:
        kinds = [
            kind if kind.window is None else replace(kind, window=kind.window + change)
            for kind in config.layer_kinds
        ]
        return replace(config, layer_kinds=tuple(kinds))

    load_with(monkeypatch, shifted)
    differences = largest_differences(load(folders(family)), folders(family))
    assert min(differences.values()) > 10 * TOLERANCE, differences


@on_one_path
def test_one_rotary_table_for_both_kinds_of_layers_shows(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def same_rope(config: DecoderConfig) -> DecoderConfig:
        kinds = tuple(replace(kind, rope=config.rope) for kind in config.layer_kinds)
        return replace(config, layer_kinds=kinds)

    load_with(monkeypatch, same_rope)
    differences = largest_differences(load(folders("gemma3")), folders("gemma3"))
    assert min(differences.values()) > 100 * TOLERANCE


@on_one_path
@pytest.mark.parametrize("case", ["qwen2", "llama-biases"])
def test_dropped_biases_show(case: str, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    load_with(monkeypatch, lambda config: replace(config, biased=()))
    contains = StoredTensors.__contains__
    monkeypatch.setattr(
        StoredTensors,
        "__contains__",
        lambda weights, name: not name.endswith(".bias") and contains(weights, name),
    )
    differences = largest_differences(load(folders(case)), folders(case))
    assert min(differences.values()) > 100 * TOLERANCE


def load_with(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[DecoderConfig], DecoderConfig]
) -> None:
    """Checkpoints are loaded as if their configs said something else."""
    monkeypatch.setattr(
        "polybasic.chain.formats.checkpoints.config.decoder_config",
        lambda raw, where: change(decoder_config(raw, where)),
    )


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, (torch.bfloat16, torch.float16)[place % 2]) for place, family in enumerate(FAMILIES)],
)
def test_half_precision_rounds_no_more_than_transformers(
    family: str, dtype: torch.dtype, folders: Folders
) -> None:
    """The measure is how far transformers' own logits in this dtype are from those in float32."""
    folder, ids = folders(family), random_tokens(60)
    exact = reference(folder)(torch.tensor([ids])).logits[0]
    theirs = reference(folder, dtype)(torch.tensor([ids])).logits[0].float()
    decoder = load(folder, dtype)
    ours = consecutive_logits(decoder, ids, [20, *range(21, 30), 60]).float()
    assert decoder.dtype == dtype
    assert (ours - exact).pow(2).mean() < 1.5 * (theirs - exact).pow(2).mean()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("case", "group_size"), [("llama-biases", 128), ("qwen3", 64), ("phi3", 32), ("gemma2", 128)]
)
def test_4_bit_copies_compute_their_dequantized_weights(
    case: str, group_size: int, folders: Folders, tmp_path: Path, kernels: str
) -> None:
    """The measure is how far the dequantized model in bfloat16 is from itself in float32.

    Eager operations round to bfloat16, too; the native kernels round rows to eight bits.
    """
    source, ids = folders(case), random_tokens(40)
    write_4bit(tmp_path, source, group_size)
    awq, dense = load(tmp_path / "awq"), load(tmp_path / "dense")
    check_shapes("awq", tmp_path / "awq", awq.config, group_size)
    ends = [25, 26, 27, 40]
    exact = consecutive_logits(dense, ids, ends)
    rounded = consecutive_logits(load(tmp_path / "dense", torch.bfloat16), ids, ends).float()
    error = (consecutive_logits(awq, ids, ends) - exact).pow(2).mean()
    allowed = {"eager": 1.5, "native": 10, "device": 0.1}[kernels]
    assert error < allowed * (rounded - exact).pow(2).mean()
    # the model before it was rounded to 4 bits is far away
    unquantized = consecutive_logits(load(source), ids, ends)
    assert (unquantized - exact).pow(2).mean() > 20 * error
    assert awq.config.cache_shape == load(source).config.cache_shape


def test_decoders_of_different_kinds_of_layers_share_no_cache(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [load(folders(case)).config.cache_shape for case in ("mistral", "mistral-no-window")]
    assert shapes[0] != shapes[1]
    load_with(monkeypatch, lambda config: replace(config, rope=config.rope | {"rope_theta": 2e4}))
    assert load(folders("mistral-no-window")).config.cache_shape != shapes[1]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "num_tokens"), [("mistral", 2), ("mistral", 9), ("gemma2", 3), ("gemma3", 9)]
)
def test_drafts_look_back_as_far_as_the_window(
    family: str, num_tokens: int, tmp_path: Path
) -> None:
    """Scores of all candidates, in a tree that is deeper than the window."""
    write_family(tmp_path, family, sliding_window=4)
    model, tokens = reference(tmp_path), random_tokens(num_tokens)
    drafter = ModelDrafter(load(tmp_path), Tree(depth=6, top_k=2, rows=23), CAPACITY)
    drafter.observe(torch.zeros(num_tokens - 1, 1))
    candidates = drafter.candidates(tokens, 6)
    tree = candidates.keep_best(tokens[-1], len(candidates.tokens) + 1)
    assert max(tree.depths()) == 6
    scores = [0.0]
    for row in range(1, len(tree)):
        path = [tree.parents[row]]
        while path[0] > 0:
            path.insert(0, tree.parents[path[0]])
        text = tokens[:-1] + [tree.tokens[node] for node in path]
        logits = model(torch.tensor([text])).logits[0, -1]
        law = logits.log_softmax(-1)
        scores.append(scores[tree.parents[row]] + float(law[tree.tokens[row]]))
    torch.testing.assert_close(candidates.scores, torch.tensor(scores[1:]), rtol=0, atol=1e-3)


@on_one_path
@pytest.mark.parametrize("case", CASES)
def test_shapes_of_all_families_are_checked(case: str, folders: Folders) -> None:
    check_shapes("decoder", folders(case), read_config(folders(case)).decoder)


@on_one_path
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen2", "self_attn.q_proj.bias"),
        ("qwen3", "self_attn.k_norm.weight"),
        ("phi3", "self_attn.qkv_proj.weight"),
        ("phi3", "mlp.gate_up_proj.weight"),
        ("gemma2", "pre_feedforward_layernorm.weight"),
        ("gemma3", "post_feedforward_layernorm.weight"),
    ],
)
def test_what_a_family_needs_is_missed(
    family: str, name: str, folders: Folders, tmp_path: Path
) -> None:
    full_name = f"model.layers.1.{name}"
    tensors = {key: tensor.clone() for key, tensor in load_tensors(folders(family)).items()}
    tensor = tensors.pop(full_name)
    (tmp_path / "config.json").write_bytes((folders(family) / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_config(tmp_path).decoder
    with pytest.raises(UserError, match=f"missing tensor: {full_name} in"):
        check_shapes("decoder", tmp_path, config)
    with pytest.raises(UserError, match=f"weight missing: {full_name} in"):
        load(tmp_path)
    save_file(tensors | {full_name: tensor[:-2].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=f"tensor shape mismatch: {full_name} in"):
        check_shapes("decoder", tmp_path, config)


@on_one_path
@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_a_wrong_rotary_scaling_shows(rope_type: str, folders: Folders) -> None:
    config = read_config(folders(f"llama-{rope_type}")).decoder
    assert config.rope["rope_type"] == rope_type
    scaled, _ = inverse_frequency(config.rope, config.head_dim, config.context_tokens)
    plain, factor = inverse_frequency(
        {"rope_type": "default", "rope_theta": 1e4}, config.head_dim, config.context_tokens
    )
    assert factor == 1.0
    assert (plain / scaled).max() == pytest.approx(4.0)


@on_one_path
def test_a_head_sees_all_that_its_model_sees(folders: Folders, tmp_path: Path) -> None:
    config = json.loads((folders("qwen-windows") / "config.json").read_text())
    one_layer = {"num_hidden_layers": 1, "layer_types": None, "max_window_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config | one_layer))
    assert read_config(tmp_path).decoder.layer_kinds != ()
    assert read_config(tmp_path).head.layer_kinds == ()
