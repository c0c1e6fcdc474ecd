"""Recipes, overlays and overrides become one configuration, or one error that lists everything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from unirl.cli.compose import BLOCK_FORMS, compose, compose_and_check
from unirl.cli.recipes import RecipeFolders
from unirl.config.keys import ANY, all_keys
from unirl.config.schema import RunConfig
from unirl.core.errors import ConfigError

SHIPPED = RecipeFolders(None).recipe_names()


def recipe(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def problems_of(name: str, overrides: list[str], folder: Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        compose(name, overrides, folder)
    return str(error.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_valid(name: str, tmp_path: Path) -> None:
    ships_with_weights = name == "quickstart" or "/tiny/" in name
    folder = [] if ships_with_weights else [f"model.path={tmp_path}"]
    assert compose_and_check(name, folder)[1] == []


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_described(name: str) -> None:
    text = (RecipeFolders(None).examples / f"{name}.yaml").read_text()
    assert f"command    unirl train {name}" in text
    assert "hardware" in text
    assert "expect" in text
    assert "\ndescription: " in text


def test_the_published_arms_of_the_residency_gate_are_valid() -> None:
    gate = "diffusion/tiny/tiny_residency_gate"
    arms = [
        "",
        "train_resident=true reward_resident=true",
        "eval_interval=2 save_interval=2",
        "eval_interval=1 eval_num_prompts=24 eval_chunk_prompts=8 save_interval=2",
        "accumulate_rollouts=2 stack.num_updates_per_batch=1 eval_interval=4 save_interval=4 "
        "eval_num_prompts=16 eval_chunk_prompts=8 num_rollouts=10",
    ]
    for arm in arms:
        compose(gate, arm.split())
    parked = compose(gate, [])
    assert not parked.train_resident
    assert not parked.rollout_resident
    assert not parked.reward_resident


def test_every_key_can_be_overridden_without_plus(tmp_path: Path) -> None:
    recipe(tmp_path, "plain", "defaults: [/base]\nstack: {lora: {}}\n")
    values = _leaves(RunConfig(stack={"lora": {}}).model_dump())  # type: ignore[arg-type]
    overrides = [f"{key}={_text(value)}" for key, value in values.items()]
    _, problems = compose_and_check("plain", overrides, tmp_path)
    assert not any("not a key" in problem.message for problem in problems), problems
    assert set(values) >= {key for key in all_keys() if ANY not in key} - _blocks()


def _leaves(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found |= _leaves(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def _text(value: object) -> str:
    return "null" if value is None else str(value).replace("'", "")


def _blocks() -> set[str]:
    return {key.rpartition(".")[0] for key in all_keys()}


def test_overrides_win_over_the_recipe() -> None:
    config = compose("quickstart", ["stack.lora.rank=32", "+seed=7", "++batch_size=4"])
    assert (config.stack.lora and config.stack.lora.rank) == 32
    assert (config.seed, config.batch_size) == (7, 4)


def test_an_adapter_key_is_refused_where_the_recipe_has_no_adapter() -> None:
    text = problems_of("diffusion/tiny/tiny_full", ["stack.lora.rank=32"])
    assert "stack.lora is null in this recipe" in text
    assert "'stack.lora={rank: 32}'" in text


def test_an_adapter_can_be_added_as_a_block() -> None:
    config = compose("diffusion/tiny/tiny_full", ["stack.lora={rank: 4}"])
    assert config.stack.lora is not None
    assert config.stack.lora.rank == 4


def test_a_scorer_can_be_added_and_removed_on_the_command_line() -> None:
    config = compose("quickstart", ["reward.scorers.small.path=jpeg_size", "~reward.scorers.color"])
    assert config.reward is not None
    assert list(config.reward.scorers) == ["ocr", "small"]


def test_config_groups_are_chosen_on_the_command_line() -> None:
    config = compose("quickstart", ["layout=colocate", "reward=ocr"])
    assert config.rollout.engine == "replica"
    assert config.reward is not None
    assert list(config.reward.scorers) == ["ocr"]


@pytest.mark.parametrize("group", ["layout=colocate", "+layout=colocate", "++layout=colocate"])
def test_a_group_can_be_chosen_whether_the_recipe_has_it_or_not(group: str, tmp_path: Path) -> None:
    recipe(tmp_path, "bare", "defaults: [/base, /model: tiny, /reward: ocr]\n")
    assert compose("quickstart", [group]).rollout.engine == "replica"
    assert compose("bare", [group], tmp_path).rollout.engine == "replica"


def test_interpolations_and_environment_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTS", "4")
    config = compose("quickstart", ["batch_size=${oc.env:PROMPTS}", "num_rollouts=${batch_size}"])
    assert (config.batch_size, config.num_rollouts) == (4, 4)


def test_all_problems_are_listed_at_once() -> None:
    text = problems_of(
        "quickstart",
        [
            "micro_batch_size=4",
            "batch_size=many",
            "enable_fsdp_offload=false",
            "model=blob",
            "seed=${nowhere}",
            "data.train=/a=b",
            "eval_interval=1,2",
            "sampling.eta=0",
            "~reward.scorers.clip",
        ],
    )
    assert text.startswith("9 problems in quickstart:")
    for fragment in (
        "micro_batch_size\n    is not a key. Did you mean stack.micro_batch_size?",
        'batch_size\n    is "many", but it must be a valid integer',
        "enable_fsdp_offload\n    is retired",
        "model\n    is 'blob', but the config group model has only: flux, ",
        "seed\n    Interpolation key 'nowhere' not found",
        "data.train=/a=b\n    cannot be read as key=value",
        "eval_interval\n    is given several values",
        "sampling.eta\n    is 0",
        "reward.scorers.clip\n    cannot be deleted",
    ):
        assert fragment in text


@pytest.mark.parametrize("override", ["=3", "~", "+", "a b", "a==b"])
def test_what_is_no_override_is_named(override: str) -> None:
    assert f"\n{override}\n" in problems_of("quickstart", [override])


def test_a_missing_recipe_names_the_nearest_one() -> None:
    text = problems_of("tiny_ful", [])
    assert "Did you mean diffusion/tiny/tiny_full?" in text
    assert "quickstart" in text


def test_a_users_overlay_builds_on_a_shipped_recipe(tmp_path: Path) -> None:
    folder = tmp_path / "my recipes' folder"
    recipe(folder, "mine", "defaults: [/quickstart, _self_]\nbatch_size: 4\n")
    config = compose("mine", ["seed=3"], folder)
    assert (config.batch_size, config.seed) == (4, 3)
    assert config.model.family == "tiny"


def test_shipped_recipes_and_own_groups_work_together(tmp_path: Path) -> None:
    recipe(tmp_path, "reward/mine", "scorers: {small: {path: jpeg_size}}\n")
    config = compose("quickstart", ["reward=mine"], tmp_path)
    assert config.reward is not None
    assert list(config.reward.scorers) == ["small"]


def test_an_overlay_removes_a_scorer_with_null(tmp_path: Path) -> None:
    text = "defaults: [/quickstart, _self_]\neval_rewards: {color: null}\n"
    recipe(tmp_path, "mine", text)
    assert "color" not in compose("mine", [], tmp_path).eval_rewards


def test_a_recipe_can_be_given_as_a_file(tmp_path: Path) -> None:
    path = recipe(tmp_path, "mine", "defaults: [/quickstart, _self_]\nbatch_size: 4\n")
    assert compose(str(path), []).batch_size == 4
    shipped = RecipeFolders(None).examples / "diffusion/tiny/tiny_full.yaml"
    assert compose(str(shipped), []).run_name == "tiny_full"


def test_a_resolved_config_is_a_recipe(tmp_path: Path) -> None:
    config = compose("quickstart", ["seed=5"])
    path = recipe(tmp_path, "config", yaml.safe_dump(config.model_dump()))
    assert compose(str(path), []) == config


def test_a_recipe_without_base_has_the_defaults_and_can_be_overridden(tmp_path: Path) -> None:
    text = "defaults: [/model: tiny, /reward: ocr]\nseed: 2\nreward: {on_failure: retry}\n"
    recipe(tmp_path, "bare", text)
    assert compose("bare", ["batch_size=4"], tmp_path).batch_size == 4


@pytest.mark.filterwarnings("error")
def test_own_values_win_although_the_defaults_list_lacks_self(tmp_path: Path) -> None:
    recipe(tmp_path, "mine", "defaults: [/quickstart]\nbatch_size: 4\n")
    assert compose("mine", [], tmp_path).batch_size == 4


def test_a_missing_package_line_is_explained(tmp_path: Path) -> None:
    recipe(tmp_path, "team/mine", "defaults: [/quickstart, _self_]\nseed: 2\n")
    text = problems_of("team/mine", [], tmp_path)
    assert "`# @package _global_`" in text
    assert text.startswith("1 problem")


def test_an_overlay_that_hides_its_own_base_is_explained(tmp_path: Path) -> None:
    recipe(tmp_path, "quickstart", "defaults: [/quickstart, _self_]\n")
    assert "leads back to itself" in problems_of("quickstart", [], tmp_path)


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("seed: [1\nrun_name: x\n", ["mine.yaml", "line 2"]),
        ("seed: 1\nseed: 2\n", ["duplicate key seed"]),
        ("- seed\n", ["mine"]),
        ("defaults: [/base, /model: blob]\n", ["model/blob", "sd3", "tiny"]),
        ("defaults: [/base, /modl: tiny]\n", ["modl/tiny", "Did you mean model?"]),
        ("defaults: [/quickstrat]\n", ["Did you mean quickstart?"]),
        ("defaults: [/base]\nseed: ${a b}\n", ["mine"]),
        ("defaults: [/quickstart]\nseed: ${seed}\n", ["seed", "ecursive"]),
        ("defaults: [/quickstart]\nrun_name: ${oc.env:NO_SUCH_NAME}\n", ["NO_SUCH_NAME"]),
        ("defaults: [/quickstart]\nrun_name: ???\nseed: ${missing}\n", ["missing"]),
    ],
)
def test_a_recipe_that_cannot_be_composed_is_an_error_with_its_place(
    tmp_path: Path, text: str, fragments: list[str]
) -> None:
    recipe(tmp_path, "mine", text)
    message = problems_of("mine", [], tmp_path)
    for fragment in fragments:
        assert fragment in message


def test_a_binary_recipe_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_bytes(b"\x80\x81\xff")
    assert "not a text file" in problems_of("mine", [], tmp_path)


def test_an_installed_package_carries_its_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = RecipeFolders(None).examples.parent
    for name in ("examples", "configs"):
        shutil.copytree(repository / name, tmp_path / "_recipes" / name)
    monkeypatch.setattr("unirl.cli.recipes._PACKAGE", tmp_path)
    assert RecipeFolders(None).examples == tmp_path / "_recipes" / "examples"
    assert compose("diffusion/tiny/tiny_full", []).run_name == "tiny_full"


def test_a_config_dir_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    assert "is not a folder" in problems_of("quickstart", [], tmp_path / "nowhere")


def test_an_own_scorer_is_named_by_its_dotted_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("class Sharpness:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = "defaults: [/quickstart, _self_]\nreward: {scorers: {s: {path: 'my_rewards:Sharpness'}}}"
    recipe(tmp_path, "mine", text)
    config = compose("mine", [], tmp_path)
    assert config.reward is not None
    assert config.reward.scorers["s"].path == "my_rewards:Sharpness"


def test_a_group_chosen_on_the_command_line_wins_over_the_recipes_own_values() -> None:
    config = compose("quickstart", ["algorithm=flash_grpo", "sampling.sde_steps.range=[0,0.75]"])
    assert config.sampling.kernel == "flash"
    assert config.sampling.sde_steps.strategy == "stratified"
    assert config.sampling.sde_steps.range == [0, 0.75]
    assert compose("quickstart", []).sampling.kernel == "cps"
    as_recipe = compose("diffusion/tiny/tiny_ddpo", []).sampling
    assert compose("quickstart", ["algorithm=ddpo"]).sampling.kernel == as_recipe.kernel == "ddim"


def test_a_key_on_the_command_line_wins_over_a_group_chosen_there() -> None:
    config = compose("quickstart", ["sampling.kernel=flow", "algorithm=ddpo"])
    assert config.sampling.kernel == "flow"


@pytest.mark.parametrize(
    ("word", "form"),
    [
        ("run_name=mein läuf ü", "run_name='mein läuf ü'"),
        ("run_name=a=b,[c", "run_name='a=b,[c'"),
        ("run_name=it's [", "key='a=b'"),
        ("größe=3", "key='a=b'"),
    ],
)
def test_a_word_that_cannot_be_read_is_shown_in_quotes(word: str, form: str) -> None:
    told = problems_of("quickstart", [word])
    assert "letters that are not ASCII" in told
    assert told.endswith(f'quotes of two kinds: "{form}".')


def test_the_quoted_form_is_the_value_that_was_meant() -> None:
    assert compose("quickstart", ["run_name='mein läuf ü'"]).run_name == "mein läuf ü"


def test_a_list_where_a_block_is_expected_shows_the_form(tmp_path: Path) -> None:
    said = "is a list, but it is a block of keys with a name for each entry, e.g. {exact_read: {"
    told = problems_of("quickstart", ["eval_rewards=[ocr]", "stack.lora=[3]"])
    assert f"eval_rewards\n    {said}" in told
    assert "stack.lora\n    is a list, but it is a block of keys." in told
    text = "defaults: [/quickstart]\neval_rewards: [ocr]\nreward: {scorers: [{path: ocr}]}\n"
    recipe(tmp_path, "mine", text)
    told = problems_of("mine", [], tmp_path)
    assert f"eval_rewards\n    {said}" in told
    assert "reward.scorers\n    is a list" in told
    recipe(tmp_path, "above", "defaults: [/mine]\n")
    assert "e.g. of eval_rewards: {exact_read: {" in problems_of("above", [], tmp_path)


def test_the_form_of_a_block_that_was_given_as_list_is_right() -> None:
    overrides = [f"{key}={form}" for key, form in BLOCK_FORMS.items()]
    config = compose("quickstart", overrides)
    assert config.eval_suites["mine"].data == "mine.jsonl"
