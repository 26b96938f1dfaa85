"""Where the prompts come from that a plan or a report is measured on."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from polybasic.chain.formats.files import sha256_of_file
from polybasic.chain.formats.manifest import Provenance
from polybasic.deploy.planner.prompts import read_questions, write_first_turns
from polybasic.deploy.planner.settings import BenchSettings, PlanSettings
from polybasic.recipes.pipeline.downloads import fetch, is_url
from polybasic.recipes.schema.recipe import NUM_TASKS, asks_heldout
from polybasic.train.data.shipped import NUM_HELDOUT, heldout_shipped
from polybasic.train.settings import SHIPPED

PROMPTS_NAME = "prompts.jsonl"
PLAN_PROMPTS_NAME = "plan_prompts.jsonl"
"""In the folder of stage data: what is downloaded, or taken from conversations."""
SettingsT = TypeVar("SettingsT", PlanSettings, BenchSettings)
_ON_COMMAND_LINE = "--prompts"


@dataclass(frozen=True)
class PromptSource:
    """What `prompts` of a section says.

    Attributes:
        named: the value.
        key: that it was given under, for errors.
        num_per_task: that are asked at most.
        part: of the held-out shipped conversations: 0 for plans, 1 for reports.
        conversations: of section data; those of the run that made the chain, "" where none did.
        num_heldout: shipped conversations, where heads learned from these.
    """

    named: str
    key: str
    num_per_task: int
    part: int
    conversations: str
    num_heldout: int = NUM_HELDOUT

    @property
    def shown(self) -> str:
        """For people, without a folder."""
        if self.is_heldout:
            return f"held-out turns of {Path(self.conversations).name}"
        if self.is_shipped:
            return SHIPPED
        return self.named if self.file is None else self.file.name

    @property
    def is_shipped(self) -> bool:
        """Whether they are first turns of shipped conversations, of those that are held out."""
        return self.named == SHIPPED or (self.named == "auto" and not self.conversations)

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
    def is_kept(self) -> bool:
        """Whether a run keeps them in stage data, beside the conversations."""
        return self.is_heldout or self.is_shipped or self.is_url

    @property
    def file(self) -> Path | None:
        """The question file that is named; None where one is yet to be written."""
        return None if self.is_kept else Path(self.named)

    def write(self, path: Path) -> Path:
        """Write them to `path`, where no file is named.

        Returns:
            The question file.

        Raises:
            UserError: the download failed, or brought no questions.
        """
        if self.is_shipped:
            by_task = sorted(heldout_shipped(self.num_heldout), key=lambda row: row["task"])
            write_first_turns(by_task[self.part :: 2], [path])
        elif self.is_url:
            fetch(self.named, path, self.key)
            read_questions(path)
        assert not self.is_heldout, "stage data has the conversations"
        return self.file or path


def bench_prompts(
    settings: BenchSettings, conversations: str, key: str = "bench.prompts"
) -> PromptSource:
    """Those of a report; `conversations` as the recipe has them in section data."""
    return PromptSource(settings.prompts, key, settings.num_prompts_per_task, 1, conversations)


def plan_prompts(
    settings: PlanSettings, conversations: str, key: str = "plan.prompts"
) -> PromptSource:
    """Those of a plan, of another part: it is not judged on what it was chosen by."""
    return PromptSource(settings.prompts, key, settings.num_prompts_per_task, 0, conversations)


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
        The source and its file; shipped prompts and None where the file is not there, or is not
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
    data = made.recipe.get("data", {})
    learned = (
        data.get("num_heldout", NUM_HELDOUT) if source.conversations == SHIPPED else NUM_HELDOUT
    )
    return replace(source, named=SHIPPED, num_heldout=learned), None
