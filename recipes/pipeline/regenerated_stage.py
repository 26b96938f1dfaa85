"""The stages in which the target writes questions, and answers all conversations again, before
anything learns from them.

Heavy modules are imported where they run, so that a run with nothing to do answers at once.
"""

import asyncio
import sys
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polybasic.chain.base.processes.coordinator import broadcast_from_first
from polybasic.chain.base.processes.place import Place
from polybasic.chain.formats.files import sha256_of_file
from polybasic.recipes.pipeline.running import PipelineStage, Workspace
from polybasic.recipes.pipeline.sources import (
    CONVERSATIONS_NAME,
    REGENERATED,
    SELF_PROMPTED,
    checkpoint_of,
    tokenizer_of,
)
from polybasic.recipes.schema.recipe import Recipe
from polybasic.train.settings import RegenerateSettings

if TYPE_CHECKING:
    from polybasic.deploy.runtime.answering import LoneTarget
    from polybasic.deploy.runtime.rounds.warping import Sampling
    from polybasic.train.answers.answerer import Answerer, AskedPrompt, WrittenTurn
    from polybasic.train.data.chat import UserTurn

ANSWERS_NAME = "answers"
"""Folder of journals. It lies beside those of the stages: what makes this stage run anew, such as
another `data.limit`, leaves the answers that are there good."""
_ALONE = Place()


def _question_inputs(workspace: Workspace) -> dict[str, Any]:
    recipe = workspace.recipe
    target, num = workspace.identity("target"), recipe.data.self_prompted
    return {"target": target, "self_prompted": num, "seed": recipe.seed}


