"""Every start-up rejection: what is asked, the key it is reported for and what the text says."""

from __future__ import annotations

from pathlib import Path

import pytest

from unirl.cli.check import checked
from unirl.cli.compose import compose_and_check
from unirl.core.errors import ConfigError

OWN_MODULE = """
from unirl.core.capabilities import AlgorithmCapabilities, EngineCapabilities

class SilentEngine:
    capabilities = EngineCapabilities(
        shares_train_weights=False, emits_log_probs=False, keeps_adapter_on_sleep=False
    )

class Undeclared:
    pass

class EmaAlgorithm:
    capabilities = AlgorithmCapabilities(
        needs_advantages=False,
        needs_ema_rollout=True,
        supports_multi_update=False,
        needs_stochastic_steps=False,
    )

class Sharpness:
    def __init__(self, radius: int) -> None:
        self.radius = radius

NOT_A_CLASS = 1
"""

REPLICA = "layout=colocate"
EMA = "algorithm.path=own_parts:EmaAlgorithm"
NO_NOISE = ("sampling.eta=0", "sampling.init_same_noise=false")
ONE_UPDATE = "stack.num_updates_per_batch=1"
SILENT = "rollout.engine=own_parts:SilentEngine"

REJECTIONS = [
    # Reward
    (["reward=null"], "reward", ["is null", "needs advantages", "reward=ocr_color"]),
    (
        ["~reward.scorers.ocr", "~reward.scorers.color"],
        "reward",
        ["has no scorers", "reward.scorers"],
    ),
    (["reward=null", EMA, ONE_UPDATE], "eval_interval", ["is 10", "eval_interval=0"]),
    (["reward=null", "reward_fraction=0.2"], "reward_fraction", ["is 0.2", "reward_fraction=0"]),
    (
        ["reward.scorers.ocr.optional=true"],
        "reward.scorers.ocr.optional",
        ["only eval_rewards may be optional"],
    ),
    (
        ["reward.scorers.ocr.weight=0", "reward.scorers.color.weight=0"],
        "reward.scorers",
        ["weights of 0", "reward.scorers.ocr.weight"],
    ),
    (["+eval_rewards.reward.path=ocr"], "eval_rewards.reward", ["taken by the total reward"]),
    (["+eval_rewards.ocr.path=ocr"], "eval_rewards.ocr", ["the name of reward.scorers.ocr too"]),
    (["stop_on=[hacking]", "~eval_rewards"], "stop_on", ["no scorer that the reward has not"]),
    (["stop_on=[hacking]", "eval_interval=0"], "stop_on", ["eval_interval is 0"]),
    (["eval_suites={eval:{data:a.txt,scorers:{}}}"], "eval_suites.eval", ["data.eval"]),
    (["eval_suites={a:{data:a.txt,scorers:{}}}"], "eval_suites.a.scorers", ["is empty"]),
    (
        ["eval_suites={a:{data:a.txt,scorers:{o:{path:ocr,optional:true}}}}"],
        "eval_suites.a.scorers.o.optional",
        ["only eval_rewards may be optional"],
    ),
    (
        ["eval_suites={a:{data:a.txt,scorers:{o:{path:ocr}}}}", "eval_interval=0"],
        "eval_suites",
        ["eval_interval is 0"],
    ),
    (["eval_rewards={a/b: {path: ocr}}"], "eval_rewards.a/b", ["metric names"]),
    # Components
    (["algorithm.path=flow_gpo"], "algorithm.path", ["Did you mean flow_grpo?", "package.module"]),
    (["rollout.engine=vllm"], "rollout.engine", ["built in are: recorded, replica, trainside"]),
    (["model.family=tiny2"], "model.family", ["Did you mean tiny?"]),
    (["eval_rewards.color.path=colour"], "eval_rewards.color.path", ["Did you mean color?"]),
    (["rollout.engine=own_parts:Undeclared"], "rollout.engine", ["EngineCapabilities(...)"]),
    (["algorithm.path=own_parts:Undeclared"], "algorithm.path", ["AlgorithmCapabilities(...)"]),
    (["algorithm.path=own_parts:Missing"], "algorithm.path", ["has no 'Missing'"]),
    (["algorithm.path=own_parts:NOT_A_CLASS"], "algorithm.path", ["not a class"]),
    (["model.family=nowhere.to:BeFound"], "model.family", ["No module named 'nowhere'"]),
    (
        ["reward.scorers.sharp.path=own_parts:Sharpness"],
        "reward.scorers.sharp.args",
        ["own_parts:Sharpness", "radius"],
    ),
    (["model.family=own_parts:Undeclared"], "stack.lora.target_modules", ["List the names"]),
    # Geometry
    (
        ["stack.num_updates_per_batch=5"],
        "stack.num_updates_per_batch",
        [
            "batch_size 8 x sampling.samples_per_prompt 16 x accumulate_rollouts 1 = 128 samples",
            "/ stack.num_updates_per_batch 5 = 25.60",
            "4 or 8",
        ],
    ),
    (["sampling.samples_per_prompt=1"], "sampling.samples_per_prompt", ["all be 0", "2 or more"]),
    (["sampling.width=64"], "sampling.height", ["16 x 64", "16 x 32 only", "sampling.width=32"]),
    (["eval_sampling.height=32"], "eval_sampling.height", ["32 x 32", "eval_sampling.height=16"]),
    (["model=sd3", "sampling.width=500"], "sampling.width", ["multiple of 16", "496 or 512"]),
    (["model=sd3"], "model.path", ["is empty", "Set it to"]),
    # Stochastic steps
    (["sampling.eta=0"], "sampling.eta", ["is 0", "no log-prob", "sampling.eta=0.7"]),
    (
        ["sampling.sde_steps.range=[0,0.1]"],
        "sampling.sde_steps.range",
        ["of 8 steps", "[int(8 x 0), int(8 x 0.1))", "[0, 0): none"],
    ),
    (
        ["sampling.sde_steps.range=[0.9,1]"],
        "sampling.sde_steps.range",
        ["without the last step", "[7, 7): none"],
    ),
    (["sampling.sde_steps.range=[0.5,0.2]"], "sampling.sde_steps.range", ["0 <= start < end <= 1"]),
    (["sampling.sde_steps.range=[-0.5,0.2]"], "sampling.sde_steps.range", ["0 <= start < end"]),
    (
        ["sampling.sde_steps.strategy=window"],
        "sampling.sde_steps.num_steps",
        ["is null", "2 steps"],
    ),
    (["sampling.sde_steps.num_steps=1"], "sampling.sde_steps.num_steps", ["strategy=random"]),
    (
        ["sampling.sde_steps.strategy=random", "sampling.sde_steps.num_steps=3"],
        "sampling.sde_steps.num_steps",
        ["is 3", "[0, 2): 2", "widen the range"],
    ),
    (["sampling.kernel=cps", "sampling.eta=1.5"], "sampling.eta", ["is 1.5", "ends at 1"]),
    (
        ["eval_eta=0.3", "eval_sampling.num_inference_steps=20"],
        "eval_eta",
        ["sampling.num_inference_steps=8", "is 20", "eval_eta=0"],
    ),
    # Windows of rollouts
    (["accumulate_rollouts=2"], "stack.num_updates_per_batch", ["is 2", "accumulate_rollouts=1"]),
    (
        ["accumulate_rollouts=2", ONE_UPDATE, EMA],
        "accumulate_rollouts",
        ["EMA", "accumulate_rollouts=1"],
    ),
    (
        ["accumulate_rollouts=3", ONE_UPDATE],
        "eval_interval",
        ["is 10", "multiple of accumulate_rollouts=3", "9 or 12"],
    ),
    (["accumulate_rollouts=3", ONE_UPDATE, "save_interval=1"], "save_interval", ["to 3"]),
    (["accumulate_rollouts=4", ONE_UPDATE], "num_rollouts", ["is 30", "28 or 32"]),
    ([EMA], "stack.num_updates_per_batch", ["is 2", "one update per batch"]),
    (
        ["stack.scheduler.total_steps=5", "stack.scheduler.warmup_steps=5"],
        "stack.scheduler.total_steps",
        ["warmup_steps=5"],
    ),
    # Adapter
    (
        ["stack.lora=null", "algorithm.kl_coefficient=0.1"],
        "algorithm.reference",
        ["stack.lora is null", "kl_coefficient=0"],
    ),
    (["stack.lora=null", "save_mode=adapter"], "save_mode", ["save_mode=auto"]),
    # Roles
    ([SILENT, "algorithm.old_log_prob=rollout"], "algorithm.old_log_prob", ["old_log_prob=replay"]),
    (
        [SILENT, "weight_sync_interval=3"],
        "weight_sync_interval",
        ["is 3", "loses its adapter", "rollout_resident=true"],
    ),
    (["train_resident=false"], "train_resident", ["trainside", "nothing to park"]),
    (
        ["train_resident=false", "layout=separate", "rollout.engine=replica", "stack.lora=null"],
        "train_resident",
        ["layout=separate", "nothing to park"],
    ),
    (
        ["train_resident=false", REPLICA, "stack.lora=null", EMA],
        "train_resident",
        ["weight sync of full weights", "stack.lora={}"],
    ),
    (["train_resident=false", REPLICA, EMA], "train_resident", ["EMA", "train_resident=true"]),
    (["layout=separate"], "layout", ["trainside", "layout=colocate"]),
    (["reward_fraction=1"], "reward_fraction", ["below 1"]),
    (["reward_fraction=-0.1"], "reward_fraction", ["at least 0"]),
    (
        ["layout=separate", "train_fraction=0.7", "reward_fraction=0.4"],
        "train_fraction",
        ["0.7 + reward_fraction 0.4 = 1.1", "below 1"],
    ),
    (["layout=separate", "train_fraction=0"], "train_fraction", ["between 0 and 1"]),
    # Surroundings
    (["model.path=/nowhere/model"], "model.path", ["/nowhere/model does not exist"]),
    (["run_name=../elsewhere"], "run_name", ["below output_dir=runs"]),
    (["run_name=''"], "run_name", ["must name a folder"]),
    (["device=gpu"], "device", ["cuda:<n>"]),
    # Several devices
    (
        ["batch_size=8", "num_devices=3"],
        "num_devices",
        ["batch_size 8 / num_devices 3 = 2.67", "batch_size=9", "num_devices to 2 or 4"],
    ),
    (
        ["num_devices=4", "backend.mesh=hybrid"],
        "backend.shard_size",
        ["is null", "backend.mesh=hybrid needs"],
    ),
    (
        ["num_devices=4", "backend={mesh:hybrid,shard_size:3}"],
        "backend.shard_size",
        ["num_devices 4 / backend.shard_size 3 = 1.33"],
    ),
    (["num_devices=2", "device=cuda:1"], "device", ["one device for num_devices=2 ranks"]),
    (["backend.shard_size=2"], "backend.shard_size", ["backend.mesh=full has no shard groups"]),
    (
        ["backend.gather_dtype=bf16", "model.precision=fp32"],
        "backend.gather_dtype",
        ["model.precision=fp32 computes with float32", "model.precision=bf16"],
    ),
    (
        ["backend={mesh:no_shard,gather_dtype:bf16}", "model.precision=bf16"],
        "backend.gather_dtype",
        ["backend.mesh=no_shard", "Remove it"],
    ),
    (
        ["backend.mesh=no_shard", "rollout.unshard=true"],
        "rollout.unshard",
        ["backend.mesh=no_shard", "Remove it"],
    ),
    (
        ["rollout.engine=replica", "rollout.unshard=true"],
        "rollout.unshard",
        ["rollout.engine=replica has whole weights", "rollout.unshard=false"],
    ),
    # Not in this version
    (["layout=separate", "rollout.engine=replica"], "layout", ["not available in this version"]),
    (["reward_fraction=0.2"], "reward_fraction", ["not available in this version"]),
]

