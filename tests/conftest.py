import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("rlhf_notes", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("rlhf_notes")
