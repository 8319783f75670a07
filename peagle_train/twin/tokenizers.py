"""Small real tokenizers of the target families: their order of ids, their control tokens, their chat format.

A family's tokenizer has few merges, but what stands where is as in the real one, because that decides
what can be a mask token and where an answer ends:

    smollm2    specials | bytes (ASCII) | merges | rows without a token
    llama3     bytes | merges | specials, reserved ones to the table's end: the table is full
    qwen2/3    bytes | merges | specials | rows without a token
    gpt_oss    bytes | merges | specials and a few reserved | rows without a token
    gemma4     specials | pieces | byte fallback | letters | media marks | reserved: the table is full

The chat templates are those of templates.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from peagle_train.twin import templates

MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("o", "n"), ("a", "n"), ("Ġ", "a"), ("Ġ", "the")]
_ORDINARY = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]


@dataclass(frozen=True)
class TokenizerShape:
    """One family's tokenizer.

    build: makes the bare tokenizer for a table of so many rows.
    roles: bos, eos, pad, ... by the text of the token.
    ends: the tokens that generation_config.json lists as ends of an answer.
    mask: what a recipe's `head.mask_token` should be, and `mask_id` the id it means.
    """

    build: Callable[[int], Tokenizer]
    template: str
    roles: dict[str, str]
    ends: Sequence[str]
    mask: str
    mask_id: int


def save_tokenizer(folder: Path, family: str = "smollm2", vocab: int = 256) -> Any:
    """Writes the family's tokenizer for a table of `vocab` rows into `folder`; returns it.

    Raises ValueError where the table is too small for it.
    """
    shape = SHAPES[family]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=shape.build(vocab), chat_template=shape.template, **shape.roles
    )
    if len(tokenizer) > vocab:
        raise ValueError(f"vocab must be at least {len(tokenizer)}, the size of the {family} tokenizer")
    tokenizer.save_pretrained(folder)
    return tokenizer


def _added(bare: Tokenizer, texts: Sequence[str], plain: Sequence[str] = ()) -> Tokenizer:
    """Adds `texts` in order; those in `plain` are not marked special."""
    for text in texts:
        token = AddedToken(text, special=text not in plain, normalized=False)
        (bare.add_tokens if text in plain else bare.add_special_tokens)([token])
    return bare


def _byte_level(texts: Sequence[str], **settings: Any) -> Tokenizer:
    bare = Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(texts)}, merges=MERGES, **settings))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    return bare


# --- SmolLM2: the target that travels in a package. Only ASCII, so that other text becomes unk.

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]


def _smollm2(vocab: int) -> Tokenizer:
    letters = [chr(code) for code in range(33, 127)] + ["Ċ", "Ġ"]
    texts = [*SPECIALS, *letters, *("".join(merge) for merge in MERGES)]
    return _added(_byte_level(texts, unk_token=SPECIALS[0]), SPECIALS)


# --- Llama 3

_LLAMA3 = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
]


def _llama3(vocab: int) -> Tokenizer:
    left = vocab - len(_ORDINARY) - len(_LLAMA3)
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(3, 3 + left)]
    return _added(_byte_level(_ORDINARY), [*_LLAMA3, *reserved])


# --- Qwen

_QWEN2 = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MEDIA = ["object_ref_start", "object_ref_end", "box_start", "box_end", "quad_start", "quad_end"]
_MEDIA += ["vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
QWEN_PLAIN = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"]
QWEN_PLAIN += ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"]
QWEN_PLAIN += ["<think>", "</think>"]
QWEN3 = [*_QWEN2, *(f"<|{name}|>" for name in _MEDIA), *QWEN_PLAIN]


def _qwen2(vocab: int) -> Tokenizer:
    return _added(_byte_level(_ORDINARY), _QWEN2)


def _qwen3(vocab: int) -> Tokenizer:
    return _added(_byte_level(_ORDINARY), QWEN3, QWEN_PLAIN)


# --- gpt-oss: harmony

HARMONY = {0: "startoftext", 1: "endoftext", 4: "return", 5: "constrain", 7: "channel", 8: "start", 9: "end"}
HARMONY |= {10: "message", 14: "call", 20: "endofprompt"}


def harmony(first: int) -> list[str]:
    """The 21 tokens that gpt-oss' tokenizer names behind its ordinary ones, the first with id `first`."""
    return [f"<|{HARMONY.get(place, f'reserved_{first + place}')}|>" for place in range(21)]


