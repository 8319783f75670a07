"""`peagle extract RECIPE --repair`: finds damaged states, so that extract makes just those anew.

Every byte is read and compared with its checksum. Damaged batches are set aside, to states.damaged/ (at a URL
to FINGERPRINT.damaged/), and the stage counts as unfinished again: what is whole stays as it is.
"""

from __future__ import annotations

from rich.console import Console

from data_prep.plan import amount, extract_parts, states_plan
from peagle_train.errors import CorruptError, PeagleError
from peagle_train.files import fingerprint
from peagle_train.run import Run
from peagle_train.stages import read_record, reopen, require
from peagle_train.store.format import INDEX, read_object


def repair(run: Run, console: Console) -> None:
    """Sets the damaged batches of a run's states aside; the stage `extract` makes them anew.

    Raises PeagleError: there are no stored states of this recipe.
    """
    parts = extract_parts(run, require(run, "prepare"))
    directory, record = run.states_dir, read_record(run.states_dir)
    if run.recipe.states.mode != "stored" or record is None or record.fingerprint != fingerprint(parts):
        raise PeagleError(
            f"{directory}: found no stored states of this recipe; expected them, to be repaired; run "
            f"`{run.command_for('extract')}`"
        )
    writer = states_plan(run, parts).writer()
    stored = sum(path.stat().st_size for path in directory.glob("batch-*"))
    console.print(f"reading every batch of {directory} ({amount(stored)})", highlight=False, markup=False)
    damaged = writer.damaged()
    for fault in damaged.values():
        console.print(f"damaged: {fault}", style="yellow", highlight=False, markup=False)
    if not damaged and (record.finished is None or _has_index(run)):
        console.print("nothing is damaged", highlight=False)
        return
    writer.drop(damaged)
    if record.finished is not None:
        reopen(directory)
    console.print(
        f"{len(damaged)} batches set aside; what is whole stays as it is", highlight=False, markup=False
    )


def _has_index(run: Run) -> bool:
    try:
        return bool(read_object(run.states_dir / INDEX))
    except (CorruptError, FileNotFoundError):
        return False
