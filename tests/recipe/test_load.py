"""Every kind of fault, by the message the user reads; and what a good recipe becomes."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from peagle_train.errors import PeagleError, RecipeError
from peagle_train.recipe import Recipe, find_recipe, load_recipe, read_recipe
from peagle_train.recipe.fields import all_keys, documentation
from peagle_train.recipe.section import Section
from peagle_train.recipe.yaml_text import dump, parse

GOOD = """\
name: tiny
target:
  model: some/model
data:
  train: {source: stdlib, split: train}
  validation: {source: stdlib, split: validation}
  heldout:
    stdlib: {source: stdlib, split: heldout}
head:
  aux_layers: [1, 2]
  mask_token: 3
train:
  steps: 20
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(GOOD)
    return path


def faults_of(path: Path, *overrides: str, text: str | None = None) -> list[str]:
    """The faults, with the file's path written as FILE."""
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert all(fault in str(caught.value) for fault in caught.value.faults)
    return [fault.replace(str(path), "FILE") for fault in caught.value.faults]


def test_defaults_are_filled_in(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.train.cod.rate == 0.8
    assert recipe.output == "runs"
    assert recipe.data.heldout["stdlib"].count is None


def test_the_shipped_recipes_load() -> None:
    files = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    assert files
    for file in files:
        assert load_recipe(file).name == file.stem


def test_overrides_are_yaml(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        [
            "train.cod.rate=0.7",
            "train.learning_rate=3e-4",
            "train.betas=[0.8, 0.99]",
            "head.aux_layers=[2,15,27]",
            "data.heldout.stdlib.count=8",
            "data.heldout.more={source: more.jsonl}",
            "head.mask_token=<repo_name>",
            "target.revision='12'",
            "push.to=",
            "data.system_prompt=a = b",
            "train.steps=5",
            "train.steps=6",
        ],
    )
    assert recipe.train.cod.rate == 0.7
    assert recipe.train.learning_rate == 3e-4
    assert recipe.train.betas == (0.8, 0.99)
    assert recipe.head.aux_layers == [2, 15, 27]
    assert recipe.data.heldout["stdlib"].count == 8
    assert recipe.data.heldout["more"].source == "more.jsonl"
    assert recipe.head.mask_token == "<repo_name>"
    assert recipe.target.revision == "12"
    assert recipe.push.to is None
    assert recipe.data.system_prompt == "a = b"
    assert recipe.train.steps == 6  # the last one counts


def test_variables_of_the_template_keep_their_types(recipe_file: Path) -> None:
    variables = "{reasoning_effort: low, enable_thinking: false, budget: 3, share: 0.5}"
    data = load_recipe(recipe_file, [f"data.template_variables={variables}", "data.date=2025-06-28"]).data
    assert data.template_variables == {
        "reasoning_effort": "low",
        "enable_thinking": False,
        "budget": 3,
        "share": 0.5,
    }
    assert type(data.template_variables["budget"]) is int
    assert data.day == date(2025, 6, 28)
    assert load_recipe(recipe_file).data.day is None


def test_whole_numbers_are_numbers(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["train.clip_norm=1"]).train.clip_norm == 1.0


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        # unknown keys: a sibling, the right key in another section, no idea
        ("train.setps=5", "train.setps: unknown key; did you mean train.steps?"),
        ("heads.layers=1", "heads: unknown key; did you mean head?"),
        ("train.cod.rat=0.5", "train.cod.rat: unknown key; did you mean train.cod.rate?"),
        ("learning_rate=1e-3", "learning_rate: unknown key; did you mean train.learning_rate?"),
        ("train.rate=0.5", "train.rate: unknown key; did you mean train.cod.rate?"),
        (
            "data.heldout.stdlib.cuont=5",
            "data.heldout.stdlib.cuont: unknown key; did you mean data.heldout.stdlib.count?",
        ),
        ("export.xyz=1", "export.xyz: unknown key; expected one of dtype, format"),
        (
            "data.date=2025-13-01",
            "data.date: found the text '2025-13-01'; expected a day as YYYY-MM-DD, e.g. 2025-12-31",
        ),
        (
            "data.date=today",
            "data.date: found the text 'today'; expected a day as YYYY-MM-DD, e.g. 2025-12-31",
        ),
        (
            "data.template_variables.tools=[1]",
            "data.template_variables.tools: found the list [1]; expected true or false, or a whole number, "
            "or a number, or text",
        ),
        # the form of an override
        (
            "train.steps",
            "found 'train.steps'; expected KEY=VALUE with a dotted key, e.g. train.steps=100",
        ),
        ("=5", "found '=5'; expected KEY=VALUE with a dotted key, e.g. train.steps=100"),
        (
            "train..steps=5",
            "found 'train..steps=5'; expected KEY=VALUE with a dotted key, e.g. train.steps=100",
        ),
        ("name.x=1", "name.x: name is the text 'tiny'; expected a section"),
        # choices
        (
            "target.dtype=bf16",
            "target.dtype: found the text 'bf16'; expected one of float32, bfloat16; did you mean bfloat16?",
        ),
        (
            "target.dtype=fp32",
            "target.dtype: found the text 'fp32'; expected one of float32, bfloat16; did you mean float32?",
        ),
        (
            "train.decay=Cosine",
            "train.decay: found the text 'Cosine'; expected one of linear, cosine, constant; did you "
            "mean cosine?",
        ),
        ("train.loss=xyz", "train.loss: found the text 'xyz'; expected one of kl, ce"),
        ("train.loss=1", "train.loss: found the number 1; expected one of kl, ce"),
        (
            "track.log_with=[wandb, tensorbord]",
            "track.log_with[1]: found the text 'tensorbord'; expected one of tensorboard, wandb, mlflow, "
            "trackio; did you mean tensorboard?",
        ),
        (
            "track.log_with=[wandb, wandb]",
            "track.log_with: found ['wandb', 'wandb']; expected each tracker once; write ['wandb']",
        ),
        (
            "track.log_with=wandb",
            "track.log_with: found the text 'wandb'; expected a list (one of tensorboard, wandb, mlflow, "
            "trackio)",
        ),
        ("track.with=[wandb]", "track.with: unknown key; did you mean track.log_with?"),
        # types
        ("train.steps=many", "train.steps: found the text 'many'; expected a whole number, at least 1"),
        (
            "train.steps='9'",
            "train.steps: found the text '9'; expected a whole number, at least 1; leave the quotes out",
        ),
        ("train.steps=2.5", "train.steps: found the number 2.5; expected a whole number, at least 1"),
        ("train.steps=true", "train.steps: found true; expected a whole number, at least 1"),
        ("train.steps=", "train.steps: found nothing; expected a whole number, at least 1"),
        ("train.steps=[1]", "train.steps: found the list [1]; expected a whole number, at least 1"),
        (
            "train.learning_rate=high",
            "train.learning_rate: found the text 'high'; expected a number, greater than 0.0",
        ),
        (
            "target.trust_remote_code=yes",
            "target.trust_remote_code: found the text 'yes'; expected true or false; did you mean true?",
        ),
        (
            "target.trust_remote_code=1",
            "target.trust_remote_code: found the number 1; expected true or false",
        ),
        (
            "target.revision=1234567",
            "target.revision: found the number 1234567; expected text, not empty, or left out; put "
            "it in quotes (on a command line in both kinds: '\"...\"')",
        ),
        (
            "target={}",
            "target.model: missing; expected text, not empty: a folder, a Hub id, or `package:NAME` "
            "for a GGUF file inside an installed Python package",
        ),
        (
            "target=x",
            "target: found the text 'x'; expected a section with the keys model, revision, dtype, "
            "device, trust_remote_code, parallel",
        ),
        (
            "data.train=",
            "data.train: found nothing; expected a section with the keys source, subset, part, revision, "
            "columns, roles, mix, split, count",
        ),
        (
            "head.aux_layers=2",
            "head.aux_layers: found the number 2; expected a list (a whole number, at least 0), not empty",
        ),
        (
            "head.aux_layers=[1,x]",
            "head.aux_layers[1]: found the text 'x'; expected a whole number, at least 0",
        ),
        (
            "train.betas=[0.9]",
            "train.betas[1]: missing; expected a number, at least 0.0, less than 1.0",
        ),
        (
            "train.betas=[0.9, '0.5']",
            "train.betas[1]: found the text '0.5'; expected a number, at least 0.0, less than 1.0; "
            "leave the quotes out",
        ),
        (
            "method=eagle-3",
            "method: found the text 'eagle-3'; expected one of peagle, eagle3; did you mean eagle3?",
        ),
        # impossible values
        ("evaluate.k=0", "evaluate.k: found the number 0; expected a whole number, at least 1"),
        (
            "train.positions=-1",
            "train.positions: found the number -1; expected a whole number, at least 1",
        ),
        (
            "data.train.count=0",
            "data.train.count: found the number 0; expected a whole number, at least 1, or left out",
        ),
        (
            "train.cod.rate=1.5",
            "train.cod.rate: found the number 1.5; expected a number, greater than 0.0, at most 1.0",
        ),
        (
            "train.cod.rate=.nan",
            "train.cod.rate: found the number nan; expected a number, greater than 0.0, at most 1.0",
        ),
        (
            "train.clip_norm=.inf",
            "train.clip_norm: found the number inf; expected a number, greater than 0.0",
        ),
        (
            "train.betas=[0.9, 1.0]",
            "train.betas[1]: found the number 1.0; expected a number, at least 0.0, less than 1.0",
        ),
        ("seed=-1", "seed: found the number -1; expected a whole number, at least 0"),
        (
            "head.mask_token=-1",
            "head.mask_token: found the number -1; expected a whole number, at least 0, or text, not "
            "empty, or left out",
        ),
        (
            "head.mask_token=[3]",
            "head.mask_token: found the list [3]; expected a whole number, at least 0, or text, not "
            "empty, or left out",
        ),
        (
            "head.aux_layers=[]",
            "head.aux_layers: found the list []; expected a list (a whole number, at least 0), not empty",
        ),
        (
            "head.aux_layers=[2,1]",
            "head.aux_layers: found [2, 1]; expected layers that rise without repeats, the order "
            "vLLM puts them in; write [1, 2]",
        ),
        (
            "head.aux_layers=[1,1]",
            "head.aux_layers: found [1, 1]; expected layers that rise without repeats, the order "
            "vLLM puts them in; write [1]",
        ),
        (
            "name=a/b",
            "name: found the text 'a/b'; expected text, letters, digits, '.', '_', '-' only, the "
            "first no sign",
        ),
        (
            "data.heldout={}",
            "data.heldout: found an empty section; expected a section with a name for each entry, not empty",
        ),
        (
            "data.heldout={a b: {source: x.jsonl}}",
            "data.heldout.a b: found the name 'a b'; expected letters, digits, '_' and '-', the "
            "first no sign",
        ),
        # rules between keys
        (
            "head.mask_token=",
            "head.mask_token: missing; expected the id or text of a token that neither data nor template "
            "holds, because method peagle drafts from mask tokens; write `unused` to find one",
        ),
        (
            "evaluate.k=9",
            "evaluate.k: found 9; expected at most train.positions = 8, because positions that were "
            "never trained draft noise; set evaluate.k=8 or train.positions=9",
        ),
        (
            "train.warmup_steps=20",
            "train.warmup_steps: found 20; expected fewer than train.steps = 20, or the full rate is "
            "never reached",
        ),
        (
            "track={entity: team, log_with: [tensorboard]}",
            "track.entity: found team, but track.log_with does not name wandb, which alone has such a thing; "
            "leave it out, or add wandb",
        ),
        (
            "head.norm_output=true",
            "head.norm_output: found true; expected false, because a peagle head feeds no state back; leave "
            "it out, or set method=eagle3",
        ),
        (
            "head.layer_types=[full_attention]",
            "head.layer_types: found 1 kinds; expected one for each of the 4 layers of the head; "
            "change it or head.layers",
        ),
        (
            "head={layers: 1, aux_layers: [1], mask_token: 3, layer_types: [sliding_attention]}",
            "head.sliding_window: found none; expected the window of the sliding layers in "
            "head.layer_types; name it, for example sliding_window: 1024",
        ),
        (
            "head.sliding_window=8",
            "head.sliding_window: found 8, but no layer of head.layer_types is sliding_attention; "
            "expected none; leave it out or name the sliding layers",
        ),
        (
            "states.dtype=float16",
            "states.dtype: found float16 for a target in bfloat16; expected bfloat16 (the same "
            "size), because float16 ends at 65,504 and a large state would be stored as infinity",
        ),
        (
            "head={layers: 1, aux_layers: [1], mask_token: 3, initialise: random, output: frozen}",
            "head.output: found frozen beside initialise: random; expected trained, because random "
            "output rows would never learn; write output: trained, or initialise: target",
        ),
        (
            "data.heldout.train={source: x.jsonl}",
            "data.heldout.train: found a held-out set named train; expected another name, because "
            "the prompts of data.train are stored under this one",
        ),
    ],
)
def test_one_fault_one_message(recipe_file: Path, override: str, fault: str) -> None:
    assert faults_of(recipe_file, override) == [f"command line: {fault}"]


