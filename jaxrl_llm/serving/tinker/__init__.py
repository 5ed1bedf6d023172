"""A training server that Tinker's client speaks to: LoRA adapters on one base model, trained and sampled by its requests."""
