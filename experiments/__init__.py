"""Programs to start: each is a file of its own with flags; nothing imports them. Installed as `jaxrl_llm.experiments`."""
