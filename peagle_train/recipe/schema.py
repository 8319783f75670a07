"""The recipe: everything one run depends on, in one typed YAML file.

Each class below is one section of the file (`data` has its own file, data.py), and the descriptions are the
documentation: `peagle recipe` prints them. A key left out takes the default given here; an unknown key is an
error. What one field must be stands here; what several fields must be together stands in `rules.py`, and what
only the target can tell (its depth, its vocabulary) in `checks.py`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from peagle_train.recipe.data import DataSection
from peagle_train.recipe.rules import View, broken_rules
from peagle_train.recipe.section import Count, Index, Momentum, Name, Positive, Section, Share, Text


class TargetSection(Section):
    """The model that verifies, and for which the head drafts."""

    model: Text = Field(
        description="a folder, a Hub id, or `package:NAME` for a GGUF file inside an installed Python package"
    )
    revision: Text | None = Field(
        default=None, description="Hub revision; a commit hash makes the run repeatable"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="in which the target runs; float32 is faster on most CPUs"
    )
    device: Text = Field(
        default="auto",
        description="auto: a GPU where there is one; cpu, cuda, or cuda:N; where the target runs beside "
        "training, process R of a machine has GPU N + R for it",
    )
    trust_remote_code: bool = Field(
        default=False, description="run Python code that comes with the model: only for models you trust"
    )
    parallel: Literal["none", "layers", "tensor"] = Field(
        default="none",
        description="a target larger than one GPU: layers are dealt out to the GPUs of this machine "
        "(device_map); tensor: every matrix is split over them, which vLLM does",
    )

    @field_validator("device")
    @classmethod
    def _device_is_known(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"found the text {device!r}; expected auto, cpu, cuda or cuda:N")
        return device


class StatesSection(Section):
    """Hidden states of the target, as they are stored."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="in which states are stored; float16 ends at 65,504"
    )
    keep_while_answering: bool = Field(
        default=True,
        description="keep the states of the pass that answers; otherwise, and with backend vllm, a second "
        "pass makes them",
    )
    mode: Literal["stored", "bounded", "online"] = Field(
        default="stored",
        description="stored: all of them, before training; bounded: made beside training, at most `cap` of "
        "them on the disk; online: made by the training process itself, none stored",
    )
    cap: Positive | None = Field(default=None, description="bounded: GB that may lie on the disk at a time")
    backend: Literal["hf", "vllm"] = Field(
        default="hf",
        description="what runs the target in the second pass: transformers, or a vLLM (VLLM_PYTHON names its "
        "interpreter)",
    )
    batch_tokens: Count = Field(
        default=16384, description="most tokens of one pass of the target; a longer row has one of its own"
    )
    url: Text | None = Field(
        default=None,
        description="s3://BUCKET/PREFIX or any URL of fsspec that keeps the states; left out: in the run",
    )
    cache: Positive = Field(default=50.0, description="GB of the local cache in front of `url`")

    @property
    def kept_while_answering(self) -> bool:
        """Whether the pass that answers keeps its states: not where others make them, or none are stored."""
        return self.keep_while_answering and self.backend == "hf" and self.mode == "stored"


class RopeSection(Section):
    """Rotary positions of the head, keys as transformers names them. Left out: the target's."""

    rope_type: Literal["target", "default", "linear", "llama3", "yarn"] = Field(
        default="target", description="target: the target's own scaling; the keys below belong to the others"
    )
    rope_theta: Positive | None = Field(
        default=None, description="base of the frequencies; left out: the target's"
    )
    factor: Positive | None = Field(
        default=None, description="linear, llama3, yarn: how far the context is stretched"
    )
    original_max_position_embeddings: Count | None = Field(
        default=None, description="llama3, yarn: the context before stretching"
    )
    low_freq_factor: Positive | None = Field(default=None, description="llama3")
    high_freq_factor: Positive | None = Field(default=None, description="llama3")
    beta_fast: Positive | None = Field(default=None, description="yarn; left out: 32")
    beta_slow: Positive | None = Field(default=None, description="yarn; left out: 1")
    attention_factor: Positive | None = Field(default=None, description="yarn; left out: 0.1 ln(factor) + 1")
    mscale: Positive | None = Field(default=None, description="yarn, together with mscale_all_dim")
    mscale_all_dim: Positive | None = Field(default=None, description="yarn, together with mscale")
    truncate: bool | None = Field(default=None, description="yarn; left out: true")


