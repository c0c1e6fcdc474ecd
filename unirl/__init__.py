"""unirl: post-train diffusion and flow-matching models with reinforcement learning."""

import logging

__version__ = "0.1.0"

# torchao, which peft imports where it is installed, reports what only other hardware could use, and
# diffusers what is new in it.
for _name in ("torchao", "torch.utils._pytree", "diffusers.quantizers", "diffusers.guiders"):
    logging.getLogger(_name).setLevel(logging.ERROR)