def _gpt_oss(vocab: int) -> Tokenizer:
    return _added(_byte_level(_ORDINARY), harmony(len(_ORDINARY)))


# --- Gemma 4: pieces with a visible space and byte fallback, as SentencePiece makes them

_GEMMA4 = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "[multimodal]", "<unused0>", "<unused1>"]
_GEMMA4 += ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"]
_GEMMA4 += ["<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>']
_GEMMA4_PLAIN = ["\n\n", "▁▁", "<table>", "</table>"]  # added, yet ordinary text
GEMMA4_MEDIA = {"boi": "<|image>", "eoi": "<image|>", "image": "<|image|>", "audio": "<|audio|>"}
GEMMA4_MEDIA |= {"video": "<|video|>"}


def _gemma4(vocab: int) -> Tokenizer:
    merges = [(a.replace("Ġ", "▁"), b) for a, b in MERGES]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "\n", *(chr(code) for code in range(33, 127)), *("".join(merge) for merge in merges)]
    media = list(GEMMA4_MEDIA.values())
    texts = [*_GEMMA4, *_GEMMA4_PLAIN, *pieces, *media]
    reserved = [f"<unused{number}>" for number in range(2, 2 + vocab - len(texts))]
    bare = Tokenizer(
        models.BPE(
            vocab={text: id for id, text in enumerate([*texts, *reserved])},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    bare.normalizer = normalizers.Replace(" ", "▁")
    bare.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    # Their unused tokens are added but not marked special; of a table of real width some hundred will do,
    # since each costs the tokenizer's start a moment.
    reserved = reserved[:400]
    plain = [text for text in [*_GEMMA4, *reserved] if "unused" in text] + _GEMMA4_PLAIN
    return _added(bare, [*_GEMMA4, *_GEMMA4_PLAIN, *media, *reserved], plain)


SHAPES = {
    "smollm2": TokenizerShape(
        _smollm2,
        templates.CHATML,
        {
            "unk_token": SPECIALS[0],
            "bos_token": SPECIALS[1],
            "eos_token": SPECIALS[2],
            "pad_token": SPECIALS[2],
        },
        ["<|im_end|>"],
        "<repo_name>",
        3,
    ),
    "llama3": TokenizerShape(
        _llama3,
        templates.LLAMA3,
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        "<|reserved_special_token_0|>",
        266,
    ),
    "qwen2": TokenizerShape(
        _qwen2,
        templates.CHATML,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ["<|im_end|>", "<|endoftext|>"],
        "unused",
        267,
    ),
    "qwen3": TokenizerShape(
        _qwen3,
        templates.QWEN3,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ["<|im_end|>", "<|endoftext|>"],
        "unused",
        290,
    ),
    "qwen3_moe": TokenizerShape(
        _qwen3,
        templates.QWEN3_CODER,
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ["<|im_end|>", "<|endoftext|>"],
        "unused",
        290,
    ),
    "gpt_oss": TokenizerShape(
        _gpt_oss,
        templates.HARMONY,
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"},
        ["<|return|>", "<|endoftext|>", "<|call|>"],
        "unused",
        285,
    ),
    "gemma4": TokenizerShape(
        _gemma4,
        templates.GEMMA4,
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "mask_token": "<mask>",
        },
        ["<eos>", "<turn|>"],
        "<unused0>",
        6,
    ),
}
