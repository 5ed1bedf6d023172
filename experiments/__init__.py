"""Programs to run: each is a separate file with flags; nothing imports them. Installed as `jaxrl_llm.experiments`."""