def test_a_mask_token_belongs_to_peagle_alone(recipe_file: Path) -> None:
    assert faults_of(recipe_file, "method=eagle3") == [
        "FILE:11: head.mask_token: found 3; expected none, because method eagle3 drafts one token after the "
        "other and has no mask token; leave it out (`head.mask_token=`), or set method=peagle"
    ]
    recipe = load_recipe(recipe_file, ["method=eagle3", "head.mask_token="])
    assert (recipe.method, recipe.head.mask_token) == ("eagle3", None)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["data.validation.split=train"], ["data.validation"]),
        (["data.heldout.stdlib.split=train"], ["data.heldout.stdlib"]),
        (["data.heldout.stdlib.split=validation"], ["data.heldout.stdlib"]),
        (["data.train.split=all"], ["data.validation", "data.heldout.stdlib"]),
        (["data.heldout.more.source=stdlib"], ["data.heldout.more", "data.heldout.more"]),
        (["data.train.source=./a.jsonl", "data.heldout.b={source: a.jsonl}"], ["data.heldout.b"]),
    ],
)
def test_prompts_of_training_are_not_held_out(
    recipe_file: Path, overrides: list[str], keys: list[str]
) -> None:
    faults = faults_of(recipe_file, *overrides)
    assert sorted(fault.split(": ")[1] for fault in faults) == sorted(keys)
    assert all("expected prompts that are not" in fault for fault in faults)


