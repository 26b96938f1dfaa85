"""What a user of transformers would run instead: its own loops over the source target."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from polybasic.chain.base.errors import UserError
from polybasic.chain.base.progress import waiting
from polybasic.chain.formats.manifest import Member
from polybasic.deploy.bench.systems.compiled_loop import CompiledLoop
from polybasic.deploy.bench.systems.fastest_loop import (
    LoopChoice,
    Way,
    candidate_attentions,
    candidate_dtypes,
    fastest_way,
    set_attention,
)
from polybasic.deploy.bench.systems.generate_loops import GenerateLoop, load_for_generate
from polybasic.deploy.bench.systems.system import System, TimedAnswer
from polybasic.deploy.runtime.chain import Chain
from polybasic.deploy.runtime.rounds.sampling import Sampling

LOOKUP_TOKENS = 10
"""That prompt lookup copies at most: what the authors of the method recommend."""
LACKING = "independent draft model that transformers loads, which it does not with 4 bits"
_PLAIN = "transformers generate() on the source target"


def transformers_systems(
    names: Sequence[str],
    chain: Chain,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    say: Callable[[str], None],
) -> tuple[list[System], dict[str, str]]:
    """The systems of these names that run here, over one model.

    Args:
        names: of hf_generate, hf_static, hf_prompt_lookup and hf_assisted; others are passed over.
        prompts: token ids of all that will be asked: the dtype and attention are chosen for the
            median length, the static cache is as long as the longest one needs.
        max_new_tokens: of each answer.
        say: takes a line for people before what takes long.

    Returns:
        The systems in the order of `names`, and for each one that does not run here, why.

    Raises:
        UserError: hf_assisted in a chain without a model that transformers can draft with.
    """
    names = [name for name in names if name.startswith("hf_")]
    if not names:
        return [], {}
    drafting = drafting_model(chain)
    if "hf_assisted" in names and drafting is None:
        raise UserError(
            "system without members",
            f"hf_assisted in bench.systems; {chain.folder} has no {LACKING}",
            "leave it out",
        )
    by_length = sorted(prompts, key=len)
    usual, longest = by_length[len(by_length) // 2], by_length[-1]
    say("transformers: which dtype and attention are fastest here")
    with waiting("timing transformers' dtypes and attentions"):
        model, choice = _fastest(chain, usual, max_new_tokens)
    cache_tokens = len(longest) + max_new_tokens
    systems: dict[str, System] = {}
    left_out: dict[str, str] = {}
    for name in names:
        if name == "hf_generate":
            described = f"{_PLAIN}, {choice.way.attention} attention"
            systems[name] = GenerateLoop(name, described, model, chain.stop_tokens)
            systems[name].notes = (choice.shown,)
        elif name == "hf_prompt_lookup":
            described = (
                f"{_PLAIN} with prompt_lookup_num_tokens={LOOKUP_TOKENS}: drafts are copied from "
                "prompt and answer, and verified greedily or by sampling from the target"
            )
            settings = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
            systems[name] = GenerateLoop(name, described, model, chain.stop_tokens, settings)
        elif name == "hf_assisted":
            assert drafting is not None
            described = (
                f"{_PLAIN} with assistant_model={drafting.name}: it drafts up to 20 tokens while "
                "it is confident, verified greedily or by speculative sampling"
            )
            assistant = load_for_generate(
                chain.member_folders[drafting.name], choice.way.dtype, model.device
            )
            set_attention(assistant, choice.way.attention)
            systems[name] = GenerateLoop(
                name, described, model, chain.stop_tokens, assistant=assistant
            )
        elif name == "hf_static":
            say(f"{name}: transformers compiles the target, which can take minutes")
            described = (
                f"{_PLAIN} with a static cache of {cache_tokens} tokens, which all answers fit, "
                "and passes of one token compiled by its default CompileConfig; compiling is not "
                "timed"
            )
            compiled = CompiledLoop(name, described, model, chain.stop_tokens, cache_tokens)
            with waiting("compiling the target"):
                reason = _why_not_compiled(compiled, usual)
            if reason is None:
                systems[name] = compiled
            else:
                left_out[name] = reason
    return list(systems.values()), left_out


def drafting_model(chain: Chain) -> Member | None:
    """The independent draft model, or else the smallest model of the chain, that is not in 4 bits.

    Of neither kind there is one in a chain of a target, its 4-bit copy and a head: then None.
    """
    target, *intermediates = chain.manifest.verifying
    drafters = [member for member in chain.manifest.drafters if target.name in member.drafts_for]
    for member in (*drafters, *reversed(intermediates)):
        if member.kind == "decoder":
            return member
    return None


def _fastest(
    chain: Chain, prompt: list[int], new_tokens: int
) -> tuple[PreTrainedModel, LoopChoice]:
    """The target in the way in which transformers answers fastest; its other copies are dropped."""
    target = chain.engine.models.target
    num_parameters = chain.manifest.members[0].num_parameters
    dtypes, left_out = candidate_dtypes(target.dtype, target.device, num_parameters)
    models = {
        dtype: load_for_generate(chain.target_folder, dtype, target.device) for dtype in dtypes
    }
    loops = {
        dtype: GenerateLoop("hf_generate", _PLAIN, model, chain.stop_tokens)
        for dtype, model in models.items()
    }

    def answer(way: Way, prompt: list[int], num_tokens: int) -> TimedAnswer:
        set_attention(models[way.dtype], way.attention)
        return loops[way.dtype].answer(prompt, num_tokens, Sampling(), num_tokens)

    ways = [
        Way(dtype, attention)
        for dtype, model in models.items()
        for attention in candidate_attentions(model)
    ]
    choice = fastest_way(ways, answer, prompt, new_tokens)
    model = models[choice.way.dtype]
    set_attention(model, choice.way.attention)
    return model, replace(choice, left_out=left_out)


def _why_not_compiled(loop: CompiledLoop, prompt: list[int]) -> str | None:
    """Compile for a loop; what to tell where that does not work, else None."""
    try:
        is_compiled = loop.compile(prompt)
    except RuntimeError as error:  # of torch.compile and of the compilers that it calls
        first, *others = [line.strip() for line in f"{error}".splitlines() if line.strip()] or [""]
        said = " ".join([first, *others[:1]] if first.endswith(":") else [first]).rstrip(".")
        return f"torch.compile fails on it: {said or type(error).__name__}"
    return None if is_compiled else "transformers compiles nothing of it on this machine"
