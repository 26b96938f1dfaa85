"""Where the prompts come from that a plan or a report is measured on."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from polybasic.chain.formats.files import sha256_of_file
from polybasic.chain.formats.manifest import Provenance
from polybasic.deploy.prompts import read_questions
from polybasic.deploy.settings import BenchSettings, PlanSettings
from polybasic.recipes.pipeline.downloads import fetch, is_url
from polybasic.recipes.schema.recipe import NUM_TASKS, asks_heldout

PROMPTS_NAME = "prompts.jsonl"
PLAN_PROMPTS_NAME = "plan_prompts.jsonl"
"""In the folder of stage data: what is generated or downloaded, or taken from conversations."""
SettingsT = TypeVar("SettingsT", PlanSettings, BenchSettings)
_ON_COMMAND_LINE = "--prompts"


@dataclass(frozen=True)
class PromptSource:
    """What `prompts` of a section says.

    Attributes:
        named: the value.
        key: that it was given under, for errors.
        num_per_task: of generated prompts.
        seed: of generated prompts.
        conversations: of section data; those of the run that made the chain.
        has_groups: whether topics that are new to the chain's heads are told apart, as generated
            prompts can be where heads learned from the embedded conversations.
    """

    named: str
    key: str
    num_per_task: int
    seed: int
    conversations: str = "embedded"
    has_groups: bool = True

    @property
    def shown(self) -> str:
        """For people, without a folder."""
        if self.is_heldout:
            return f"held-out turns of {Path(self.conversations).name}"
        if self.is_embedded:
            return "embedded"
        return self.named if self.file is None else self.file.name

    @property
    def is_embedded(self) -> bool:
        """Whether they are generated."""
        return self.named == "embedded" or (self.named == "auto" and not self.is_heldout)

    @property
    def is_heldout(self) -> bool:
        """Whether they are first turns of held-out conversations, which only a run has."""
        is_file = self.named == "heldout" and self.key == _ON_COMMAND_LINE
        return asks_heldout(self.named, self.conversations) and not is_file

    @property
    def is_url(self) -> bool:
        """Whether they are downloaded."""
        return is_url(self.named)

    @property
    def file(self) -> Path | None:
        """The question file that is named; None where one is yet to be written."""
        is_written = self.is_embedded or self.is_heldout or self.is_url
        return None if is_written else Path(self.named)

    def write(self, path: Path) -> Path:
        """Generate or download them to `path`; where a file is named nothing is written.

        Returns:
            The question file.

        Raises:
            UserError: the download failed, or brought no questions.
        """
        if self.is_embedded:
            from polybasic.recipes.embedded.conversations import write_prompts

            write_prompts(path, self.num_per_task, self.seed, self.has_groups)
        elif self.is_url:
            fetch(self.named, path, self.key)
            read_questions(path)
        assert not self.is_heldout, "stage data has the conversations"
        return self.file or path


def bench_prompts(
    settings: BenchSettings,
    seed: int,
    key: str = "bench.prompts",
    conversations: str = "embedded",
) -> PromptSource:
    """Those of a report; `seed` is the recipe's, and so is `conversations`, of section data."""
    has_groups = conversations == "embedded"
    num = settings.num_prompts_per_task
    return PromptSource(settings.prompts, key, num, seed, conversations, has_groups)


def plan_prompts(
    settings: PlanSettings,
    seed: int,
    key: str = "plan.prompts",
    conversations: str = "embedded",
) -> PromptSource:
    """Those of a plan, generated from another seed: it is not judged on what it was chosen by."""
    num = settings.num_prompts_per_task
    return PromptSource(settings.prompts, key, num, seed + 1, conversations)


def with_prompts(settings: SettingsT, source: PromptSource, path: Path) -> SettingsT:
    """Settings that name a file of prompts: as many, of held-out turns of any number of tasks."""
    num = settings.num_prompts_per_task
    if source.is_heldout:
        num_tasks = len({question.task for question in read_questions(path)})
        num = math.ceil(num * NUM_TASKS / num_tasks)
    return settings.model_copy(update={"prompts": str(path), "num_prompts_per_task": num})


def prompts_of_run(
    source: PromptSource, chain: Path, made: Provenance, name: str
) -> tuple[PromptSource, Path | None]:
    """The held-out prompts of the run that made a chain, where its folder is still around it.

    Args:
        source: names held-out conversations.
        chain: its folder.
        made: as its manifest says.
        name: PROMPTS_NAME or PLAN_PROMPTS_NAME.

    Returns:
        The source and its file; generated prompts and None where the file is not there, or is not
        the one that the run wrote.
    """
    section = made.recipe.get("plan" if name == PLAN_PROMPTS_NAME else "bench", {})
    path = chain.resolve().parent / "data" / name
    if (
        asks_heldout(section.get("prompts", ""), source.conversations)
        and path.is_file()
        and sha256_of_file(path) == made.data_digests.get(path.stem)
    ):
        return source, path
    return replace(source, named="embedded"), None
