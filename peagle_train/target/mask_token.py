"""The mask token: the id whose embedding stands at every drafted position after the first.

It must be an id that never comes up otherwise. Were it a token of the data, its embedding would mean
two things; were it the pad token, its row might never learn (`padding_idx`). So the id is named in
the recipe or is a row of the table that no text can produce; it is never chosen as a last resort.

                                            can be the mask token
    row without a token                     yes; `unused` takes the first
    token in reserve (`<unused0>`)          yes, named
    other special token                     yes, named, unless it has a role, ends answers, or the
                                            chat template writes it
    any other token                         no: it is text
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from peagle_train.errors import PeagleError
from peagle_train.target.tokens import is_reserve, special_tokens

UNUSED = "unused"
_ROLES = ("pad", "eos", "bos", "unk", "sep", "cls", "mask")
_SHOWN = 8


def resolve_mask_token(
    spec: int | str,
    tokenizer: Any,
    vocab_size: int,
    used_ids: Collection[int] | None,
    end_token_ids: Collection[int] = (),
) -> int:
    """The id that a recipe's `head.mask_token` means.

    Args:
        spec: an id, the text of one token, or `unused`.
        tokenizer: the target's, of transformers.
        vocab_size: rows of the target's embedding table.
        used_ids: ids that occur in the data; None before there is any.
        end_token_ids: the tokens that end an answer.

    Raises:
        PeagleError: for an id outside the table; for pad, eos, bos, unk, whatever ends an answer and
            whatever the chat template writes; for an id in the data; for a token that is text; for a
            text that is not one token; and for `unused` where every row has a token.
    """
    table = _Table(tokenizer, vocab_size, used_ids or (), end_token_ids)
    if spec == UNUSED:
        free = table.free_rows()
        if not free:
            raise PeagleError(
                f"head.mask_token: `{UNUSED}` finds nothing: each of the {vocab_size} rows of the target's "
                f"table has a token. {table.advice()}"
            )
        return free[0]
    token_id = _one_token(spec, tokenizer, table) if isinstance(spec, str) else spec
    fault = table.fault(token_id)
    if fault is not None:
        raise PeagleError(f"head.mask_token: {spec!r} {fault}. {table.advice()}")
    return token_id


def _one_token(spec: str, tokenizer: Any, table: _Table) -> int:
    ids: list[int] = tokenizer.encode(spec, add_special_tokens=False)
    if len(ids) != 1 or (ids[0] == tokenizer.unk_token_id and spec != tokenizer.unk_token):
        raise PeagleError(
            f"head.mask_token: {spec!r} is not one token of the target's tokenizer "
            f"but {len(ids)} ({ids[:_SHOWN]}). {table.advice()}"
        )
    return ids[0]


class _Table:
    """What the rows of the target's embedding table are used for."""

    def __init__(
        self, tokenizer: Any, vocab_size: int, used_ids: Collection[int], end_token_ids: Collection[int]
    ):
        self._tokenizer = tokenizer
        self._size = vocab_size
        self._used = used_ids
        self._ends = end_token_ids
        self._named = set(tokenizer.get_vocab().values())
        self._special = special_tokens(tokenizer)
        template = tokenizer.chat_template or ""
        texts = template if isinstance(template, str) else "\n".join(template.values())
        # End of turn, roles, tool marks.
        self._written = {id for id, text in self._special.items() if text in texts}

    def fault(self, token_id: int) -> str | None:
        """Why an id cannot be the mask token; None where it can."""
        if not 0 <= token_id < self._size:
            return f"is outside the target's embedding table, whose ids run from 0 to {self._size - 1}"
        for role in _ROLES:
            if getattr(self._tokenizer, f"{role}_token_id", None) == token_id:
                return f"is the tokenizer's {role} token (id {token_id})"
        if token_id in self._ends:
            return f"is id {token_id}, which ends an answer"
        if token_id in self._written:
            return f"is id {token_id}, which the chat template writes"
        if token_id in self._named and token_id not in self._special:
            text = self._tokenizer.convert_ids_to_tokens(token_id)
            return f"is id {token_id}, the ordinary token {text!r}, which any text may hold"
        if token_id in self._used:
            return f"(id {token_id}) occurs in the data"
        return None

    def free_rows(self) -> list[int]:
        """The rows for which the tokenizer has no token, rising."""
        return [id for id in range(self._size) if id not in self._named and self.fault(id) is None]

    def advice(self) -> str:
        """What to write instead: candidates are named, the choice is the user's."""
        fit = [(id, text) for id, text in sorted(self._special.items()) if self.fault(id) is None]
        # A token in reserve means nothing; another special one may mean something to somebody.
        fit = [(id, text) for id, text in fit if is_reserve(text)] or fit
        free = len(self.free_rows())
        rows = f"`{UNUSED}` (the table has {free} rows without a token) or " if free else ""
        if not fit:
            return f"Name {rows}the id of a token that neither your data nor the template holds."
        more = f" and {len(fit) - _SHOWN} more" if len(fit) > _SHOWN else ""
        examples = ", ".join(f"{text} ({id})" for id, text in fit[:_SHOWN])
        return f"Name {rows}a reserved token that your data does not hold, for example {examples}{more}."
