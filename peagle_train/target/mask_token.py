"""The mask token: the id whose embedding stands at every drafted position after the first.

It must be an id that never comes up otherwise. Were it a token of the data, its embedding would mean
two things; were it the pad token, its row might never learn (`padding_idx`). So the id is named in
the recipe or is a row of the table that no text can produce; it is never chosen as a last resort.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from peagle_train.errors import PeagleError

UNUSED = "unused"
_ROLES = ("pad", "eos", "bos", "unk", "sep", "cls", "mask")
_SHOWN = 8


def resolve_mask_token(
    spec: int | str, tokenizer: Any, vocab_size: int, used_ids: Collection[int] | None
) -> int:
    """The id that a recipe's `head.mask_token` means.

    Args:
        spec: an id, the text of one token, or `unused`.
        tokenizer: the target's, of transformers.
        vocab_size: rows of the target's embedding table.
        used_ids: ids that occur in the data; None before there is any.

    Raises:
        PeagleError: for an id outside the table; for pad, eos, bos, unk and whatever the chat template
            writes, end of turn included; for an id in the data; for a text that is not one token; and
            for `unused` where every row has a token.
    """
    if spec == UNUSED:
        return _unused_row(tokenizer, vocab_size, used_ids or ())
    token_id = _one_token(spec, tokenizer, used_ids, vocab_size) if isinstance(spec, str) else spec
    fault = _fault(token_id, tokenizer, vocab_size, used_ids or ())
    if fault is not None:
        raise PeagleError(
            f"head.mask_token: {spec!r} {fault}. {_advice(tokenizer, vocab_size, used_ids or ())}"
        )
    return token_id


def _one_token(spec: str, tokenizer: Any, used_ids: Collection[int] | None, vocab_size: int) -> int:
    ids: list[int] = tokenizer.encode(spec, add_special_tokens=False)
    if len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and spec != tokenizer.unk_token):
        raise PeagleError(
            f"head.mask_token: {spec!r} is not one token of the target's tokenizer "
            f"but {len(ids)} ({ids[:_SHOWN]}). " + _advice(tokenizer, vocab_size, used_ids or ())
        )
    return ids[0]


def _fault(token_id: int, tokenizer: Any, vocab_size: int, used_ids: Collection[int]) -> str | None:
    """Why an id cannot be the mask token; None where it can."""
    if not 0 <= token_id < vocab_size:
        return f"is outside the target's embedding table, whose ids run from 0 to {vocab_size - 1}"
    for role in _ROLES:
        if getattr(tokenizer, f"{role}_token_id", None) == token_id:
            return f"is the tokenizer's {role} token (id {token_id})"
    if token_id in _template_ids(tokenizer):
        return f"is id {token_id}, which the chat template writes"
    if token_id in used_ids:
        return f"is id {token_id}, which occurs in the data"
    return None


def _template_ids(tokenizer: Any) -> set[int]:
    """Added tokens (end of turn, roles, tool marks) whose text stands in the chat template."""
    template = tokenizer.chat_template or ""
    texts = template if isinstance(template, str) else "\n".join(template.values())
    return {id for text, id in tokenizer.get_added_vocab().items() if text in texts}


def _unused_row(tokenizer: Any, vocab_size: int, used_ids: Collection[int]) -> int:
    """The first row of the table for which the tokenizer has no token."""
    named = set(tokenizer.get_vocab().values())
    for token_id in range(vocab_size):
        if token_id not in named and token_id not in used_ids:
            return token_id
    raise PeagleError(
        f"head.mask_token: `{UNUSED}` finds nothing: each of the {vocab_size} rows of the target's table "
        "has a token. " + _advice(tokenizer, vocab_size, used_ids, look_for_rows=False)
    )


def _advice(tokenizer: Any, vocab_size: int, used_ids: Collection[int], *, look_for_rows: bool = True) -> str:
    """What to write instead: candidates are named, the choice is the user's."""
    candidates = [
        f"{text} ({id})"
        for text, id in sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1])
        if _fault(id, tokenizer, vocab_size, used_ids) is None
    ]
    named = len({id for id in tokenizer.get_vocab().values() if id < vocab_size})
    rows = f"`{UNUSED}` (the table has {vocab_size - named} rows without a token) or "
    start = "Name " + (rows if look_for_rows and named < vocab_size else "")
    if not candidates:
        return start + "the id of a token that neither your data nor the template holds."
    more = f" and {len(candidates) - _SHOWN} more" if len(candidates) > _SHOWN else ""
    examples = ", ".join(candidates[:_SHOWN])
    return f"{start}a reserved token that your data does not hold, for example {examples}{more}."