class HeadSection(Section):
    """The drafter head, as vLLM computes it. Sizes left out are the target's."""

    layers: Count = Field(default=4, description="decoder layers; the paper recommends 4")
    aux_layers: Annotated[list[Index], Field(min_length=1)] = Field(
        description="tapped layers in vLLM's convention: id = output of the first id decoder layers"
    )
    mask_token: Index | Text | None = Field(
        default=None,
        description="peagle needs it, eagle3 has none: id or text of a token that neither data nor template "
        "holds; `unused` finds a row that no text can produce",
    )
    draft_vocab_size: Count | None = Field(
        default=None, description="tokens the head can draft; left out: the target's whole vocabulary"
    )
    drafter: Literal["llama", "qwen3"] = Field(
        default="llama", description="kind of decoder layer; qwen3 norms queries and keys"
    )
    hidden_size: Count | None = Field(
        default=None, description="width of the head; other than the target's it needs embeddings of its own"
    )
    intermediate_size: Count | None = Field(default=None, description="width of the MLP")
    num_attention_heads: Count | None = Field(default=None, description="query heads")
    num_key_value_heads: Count | None = Field(default=None, description="must divide num_attention_heads")
    head_dim: Count | None = Field(
        default=None, description="width of one head; even, since RoPE turns pairs"
    )
    rope: RopeSection = Field(default=RopeSection(), description="rotary positions; left out: the target's")
    layer_types: Annotated[
        list[Literal["full_attention", "sliding_attention"]] | None, Field(min_length=1)
    ] = Field(default=None, description="one per layer; left out: all of them full_attention")
    sliding_window: Count | None = Field(
        default=None, description="positions that a row of a sliding_attention layer sees"
    )
    norm_before_residual: bool = Field(
        default=False, description="layer 0's residual starts from the normed state"
    )
    norm_before_fc: bool = Field(default=False, description="one norm over all tapped states before fc")
    fc_norm: bool = Field(default=False, description="a norm for each tapped state before fc")
    norm_output: bool = Field(
        default=False, description="eagle3 only: the state that is fed back is the normed one"
    )
    attention_bias: bool = Field(
        default=False, description="biases on q, k, v; with the llama drafter on the output too"
    )
    max_position_embeddings: Count | None = Field(
        default=None, description="longest context; at least the target's, or serving fails there"
    )
    embeddings: Literal["own", "shared"] = Field(
        default="own",
        description="own: a trained copy of the target's table; shared: the target's, not exported",
    )
    output: Literal["trained", "frozen"] = Field(
        default="trained",
        description="the output matrix; frozen: it stays as it is at the start, its gradient is not taken",
    )
    rms_norm_eps: Positive | None = Field(default=None, description="epsilon of the head's norms")
    initialise: Literal["target", "random"] = Field(
        default="target", description="where the first weights come from"
    )
    start_from: Text | None = Field(
        default=None,
        description="folder of a head (of `peagle export` or `peagle import`) that training goes on from, in "
        "place of initialise; this section must describe it, and its draft vocabulary is kept",
    )

    @field_validator("aux_layers")
    @classmethod
    def _aux_layers_rise(cls, layers: list[int]) -> list[int]:
        if layers != sorted(set(layers)):
            raise ValueError(
                f"found {layers}; expected layers that rise without repeats, the order vLLM puts them in; "
                f"write {sorted(set(layers))}"
            )
        return layers


class CodSection(Section):
    """Conditional drop-token sampling: which mask slots are trained in a step."""

    rate: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.8, description="depth d keeps rate ** d of its trainable chains"
    )
    floor: Share = Field(default=0.0, description="at least this share is kept at every depth")


