"""Which of a tokenizer's tokens are more than text: those that steer, that end, that stand in reserve."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from peagle_train.errors import PeagleError

# `<unused12>` (Gemma), `<|reserved_special_token_4|>` (Llama 3), `<|reserved_200013|>` (gpt-oss).
_RESERVE = re.compile(r"unused|reserved", re.IGNORECASE)


def control_texts(tokenizer: Any) -> set[str]:
    """Texts of added tokens that are special or look like markup; added runs of spaces do not count."""
    texts = set()
    for token in tokenizer.added_tokens_decoder.values():
        bracketed = token.content.startswith(("<", "[")) and token.content.endswith((">", "]"))
        if token.content.strip() and (token.special or bracketed):
            texts.add(token.content)
    return texts


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Added tokens that ordinary text never holds, by id: special ones, and those kept in reserve.

    Gemma does not mark its `<unusedN>` special. Others without that mark are left out: `<think>`,
    `<table>` and runs of spaces are text.
    """
    return {
        id: token.content
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special or is_reserve(token.content)
    }


def is_reserve(text: str) -> bool:
    """Whether a token's text says that it stands in reserve and means nothing."""
    return _RESERVE.search(text) is not None


def end_tokens(named: int | list[int] | None, tokenizer: Any, target: str) -> tuple[int, ...]:
    """The tokens at which an answer ends, as vLLM stops: rising, without repeats.

    named: `eos_token_id` of the generation config. Raises PeagleError where there is none at all.
    """
    ends = {*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id} - {None}
    if not ends:
        raise PeagleError(
            f"target {target}: neither generation_config.json nor the tokenizer names an end-of-text token, "
            "so no answer would ever end. Add `eos_token_id` to generation_config.json."
        )
    return tuple(sorted(ends))


def end_tokens_of(folder: Path, tokenizer: Any, target: str, *, trust_remote_code: bool) -> tuple[int, ...]:
    """As `end_tokens`, of a target's folder: without its weights, yet what the loaded model would say."""
    from transformers import AutoConfig, GenerationConfig

    if (folder / "generation_config.json").is_file():
        settings = GenerationConfig.from_pretrained(folder)
    else:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        settings = GenerationConfig.from_model_config(config)
    return end_tokens(settings.eos_token_id, tokenizer, target)
