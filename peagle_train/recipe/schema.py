"""The recipe: everything one run depends on, in one typed YAML file.

Each class below is one section of the file. The descriptions are the documentation:
`peagle recipe` prints them. A key left out takes the default given here; an unknown key is an error.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A part of the recipe: immutable, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TargetSection(Section):
    """The model that verifies, and for which the head drafts."""

    model: str = Field(
        description="a folder, a Hub id, or `package:NAME` for a GGUF file that travels in an installed Python package"
    )
    revision: str | None = Field(None, description="Hub revision; a commit hash makes the run repeatable")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="in which the target runs; float32 is faster on most CPUs"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    trust_remote_code: bool = Field(
        False, description="run Python code that comes with the model: only for models you trust"
    )


class PromptSet(Section):
    """Some prompts of one source."""

    source: str = Field(
        description="`stdlib` (requests made from Python's standard library), `humaneval`, or the path of a JSONL file"
    )
    split: Literal["train", "validation", "heldout", "all"] = Field(
        "all", description="which part of the source; the parts share no prompt"
    )
    count: Count | None = Field(None, description="how many prompts; left out: all")


class DataSection(Section):
    """Prompts, and how the target answers them."""

    train: PromptSet
    validation: PromptSet = Field(description="picks the best checkpoint; never trained on")
    heldout: dict[str, PromptSet] = Field(description="sets to report on, by name; used once, after training")
    system_prompt: str | None = Field(
        None, description="system turn put before every prompt; left out: the template's own default"
    )
    max_prompt_tokens: Count = Field(256, description="longer prompts are left out and counted")
    max_new_tokens: Count = Field(64, description="an answer is cut here and counted as truncated")
    batch_size: Count = Field(32, description="rows answered at once; the unit that is redone after a kill")
    workers: Count | None = Field(
        None, description="single-thread processes on a CPU; left out: one per core, one on a GPU"
    )


class StatesSection(Section):
    """Hidden states of the target."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="in which states are stored"
    )
    keep_while_answering: bool = Field(
        True, description="keep the states of the pass that answers; otherwise a second pass makes them"
    )


class HeadSection(Section):
    """The drafter head, as vLLM computes it. Sizes left out are the target's."""

    layers: Count = Field(4, description="decoder layers; the paper recommends 4")
    aux_layers: list[Annotated[int, Field(ge=0)]] = Field(
        description="tapped layers in vLLM's convention: id = output of the first id decoder layers"
    )
    mask_token: int | str = Field(
        description="id or text of a token that neither data nor template holds, or `unused` to find a row no text can produce"
    )
    draft_vocab_size: Count | None = Field(
        None, description="tokens the head can draft; left out: the target's whole vocabulary"
    )
    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rope_theta: Annotated[float, Field(gt=0)] | None = None
    max_position_embeddings: Count | None = Field(None, description="at least the target's")
    embeddings: Literal["own", "shared"] = Field(
        "own",
        description="own: a copy of the target's table, trained; shared: the target's, frozen, not exported",
    )
    initialise: Literal["target", "random"] = Field("target", description="where the first weights come from")

    @model_validator(mode="after")
    def _aux_layers_are_a_sorted_set(self) -> HeadSection:
        if not self.aux_layers:
            raise ValueError("aux_layers: at least one layer is needed")
        if self.aux_layers != sorted(set(self.aux_layers)):
            raise ValueError(
                f"aux_layers: {self.aux_layers} must rise without repeats, as vLLM sorts them: {sorted(set(self.aux_layers))}"
            )
        return self


class CodSection(Section):
    """Conditional drop-token sampling: which mask slots are trained in a step."""

    rate: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        0.8, description="depth d keeps rate ** d of its trainable chains"
    )
    floor: Fraction = Field(0.0, description="at least this share is kept at every depth")


class TrainSection(Section):
    """How the head learns. Training counts steps, never seconds."""

    positions: Count = Field(
        8,
        description="K_train: positions drafted in one pass, 1 real and K - 1 mask slots; at least the K that serving uses",
    )
    cod: CodSection = CodSection()
    loss: Literal["kl", "ce"] = Field(
        "kl", description="kl: the target's distribution over the draft vocabulary; ce: its tokens"
    )
    steps: Count
    batch_rows: Count = Field(8, description="rows per step and process")
    accumulate: Count = Field(1, description="micro-batches per step")
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    decay: Literal["linear", "cosine", "constant"] = "linear"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    precision: Literal["fp32", "bf16"] = Field(
        "bf16", description="bf16: computed in bfloat16 over float32 master weights"
    )
    log_every: Count = 10
    validate_every: Count = 100
    checkpoint_every: Count = 100


class ExportSection(Section):
    """The directory vLLM loads."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    format: Literal["plain", "speculators"] = Field(
        "plain",
        description="plain: served with --speculative-config; speculators: `vllm serve HEAD` finds the target",
    )


class EvaluateSection(Section):
    """Acceptance on the held-out sets."""

    k: Count = Field(5, description="num_speculative_tokens")
    loop_prompts: Annotated[int, Field(ge=0)] = Field(
        4, description="prompts per set that also go through the real speculative loop"
    )


class PushSection(Section):
    """Where the finished head goes; nothing is pushed unless `peagle push` is called."""

    to: str | None = Field(None, description="s3://bucket/prefix or hf://owner/name")


class Recipe(Section):
    """One run, from prompts to a proven head."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0)] = 0
    output: str = Field("runs", description="the run's folder is OUTPUT/NAME")
    target: TargetSection
    data: DataSection
    states: StatesSection = StatesSection()
    head: HeadSection
    train: TrainSection
    export: ExportSection = ExportSection()
    evaluate: EvaluateSection = EvaluateSection()
    push: PushSection = PushSection()