PLAIN = [
    "num_rollouts=30",
    "eval_interval=10",
    "save_interval=10",
    "eval_sampling.num_inference_steps=null",
    "sampling.num_inference_steps=8",
    "sampling.sde_steps={strategy:all,range:[0,0.25],num_steps:null}",
    "algorithm.old_log_prob=replay",
    "stack.num_updates_per_batch=2",
]
"""A quickstart of fixed settings: the shipped one is tuned now and then."""


@pytest.fixture(autouse=True)
def own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "key", "fragments"), REJECTIONS, ids=[" ".join(case[0]) for case in REJECTIONS]
)
def test_rejected_with_the_key_and_the_way_out(
    overrides: list[str], key: str, fragments: list[str]
) -> None:
    _, problems = compose_and_check("quickstart", [*PLAIN, *overrides])
    messages = [problem.message for problem in problems if problem.key == key]
    assert any(all(fragment in text for fragment in fragments) for text in messages), problems


@pytest.mark.parametrize(
    "overrides",
    [
        [REPLICA, "train_resident=false", "rollout_resident=true", "reward_resident=false"],
        [REPLICA, "stack.lora=null"],
        [SILENT, "weight_sync_interval=3", "rollout_resident=true"],
        [SILENT, "weight_sync_interval=3", "stack.lora=null"],
        [EMA, ONE_UPDATE, "reward=null", "eval_interval=0", *NO_NOISE],
        ["accumulate_rollouts=5", ONE_UPDATE],
        ["eval_eta=0.3", "eval_sampling.num_inference_steps=8"],
        ["reward.scorers.sharp={path: 'own_parts:Sharpness', args: {radius: 2}}"],
        ["model.family=own_parts:Undeclared", "stack.lora.target_modules=[fc]"],
        ["sampling.sde_steps.strategy=progressive", "sampling.sde_steps.num_steps=2"],
    ],
    ids=" ".join,
)
def test_accepted(overrides: list[str]) -> None:
    assert compose_and_check("quickstart", [*PLAIN, *overrides])[1] == []