def _write_questions(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.chain.formats.tokenizer import load_tokenizer
    from polybasic.train.answers.self_prompting import write_questions

    num = workspace.recipe.data.self_prompted
    assert num is not None, "the stage is there for the questions"
    return write_questions(
        load_tokenizer(tokenizer_of(workspace), "target's tokenizer"),
        _runtime(workspace),
        num=num,
        identity={"target": workspace.identity("target")},
        seed=workspace.recipe.seed,
        journals=workspace.out / ANSWERS_NAME,
        out=folder,
    )


def _identify_questions(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.train.answers.self_prompting import QUESTIONS_NAME

    return {"questions": sha256_of_file(folder / QUESTIONS_NAME)}


def _questions(workspace: Workspace) -> list[str]:
    """What the target has written, as the recipe asks for."""
    from polybasic.train.answers.self_prompting import QUESTIONS_NAME, read_questions

    if workspace.recipe.data.self_prompted is None:
        return []
    return read_questions(workspace.folder(SELF_PROMPTED) / QUESTIONS_NAME)


def _settings(workspace: Workspace) -> RegenerateSettings:
    settings = workspace.recipe.data.regenerate
    assert settings is not None, "the stage is there for the section"
    return settings


def _inputs(workspace: Workspace) -> dict[str, Any]:
    """How the target is asked, of a server or with graphs, may differ between two runs."""
    data, settings = workspace.recipe.data, _settings(workspace)
    inputs: dict[str, Any] = {
        "target": workspace.identity("target"),
        "through": "runtime" if settings.endpoint is None else "endpoint",
        "conversations": workspace.identity("data")["conversations"],
        "data": data.model_dump(include={"limit", "max_tokens"}),
        "regenerate": settings.model_dump(include={"model", "max_new_tokens", "temperature"}),
    }
    if settings.temperature:
        inputs["seed"] = workspace.recipe.seed
    if data.self_prompted is not None:
        inputs[SELF_PROMPTED] = workspace.identity(SELF_PROMPTED)
    return inputs


def _run(workspace: Workspace, folder: Path) -> dict[str, Any]:
    from polybasic.chain.base.processes.launching import in_processes

    if _settings(workspace).endpoint is not None:
        summary = broadcast_from_first(lambda: _regenerate(workspace, folder, _server(workspace)))
    else:
        arguments = {"workspace": workspace, "folder": folder}
        num_processes = workspace.recipe.train.num_processes
        summary = in_processes(_regenerate_here, arguments, num_processes)
    if summary["num_failed"]:
        done = workspace.folder(REGENERATED)
        print(f"to ask again for what failed alone: remove {done} and run again", file=sys.stderr)
    return summary


def _regenerate_here(workspace: Workspace, folder: Path) -> dict[str, Any]:
    """Through this runtime, in each of the processes."""
    from polybasic.chain.base.processes.group import process_group

    with process_group() as place:
        return _regenerate(workspace, folder, _runtime(workspace), place)


def _regenerate(
    workspace: Workspace,
    folder: Path,
    opened: "AbstractAsyncContextManager[Answerer]",
    place: Place = _ALONE,
) -> dict[str, Any]:
    from polybasic.chain.formats.tokenizer import load_tokenizer
    from polybasic.train.answers.regeneration import regenerate

    return regenerate(
        workspace.recipe.data.conversations,
        workspace.recipe.data,
        load_tokenizer(tokenizer_of(workspace), "target's tokenizer"),
        opened,
        identity={"target": workspace.identity("target")},
        seed=workspace.recipe.seed,
        journals=workspace.out / ANSWERS_NAME,
        out=folder,
        self_prompted=_questions(workspace),
        place=place,
    )


def _server(workspace: Workspace) -> "AbstractAsyncContextManager[Answerer]":
    """The server that the recipe names."""
    from polybasic.chain.formats.checkpoints.config import read_config
    from polybasic.train.answers.endpoint import open_endpoint

    target = checkpoint_of(workspace, "target")
    print(
        f"data.regenerate.endpoint must serve {target}, with the same chat template",
        file=sys.stderr,
    )
    return open_endpoint(_settings(workspace), read_config(target).decoder.context_tokens)


def _runtime(workspace: Workspace) -> "nullcontext[RuntimeAnswerer]":
    """This runtime."""
    from polybasic.chain.formats.checkpoints.config import read_config
    from polybasic.deploy.runtime.answering import LoneTarget, answering_dtype

    target, settings = checkpoint_of(workspace, "target"), _settings(workspace)
    config = read_config(target)
    # longer prompts are not asked
    most = workspace.recipe.data.max_tokens + settings.max_new_tokens
    context_tokens = min(config.decoder.context_tokens, most)
    # by timings, which differ from process to process
    dtype = broadcast_from_first(lambda: answering_dtype(config))
    target_here = LoneTarget(
        target,
        tokenizer_of(workspace),
        context_tokens,
        sequences=settings.num_parallel,
        dtype=dtype,
        graphs=settings.graphs,
    )
    return nullcontext(RuntimeAnswerer(target_here, context_tokens))


class RuntimeAnswerer:
    """This runtime as one who answers, and who writes questions."""

    def __init__(self, target: "LoneTarget", context_tokens: int) -> None:
        self._target = target
        self.context_tokens = context_tokens
        self.num_parallel = target.sequences
        self.identity: dict[str, Any] = {"through": "runtime"}

    async def answer(self, prompt: "AskedPrompt") -> "WrittenTurn":
        """Answer one prompt, as the checkpoint's defaults say beside the temperature."""
        sampling = replace(self._target.sampling, temperature=prompt.temperature, seed=prompt.seed)
        return await self._complete(prompt.token_ids, prompt.max_new_tokens, sampling)

    async def write(self, turn: "UserTurn", seed: int) -> "WrittenTurn":
        """Write one question, whatever the checkpoint's defaults say: they are made for answers."""
        from polybasic.deploy.runtime.rounds.warping import Sampling
        from polybasic.train.answers.self_prompting import MOST_TOKENS, TEMPERATURE, TOP_P

        room = self.context_tokens - len(turn.token_ids)
        sampling = Sampling(temperature=TEMPERATURE, top_p=TOP_P, seed=seed)
        return await self._complete(
            turn.token_ids, min(MOST_TOKENS, room), sampling, turn.stop_tokens
        )

    async def _complete(
        self,
        token_ids: list[int],
        max_new_tokens: int,
        sampling: "Sampling",
        stop_tokens: Iterable[int] = (),
    ) -> "WrittenTurn":
        """Go on behind a prompt; an interrupt takes effect between two passes of the target.

        Whoever waits for a text runs the next pass, which brings all of them forward.
        """
        from polybasic.train.answers.answerer import WrittenTurn

        running = self._target.begin(token_ids, max_new_tokens, sampling, stop_tokens)
        with closing(running):
            while not running.is_over:
                self._target.step()
                await asyncio.sleep(0)
            is_cut = running.statistics.stopped_by == "length"
            tokens = [token for piece in running.take() for token in piece.token_ids]
        return WrittenTurn(self._target.text(tokens), is_cut)


def _identify(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return {"conversations": sha256_of_file(folder / CONVERSATIONS_NAME)}


# what is written, which is their progress, lies in the journals, outside of the stages' folders
SELF_PROMPTED_STAGE = PipelineStage(
    SELF_PROMPTED, ("target",), _question_inputs, _write_questions, _identify_questions, ()
)


def regenerated_stage(recipe: Recipe) -> PipelineStage:
    """The stage of the answers, behind that of the questions where the target writes some."""
    needs = ("data", "target", *([SELF_PROMPTED] if recipe.data.self_prompted else []))
    return PipelineStage(REGENERATED, needs, _inputs, _run, _identify, progress=(), is_of_all=True)
