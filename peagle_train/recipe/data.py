"""The recipe's section `data`: where prompts come from, and how the target answers them."""

from __future__ import annotations

import datetime
from typing import Annotated, Literal

from pydantic import Field, field_validator

from peagle_train.recipe.section import Column, Count, Index, Positive, Section, SetName, Share, Text


class SourceKeys(Section):
    """Where prompts come from, and how a row there is to be read."""

    source: Text | None = Field(
        default=None,
        description="`stdlib` (requests made from Python's standard library), `humaneval`, a preset "
        "(`peagle sources` lists them), `hub:OWNER/NAME`, or a file, folder, glob or URL of JSONL, JSON or "
        "Parquet",
    )
    subset: Text | None = Field(default=None, description="Hub: configuration of the dataset")
    part: Text | None = Field(default=None, description="Hub: which of its splits is read, e.g. train_sft")
    revision: Text | None = Field(
        default=None, description="Hub: revision; a commit hash makes the run repeatable"
    )
    columns: dict[Column, Text] = Field(
        default={},
        description="our name: the name in the data; left out: `messages` or `prompt`, and `id`, `tools`",
    )
    roles: dict[Text, Literal["system", "user", "assistant", "tool"]] = Field(
        default={}, description="their name of a role: ours, e.g. human: user; left out: the same names"
    )


class MixPart(SourceKeys):
    """A share of a mix."""

    source: Text = Field(description="as that of a set")
    weight: Positive = Field(default=1.0, description="its share of the mix, against the others' weights")


class PromptSet(SourceKeys):
    """Some prompts, of one source or of several."""

    mix: Annotated[list[MixPart], Field(min_length=1)] | None = Field(
        default=None, description="several sources in place of `source`"
    )
    split: Literal["train", "validation", "heldout", "all"] = Field(
        default="all", description="which part of the source; the parts share no prompt"
    )
    count: Count | None = Field(default=None, description="how many prompts; left out: all of them")

    @property
    def parts(self) -> list[MixPart]:
        """The sources, one or several."""
        if self.mix is not None:
            return self.mix
        assert self.source is not None  # a rule of the recipe: one of the two
        return [MixPart(**{key: getattr(self, key) for key in SourceKeys.model_fields})]


class Sampling(Section):
    """One way in which the target is asked; each prompt draws one by the hash of its content."""

    weight: Positive = Field(default=1.0, description="its share of the prompts, against the others' weights")
    temperature: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0,
        description="0: greedy; only training prompts are asked otherwise: what is measured is greedy",
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(default=1.0, description="of the sampling")
    template_variables: dict[SetName, bool | int | float | str] = Field(
        default={}, description="put over data.template_variables, e.g. reasoning_effort: low"
    )


class ServerSection(Section):
    """An OpenAI-compatible server of the target that answers in place of this process."""

    url: Text = Field(description="its base URL, e.g. http://localhost:8000/v1")
    model: Text | None = Field(
        default=None, description="name under which it serves the target; left out: the only one it serves"
    )
    api_key_env: Text | None = Field(
        default=None, description="environment variable that holds the key; left out: no key is sent"
    )
    concurrency: Count = Field(default=64, description="requests in flight")
    timeout: Positive = Field(default=600.0, description="seconds until a request counts as failed")
    retries: Index = Field(
        default=5, description="further attempts of a failed request, each after a longer pause"
    )
    max_failures: Share = Field(
        default=0.01, description="the run ends with an error above this share of prompts without answer"
    )


class DataSection(Section):
    """Prompts, and how the target answers them."""

    train: PromptSet = Field(description="the head learns from the answers to these")
    validation: PromptSet = Field(description="picks the best checkpoint; never trained on")
    heldout: Annotated[dict[SetName, PromptSet], Field(min_length=1)] = Field(
        description="sets to report on, by name; used once, after training"
    )
    system_prompt: str | None = Field(
        default=None, description="system turn put before every prompt; left out: the template's own default"
    )
    template_variables: dict[SetName, bool | int | float | str] = Field(
        default={}, description="what the chat template reads besides the turns, e.g. reasoning_effort: low"
    )
    date: Text | None = Field(
        default=None,
        description="YYYY-MM-DD, the day that a chat template is told as today; templates that ask need it",
    )
    turns: Literal["last", "each"] = Field(
        default="last",
        description="last: a conversation stands as it is and its last turn is answered; each: every user "
        "turn is answered in order, the target's own answers taking the place of those in the data",
    )
    sampling: list[Sampling] = Field(
        default=[], description="temperatures and template variables by share; left out: all greedy"
    )
    server: ServerSection | None = Field(
        default=None, description="a server that answers; left out: the target is loaded here"
    )
    decontaminate: list[Text] = Field(
        default=[],
        description="benchmarks whose text train and validation must not hold: humaneval, gsm8k-test, "
        "mt-bench, or a file",
    )
    max_rejects: Share = Field(
        default=0.01,
        description="the run ends with an error above this share of unreadable rows; fewer are counted and "
        "quoted in rejects.jsonl",
    )
    min_prompt_tokens: Index = Field(default=0, description="shorter prompts are left out and counted")
    max_prompt_tokens: Count = Field(
        default=256, description="longer prompts, their history included, are left out and counted"
    )
    max_new_tokens: Count = Field(default=64, description="an answer is cut here and counted as truncated")
    batch_size: Count = Field(
        default=32, description="rows answered at once; the unit that is redone after a kill"
    )
    workers: Count | None = Field(
        default=None, description="single-thread processes on a CPU; left out: one per core, one on a GPU"
    )

    @field_validator("date")
    @classmethod
    def _date_is_a_day(cls, text: str | None) -> str | None:
        try:
            good = text is None or datetime.date.fromisoformat(text).isoformat() == text
        except ValueError:
            good = False
        if not good:
            raise ValueError(f"found the text {text!r}; expected a day as YYYY-MM-DD, e.g. 2025-12-31")
        return text

    @property
    def day(self) -> datetime.date | None:
        """`date` as a date."""
        return None if self.date is None else datetime.date.fromisoformat(self.date)
