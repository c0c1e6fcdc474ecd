"""Every configuration key: its type, default, bounds and meaning. Imports no torch.

Hydra composes a recipe, `RunConfig` validates it once, and everything after that reads typed
attributes. Defaults live only here; they are also registered in Hydra's store (`cli.compose`), so
every key can be overridden on the command line without `+`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]
KernelName = Literal["flow", "dance", "cps", "flash", "ddim"]
SolverName = Literal["euler", "dpmpp_2m", "unipc"]
AUTO = "auto"
"""load_dir: the run's own newest sound checkpoint."""


class Block(BaseModel):
    """Base of every block: unknown keys are errors, values never change."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # run_name=7 names a run "7"
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts true as 1; in a recipe `batch_size: true` is a mistake."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        is_bool_field = bool in (annotation, *get_args(annotation))
        if isinstance(value, bool) and not is_bool_field:
            raise ValueError("this key is not a switch")
        return value


class LoraConfig(Block):
    """Low-rank adapter on the denoising network (PEFT)."""

    rank: PositiveCount = 16
    """Inner width of the adapter: more can change more, and costs more."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's output is scaled by alpha / rank."""
    target_modules: list[str] | None = None
    """Names of linear layers; null takes the model family's list."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that a larger rank does not learn slower
    (arXiv:2312.03732)."""
    use_dora: bool = False
    """Train the length of each weight's columns apart from their direction (arXiv:2402.09353): a
    little better at low rank, slower, and not with weights in shards."""


class ModelConfig(Block):
    """Which generator is trained."""

    family: str = "tiny"
    """A name of `unirl recipes --components`, or `package.module:Class`."""
    path: str = "pkg:tiny/model.safetensors"
    """Weights: a file or folder; `pkg:` marks files that ship with unirl."""
    release: str | None = None
    """Published model whose sizes `unirl plan` takes where model.path is not on this machine."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the denoising network, the same for sampling and training."""
    frozen_dtype: Literal["fp32", "bf16"] = "fp32"
    """Storage of weights that are not trained. Trained weights are always float32."""
    quantization: Literal["int8"] | None = None
    """Storage of the denoising network's frozen weights with an adapter on them (stack.lora): int8
    with a scale per row, by torchao through diffusers. Half the memory of bf16; the adapter learns
    on the rounded weights."""
    max_sequence_length: PositiveCount = 256
    """Longest prompt in tokens where the family has a T5 encoder."""
    encodings: str | None = None
    """Folder that keeps what the text encoders say about each prompt. Prompts it lacks are encoded
    when a run starts; the run itself then needs no text encoders. Null encodes in every rollout."""


class SdeStepsConfig(Block):
    """Which of the T denoising steps are stochastic and recorded for training."""

    strategy: Literal["all", "random", "window", "progressive", "stratified", "list"] = "all"
    """all: every step of the range; random: num_steps of it without replacement; window: num_steps
    consecutive ones, start drawn per rollout; progressive: such a window that moves on slowly;
    stratified: one step per sample, spread evenly over a group; list: those of `steps`."""
    range: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.0, 1.0]
    """Fraction of the schedule they are taken from: steps [int(T*a), int(T*b)). Not with list."""
    steps: list[Count] | None = None
    """list: the steps themselves, counted from 0."""
    num_steps: PositiveCount | None = None
    """Needed by random, window and progressive; the others know their number."""
    rollouts_per_window: PositiveCount = 25
    """progressive: rollouts before the window moves."""
    window_stride: PositiveCount = 1
    """progressive: steps it moves by; num_steps leaves no overlap."""
    window_pace: Literal["constant", "decay", "exp_decay"] = "constant"
    """progressive: how long the window stays on its way from the first position to the last:
    rollouts_per_window everywhere, or falling from that to min_rollouts_per_window, linearly or
    geometrically."""
    min_rollouts_per_window: PositiveCount = 1
    """progressive, with window_pace decay or exp_decay: rollouts at the last position."""
    roll_back: bool = False
    """progressive: start again at the first position after the last; otherwise stay there."""

    def candidates(self, num_inference_steps: int) -> range:
        """The steps of `range`. The last step of a schedule is never one of them: its Gaussian is
        too sharp to compare log-probs on (of width 0 with the cps kernel)."""
        first, end = (int(num_inference_steps * fraction) for fraction in self.range)
        return range(first, min(end, num_inference_steps - 1))


