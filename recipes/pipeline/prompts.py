"""Where the prompts come from that a plan or a report is measured on."""

from dataclasses import dataclass
from pathlib import Path

from polybasic.deploy.prompts import read_questions
from polybasic.deploy.settings import BenchSettings, PlanSettings
from polybasic.recipes.pipeline.downloads import fetch, is_url


@dataclass(frozen=True)
class PromptSource:
    """What `prompts` of a section says: generated or held-out prompts, a URL or a question file.

    Attributes:
        named: the value.
        key: that it was given under, for errors.
        num_per_task: of generated prompts.
        seed: of generated prompts.
        has_groups: whether topics that are new to the chain's heads are told apart, as generated
            prompts can be where heads learned from the embedded conversations.
    """

    named: str
    key: str
    num_per_task: int
    seed: int
    has_groups: bool = True

    @property
    def shown(self) -> str:
        """For people, without a folder."""
        return self.named if self.file is None else self.file.name

    @property
    def is_embedded(self) -> bool:
        """Whether they are generated."""
        return self.named == "embedded"

    @property
    def is_heldout(self) -> bool:
        """Whether they are first turns of held-out conversations, which only a recipe has."""
        return self.named == "heldout" and self.key == "plan.prompts"

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
        assert not self.is_heldout, "the stage that plans has the conversations"
        return self.file or path


def bench_prompts(
    settings: BenchSettings,
    seed: int,
    key: str = "bench.prompts",
    conversations: str = "embedded",
) -> PromptSource:
    """Those of a report; `seed` is the recipe's, and so is `conversations`, of section data."""
    has_groups = conversations == "embedded"
    return PromptSource(settings.prompts, key, settings.num_prompts_per_task, seed, has_groups)


def plan_prompts(settings: PlanSettings, seed: int, key: str = "plan.prompts") -> PromptSource:
    """Those of a plan, generated from another seed: it is not judged on what it was chosen by."""
    return PromptSource(settings.prompts, key, settings.num_prompts_per_task, seed + 1)
