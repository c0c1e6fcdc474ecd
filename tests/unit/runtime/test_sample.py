"""Files of samples: what was drawn comes back, and says which prompt it belongs to."""

from __future__ import annotations

import numpy as np
import torch
from builders import rollout_request
from PIL import Image, ImageSequence

from unirl.runtime.sample import write_samples


def test_an_image_is_kept_losslessly_and_a_video_frame_by_frame(tmp_path):
    request = rollout_request(num_prompts=2)  # 4 samples of each
    frames = torch.zeros(8, 3, 3, 4, 6, dtype=torch.uint8)
    frames += (torch.arange(3) * 100).view(1, 3, 1, 1, 1).to(torch.uint8)
    noise = torch.randint(0, 256, (8, 3, 4, 6), dtype=torch.uint8)
    images = write_samples(noise, request, tmp_path, "")
    videos = write_samples(frames, request, tmp_path, "base-")
    assert [s.file.name for s in videos[3:5]] == ["base-00-03.gif", "base-01-00.gif"]
    assert [s.prompt for s in videos[3:5]] == request.prompts.texts
    with Image.open(images[7].file) as image:
        assert np.array_equal(np.array(image), noise[7].permute(1, 2, 0).numpy())
    with Image.open(videos[0].file) as video:
        shades = [np.array(f.convert("RGB"))[0, 0, 0] for f in ImageSequence.Iterator(video)]
    assert shades == [0, 100, 200]
