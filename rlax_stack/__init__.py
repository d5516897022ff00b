"""rlax_stack: reinforcement-learning post-training of language models, native to JAX."""

__version__ = '0.1.0'