def test_heldout_sets_may_share_prompts(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["data.heldout.again={source: stdlib, split: heldout, count: 3}"])
    assert set(recipe.data.heldout) == {"stdlib", "again"}


def test_all_faults_at_once_in_the_order_of_the_file(recipe_file: Path) -> None:
    text = """\
name: tiny
learning_rate: 3e-4
target:
  model: 12
data:
  train: {source: stdlib, split: train, count: 0}
  validation: {source: stdlib, split: train}
  heldout:
    stdlib: {source: stdlib, split: heldout}
  batch_size: 3
  batch_size: 4
train:
  positions: 3
  steps: [1]
"""
    faults = faults_of(recipe_file, "evaluate.k=7", "foo", "train.cod.rat=1", text=text)
    assert [fault.split(": ")[:2] for fault in faults] == [
        ["FILE", "head"],  # missing: the file as a whole
        ["FILE:2", "learning_rate"],
        ["FILE:4", "target.model"],
        ["FILE:6", "data.train.count"],
        ["FILE:7", "data.validation"],  # a rule, found although other keys are faulty
        ["FILE:11", "data.batch_size"],
        ["FILE:14", "train.steps"],
        ["command line", "found 'foo'; expected KEY=VALUE with a dotted key, e.g. train.steps=100"],
        ["command line", "train.cod.rat"],
        ["command line", "evaluate.k"],
    ]
    assert "missing; expected a section with the keys layers, aux_layers" in faults[0]


