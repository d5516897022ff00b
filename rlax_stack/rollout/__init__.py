"""Rollout: the engine, the sampler, the scheduler and the worker that leases groups."""
