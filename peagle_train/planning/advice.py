"""What a recipe is allowed to do and will probably regret: each with its cure."""

from __future__ import annotations

from collections.abc import Iterator

from peagle_train.planning.lengths import Lengths
from peagle_train.planning.work import Work
from peagle_train.recipe.data import PromptSet
from peagle_train.recipe.schema import Recipe
from peagle_train.target.known import Known

CUT = 0.25
"""Share of the answers cut short above which a user is warned: the paper lost up to 25 % of the acceptance
length to short training rows."""

MANY_EPOCHS = 20
BENCHMARKS = ("humaneval", "gsm8k-test", "mt-bench")


def advice(recipe: Recipe, known: Known | None, lengths: Lengths, work: Work, device: str) -> Iterator[str]:
    """One sentence each: key, what is doubtful, what to do.

    known: of the target, if anything is. device: on which training is planned.
    """
    yield from _against_the_published_head(recipe, known)
    yield from _lengths(recipe, lengths)
    yield from _epochs(recipe, lengths, work)
    yield from _precision(recipe, device)
    yield from _benchmarks(recipe)
    yield from _states(recipe)


def _against_the_published_head(recipe: Recipe, known: Known | None) -> Iterator[str]:
    published = known.published if known is not None else None
    if published is None or recipe.method != "peagle":
        return
    if published.positions is not None and recipe.train.positions < published.positions:
        yield (
            f"train.positions: {recipe.train.positions}, and {published.head} was trained for "
            f"{published.positions}; the best K when serving is often 7 to 11: set "
            f"train.positions={published.positions}"
        )
    if published.k is not None and recipe.evaluate.k > published.k:
        yield (
            f"evaluate.k: {recipe.evaluate.k}, and {published.head} was reported at {published.k}: to "
            f"compare, evaluate.k={published.k}"
        )


def _lengths(recipe: Recipe, lengths: Lengths) -> Iterator[str]:
    data, cut = recipe.data, lengths.train.cut
    if cut is not None and cut > CUT:
        yield (
            f"data.max_new_tokens: {data.max_new_tokens:,} cuts {100 * cut:.0f} % of the training answers; "
            "short rows cost acceptance in long ones (arXiv 2602.01469: up to 25 %): raise it, with "
            "train.batch_tokens, or count on it"
        )
    if lengths.unknown:
        yield (
            f"data: the number of prompts of {', '.join(lengths.unknown)} is the source's, which a plan "
            f"does not read; disk and epochs are without them: name data.{lengths.unknown[0]}.count"
        )


def _epochs(recipe: Recipe, lengths: Lengths, work: Work) -> Iterator[str]:
    epochs = work.epochs
    if epochs is None or lengths.train.rows is None:
        return
    if epochs < 1:
        yield (
            f"train.steps: {recipe.train.steps:,} are {epochs:.2f} epochs, so rows are answered and stored "
            f"that nobody trains on: lower data.train.count to {int(lengths.train.rows * epochs):,}, or "
            f"raise train.steps to {round(recipe.train.steps / epochs):,}"
        )
    if epochs > MANY_EPOCHS and recipe.train.patience is None:
        yield (
            f"train.steps: {epochs:.0f} epochs over the same rows: raise data.train.count, or set "
            "train.patience so that training ends when validation stops rising"
        )


def _precision(recipe: Recipe, device: str) -> Iterator[str]:
    if recipe.states.dtype == "float16":
        yield (
            "states.dtype: float16 ends at 65,504, and single channels of large models go beyond: bfloat16 "
            "has the same size"
        )
    if recipe.train.precision == "bf16" and device == "cpu":
        yield (
            "train.precision: bf16 on a CPU is slower than fp32 and keeps buffers that no plan counts: fp32"
        )
    if recipe.train.precision == "fp32" and device == "cuda":
        yield (
            "train.precision: fp32 on a GPU takes several times as long as bf16, which keeps float32 masters"
        )
    if recipe.target.dtype == "float32" and device == "cuda":
        yield "target.dtype: float32 doubles the target's memory on a GPU: bfloat16"


def _benchmarks(recipe: Recipe) -> Iterator[str]:
    data = recipe.data
    reported = {source for part in data.heldout.values() for source in _sources(part)}
    trained = _sources(data.train) | _sources(data.validation)
    left = sorted((reported & set(BENCHMARKS)) - set(data.decontaminate))
    if left and trained - {"stdlib"}:
        yield (
            f"data.decontaminate: {', '.join(left)} is reported on, and nothing keeps its text out of the "
            f"training prompts: data.decontaminate=[{','.join(left)}]"
        )


def _states(recipe: Recipe) -> Iterator[str]:
    if recipe.states.mode != "stored":
        yield (
            f"states.mode: {recipe.states.mode} runs the target beside the training; its memory is not in "
            "the figures above: give it GPUs of its own with target.device=cuda:N"
        )


def _sources(part: PromptSet) -> set[str]:
    return {source.source for source in part.parts}
