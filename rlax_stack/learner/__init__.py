"""Learner: packing, the train step, scoring, the optimizer, checkpoints and the loop."""
