"""The catalogue of metrics: every name a run logs, with its unit and meaning.

`<...>` in a name stands for a component, role or phase. To add a metric, add a line to `METRICS`;
the reference in the docs is made from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    unit: str
    """"" for a plain number."""
    meaning: str


METRICS: Mapping[str, Metric] = {
    # rollout/: what was sampled, over the samples of one window
    "rollout/reward_mean": Metric("reward", "mean total reward of the samples trained on"),
    "rollout/reward_std": Metric("reward", "standard deviation over all samples"),
    "rollout/reward_min": Metric("reward", "worst sample"),
    "rollout/reward_max": Metric("reward", "best sample"),
    "rollout/reward_<component>_mean": Metric("score", "one scorer's own score, unweighted"),
    "rollout/reward_<component>_std": Metric("score", "its standard deviation"),
    "rollout/reward_<component>_min": Metric("score", "its lowest score"),
    "rollout/reward_<component>_max": Metric("score", "its highest score"),
    "rollout/zero_std_group_ratio": Metric(
        "fraction", "groups whose samples all got the same reward; nothing is learned from them"
    ),
    "rollout/group_count": Metric("groups", "prompts sampled"),
    "rollout/num_samples": Metric("samples", "samples drawn, failed ones included"),
    "rollout/dropped_groups": Metric("groups", "groups left out because a score failed"),
    "rollout/advantage_mean": Metric("", "near 0 by construction"),
    "rollout/advantage_std": Metric("", "near 1, lower with zero-std groups"),
    "rollout/advantage_min": Metric("", "lowest advantage, at least -adv_clip_max"),
    "rollout/advantage_max": Metric("", "highest advantage, at most adv_clip_max"),
    # train/: optimizer steps of one window
    "train/loss": Metric("", "policy loss plus weighted penalties"),
    "train/policy_loss": Metric("", "clipped surrogate alone; its value says little, near 0"),
    "train/ratio_mean": Metric("ratio", "new over old probability; 1 before the first update"),
    "train/ratio_min": Metric("ratio", "lowest ratio"),
    "train/ratio_max": Metric("ratio", "highest ratio"),
    "train/ratio_std": Metric("ratio", "standard deviation of the ratio"),
    "train/log_ratio_abs_max": Metric(
        "nats per latent element", "largest |new - old log-prob|, at full precision"
    ),
    "train/clip_fraction": Metric(
        "fraction", "rows whose ratio lies outside the clip range, or that a mask leaves out"
    ),
    "train/clip_fraction_high": Metric("fraction", "those above the upper bound"),
    "train/clip_fraction_low": Metric("fraction", "those below the lower bound"),
    "train/approx_kl": Metric(
        "nats per latent element",
        "distance from the sampling policy, half the mean squared log-ratio",
    ),
    "train/kl_reference": Metric(
        "unit of kl_form", "divergence from the reference policy, before its coefficient"
    ),
    "train/kl_old_mean": Metric(
        "nats per latent element", "flow_dppo: mean KL from the policy before the update"
    ),
    "train/kl_old_max": Metric("nats per latent element", "flow_dppo: the largest of them"),
    "train/velocity_deviation": Metric(
        "", "with kl_coefficient: mean squared distance to the velocity without adapter"
    ),
    "train/positive_loss": Metric("", "diffusion_nft: error of the implicit positive policy"),
    "train/negative_loss": Metric("", "diffusion_nft: error of the implicit negative policy"),
    "train/old_deviation": Metric(
        "", "diffusion_nft: mean squared distance to the velocity of the policy that samples"
    ),
    "train/preference_margin": Metric(
        "", "diffusion_dpo: log-odds the policy gives the preferred sample, 0 for the reference"
    ),
    "train/preference_accuracy": Metric(
        "fraction", "diffusion_dpo: pairs whose margin is above 0; 0 before the first update"
    ),
    "train/reward_mean": Metric(
        "reward", "draft, refl: mean of the differentiated reward; refl's is of predicted images"
    ),
    "train/capped_fraction": Metric(
        "fraction", "draft, refl: samples beyond reward_cap, which have no gradient"
    ),
    "train/saturated_fraction": Metric(
        "fraction", "draft, refl: pixel values at 0 or 1, where clipping may stop the gradient"
    ),
    "train/kl_teacher": Metric(
        "nats per latent element", "distillation: KL of the student's steps to the teacher's"
    ),
    "train/kl_teacher_<domain>": Metric(
        "nats per latent element", "the same over the prompts of one teacher"
    ),
    "train/grad_norm": Metric("", "gradient norm before clipping"),
    "train/lr": Metric("", "learning rate, mean over the window's steps"),
    "train/skipped_steps": Metric(
        "steps", "optimizer steps not taken: non-finite or zero gradient"
    ),
    "train/optimizer_step": Metric("steps", "optimizer steps done so far"),
    "train/rollout_replay_log_prob_diff_mean": Metric(
        "nats per latent element", "mean |engine's - replayed log-prob|: sampler and trainer agree"
    ),
    "train/rollout_replay_log_prob_diff_max": Metric(
        "nats per latent element", "largest |engine's - replayed log-prob|"
    ),
    # progress/: what the run has cost so far, before a resume too; in every row
    "progress/wall_seconds": Metric(
        "s",
        "time since the model was loaded, evaluations and saves included; what a kill took back "
        "and the time until a resume are not",
    ),
    "progress/device_seconds": Metric("s", "that time by the number of devices"),
    "progress/images": Metric(
        "samples", "drawn for training, failed ones included; a video counts as one"
    ),
    "progress/denoiser_evaluations": Metric(
        "samples",
        "the denoising network was run on for training, on all devices: sampling, replays, "
        "references, updates, probes of a sync and fillers of ranks without rows, guidance twice; "
        "not evaluations, backwards or the doctor",
    ),
    # perf/: wall-clock time of one window
    "perf/samples_per_second": Metric("samples / s", "samples trained on per second of the window"),
    "perf/<phase>_seconds": Metric(
        "s",
        "time in one phase: rollout (sync included), reward, sync, train (doctor included), "
        "doctor, evaluate, save, total; the row after an evaluation "
        "has its rollout and reward time too",
    ),
    "perf/<phase>_denoiser_forwards": Metric(
        "samples",
        "samples the denoising network was run on in a phase, guidance twice; total is the window",
    ),
    "perf/<phase>_denoiser_backwards": Metric("samples", "those with gradients"),
    # eval/: held-out prompts with fixed noise
    "eval/reward_mean": Metric("reward", "mean total reward on the evaluation prompts"),
    "eval/reward_ci95": Metric("reward", "half the 95 % interval of that mean, over prompts"),
    "eval/num_samples": Metric("samples", "samples scored"),
    "eval/judge_<name>_mean": Metric("score", "mean score of a judge that training never sees"),
    "eval/judge_<name>_ci95": Metric("score", "half the 95 % interval of that mean"),
    "eval/hacking_alarm_<judge>": Metric(
        "0 or 1", "since this judge thought best of the model the reward rose and it fell, for sure"
    ),
    "eval/<component>_mean": Metric("score", "mean of one scorer, unweighted"),
    "eval/<component>_ci95": Metric("score", "half the 95 % interval of that mean"),
    "eval/<suite>/reward_mean": Metric("reward", "mean weighted total of a suite's own scorers"),
    "eval/<suite>/reward_ci95": Metric("reward", "half the 95 % interval of that mean"),
    "eval/<suite>/<component>_mean": Metric("score", "mean of one of its scorers, unweighted"),
    "eval/<suite>/<component>_ci95": Metric("score", "half the 95 % interval of that mean"),
    "eval/<suite>/hacking_alarm_<scorer>": Metric(
        "0 or 1", "since this scorer thought best of the model the held-out reward rose and it fell"
    ),
    "eval/<suite>/num_samples": Metric("samples", "samples of the suite with a reward"),
    # memory/: the device's own account, where it has one
    "memory/<phase>_peak_bytes": Metric("bytes", "most that was allocated during the phase"),
    # residency/: moves of weights in one window
    "residency/<role>_onloads": Metric("transitions", "times a role's weights went to the device"),
    "residency/<role>_offloads": Metric("transitions", "times they left it"),
    "residency/for_<phase>_bytes": Metric("bytes", "copied, both ways, so that the phase can work"),
    "residency/for_<phase>_seconds": Metric("s", "time those moves took"),
    "residency/for_<phase>_gb_per_second": Metric("GB/s", "those bytes over that time"),
    "residency/<move>_bytes": Metric("bytes", "copied onto the device (onload) or off it"),
    "residency/dropped_bytes": Metric("bytes", "freed without a copy, since the host had them"),
    "residency/<move>_gb_per_second": Metric("GB/s", "those bytes over the time the moves took"),
    "residency/seconds": Metric("s", "time spent moving"),
}

AXES: Mapping[str, Metric] = {
    "rollout/step": Metric("rollouts", "done so far; windows are drawn over it"),
    "train/step": Metric("steps", "optimizer steps done so far; `train/*` is drawn over it"),
    "eval/step": Metric("rollouts", "done before the evaluation"),
}
"""What wandb and trackio get beside each row, to draw it over."""

PANELS: Mapping[str, str] = {
    "eval/samples": "first sample of each of the first prompts, with its reward",
    "eval/<suite>/samples": "the same of a suite of its own prompts",
    "eval/grid": "the same as one sheet",
    "eval/before_after": "the first evaluation beside this one",
}
"""Pictures of each evaluation: the same prompts and noise each time."""


def describe(name: str) -> Metric:
    """Unit and meaning of a logged metric or axis.

    Raises:
        LookupError: the name is not in the catalogue.
    """
    if name in METRICS:
        return METRICS[name]
    if name in AXES:
        return AXES[name]
    for pattern, metric in METRICS.items():
        if "<" in pattern and re.fullmatch(_regex(pattern), name):
            return metric
    raise LookupError(f"metric '{name}' is not in the catalogue; add it to unirl.tracking.metrics")


def describe_panel(name: str) -> str:
    """What a panel shows.

    Raises:
        LookupError: the name is not in the catalogue.
    """
    for pattern, meaning in PANELS.items():
        if re.fullmatch(_regex(pattern), name):
            return meaning
    raise LookupError(f"panel '{name}' is not in the catalogue; add it to unirl.tracking.metrics")


def _regex(pattern: str) -> str:
    """ "eval/<component>_mean" -> "eval/[^/]+_mean"."""
    return "[^/]+".join(re.escape(part) for part in re.split(r"<\w+>", pattern))
