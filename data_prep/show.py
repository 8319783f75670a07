"""`peagle prepare RECIPE --show N`: rows as the head will learn them, supervised tokens marked.

On a terminal supervised tokens are green; elsewhere they stand between >> and <<, so that a log or a
pipe shows the same.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from data_prep.plan import prepare_parts, target_folder
from peagle_train.errors import PeagleError
from peagle_train.files import fingerprint
from peagle_train.run import Run
from peagle_train.store import AnswerRow, AnswerStore
from peagle_train.store.answers import INDEX

_OPEN, _CLOSE = ">>", "<<"


def show(run: Run, n: int, console: Console) -> None:
    """Prints the first `n` rows, dealt from all sets in turn.

    Raises PeagleError, with the command to run, if `prepare` has not finished for this recipe.
    """
    from transformers import AutoTokenizer

    if not (run.answers_dir / INDEX).is_file():
        raise PeagleError(f"{run.answers_dir}: no finished answers yet; run `{run.command_for('prepare')}`")
    folder = target_folder(run, console)
    store = AnswerStore(run.answers_dir, expected=fingerprint(prepare_parts(run, folder)))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=run.recipe.target.trust_remote_code)
    for row in _dealt(store.rows(), n):
        console.print(marked(row, tokenizer, colour=console.is_terminal), soft_wrap=True)


def marked(row: AnswerRow, tokenizer: Any, *, colour: bool) -> Text:
    """One row as text: counts and spans, the tokens with the supervised ones marked, the ids."""
    total, supervised = len(row.token_ids), row.supervised
    about = f"{total} tokens, {supervised} supervised, spans {row.spans}, finish {row.finish}"
    if row.temperature:
        about += f", temperature {row.temperature:g}"
    if row.stopped:
        about += f", later turns not asked: {row.stopped}"
    text = Text(f"--- row {row.row}  set {row.set}  {row.id}\n    {about}\n")
    for flag, run in groupby(zip(row.token_ids, row.loss_mask, strict=True), key=lambda pair: pair[1]):
        piece = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        if flag and not colour:
            piece = f"{_OPEN}{piece}{_CLOSE}"
        text.append(piece, style="bold green" if flag and colour else "")
    text.append("\n    ids: ")
    for token, flag in zip(row.token_ids, row.loss_mask, strict=True):
        label = f"{token} " if colour or not flag else f"*{token} "
        text.append(label, style="bold green" if flag and colour else "dim" if colour else "")
    return text.append("\n")


def _dealt(rows: list[AnswerRow], n: int) -> list[AnswerRow]:
    """`n` rows, one of each set in turn."""
    seen: dict[str, int] = {}
    ranked = []
    for row in rows:
        seen[row.set] = seen.get(row.set, -1) + 1
        ranked.append((seen[row.set], row.row, row))
    return [row for _, _, row in sorted(ranked, key=lambda entry: entry[:2])[:n]]
