"""Learners on named machines; `python -m rlax_stack.plan` says whether one fits and what it costs."""
