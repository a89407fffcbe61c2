"""What every test has: one thread (tests run side by side), and hypothesis that draws the same examples every time."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "evenclip", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)
settings.load_profile("evenclip")
