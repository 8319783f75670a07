"""What the rest of the program may know about a target without loading its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from peagle_train.errors import PeagleError
from peagle_train.target.families import family_of
from peagle_train.target.quantised import quantisation_of

# Keys that change what a model computes and leave no trace in its weights. (What has weights, a norm, a
# bias, a sink, is noticed when they are loaded.) RoPE's keys end up in `rope_parameters`, which is read.
_ARITHMETIC = re.compile(
    r"(?!rope_|initializer_).*(softcap|multiplier|scal(e|ing|ar)s?(_|$)|parallel_residual|clip_qkv|alibi"
    r"|sliding_window$|temperature)"
)


class KVLayer(NamedTuple):
    """What one decoder layer keeps in a KV cache. window: positions it sees; None: all."""

    window: int | None
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class TargetFacts:
    """Sizes and settings of a target, read from its own configuration.

    model: the target as the recipe names it.
    class_name: class of transformers, the first of `architectures`.
    num_layers: decoder layers L; aux layer ids run from 0 (embeddings) to L.
    rope_theta, rope_scaling: base, and the rest of the RoPE settings (None: plain RoPE). For classes
        with one RoPE per kind of layer: those of the full-attention layers.
    kv_layers: the layers that keep a KV cache of their own, in order.
    logit_softcap: cap c of `c * tanh(logits / c)`; None where logits are not capped.
    """

    model: str
    class_name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rms_norm_eps: float
    tie_word_embeddings: bool
    logit_softcap: float | None
    kv_layers: tuple[KVLayer, ...] = ()


def read_facts(config: Any, model: str) -> TargetFacts:
    """The facts of a transformers config.

    Raises PeagleError as `facts_of`, for a peculiarity unknown, and for a quantisation not supported.
    """
    quantisation_of(config, model)
    settings = settings_of(config)
    _refuse_uncomputed(config, str((settings["architectures"] or [config.model_type])[0]), model)
    return facts_of(settings, model)


def settings_of(config: Any) -> dict[str, Any]:
    """A transformers config as plain settings; of a multimodal one the text part, with the outer class."""
    return {**config.get_text_config().to_dict(), "architectures": config.architectures}


def facts_of(settings: Mapping[str, Any], model: str) -> TargetFacts:
    """Reads the settings of a target, named as transformers names them.

    Nothing is guessed here: a key that config.json leaves out has the value with which transformers
    builds the model. Raises PeagleError for a class that is not supported and for a key without value.
    """
    architectures = settings.get("architectures")
    if not architectures:
        raise PeagleError(
            f"target {model}: its config.json has no `architectures`; expected the model's class, "
            'for example ["LlamaForCausalLM"]. Add it to config.json.'
        )
    class_name = architectures[0]
    family = family_of(class_name)

    def need(key: str) -> Any:
        if settings.get(key) is None:
            raise PeagleError(
                f"target {model} ({class_name}): its config.json has no `{key}`; "
                "add the value the model was trained with."
            )
        return settings[key]

    rope = need("rope_parameters")
    if family.rope_group is not None:
        if family.rope_group not in rope:
            raise PeagleError(
                f"target {model} ({class_name}): `rope_parameters` of its config.json has no "
                f"`{family.rope_group}`, only {sorted(rope)}"
            )
        rope = rope[family.rope_group]
    if rope.get("rope_theta") is None:
        raise PeagleError(f"target {model} ({class_name}): its config.json gives no `rope_theta`")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta" and value is not None}
    heads = int(need("num_attention_heads"))
    hidden = int(need("hidden_size"))
    # Qwen2 and Qwen3Moe configs may leave head_dim out; their own code then divides, so this is the
    # model's rule and not a guess.
    head_dim = settings.get("head_dim") or hidden // heads
    softcap = settings.get(family.softcap_key) if family.softcap_key else None
    return TargetFacts(
        model=model,
        class_name=class_name,
        num_layers=int(need("num_hidden_layers")),
        hidden_size=hidden,
        intermediate_size=int(need("intermediate_size")),
        num_attention_heads=heads,
        num_key_value_heads=int(need("num_key_value_heads")),
        head_dim=int(head_dim),
        vocab_size=int(need("vocab_size")),
        max_position_embeddings=int(need("max_position_embeddings")),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=None if scaling.get("rope_type", "default") == "default" else scaling,
        rms_norm_eps=float(need("rms_norm_eps")),
        tie_word_embeddings=bool(need("tie_word_embeddings")),
        logit_softcap=None if softcap is None else float(softcap),
        kv_layers=_kv_layers(settings, int(need("num_key_value_heads")), int(head_dim)),
    )


def _kv_layers(settings: Mapping[str, Any], kv_heads: int, head_dim: int) -> tuple[KVLayer, ...]:
    """One entry a layer; the last `num_kv_shared_layers` read an earlier layer's cache (Gemma4)."""
    count = int(settings["num_hidden_layers"]) - int(settings.get("num_kv_shared_layers") or 0)
    kinds = settings.get("layer_types") or ["full_attention"] * count
    # Its keys are layer numbers as text, filled up with zeros to one width: "05" of 60 layers.
    own = {int(index): values for index, values in (settings.get("per_layer_config") or {}).items()}
    layers = []
    for index, kind in enumerate(kinds[:count]):
        window = settings.get("sliding_window") if kind == "sliding_attention" else None
        values = own.get(index, {})
        layers.append(
            KVLayer(
                window,
                int(values.get("num_key_value_heads") or kv_heads),
                int(values.get("head_dim") or head_dim),
            )
        )
    return tuple(layers)


def _refuse_uncomputed(config: Any, class_name: str, model: str) -> None:
    """Raises PeagleError for a setting of config.json that the target's class would pass over in silence.

    transformers keeps keys that a class does not declare and does nothing with them: a Llama config with
    `logits_scaling` loads, and computes as if the key were not there. What was trained with it, and what
    a server does with it, is something else.
    """
    for part in (config, config.get_text_config()):
        declared = {field.name for field in fields(type(part))}
        for key, value in part.to_dict().items():
            off = value is None or (value is not True and value in (0, 1))  # False, no cap, a factor of one
            if key in declared or off or not _ARITHMETIC.match(key):
                continue
            raise PeagleError(
                f"target {model} ({class_name}): its config.json sets `{key}` to {value!r}, which this class "
                "of transformers does not compute. Needed: the class that does in `architectures`, supported "
                "in peagle_train/target/families.py; or, if the model was trained without it, a config.json "
                "without the key."
            )
