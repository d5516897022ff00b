"""What a person sees: metrics, progress, rollout records and reports."""
