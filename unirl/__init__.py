"""unirl: post-train diffusion and flow-matching models with reinforcement learning."""

__version__ = "0.1.0"
