"""The target as the rest of the program sees it: tapped states, true distribution, tables.

Aux layer ids are vLLM's: id i is the output of the first i decoder layers, so 0 is the embeddings
and L the last layer before the final norm. Every class is tapped the same way, by hooks on
`get_decoder().layers`; `hidden_states` of transformers would do for ids below L, but its last entry
is taken after the final norm, and asking for it keeps all layers in memory.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from peagle_train.recipe.schema import TargetSection
from peagle_train.target.cache import KeyValueCache
from peagle_train.target.facts import TargetFacts, read_facts
from peagle_train.target.loading import load_model
from peagle_train.target.self_check import self_check
from peagle_train.target.tokens import end_tokens


class TappedStates(NamedTuple):
    """States of one pass, in the target's dtype.

    aux: [B, S, A * H], the asked layers side by side in the order asked.
    last: [B, S, H], the last decoder layer's output BEFORE the final norm.
    """

    aux: torch.Tensor
    last: torch.Tensor


class TargetOutput(nn.Module):
    """From the last state to logits: final norm, head rows, softcap. Nothing in it is trained.

    Training keeps this small part and frees the target.
    """

    weight: torch.Tensor  # [V or rows, H]

    def __init__(self, norm: nn.Module, weight: torch.Tensor, softcap: float | None):
        super().__init__()
        self.norm = norm
        self.register_buffer("weight", weight)
        self.softcap = softcap

    def forward(self, last: torch.Tensor) -> torch.Tensor:
        """last [..., H] before the final norm -> logits [..., rows] in float32."""
        return _logits(self.norm, self.weight, self.softcap, last)


class Target:
    """A loaded causal LM. Build it with `load`; it never trains and never tracks gradients.

    facts: its sizes. end_token_ids: the tokens at which an answer ends, as vLLM stops: those of the
    generation config and the tokenizer's own end token.
    """

    def __init__(self, model: Any, tokenizer: Any, facts: TargetFacts):
        self.model = model
        self.tokenizer = tokenizer
        self.facts = facts
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self._decoder = model.get_decoder()
        self._norm: Any = self._decoder.norm
        # transformers renamed the argument; both spellings are in use (5.19 and 5.24).
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.end_token_ids = end_tokens(model.generation_config.eos_token_id, tokenizer, facts.model)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        dtype: torch.dtype | str,
        device: torch.device | str,
        trust_remote_code: bool = False,
        spread: bool | dict[str, str] = False,
        prove: bool = True,
    ) -> Target:
        """Loads a folder with config.json, safetensors and tokenizer, as `source.obtain` returns it.

        dtype: torch dtype or its name ("float32"). device: "auto" takes a GPU where there is one.
        spread: deal the layers out to all GPUs in place of `device`, for a target larger than one; or a
            device map of accelerate's that says where each module goes.
        prove: False for a caller that makes the comparisons of `self_check` itself.
        Raises PeagleError for a class or a quantisation that is not supported, for weights that are not
        complete, not all used, or too large for the GPU, and where the adapter and the model's own forward
        disagree (`self_check`).
        """
        from transformers import AutoConfig, AutoTokenizer

        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        facts = read_facts(config, str(folder))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        model = load_model(
            Path(folder),
            config,
            facts,
            dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype,
            device=torch.device(device),
            trust_remote_code=trust_remote_code,
            spread=spread,
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        target = cls(model, tokenizer, facts)
        if prove:
            self_check(target)
        return target

    @classmethod
    def of(
        cls, section: TargetSection, folder: Path, *, device: str | None = None, prove: bool = True
    ) -> Target:
        """As `load`, as a recipe's section says. device: another than the section's."""
        return cls.load(
            folder,
            dtype=section.dtype,
            device=section.device if device is None else device,
            trust_remote_code=section.trust_remote_code,
            spread=section.parallel == "layers",
            prove=prove,
        )

    def new_cache(self) -> KeyValueCache:
        """An empty KV cache for `forward`: `crop` takes rejected tokens back, `select` drops rows."""
        return KeyValueCache()

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        aux_layers: Sequence[int],
        cache: KeyValueCache | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> TappedStates:
        """One pass over new tokens; computes no logits.

        input_ids: [B, S] new tokens. cache: holds `past` earlier positions and takes the new ones.
        attention_mask: [B, past + S], 1 for tokens and 0 for padding (on the left); left out: no padding.
        position_ids: [B, S]; left out: each row's tokens counted from 0, padding not counted.
        Raises ValueError for an aux layer id outside 0..L, for a mask of another length, and for positions
        that fall within a row: one row is one document, because not every class keeps packed ones apart.
        """
        batch, size = input_ids.shape
        total = size + (cache.length if cache is not None else 0)
        if attention_mask is not None:
            if attention_mask.shape != (batch, total):
                raise ValueError(
                    f"attention_mask is {list(attention_mask.shape)}, expected {[batch, total]}: "
                    "past and new tokens"
                )
            if position_ids is None:
                position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, total - size :]
        if position_ids is None:
            position_ids = torch.arange(total - size, total, device=self.device).expand(batch, size)
        elif size > 1 and bool((position_ids.diff(dim=1) < 0).any()):
            raise ValueError("position_ids fall within a row: give every document a row of its own")
        with self._tapped(aux_layers) as states:
            self._decoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=cache is not None,
                **{self._cache_argument: cache},
            )
        # Of a target that is spread over devices each layer leaves its states on its own.
        states = {layer: state.to(self.device) for layer, state in states.items()}
        last = states[self.facts.num_layers]
        if not aux_layers:
            return TappedStates(last.new_empty(batch, size, 0), last)
        return TappedStates(torch.cat([states[layer] for layer in aux_layers], dim=-1), last)

    @contextmanager
    def _tapped(self, aux_layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
        """Collects the states [B, S, H] of the asked ids and of id L while the block runs."""
        layers = self.decoder_layers()
        for layer in aux_layers:
            if not 0 <= layer <= len(layers):
                raise ValueError(f"aux layer {layer}: this target has ids 0 (embeddings) to {len(layers)}")
        states: dict[int, torch.Tensor] = {}

        def before_first(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[0] = args[0] if args else kwargs["hidden_states"]

        def after(layer: int) -> Any:
            def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                states[layer] = output[0] if isinstance(output, tuple) else output

            return keep

        with ExitStack() as stack:
            for layer in {*aux_layers, len(layers)}:
                if layer == 0:
                    stack.enter_context(
                        _removed(layers[0].register_forward_pre_hook(before_first, with_kwargs=True))
                    )
                else:
                    stack.enter_context(_removed(layers[layer - 1].register_forward_hook(after(layer))))
            yield states

    @torch.no_grad()
    def normed(self, last: torch.Tensor) -> torch.Tensor:
        """The final norm of `last` [..., H], in the target's dtype."""
        normed: torch.Tensor = self._norm(last.to(self.dtype))
        return normed

    @torch.no_grad()
    def logits(self, last: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """The target's own logits for `last` [..., H]: float32 [..., V], or [..., T] for token_ids [T]."""
        weight = self.head_table()
        if token_ids is not None:
            weight = weight[token_ids]
        return _logits(self._norm, weight, self.facts.logit_softcap, last)

    def distribution(self, last: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Next-token probabilities, float32 [..., V]; with token_ids [T] renormalised over those [..., T]."""
        return self.logits(last, token_ids).softmax(dim=-1)

    def output_head(self, token_ids: torch.Tensor | None = None) -> TargetOutput:
        """A copy of everything between `last` and the logits of token_ids [T] (left out: all)."""
        weight = self.head_table()
        weight = weight.clone() if token_ids is None else weight[token_ids]
        return TargetOutput(copy.deepcopy(self._norm), weight, self.facts.logit_softcap)

    def embedding_table(self) -> torch.Tensor:
        """[V, H], as stored: Gemma scales in the lookup, while vLLM drafts with the unscaled table."""
        return self.model.get_input_embeddings().weight.detach()

    def head_table(self) -> torch.Tensor:
        """[V, H], the output head's weight (the embedding table itself where the two are tied)."""
        return self.model.get_output_embeddings().weight.detach()

    def final_norm_weight(self) -> torch.Tensor:
        """[H], the scale of the final RMSNorm; all supported classes multiply by it as stored."""
        return self._norm.weight.detach()

    def decoder_layers(self) -> list[nn.Module]:
        """The L decoder layers in order."""
        return list(self._decoder.layers)

    def last_layers(self, count: int) -> list[dict[str, torch.Tensor]]:
        """Parameters of the last decoder layers by their names within a layer, to initialise a head from."""
        layers = self.decoder_layers()
        return [dict(layer.named_parameters()) for layer in layers[len(layers) - count :]]


def _logits(norm: nn.Module, weight: torch.Tensor, softcap: float | None, last: torch.Tensor) -> torch.Tensor:
    # The product runs in the target's dtype, as the model and vLLM do it; only then float32.
    logits = nn.functional.linear(norm(last.to(weight.dtype)).to(weight.device), weight).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
