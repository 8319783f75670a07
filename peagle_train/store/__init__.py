"""What data preparation leaves on the disk: answers (text and token ids) and hidden states (tensors).

    answers/  batch-00000.jsonl ... index.json            -> AnswerStore
    states/   batch-00000.safetensors + .json ... index.json -> StateStore

Both are written batch by batch, each batch whole or not at all, and sealed by `index.json`; both
carry the fingerprint of everything they were made from.
"""

from peagle_train.store.answers import AnswerRow, AnswerStore, AnswerWriter, SetCounts
from peagle_train.store.states import (
    RowInfo,
    StateRow,
    StateStore,
    StateWriter,
    bytes_per_token,
    stored_bytes,
    stored_bytes_at_most,
)

__all__ = [
    "AnswerRow",
    "AnswerStore",
    "AnswerWriter",
    "RowInfo",
    "SetCounts",
    "StateRow",
    "StateStore",
    "StateWriter",
    "bytes_per_token",
    "stored_bytes",
    "stored_bytes_at_most",
]
