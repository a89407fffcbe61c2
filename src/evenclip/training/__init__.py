"""Training of one model: the step, the run, the training loop, checkpoints and logs."""