class SamplingConfig(Block):
    """How samples are drawn in a rollout."""

    samples_per_prompt: PositiveCount = 8
    """Group size G: advantages compare the samples of one prompt."""
    num_inference_steps: Annotated[int, Field(ge=2)] = 10
    """Denoising steps T. Training usually takes fewer than evaluation."""
    guidance_scale: float = Field(default=1.0, ge=0)
    """Classifier-free guidance; 1 or less runs the network once a step, 0 does for Z-Image, which
    counts from 0. Networks that take guidance as an input get this number."""
    height: PositiveCount = 512
    """Pixels."""
    width: PositiveCount = 512
    """Pixels."""
    num_frames: PositiveCount = 1
    """Frames of a video; 1 for models of images."""
    decoded_frames: Literal["all", "first"] | PositiveCount = "all"
    """Frames of a video that become pixels for rewards and grids: all, the first alone (cheap where
    the decoder can), or every n-th."""
    low_noise_guidance_scale: float | None = Field(default=None, ge=0)
    """Guidance of the second expert of a model that has one for low noise (Wan 2.2); null: the
    same as guidance_scale."""
    kernel: KernelName = "flow"
    """Transition of a stochastic step: Flow-GRPO's, DanceGRPO's, coefficients-preserving,
    FlashGRPO's, or DDIM's with eta (DDPO)."""
    eta: float = Field(default=0.7, ge=0)
    """Noise level. Larger explores more and trains on noisier images. 0: no step is stochastic,
    whatever kernel and sde_steps say."""
    solver: SolverName = "euler"
    """Of the steps that are not stochastic: first order, or DPM-Solver++ 2M or UniPC, which need
    fewer steps for the same image."""
    sigma_schedule: Literal["model", "linear", "karras", "exponential"] = "model"
    """model: the one the model is deployed with; otherwise the spacing of the noise levels."""
    shift: float | None = Field(default=None, gt=0)
    """Moves another schedule than the model's to higher noise: s' = shift s / (1 + (shift - 1) s).
    Null: 1."""
    thin_after: PositiveCount = 1
    """Of the steps after the last stochastic one only every n-th is made (MixGRPO-Flash): cheaper,
    coarser endings; use solver=dpmpp_2m with it. Two steps must come after it. 1 makes all."""
    init_same_noise: bool = False
    """All samples of a group start from the same noise, so only the SDE steps tell them apart. Up
    to the first of these the network is asked once for all of them, in sampling and training."""
    samples_per_start: PositiveCount | None = None
    """Samples that start from the same noise: a group is made of branches of
    samples_per_prompt / samples_per_start starts (TempFlow-GRPO), with init_same_noise=false.
    Null: all with init_same_noise, else 1."""
    sde_steps: SdeStepsConfig = SdeStepsConfig()

    @property
    def num_samples_per_start(self) -> int:
        """samples_per_start, or what null stands for."""
        if self.samples_per_start is not None:
            return self.samples_per_start
        return self.samples_per_prompt if self.init_same_noise else 1


class EvalSamplingConfig(Block):
    """Overlay on `sampling` at evaluation; null keeps the training value."""

    num_inference_steps: Annotated[int, Field(ge=2)] | None = None
    """Denoising steps."""
    guidance_scale: float | None = Field(default=None, ge=0)
    """Classifier-free guidance."""
    height: PositiveCount | None = None
    """Pixels."""
    width: PositiveCount | None = None
    """Pixels."""
    num_frames: PositiveCount | None = None
    """Frames of a video."""
    decoded_frames: Literal["all", "first"] | PositiveCount | None = None
    """Frames that become pixels."""
    low_noise_guidance_scale: float | None = Field(default=None, ge=0)
    """Of the expert for low noise."""
    kernel: KernelName | None = None
    """Transition of stochastic steps; only with eval_eta above 0."""
    solver: SolverName | None = None
    """Of the steps that are not stochastic."""
    sigma_schedule: Literal["model", "linear", "karras", "exponential"] | None = None
    """Spacing of the noise levels."""
    shift: float | None = Field(default=None, gt=0)
    """Of the schedule."""


