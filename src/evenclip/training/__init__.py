"""Training: one step, one loop, and everything that changes while a model is trained."""
