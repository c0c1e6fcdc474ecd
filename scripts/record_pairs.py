"""Write preference pairs as files: of each prompt of a recipe, its model's best and worst sample.

    python scripts/record_pairs.py diffusion/tiny/tiny_diffusion_dpo pairs num_rollouts=64

The recipe's model samples num_rollouts x batch_size prompts as in training, and its reward judges
them. Groups of equal rewards are left out. `pairs/pairs.jsonl` is for `rollout.engine: recorded`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from unirl.algorithms.making import make_algorithm
from unirl.cli.compose import compose
from unirl.config.schema import RunConfig
from unirl.core.types import PromptRecord
from unirl.data.stream import PromptStream
from unirl.rollout.sampling import sample_with_model
from unirl.runtime.build import build_host, build_reward, load_all_prompts, pick_device
from unirl.runtime.training_model import build_model
from unirl.trainer.requests import RequestFactory


def main(argv: Sequence[str]) -> int:
    recipe, folder, *overrides = argv
    config = compose(recipe, overrides)
    torch.set_num_threads(config.num_threads or 1)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    lines = []
    for record, images in pairs(config):
        names = [f"{len(lines):05d}-{name}.png" for name in ("preferred", "rejected")]
        for name, image in zip(names, images, strict=True):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(target / name)
        metadata = {**record.metadata, "images": names}
        lines.append(json.dumps({"prompt": record.text, "metadata": metadata}))
    (target / "pairs.jsonl").write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} pairs in {target / 'pairs.jsonl'}")
    return 0


def pairs(config: RunConfig) -> Iterator[tuple[PromptRecord, Tensor]]:
    """Prompts with [2, 3, H, W] uint8, the preferred image first."""
    device = pick_device(config.device)
    model = build_model(config, device, with_encoders=True)
    reward = build_reward(config, build_host(config))
    requests = RequestFactory(config, model, make_algorithm(config.algorithm))
    stream = PromptStream(load_all_prompts(config).train, config.batch_size, config.seed)
    for rollout_id in range(config.num_rollouts):
        request = requests.training(rollout_id, stream.batch(rollout_id))
        rollout = sample_with_model(model, request, config.rollout.forward_batch_size, device)
        group = request.samples_per_prompt
        totals = reward.score(rollout).total.view(-1, group)
        images = rollout.images.unflatten(0, (-1, group))
        for number, record in enumerate(request.prompts.records):
            best, worst = int(totals[number].argmax()), int(totals[number].argmin())
            if totals[number, best] > totals[number, worst]:
                yield record, images[number, [best, worst]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