class RolloutConfig(Block):
    """The sampling role."""

    engine: str = "trainside"
    """trainside samples with the trained weights; replica keeps its own copy of the model; recorded
    returns the images that prompts name in metadata.images."""
    forward_batch_size: Count = 0
    """Samples per network call while sampling; 0 takes all samples of a request at once. On
    several devices, sampling is the same bit for bit where it divides a device's samples."""
    share_base: bool = False
    """engine=replica: sample with the train stack's own frozen weights instead of a second copy;
    only the adapter is the engine's own. Needs stack.lora and weights that are not in shards."""
    unshard: bool = False
    """engine=trainside in shards: keep all weights gathered during a generation, which saves a
    gather per block and step for the memory of the whole network."""


class ScorerConfig(Block):
    """One scorer."""

    path: str
    """A built-in name, or `package.module:Class` for your own."""
    weight: float = 1.0
    """Share in the total reward: total = sum of weight * score."""
    args: dict[str, Any] = {}
    """Keyword arguments of the scorer's constructor."""
    optional: bool = False
    """Leave the scorer out, with a notice, when a package it needs is not installed.
    Only for eval_rewards."""


class EvalSuiteConfig(Block):
    """Prompts of their own with scorers of their own, beside data.eval. Training sees neither."""

    data: str
    """Prompt file."""
    num_prompts: PositiveCount | None = None
    """The first prompts of the file; null takes all of them."""
    samples_per_prompt: PositiveCount | None = None
    """Samples of each, from fixed noise; null takes eval_samples_per_prompt."""
    scorers: dict[str, ScorerConfig]
    """Name in metrics -> scorer. One that fails costs its metric, not the run."""


class RewardConfig(Block):
    """The reward role."""

    scorers: dict[str, ScorerConfig] = {}
    """Name in metrics -> scorer."""
    on_failure: Literal["raise", "retry", "drop_group"] = "raise"
    """What a failed or non-finite score does. A failure is never counted as 0."""
    num_retries: PositiveCount = 2
    """Further attempts with on_failure=retry; then the failure is raised."""
    retry_seconds: float = Field(default=1.0, ge=0)
    """Wait before the first of them; doubled for each further one, up to a minute."""