def test_only_the_first_reason_against_parking_the_train_stack_is_given() -> None:
    asked = ["train_resident=false", "layout=separate", "stack.lora=null", EMA, ONE_UPDATE]
    _, problems = compose_and_check("quickstart", [*PLAIN, *asked])
    assert len([problem for problem in problems if problem.key == "train_resident"]) == 1


def test_what_this_version_lacks_is_said_last() -> None:
    asked = ["reward_fraction=0.5", "layout=separate", "sampling.eta=0"]
    _, problems = compose_and_check("quickstart", [*PLAIN, *asked])
    not_available = ["not available" in problem.message for problem in problems]
    assert not_available == sorted(not_available)
    assert sum(not_available) == 2


def test_a_wrong_value_causes_no_further_verdicts_about_its_default() -> None:
    _, problems = compose_and_check(
        "quickstart", [*PLAIN, "stack.num_updates_per_batch=x", "batch_size=3"]
    )
    assert [problem.key for problem in problems] == ["stack.num_updates_per_batch"]


def test_a_missing_package_is_named_unless_the_judge_is_optional(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, problems = compose_and_check("quickstart", [])
    keys = [problem.key for problem in problems]
    assert "reward.scorers.ocr.path" in keys
    assert "eval_rewards.second_ocr.path" not in keys
    assert "onnxruntime and rapidocr_onnxruntime" in problems[0].message


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        (["data.train=/nowhere.txt"], ["data.train", "/nowhere.txt"]),
        (["data.eval=/nowhere.txt"], ["data.eval", "/nowhere.txt"]),
        (["batch_size=2001"], ["batch_size", "is 2001", "2000"]),
        (["eval_num_prompts=257"], ["eval_num_prompts", "is 257", "256"]),
        (["load_dir=/nowhere"], ["load_dir", "/nowhere"]),
    ],
    ids=lambda value: value[0],
)
def test_files_are_looked_at_before_weights_load(
    overrides: list[str], fragments: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        checked("quickstart", overrides, None)
    assert "1 problem" in str(error.value)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_evaluation_prompts_do_not_matter_without_evaluation() -> None:
    checked("quickstart", ["data.eval=/nowhere.txt", "eval_interval=0"], None)


@pytest.mark.parametrize("value", ["half", "0", "-1"])
def test_a_value_of_no_allowed_kind_is_one_problem_of_its_key(value: str) -> None:
    _, problems = compose_and_check(
        "diffusion/wan/wan21_t2v_lora", ["model.path=.", f"sampling.decoded_frames={value}"]
    )
    (problem,) = problems
    assert problem.key == "sampling.decoded_frames"
    assert "'all' or 'first' or it must be" in problem.message


def test_a_folder_of_another_family_is_told_before_anything_loads(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    _, problems = compose_and_check("diffusion/sd3/sd3_trainside", [f"model.path={tmp_path}"])
    assert [problem.key for problem in problems] == ["model.path"]
    assert "is a folder of FluxPipeline, but model.family=sd3 reads" in problems[0].message


def test_frames_beyond_the_videos_end_are_told() -> None:
    keys = ["model.path=.", "sampling.num_frames=5", "sampling.decoded_frames=9"]
    _, problems = compose_and_check("diffusion/wan/wan21_t2v_lora", keys)
    assert [problem.key for problem in problems] == ["sampling.decoded_frames"]
