"""Only ids that nothing else uses become the mask token, and none is ever picked as a last resort."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from peagle_train.errors import PeagleError
from peagle_train.target.mask_token import resolve_mask_token
from peagle_train.twin.models import MASK_TOKENS, TOKENIZERS, TWINS
from peagle_train.twin.tokenizers import SHAPES, save_tokenizer

VOCAB = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(Path(folder))
    return AutoTokenizer.from_pretrained(folder)


def test_an_id_a_text_and_a_free_row(tokenizer: Any) -> None:
    assert resolve_mask_token(3, tokenizer, VOCAB, set()) == 3
    assert resolve_mask_token("<repo_name>", tokenizer, VOCAB, {7, 8}) == 3
    assert resolve_mask_token(200, tokenizer, VOCAB, None) == 200
    assert resolve_mask_token("unused", tokenizer, VOCAB, {7, 8}) == len(tokenizer)


def test_unused_fills_holes_below_the_last_token(tokenizer: Any) -> None:
    class WithHole:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def get_vocab(self) -> dict[str, int]:
            return {text: id for text, id in tokenizer.get_vocab().items() if id != 60}

    assert resolve_mask_token("unused", WithHole(), VOCAB, None) == 60
    assert resolve_mask_token("unused", WithHole(), VOCAB, {60}) == len(tokenizer)


@pytest.mark.parametrize(
    ("spec", "used", "reason"),
    [
        (0, None, "unk token"),
        (1, None, "bos token"),
        (2, None, "pad token"),
        ("<|im_end|>", None, "pad token"),
        ("<|endoftext|>", None, "unk token"),
        (VOCAB, None, "from 0 to 255"),
        (-1, None, "from 0 to 255"),
        (5, None, "ordinary token '!'"),
        ("the", None, "ordinary token 'the'"),
        (3, {3}, "occurs in the data"),
        ("<repo_name>", {3}, "occurs in the data"),
        ("two words", None, "not one token"),
        ("é", None, "not one token"),
        ("", None, "not one token"),
    ],
)
def test_refused(tokenizer: Any, spec: int | str, used: set[int] | None, reason: str) -> None:
    with pytest.raises(PeagleError, match=reason) as caught:
        resolve_mask_token(spec, tokenizer, VOCAB, used)
    assert "<file_sep> (4)" in str(caught.value)


def test_what_ends_an_answer_is_refused(tokenizer: Any) -> None:
    with pytest.raises(PeagleError, match="id 4, which ends an answer") as caught:
        resolve_mask_token("<file_sep>", tokenizer, VOCAB, None, end_token_ids=(2, 4))
    assert "<repo_name> (3)" in str(caught.value) and "(4)" not in str(caught.value)


@pytest.mark.parametrize("twin", sorted(TWINS))
def test_each_familys_advice_leads_to_its_mask_token(twin: str, tmp_path: Path) -> None:
    family, vocab = TOKENIZERS[twin], 448
    save_tokenizer(tmp_path, family, vocab)
    made, shape = AutoTokenizer.from_pretrained(tmp_path), SHAPES[family]
    ends = made.convert_tokens_to_ids(list(shape.ends))
    assert resolve_mask_token(shape.mask, made, vocab, None, ends) == MASK_TOKENS[twin]
    # Ordinary text, a token of the format and every end are refused, each time with the family's cure.
    cure = "`unused` (the table has" if shape.mask == "unused" else f"{shape.mask} ({MASK_TOKENS[twin]})"
    for spec in ["the", made.eos_token, *ends]:
        with pytest.raises(PeagleError) as caught:
            resolve_mask_token(spec, made, vocab, None, ends)
        assert cure in str(caught.value)


def test_gemmas_added_text_is_neither_allowed_nor_advised(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "gemma4", 448)
    made = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("\n\n", "▁▁", "<table>"):
        with pytest.raises(PeagleError, match="ordinary token") as caught:
            resolve_mask_token(made.convert_tokens_to_ids(text), made, 448, None)
        assert "for example <unused0> (6), <unused1> (7), <unused2>" in str(caught.value)
    with pytest.raises(PeagleError, match="mask token"):
        resolve_mask_token("<mask>", made, 448, None)


def test_what_the_template_writes_is_refused(tokenizer: Any) -> None:
    class OtherTemplate:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        chat_template = "{{ '<file_sep>' + messages[0]['content'] }}"

    with pytest.raises(PeagleError, match="chat template writes") as caught:
        resolve_mask_token("<file_sep>", OtherTemplate(), VOCAB, None)
    assert "<repo_name> (3)" in str(caught.value)


def test_a_full_table_names_candidates_and_chooses_none(tokenizer: Any) -> None:
    with pytest.raises(PeagleError, match="finds nothing") as caught:
        resolve_mask_token("unused", tokenizer, len(tokenizer), {4})
    assert "<repo_name> (3)" in str(caught.value) and "<file_sep>" not in str(caught.value)