class AlgorithmConfig(Block):
    """The loss. Each algorithm reads some of these keys; setting another one is an error."""

    path: str = "flow_grpo"
    """A built-in name, or `package.module:Class` for your own."""
    args: dict[str, Any] = {}
    """Your own algorithm's keys; built-in ones have none of these."""
    adv_clip_max: float = Field(default=5.0, gt=0)
    """Advantages are clipped to +-adv_clip_max."""

    clip_range: float = Field(default=1e-4, gt=0)
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]. Log-probs are means over
    latent elements, so useful values are 1e-5 to 1e-2."""
    clip_range_high: float | None = Field(default=None, gt=0)
    """Null: the same as clip_range."""
    clip_schedule: Literal["constant", "linear_decay", "cosine_decay"] = "constant"
    """How the clip range goes on through the run: it falls to half (linear) or to 0 (cosine)."""
    old_log_prob: Literal["rollout", "replay"] = "replay"
    """Anchor of the ratio. replay: recomputed before the first update in the training
    micro-batches, so the first ratio is exactly 1; rollout: the engine's own numbers."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference, in the unit of kl_form. 0 costs nothing."""
    kl_form: Literal["nats", "step_scaled", "mean_mse", "velocity_mse"] = "nats"
    """nats: exact Gaussian KL per latent element; step_scaled: that times -dt, as flow_grpo and
    verl-omni have it; mean_mse and velocity_mse: squared distance of means or velocities."""
    reference: Literal["base", "ema"] = "base"
    """base: the model without its adapter; ema: a running average of the trained weights."""
    ema_decay: Fraction = 0.99
    """reference=ema: what the average keeps of itself per window of rollouts."""

    kl_mask_threshold: float = Field(default=1e-5, gt=0)
    """flow_dppo: divergence from the old policy (nats per latent element) beyond which steps that
    lead further away are left out."""
    loss_per_time: bool = True
    """grpo_guard: divide the loss by -dt, as flow_grpo and verl-omni do; false as Flow-Factory."""
    weight_scale: float = Field(default=2.25, gt=0)
    """tempflow_grpo: steps weigh weight_scale times the standard deviation of their noise."""

    timesteps_per_sample: PositiveCount = 2
    """Noise levels each clean sample is trained at. More is steadier and costs as much more."""
    timestep_choice: Literal["schedule", "random"] = "schedule"
    """schedule: drawn from the rollout's own levels without replacement; random: uniform."""
    mix_beta: float = Field(default=1.0, gt=0)
    """diffusion_nft: how far the implicit positive and negative policies lie from the old one."""
    old_decay_start: Count = 0
    """diffusion_nft: the old policy keeps min(rate * (step - start), max) of itself per step."""
    old_decay_rate: float = Field(default=0.001, ge=0)
    """See old_decay_start; the paper's schedules are (0, 0.001, 0.5) and (75, 0.0075, 0.999)."""
    old_decay_max: Fraction = 0.5
    """See old_decay_start; 0 makes the old policy the present one."""
    adaptive_weight: bool = True
    """diffusion_nft: divide each sample's error by its own size."""
    error_power: float = Field(default=1.0, gt=0, le=1)
    """awm: the implicit log-prob is minus the velocity error to this power; below 1 it counts
    large errors less."""
    preference_beta: float = Field(default=100.0, gt=0)
    """diffusion_dpo: temperature. Errors are means over latent elements; sums need a beta smaller
    by their number."""

    last_steps: PositiveCount = 1
    """draft: steps at the end that gradients run through; each keeps its activations."""
    random_last_steps: bool = False
    """draft: draw their number from 1 to last_steps for each rollout (AlignProp)."""
    start_range: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.75, 1.0]
    """refl: part of the schedule from which one step is drawn per rollout. Early predictions are
    blurred, late ones leave little to change."""
    reward_cap: float | None = None
    """draft, refl: the loss is max(0, reward_cap - reward); null: minus the reward."""

    teachers: dict[str, str] = {}
    """distillation: domain -> checkpoint or safetensors file of weights like the trained ones."""
    teacher_key: str = "domain"
    """distillation: metadata field of a prompt that names its teacher; one teacher needs none."""
    distill_form: Literal["nats", "mean_mse"] = "nats"
    """distillation: KL of the step to the teacher's, or half the squared distance of means."""

    def start_steps(self, num_inference_steps: int) -> range:
        """refl: the steps of start_range."""
        first, end = (int(num_inference_steps * fraction) for fraction in self.start_range)
        return range(first, end)


class OptimizerConfig(Block):
    """AdamW."""

    learning_rate: float = Field(default=3e-4, gt=0)
    """At the top of the schedule. LoRA takes more than full weights."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Memory of the gradient's mean."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Memory of its square; short runs do better with 0.99."""
    adam_epsilon: float = Field(default=1e-8, gt=0)
    """Must stay well below the gradients, which are small: log-probs are means."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled; pulls an adapter towards the base model."""


class SchedulerConfig(Block):
    """Learning-rate schedule, counted in optimizer steps."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: Count = 0
    """Steps of linear rise."""
    total_steps: PositiveCount | None = None
    """Step at which linear and cosine reach 0; null: the steps of the whole run."""


class StackConfig(Block):
    """The train role: adapter, optimizer and update loop."""

    lora: LoraConfig | None = None
    """Null trains all weights of the denoising network."""
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    micro_batch_size: PositiveCount = 8
    """Transitions per forward and backward on each device. Larger is faster until memory ends."""
    num_updates_per_batch: PositiveCount = 1
    """Optimizer steps per rollout batch, each on its own part of the samples."""
    shuffle_updates: bool = False
    """Each part takes equally many samples of every prompt, drawn at random; otherwise parts are
    consecutive, each of batch_size / num_updates_per_batch prompts."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients of a larger global norm are scaled down to it."""


