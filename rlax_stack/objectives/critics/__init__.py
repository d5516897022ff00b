"""Critics: what values the states of a trajectory, and how it is trained.

A box: (*, options) -> CriticSettings. The learner holds the parameters (learner/critic.py).
"""

from rlax_stack.objectives.critics import networks

TABLE = networks.TABLE