def test_a_missing_key_is_placed_at_its_section(recipe_file: Path) -> None:
    faults = faults_of(recipe_file, text=GOOD.replace("  steps: 20", "  positions: 8"))
    assert faults == ["FILE:12: train.steps: missing; expected a whole number, at least 1: optimizer steps"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[1, 2]\n", "FILE: found the list [1, 2]; expected a section with the keys name, seed"),
        ("hello\n", "FILE: found the text 'hello'; expected a section with the keys name, seed"),
        ("a: [1\n", "FILE:2: not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe(recipe_file: Path, text: str, fault: str) -> None:
    faults = faults_of(recipe_file, text=text)
    assert len(faults) == 1
    assert faults[0].startswith(fault)


def test_an_empty_file_lacks_every_required_section(recipe_file: Path) -> None:
    faults = faults_of(recipe_file, text="")
    assert [fault.split(": ")[1] for fault in faults] == ["name", "target", "data", "head", "train"]


def test_bytes_that_are_no_text(recipe_file: Path) -> None:
    recipe_file.write_bytes(b"name: \xff\n")
    assert "not UTF-8" in faults_of(recipe_file)[0]


def test_an_unreadable_value_is_reported_once(recipe_file: Path) -> None:
    faults = faults_of(recipe_file, text=GOOD.replace("steps: 20", "steps: !!int x"))
    assert faults == ["FILE:13: train.steps: found 'x', which is no int"]


def test_an_override_that_is_no_yaml(recipe_file: Path) -> None:
    faults = faults_of(recipe_file, "head.aux_layers=[1,2")
    assert len(faults) == 1
    assert faults[0].startswith("command line: head.aux_layers: found '[1,2'; expected a YAML value")


def test_an_override_mends_a_fault_of_the_file(recipe_file: Path) -> None:
    recipe_file.write_text(GOOD.replace("steps: 20", "steps: many"))
    assert load_recipe(recipe_file, ["train.steps=4"]).train.steps == 4


def test_places_name_line_or_command_line(recipe_file: Path) -> None:
    places = read_recipe(recipe_file, ["train.cod.rate=0.5"]).places
    assert places.of("head.aux_layers") == f"{recipe_file}:10"
    assert places.of("head.layers") == f"{recipe_file}:9"
    assert places.of("train.cod.rate") == "command line"
    assert places.of("train.cod.floor") == "command line"  # the section was made there
    assert places.of("evaluate.k") == str(recipe_file)


def test_recipes_are_found_by_path_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipes").mkdir()
    Path("recipes/smollm2.yaml").write_text(GOOD)
    assert find_recipe("smollm2") == Path("recipes/smollm2.yaml")
    assert find_recipe("recipes/smollm2.yaml") == Path("recipes/smollm2.yaml")
    with pytest.raises(
        PeagleError, match=r"smolm2: found no such recipe; .*did you mean recipes/smollm2.yaml\?"
    ):
        find_recipe("smolm2")
    with pytest.raises(PeagleError, match=r"recipes here: recipes/smollm2.yaml"):
        find_recipe("elsewhere/xyz.yaml")


def test_a_recipe_made_in_python_obeys_the_same_rules(recipe_file: Path) -> None:
    values: dict[str, Any] = load_recipe(recipe_file).model_dump()
    values["evaluate"]["k"] = 9
    with pytest.raises(ValidationError, match=r"evaluate\.k: found 9; expected at most train\.positions = 8"):
        Recipe.model_validate(values)


def test_a_resolved_recipe_is_read_back_equal(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, ["train.learning_rate=1e-5", "target.revision='1e5'"])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump(recipe.model_dump(mode="json")))
    assert load_recipe(resolved) == recipe


def test_the_documentation_holds_every_key_with_its_default() -> None:
    text = documentation()
    document = parse(text)
    assert document.faults == []
    flat = {".".join("*" if part == "NAME" else str(part) for part in path) for path in document.lines}
    flat = {key for key in flat if not key.startswith("train.betas.")}
    assert flat - {"data.heldout.*"} == set(all_keys())
    assert document.value["train"]["learning_rate"] == 1e-4
    assert document.value["train"]["betas"] == [0.9, 0.95]
    assert "one of linear, cosine, constant" in text


def test_every_key_is_explained() -> None:
    def leaves(section: type[Section]) -> list[str]:
        return [name for name, field in section.model_fields.items() if not field.description]

    sections = Section.__subclasses__()
    unexplained = {section.__name__: leaves(section) for section in sections if section is not Recipe}
    assert not any(unexplained.values()), unexplained
    assert all(section.__doc__ for section in sections)


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["data.train.mix=[{source: a.jsonl}]"], ["data.train.source"]),
        (["data.train.source="], ["data.train.source"]),
        (["states.mode=bounded"], ["states.cap"]),
        (["states.cap=1.5"], ["states.cap"]),
        (
            ["states.mode=online", "states.url=s3://a/b", "states.backend=vllm", "train.skip_bad_rows=true"],
            ["states.backend", "states.url", "train.skip_bad_rows"],
        ),
        (["target.device=gpu"], ["target.device"]),
    ],
)
def test_sources_and_states_are_one_thing_at_a_time(
    recipe_file: Path, overrides: list[str], keys: list[str]
) -> None:
    faults = faults_of(recipe_file, *overrides)
    assert [fault.split(": ")[1] for fault in faults] == keys
    assert all("expected" in fault for fault in faults)


def test_two_sets_of_one_mix_share_no_source(recipe_file: Path) -> None:
    mix = "data.train={mix: [{source: a.jsonl}, {source: b.jsonl, weight: 2.0}]}"
    load_recipe(recipe_file, [mix, "data.validation={source: c.jsonl}"])
    (fault,) = faults_of(recipe_file, mix, "data.validation={source: ./b.jsonl}")
    assert "data.validation: found split all of b.jsonl, but data.train takes split all of it" in fault
