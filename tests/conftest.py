"""Settings every test shares."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import torch

# Two threads are 2 to 100 times slower than one for models this small on a busy machine.
torch.set_num_threads(1)