class BackendConfig(Block):
    """How the train stack lies on several devices; one device holds everything itself."""

    mesh: Literal["full", "hybrid", "no_shard"] = "full"
    """full: weights, gradients and moments in shards over all devices; hybrid: in shards over
    shard_size neighbours, and copies of these; no_shard: a copy on each device."""
    shard_size: PositiveCount | None = None
    """hybrid: devices in one shard group, usually those of one node."""
    block_classes: list[str] | None = None
    """Class names of the modules that are gathered one at a time; null takes the model family's."""
    gather_dtype: Literal["stored", "bf16"] = "stored"
    """stored: gather weights as they are kept, so that shards compute exactly what one device
    does; bf16: gather float32 ones in bf16, half the traffic when all weights are trained."""
    prefetch: Count = 1
    """Blocks gathered ahead of the one that is computed; 0 leaves the choice to FSDP, which gathers
    one ahead in the backward."""
    defer_reduce: bool | None = None
    """true reduces gradients once per optimizer step and keeps whole ones until then; false reduces
    after each micro-batch and keeps no more than one block's. Null: true with an adapter, whose
    gradients are small, false when all weights are trained."""
    activation_checkpointing: bool = False
    """Recompute each block in the backward instead of keeping its activations."""


class DataConfig(Block):
    """Prompts."""

    train: str = "pkg:numbers/train.jsonl"
    """.txt (one prompt a line), .jsonl or .json (records with `prompt` and `metadata`)."""
    eval: str | None = None
    """Held-out prompts in file order; null evaluates on the training prompts."""


class SyncConfig(Block):
    """Weight sync from the train stack to a rollout engine with weights of its own."""

    verify: bool = True
    """After a push, compare checksums and the engine's output on a probe with the trainer's."""


class LoggingConfig(Block):
    """Where numbers and pictures go besides the run directory."""

    console: Literal["auto", "rich", "plain", "quiet"] = "auto"
    """rich: a live display with time per phase and time left; plain: one line per window; quiet:
    warnings, errors and the summary at the end. auto takes rich on a terminal and plain in a pipe.
    run.log has everything."""
    report_to_wandb: bool = False
    """Log to Weights & Biases as well."""
    report_to_tensorboard: bool = False
    """Write event files to <run>/tensorboard as well; needs the extra `tensorboard`."""
    report_to_trackio: bool = False
    """Log to trackio as well, on this machine; needs the extra `trackio`."""
    project_name: str = "unirl"
    """Project in wandb and trackio."""
    entity: str | None = None
    """wandb team or user; null takes your default."""
    tags: list[str] = []
    """wandb tags."""
    media_max_items: PositiveCount = 16
    """Images of an evaluation: the first prompts' first samples."""
    media_scale: PositiveCount = 1
    """Nearest-neighbour enlargement of images in grids."""


