"""The classes of target that were checked, and where each is peculiar.

The adapter reaches every class in the same way (`get_decoder()`, its `layers`, its `norm`, the
output embedding). Whatever differs stands in this table and nowhere else. A class that is not here
may well work, but nobody has compared its tapped states and its distribution with the model's own,
so it is refused until somebody does. What the table should say but does not is found when a target is
loaded: see self_check.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from peagle_train.errors import PeagleError


@dataclass(frozen=True)
class Family:
    """What one class does differently from a plain Llama.

    attention: implementation asked of transformers. GptOss has attention sinks, which torch's
        fused attention cannot express, so it runs eagerly.
    softcap_key: the key of the text config that caps the logits (`cap * tanh(logits / cap)`), if any.
    rope_group: classes with one RoPE per kind of layer keep them in a mapping; a head attends
        without a window, so its RoPE is that of this kind.
    experts: its MLPs are experts, so their width is no measure for a head's.
    """

    attention: str = "sdpa"
    softcap_key: str | None = None
    rope_group: str | None = None
    experts: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
    "Qwen3MoeForCausalLM": Family(experts=True),
    "GptOssForCausalLM": Family(attention="eager", experts=True),
    "Gemma4ForCausalLM": Family(softcap_key="final_logit_softcapping", rope_group="full_attention"),
    "Gemma4ForConditionalGeneration": Family(
        softcap_key="final_logit_softcapping", rope_group="full_attention"
    ),
}


def family_of(class_name: str) -> Family:
    """The table's entry for a class of transformers; PeagleError for a class that was not checked."""
    if class_name not in FAMILIES:
        raise PeagleError(
            f"target class {class_name}: not supported; expected one of {', '.join(FAMILIES)}. "
            "To support it, add it to peagle_train/target/families.py with its peculiarities, and a "
            "tiny twin to peagle_train/twin/models.py; the tests then compare its states and distribution."
        )
    return FAMILIES[class_name]