class TrainSection(Section):
    """How the head learns. Training counts steps, never seconds, unless `max_hours` ends it."""

    positions: Count = Field(
        default=8,
        description="K: positions drafted, at least the K of serving; peagle: in one pass, 1 real and K - 1 "
        "masks; eagle3: in K passes",
    )
    cod: CodSection = Field(
        default=CodSection(), description="which chains are trained how deep; eagle3: rate 1.0 is usual"
    )
    loss: Literal["kl", "ce"] = Field(
        default="kl", description="kl: the target's distribution over the draft vocabulary; ce: its tokens"
    )
    steps: Count = Field(description="optimizer steps")
    batch_tokens: Count = Field(
        default=8192,
        description="most tokens of a micro-batch, rows are packed into it; a longer row has one of its own",
    )
    accumulate: Count = Field(default=1, description="micro-batches per step and process")
    learning_rate: Positive = Field(default=1e-4, description="highest rate, reached after the warm-up")
    warmup_steps: Index = Field(default=0, description="steps in which the rate rises from zero")
    decay: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="down to zero at the end"
    )
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(
        default=0.0, description="AdamW's, on matrices only"
    )
    betas: Annotated[tuple[Momentum, Momentum], Field(strict=False)] = Field(
        default=(0.9, 0.95), description="AdamW's momenta"
    )
    clip_norm: Positive = Field(default=1.0, description="gradients are scaled down to this norm")
    depth_weights: Literal["equal", "corrected"] = Field(
        default="equal",
        description="weight of an element in the loss; corrected: over the share that cod keeps at its depth",
    )
    memory: Positive | None = Field(
        default=None,
        description="GiB one process may use: of the GPU, or of the machine when it trains on a CPU; groups "
        "and chunks of a step follow from it; left out: read from the device when the run begins",
    )
    backend: Literal["auto", "sdpa", "flash", "flex", "reference"] = Field(
        default="auto",
        description="attention; auto: flash where it is proven on the device, else sdpa; flash needs the "
        "package flash-attn; reference: one dense mask",
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="bf16", description="bf16: computed in bfloat16 over float32 master weights"
    )
    log_every: Count = Field(default=10, description="steps between lines of the log")
    validate_every: Count = Field(
        default=100, description="steps between measurements of held-out acceptance"
    )
    checkpoint_every: Count = Field(default=100, description="steps between checkpoints to resume from")
    keep_checkpoints: Count = Field(default=2, description="the newest ones that are kept")
    patience: Count | None = Field(
        default=None,
        description="training ends after so many validations without a better acceptance; left out: never",
    )
    max_hours: Positive | None = Field(
        default=None,
        description="training ends after so many hours, those before a stop too, with a last validation; "
        "left out: never",
    )
    on_spike: Literal["warn", "skip", "stop"] = Field(
        default="warn",
        description="a loss or a gradient far from those of the last 100 steps: say so; take no such step; "
        "stop before it",
    )
    skip_bad_rows: bool = Field(
        default=False, description="leave rows out whose stored states hold NaN or Inf; otherwise refuse them"
    )
    launch: Text | None = Field(
        default=None,
        description="a launch file of accelerate with which `peagle run` and `make train` start the training "
        "where there are GPUs; left out: one process",
    )


class TrackSection(Section):
    """Trackers that show the curves of training; none is needed, and none changes what is trained."""

    log_with: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = Field(
        default=[], description="tensorboard, wandb, mlflow, trackio: some, or none"
    )
    project: Name = Field(default="peagle", description="the project, in mlflow the experiment")
    run: Text | None = Field(default=None, description="the run's name there; left out: the recipe's name")
    entity: Text | None = Field(default=None, description="user or team of wandb; left out: its default")
    offline: bool = Field(
        default=False, description="send nothing anywhere: keep all of it on this machine's disk"
    )

    @field_validator("log_with")
    @classmethod
    def _each_once(cls, names: list[str]) -> list[str]:
        if len(set(names)) < len(names):
            raise ValueError(f"found {names}; expected each tracker once; write {list(dict.fromkeys(names))}")
        return names


class ExportSection(Section):
    """The directory vLLM loads."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16", description="of the stored weights"
    )
    format: Literal["plain", "speculators"] = Field(
        default="plain",
        description="plain: served with --speculative-config; speculators: served by `vllm serve HEAD` alone",
    )


class EvaluateSection(Section):
    """Acceptance on the held-out sets."""

    k: Count = Field(default=5, description="num_speculative_tokens; at most train.positions")
    loop_prompts: Index = Field(
        default=4, description="prompts per set that also go through the real speculative loop"
    )


class PushSection(Section):
    """Where the finished head goes; nothing is pushed unless `peagle push` is called."""

    to: Text | None = Field(default=None, description="s3://bucket/prefix or hf://owner/name")


class Recipe(Section):
    """One run, from prompts to a proven head."""

    name: Name = Field(description="name of the run")
    seed: Index = Field(
        default=0, description="seed of everything random; same seed, same machine: same numbers"
    )
    output: Text = Field(default="runs", description="the run's folder is OUTPUT/NAME")
    method: Literal["peagle", "eagle3"] = Field(
        default="peagle",
        description="peagle: drafts K tokens in one pass; eagle3: the baseline, K passes, each fed with the "
        "state of the one before",
    )
    target: TargetSection
    data: DataSection
    states: StatesSection = StatesSection()
    head: HeadSection
    train: TrainSection
    track: TrackSection = TrackSection()
    export: ExportSection = ExportSection()
    evaluate: EvaluateSection = EvaluateSection()
    push: PushSection = PushSection()

    @model_validator(mode="after")
    def _sections_agree(self) -> Recipe:
        """For recipes made in Python; the loader asks the same rules itself, to name lines and keys."""
        broken = list(broken_rules(View(self.model_dump())))
        if broken:
            raise ValueError("; ".join(f"{key}: {message}" for key, message in broken))
        return self