class RunConfig(Block):
    """A whole run. Top-level names follow the public system."""

    description: str = ""
    """The line `unirl recipes` shows."""
    run_name: str = "run"
    """The run directory is <output_dir>/<run_name>."""
    output_dir: str = "runs"
    """Folder of run directories."""
    seed: int = 0
    """Prompts, noise, stochastic steps and adapter initialisation follow from it."""
    device: str = "auto"
    """auto takes the GPU where there is one."""
    num_threads: Count = 0
    """CPU threads of torch; 0 leaves torch's choice. Tiny models are fastest with 1."""
    num_devices: PositiveCount = 1
    """Devices in all, each driven by a process of its own. `unirl train` starts them on one node;
    torchrun starts them on many."""
    layout: Literal["colocate", "separate"] = "colocate"
    """colocate: all roles share one slab in turns; separate: train and rollout on own slabs."""
    train_fraction: float = 0.5
    """Share of the devices that train; layout=separate only."""
    reward_fraction: float = 0.0
    """Share of the devices that form the reward's own slab; 0 shares the slab."""

    num_rollouts: PositiveCount = 100
    """The total, also when resuming."""
    batch_size: PositiveCount = 8
    """Prompts per rollout, those of all devices together."""
    accumulate_rollouts: PositiveCount = 1
    """Rollouts per optimizer window."""
    weight_sync_interval: PositiveCount = 1
    """Rollouts between weight syncs."""
    adv_use_global_std: bool = False
    """Divide advantages by the batch's standard deviation instead of the group's."""
    adv_ddof: Annotated[int, Field(ge=0, le=1)] = 0
    """0: population standard deviation; 1: sample standard deviation, as in verl-omni and
    DanceGRPO."""
    adv_epsilon: float = Field(default=1e-8, ge=0)
    """Added to the standard deviation; flow_grpo and verl-omni add 1e-4."""
    adv_group: Literal["prompt", "start"] = "prompt"
    """Which samples are compared: those of a prompt, or those that also share their start noise."""
    adv_best_of: PositiveCount | None = None
    """Train on this many samples of a group only: the best and the worst half of them."""
    adv_trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Rewards beyond this and 1 - this quantile of the batch are taken back to it first."""
    adv_per_component: bool = False
    """Normalise each scorer's scores on their own, then weight and add (GDPO). Otherwise a scorer
    whose scores differ little within a group is drowned by one whose scores differ much."""

    train_resident: bool | None = None
    """Keep the train stack on the device while it is idle. Null: true; with residency=auto the
    search decides."""
    rollout_resident: bool | None = None
    """Keep the rollout engine on the device while it is idle. Null: false; with residency=auto the
    search decides."""
    reward_resident: bool | None = None
    """Keep the reward networks on the device while they are idle. Null: true; with residency=auto
    the search decides."""

    optimizer_resident: bool = True
    """Keep the optimizer's moments on the device while the train stack is there. false: they come
    for each optimizer step and leave after it, so that forward and backward have their memory;
    worth it when all weights are trained."""
    residency: Literal["policy", "auto"] = "policy"
    """policy: the three keys above decide; auto: the cheapest moves that fit device_budget_gib are
    searched, component by component, and those of the three keys that are set are kept to."""
    device_budget_gib: float | None = Field(default=None, gt=0)
    """What weights and workspace may take on a device. A run whose plan does not fit is refused
    before anything loads, and a move beyond it in any case. Null: with residency=auto the GPU's
    memory less a reserve, otherwise no limit."""
    overlap_moves: bool = False
    """Copy what leaves the device and what comes at the same time where both fit within
    device_budget_gib (null: the GPU's memory less a reserve) together; elsewhere what leaves is
    released first, as with false. Such moves are up to 1.4 times as fast, and their peak is both
    sides."""
    host_budget_gib: float | None = Field(default=None, gt=0)
    """What parked weights may take on the host, per process, taken as it is. Null: the memory of
    the machine or container less a reserve."""

    doctor: bool = True
    """Look at the first window before it is trained on, and warn of what is not fine. On several
    devices nobody looks."""

    eval_interval: Count = 0
    """Rollouts between evaluations; 0 turns them off."""
    eval_num_prompts: PositiveCount | None = 64
    """The first prompts of data.eval; more make the means steadier. Null takes all of them."""
    eval_samples_per_prompt: PositiveCount = 4
    """Samples of each, from fixed noise."""
    eval_chunk_prompts: PositiveCount = 16
    """Prompts sampled and scored at a time."""
    eval_eta: float = Field(default=0.0, ge=0)
    """Noise level at evaluation; 0 samples the ODE."""
    eval_sampling: EvalSamplingConfig = EvalSamplingConfig()
    eval_rewards: dict[str, ScorerConfig] = {}
    """Judges that training never sees, scored at evaluation only, on the samples of data.eval."""
    eval_suites: dict[str, EvalSuiteConfig] = {}
    """Further prompts that are sampled and scored at every evaluation, by name."""
    stop_on: list[Literal["hacking"]] = []
    """End the run, with a checkpoint and exit code 4, when this is found. hacking: at an evaluation
    the reward on data.eval has risen and a judge of eval_rewards, or a scorer of eval_suites that
    the reward has not, has fallen, each by more than its 95 % interval."""

    save_interval: Count = 0
    """Rollouts between checkpoints; 0 turns them off. When on, the last rollout is saved too."""
    save_dir: str | None = None
    """Null: <run directory>/checkpoints."""
    save_mode: Literal["auto", "full", "adapter"] = "auto"
    """What weights a checkpoint holds; auto: the adapter with LoRA, else everything trained."""
    save_reads: Literal["device", "host"] = "device"
    """device: a parked train stack comes back for a save, as with an engine that gathers there;
    host: its host copies are saved and nothing moves. Weights in shards need the device."""
    save_format: Literal["gathered", "sharded"] = "gathered"
    """gathered: rank 0 writes whole tensors; sharded: each rank writes its part, which all of them
    must see. Either can be resumed on another number of devices."""
    save_keep: PositiveCount | None = None
    """Checkpoints that stay: the newest ones, and the best one besides. Null keeps all."""
    keep_best: str | None = "eval/reward_mean"
    """Evaluation metric by which a checkpoint is the best one (the more the better): it is never
    deleted, and the link `best` beside the checkpoints leads to it. Only checkpoints that were
    evaluated when they were saved count, so let save_interval divide eval_interval. Null: none."""
    load_dir: str | None = None
    """Resume from this checkpoint, or the newest one in this folder. auto: from the newest sound
    one of this run itself, or from the beginning where there is none; for jobs that are started
    again and again."""
    start_from: str | None = None
    """Begin with the weights of this checkpoint, a fresh optimizer and rollout 0. An adapter is
    taken over by an adapter of the same shape; with stack.lora=null it is merged in and all weights
    are trained on from there."""
    max_hours: float | None = Field(default=None, gt=0)
    """End with a checkpoint after this wall-clock time, counted from the start of the command: a
    little less than a cluster's limit. The exit code is 124 then."""

    model: ModelConfig = ModelConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig | None = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    stack: StackConfig = StackConfig()
    backend: BackendConfig = BackendConfig()
    sync: SyncConfig = SyncConfig()
    data: DataConfig = DataConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def resident(self) -> dict[str, bool]:
        """The three residency keys with residency=policy, or what null stands for."""
        asked = {
            "train": (self.train_resident, True),
            "rollout": (self.rollout_resident, False),
            "reward": (self.reward_resident, True),
        }
        return {
            role: default if value is None else value for role, (value, default) in asked.items()
        }

    def evaluation_is_due(self, rollouts_done: int) -> bool:
        """Before the first rollout and every eval_interval; never with eval_interval=0."""
        return self.eval_interval > 0 and rollouts_done % self.eval_interval == 0

    def save_is_due(self, rollouts_done: int) -> bool:
        """Every save_interval rollouts and after the last one; never with save_interval=0."""
        return self.save_interval > 0 and (
            rollouts_done % self.save_interval == 0 or rollouts_done == self.num_rollouts
        )

    @property
    def eval_chunks(self) -> list[tuple[int, int]]:
        """Most prompts sampled at a time, and samples of each: for data.eval, then each suite."""
        asked = [(self.eval_num_prompts, self.eval_samples_per_prompt)]
        for suite in self.eval_suites.values():
            samples = suite.samples_per_prompt or self.eval_samples_per_prompt
            asked.append((suite.num_prompts, samples))
        chunk = self.eval_chunk_prompts
        return [(min(chunk, prompts or chunk), samples) for prompts, samples in asked]

    @property
    def defers_reduce(self) -> bool:
        """backend.defer_reduce, or what null stands for."""
        asked = self.backend.defer_reduce
        return self.stack.lora is not None if asked is None else asked
