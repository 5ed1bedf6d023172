"""A training server for Tinker's client: LoRA adapters on one base model, trained and sampled by its requests."""
